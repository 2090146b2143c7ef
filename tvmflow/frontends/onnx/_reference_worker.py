"""The process in which ONNX Runtime runs: `python -m tvmflow.frontends.onnx._reference_worker`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tvmflow.frontends._frames import Array, Message, serve


class _Session:
    """ONNX Runtime on the CPU.

    A quantised model gives what its nodes say: arithmetic on whole numbers of 8 bits, which takes
    their place where it is faster, overflows on a CPU without VNNI. It is what is timed.
    """

    def __init__(self, model: str, threads: int) -> None:
        import onnxruntime

        self.version = str(onnxruntime.__version__)
        self._model, self._threads = model, threads
        self._session = self._open(as_written=True)

    def _open(self, *, as_written: bool) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 3
        options.add_session_config_entry("session.disable_quant_qdq", str(int(as_written)))
        return onnxruntime.InferenceSession(
            self._model, options, providers=["CPUExecutionProvider"]
        )

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        results = self._session.run(None, dict(arrays))
        return {str(index): np.asarray(value) for index, value in enumerate(results)}

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        feed = dict(arrays)
        session = self._timed
        return lambda: session.run(None, feed)

    @functools.cached_property
    def _timed(self) -> Any:
        return self._open(as_written=False) if _is_quantised(self._model) else self._session


def _is_quantised(model: str) -> bool:
    import onnx

    graph = onnx.load(model, load_external_data=False).graph
    return any(node.op_type == "DequantizeLinear" for node in graph.node)


class _Evaluator:
    """The ONNX project's own evaluator: slow, and takes models that ONNX Runtime does not."""

    def __init__(self, model: str) -> None:
        import onnx
        from onnx.reference import ReferenceEvaluator

        self._evaluator: Any = ReferenceEvaluator(model)
        self.version = f"refuses this model; ONNX's reference evaluator {onnx.__version__}"

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        results = self._evaluator.run(None, dict(arrays))
        return {str(index): np.asarray(value) for index, value in enumerate(results)}

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        feed = dict(arrays)
        return lambda: self._evaluator.run(None, feed)


def _load(first: Message) -> _Session | _Evaluator:
    try:
        return _Session(first["model"], first["threads"])
    except ImportError:
        raise
    except Exception as refused:
        try:
            return _Evaluator(first["model"])
        except Exception:
            raise refused from None


if __name__ == "__main__":
    serve(_load)
