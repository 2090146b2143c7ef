"""Runs a runtime of ONNX models in a process: `python -m tvmflow.frontends.onnx._reference_worker`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tvmflow.core.errors import StageError
from tvmflow.core.formatting import excerpt
from tvmflow.core.types import Array
from tvmflow.custom_operators.loading import load_operators
from tvmflow.frontends._reference_process import LoadedReference, Message, ObservedNode, serve

if TYPE_CHECKING:
    from tvmflow.frontends.onnx._exercises import ObservedModel
    from tvmflow.frontends.onnx.custom_nodes import CustomReferences, SplitModel

EXACT_BYTES: Final = ("session.x64quantprecision", "1")
"""The option that makes int8 matmuls exact on x86 without VNNI, where int16 sums can overflow."""

_MAX_REASON: Final = 300


class _Session(LoadedReference):
    """ONNX Runtime on the CPU: timed with all graph optimizations, and compared without them.

    Some optimizations change results: one lets a `Pad` before a `MaxPool` pad with the lowest value instead of its
    own (1.31). Fused QDQ nodes use int8 arithmetic that overflows on CPUs without VNNI.
    """

    def __init__(self, model: str, threads: int, note: str) -> None:
        import onnxruntime

        self.name, self.note = f"ONNX Runtime {onnxruntime.__version__}", note
        self._model, self._threads = model, threads
        self._external = _map_external_data(Path(model))
        self.can_observe = self._external is not None
        self._session = _open(model, threads)

    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        return list(self._session.run(None, dict(arrays)))

    def run_as_timed(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        return list(self._timed.run(None, dict(arrays)))

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        return functools.partial(self._timed.run, None, dict(arrays))

    def observe(self, arrays: Mapping[str, Array]) -> Sequence[ObservedNode]:
        observed, session = self._observed
        names = observed.outputs
        results = session.run(names, dict(arrays)) if names else []
        return observed.read(dict(zip(names, results, strict=True)))

    @functools.cached_property
    def _observed(self) -> tuple[ObservedModel, Any]:
        import onnx

        from tvmflow.frontends.onnx._exercises import observe_model
        from tvmflow.frontends.onnx.graph import read_without_large_tensors

        path = Path(self._model)
        model = onnx.load(str(path), load_external_data=False)
        observed = observe_model(model, read_without_large_tensors(path))
        copy = path.with_name(f"observed-{path.name}")
        onnx.save(observed.model, str(copy))
        if not observed.nodes:
            return observed, None
        return observed, _open(str(copy), self._threads, external=self._external)

    @functools.cached_property
    def _timed(self) -> Any:
        return _open(self._model, self._threads, is_optimized=True)


def _map_external_data(path: Path) -> dict[str, Array] | None:
    """Return the weights in external files, by name; None if NumPy lacks an element type.

    The runtime cannot load them for a modified copy of the model: it follows no links out of the copy's folder.
    """
    import numpy as np
    import onnx
    from onnx.external_data_helper import uses_external_data

    if not any(other.is_file() for other in path.parent.rglob("*") if other != path):
        return {}
    arrays = {}
    for tensor in onnx.load(str(path), load_external_data=False).graph.initializer:
        if uses_external_data(tensor):
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            if dtype.kind not in "biuf":
                return None
            entries = {entry.key: entry.value for entry in tensor.external_data}
            file, offset = path.parent / entries["location"], int(entries.get("offset", 0))
            shape = tuple(tensor.dims)
            if 0 in shape:
                arrays[tensor.name] = np.empty(shape, dtype)
            else:
                mapped = np.memmap(file, dtype, "r", offset, shape or (1,))
                arrays[tensor.name] = mapped.reshape(shape)
    return arrays


def _open(
    model: str | bytes,
    threads: int,
    *,
    is_optimized: bool = False,
    external: Mapping[str, Array] | None = None,
) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if external:
        values = map(onnxruntime.OrtValue.ortvalue_from_numpy, external.values())
        options.add_external_initializers([*external], [*values])
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if not is_optimized:
        options.add_session_config_entry(*EXACT_BYTES)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class _SplitSession(LoadedReference):
    """Runs the parts between custom operators in ONNX Runtime, and custom operators in NumPy."""

    def __init__(self, split: SplitModel, references: CustomReferences, threads: int) -> None:
        import onnxruntime

        self.name = f"ONNX Runtime {onnxruntime.__version__}"
        self.note = _own_note(references)
        self._split, self._references, self._threads = split, references, threads
        self._sessions: dict[tuple[Any, ...], Any] = {}

    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        from tvmflow.frontends.onnx.custom_nodes import CustomPiece

        values: dict[str, Array | None] = {**self._split.constants, **arrays, "": None}
        for index, piece in enumerate(self._split.pieces):
            if isinstance(piece, CustomPiece):
                inputs = [values[name] for name in piece.node.input]
                results: Sequence[Array] = self._references.call(piece.use, piece.node, inputs)
                names: Sequence[str] = piece.node.output
            else:
                feed = {name: array for name in piece.inputs if (array := values[name]) is not None}
                # Each part has one session per combination of input shapes.
                key = (index, *(array.shape for array in feed.values()))
                if key not in self._sessions:
                    self._sessions[key] = _open(piece.make_model(feed), self._threads)
                results, names = self._sessions[key].run(None, feed), piece.outputs
            values.update(zip(names, results, strict=False))
        outputs = [values[name] for name in self._split.outputs]
        return [array for array in outputs if array is not None]


class _Evaluator(LoadedReference):
    """ONNX's reference evaluator: slow, but it runs models that ONNX Runtime refuses."""

    def __init__(self, model: str, refusal: Exception, references: CustomReferences) -> None:
        import onnx
        import onnxruntime
        from onnx.reference import ReferenceEvaluator

        classes = list(map(references.make_class, references.used))
        self._evaluator: Any = ReferenceEvaluator(model, new_ops=classes)
        self.name = f"the ONNX reference evaluator {onnx.__version__}"
        self.note = f"ONNX Runtime {onnxruntime.__version__} refuses this model: {_reason(refusal)}; {self.name} ran it instead"
        if references.used:
            self.note += f". {_own_note(references)}"

    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        return list(self._evaluator.run(None, dict(arrays)))


