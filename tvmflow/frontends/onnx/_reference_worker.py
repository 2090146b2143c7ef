"""The reference process of ONNX models: `python -m tvmflow.frontends.onnx._reference_worker`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tvmflow.core.errors import StageError
from tvmflow.core.formatting import excerpt
from tvmflow.frontends._frames import Array, Message, serve
from tvmflow.operators._loading import Operators, load_operators

_MAX_REASON: Final = 300


class _Session:
    """ONNX Runtime on the CPU.

    A model is compared with its nodes as written, and timed with all of ONNX Runtime's rewrites. Some
    of these change what is computed: a `Pad` before a `MaxPool` pads with the lowest number instead of
    its own value (1.31), and fused QDQ nodes use 8-bit arithmetic that overflows on CPUs without VNNI.
    """

    def __init__(self, model: str, threads: int) -> None:
        import onnxruntime

        self.name = f"ONNX Runtime {onnxruntime.__version__}"
        self.note = ""
        self._model, self._threads = model, threads
        self._session = self._open(is_optimized=False)

    def _open(self, *, is_optimized: bool) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 3
        if not is_optimized:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return onnxruntime.InferenceSession(
            self._model, options, providers=["CPUExecutionProvider"]
        )

    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        results: list[Array] = self._session.run(None, dict(arrays))
        return results

    def run_as_timed(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        results: list[Array] = self._timed.run(None, dict(arrays))
        return results

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        return functools.partial(self._timed.run, None, dict(arrays))

    @functools.cached_property
    def _timed(self) -> Any:
        return self._open(is_optimized=True)


class _Evaluator:
    """The reference evaluator of the ONNX project: slow, but runs models that ONNX Runtime refuses.

    Args:
        model: The path of the model.
        refusal: The error of ONNX Runtime.
        operators: The operators of the recipe, of which it runs the numpy functions.
        calls: The folder for a record of their calls.
    """

    def __init__(self, model: str, refusal: Exception, operators: Operators, calls: Path) -> None:
        import onnx
        import onnxruntime
        from onnx.reference import ReferenceEvaluator

        from tvmflow.frontends.onnx._own_references import list_used_operators, make_references

        used = list_used_operators(model, operators)
        self._evaluator: Any = ReferenceEvaluator(
            model, new_ops=make_references(used, operators, calls)
        )
        self.name = f"the ONNX reference evaluator {onnx.__version__}"
        self.note = f"ONNX Runtime {onnxruntime.__version__} refuses this model: {_reason(refusal)}; {self.name} ran it instead"
        if used:
            names = ", ".join(str(use.operator) for use in used)
            self.note += f". The reference of {names} is the numpy function of the recipe"

    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        results: list[Array] = self._evaluator.run(None, dict(arrays))
        return results

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        return functools.partial(self.run, arrays)


def _reason(refusal: Exception) -> str:
    """Return what ONNX Runtime says of a model, without the paths and the place in its source."""
    text = " ".join(str(refusal).split())
    match = re.search(r" failed:(?:/\S+:\d+ .*?\) )?(.+)", text)
    return excerpt(match[1] if match else text, _MAX_REASON)


def _load(first: Message) -> _Session | _Evaluator:
    try:
        return _Session(first["model"], first["threads"])
    except ImportError:
        raise
    except Exception as refusal:
        operators = load_operators({role: Path(path) for role, path in first["operators"].items()})
        try:
            return _Evaluator(first["model"], refusal, operators, Path(first["calls"]))
        except StageError:
            raise
        except Exception:
            raise refusal from None


if __name__ == "__main__":
    serve(_load)
