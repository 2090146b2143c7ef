"""The process of a runtime that is no reference: `python -m tvmflow.frontends._peer_worker`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tvmflow.frontends._frames import Array, LoadedReference, Message, serve


class _OpenVino(LoadedReference):
    """OpenVINO on the CPU, in the precision of the library that it is timed beside.

    Its own default is bfloat16 wherever the CPU has it. See `openvino.properties.hint`.
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
    """TensorRT in ONNX Runtime; in timed calls, inputs and outputs stay on the GPU.

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
        # A provider that cannot be loaded is left out with a line in the log.
        if self._PROVIDER not in self._session.get_providers():
            raise RuntimeError("ONNX Runtime cannot load its provider for TensorRT")

    def run(self, arrays: Mapping[str, Array]) -> Sequence[Array]:
        results: list[Array] = self._session.run(None, dict(arrays))
        return results

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        import onnxruntime

        binding = self._session.io_binding()
        for name, array in arrays.items():
            binding.bind_ortvalue_input(
                name, onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0)
            )
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
    return _RUNTIMES[first["runtime"]](first)


if __name__ == "__main__":
    serve(_load)