def _own_note(references: CustomReferences) -> str:
    names = ", ".join(str(use.operator) for use in references.used)
    return f"The reference of {names} is the numpy function of the recipe"


def _reason(refusal: Exception) -> str:
    """Return ONNX Runtime's error message about a model, without paths and source lines."""
    text = " ".join(str(refusal).split())
    match = re.search(r" failed:(?:/\S+:\d+ .*?\) )?(.+)", text)
    return excerpt(match[1] if match else text, _MAX_REASON)


# ---------------------------------------------------------------- other runtimes of ONNX models


class _OpenVino(LoadedReference):
    """OpenVINO on the CPU, in the library's precision; OpenVINO itself defaults to bfloat16 on some CPUs.

    See `openvino.properties.hint`.
    """

    def __init__(self, first: Message) -> None:
        import openvino

        self.name = f"OpenVINO {openvino.__version__.partition('-')[0]}"
        core = openvino.Core()
        model = core.read_model(first["model"])
        if model.is_dynamic():
            model.reshape(first["shapes"])
        options = {
            "INFERENCE_NUM_THREADS": first["threads"],
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16" if first["precision"] == "bfloat16" else "f32",
        }
        self._request = core.compile_model(model, "CPU", options).create_infer_request()

    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        return list(self._infer(arrays).values())

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        return functools.partial(self._infer, arrays)

    def _infer(self, arrays: Mapping[str, Array]) -> Any:
        return self._request.infer(dict(arrays), share_inputs=True, share_outputs=True)


class _TensorRt(LoadedReference):
    """TensorRT through ONNX Runtime; in timed calls, inputs and outputs stay on the GPU.

    See https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html.
    """

    _PROVIDER: Final = "TensorrtExecutionProvider"

    def __init__(self, first: Message) -> None:
        import onnxruntime
        import tensorrt

        self.name = f"TensorRT {tensorrt.__version__}"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        half = {"trt_fp16_enable": first["precision"] == "mixed"}
        self._session = onnxruntime.InferenceSession(
            first["model"], options, providers=[(self._PROVIDER, half), "CUDAExecutionProvider"]
        )
        # ONNX Runtime only logs that it cannot load a provider, and goes on without it.
        if self._PROVIDER not in self._session.get_providers():
            raise RuntimeError("ONNX Runtime cannot load its provider for TensorRT")

    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        return list(self._session.run(None, dict(arrays)))

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        import onnxruntime

        binding = self._session.io_binding()
        for name, array in arrays.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0)
            binding.bind_ortvalue_input(name, value)
        for output in self._session.get_outputs():
            binding.bind_output(output.name, "cuda", 0)

        def infer() -> None:
            self._session.run_with_iobinding(binding)
            binding.synchronize_outputs()

        return infer


_RUNTIMES: Final[Mapping[str, Callable[[Message], LoadedReference]]] = {
    "openvino": _OpenVino,
    "tensorrt": _TensorRt,
}


def _load(first: Message) -> LoadedReference:
    if runtime := first.get("runtime"):
        return _RUNTIMES[runtime](first)
    try:
        return _Session(first["model"], first["threads"], first["note"])
    except ImportError:
        raise
    except Exception as refusal:
        operators = load_operators({role: Path(path) for role, path in first["operators"].items()})
        from tvmflow.frontends.onnx.custom_nodes import (
            CustomReferences,
            list_used_operators,
            split_model,
        )

        used = list_used_operators(first["model"], operators)
        references = CustomReferences(used, operators, Path(first["calls"]))
        try:
            if used and (split := split_model(first["model"], operators)):
                return _SplitSession(split, references, first["threads"])
            return _Evaluator(first["model"], refusal, references)
        except StageError:
            raise
        except Exception:
            raise refusal from None


if __name__ == "__main__":
    serve(_load)
