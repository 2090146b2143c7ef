"""The reference process of TFLite models: `python -m tvmflow.frontends.tflite._reference_worker`."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow.core.formatting import count_text
from tvmflow.frontends._reference_process import Array, LoadedReference, Message, serve
from tvmflow.frontends.tflite._model import IDENTIFIER, list_hybrid_weights, read_model


class _Interpreter(LoadedReference):
    """LiteRT on the CPU.

    It rounds float32 data that meet integer weights by their range as it runs, in other ways on other
    CPUs: outputs are those of the same model with these weights in float32, latency that of the file.
    Inner tensors are only there where no delegate computes several operators at once; latency is
    that of the interpreter as programs use it.
    """

    def __init__(self, first: Message) -> None:
        from ai_edge_litert.interpreter import OpResolverType

        self.name = f"LiteRT {importlib.metadata.version('ai-edge-litert')}"
        path = Path(first["model"])
        content = path.read_bytes()
        model = read_model(content)
        self._shapes: dict[str, list[int]] = first["shapes"]
        self._current: dict[int, Mapping[str, Sequence[int]]] = {}
        self._inputs = {name: number for number, name in model.inputs.items()}
        names = dict(model.outputs)
        inner = {model.tensors[n].name: n for op in model.operators for n in op.outputs}
        self._results = [*map(names.__getitem__, first["outputs"])]
        self._results += map(inner.__getitem__, first["tensors"])
        options: dict[str, Any] = {}
        if first["tensors"]:
            options = {
                "experimental_preserve_all_tensors": True,
                "experimental_op_resolver_type": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            }
        options["num_threads"] = first["threads"]
        self._interpreter = self._open(model_path=str(path), **options)
        self._exact = self._interpreter
        if weights := list_hybrid_weights(model):
            content = _with_float_weights(content, weights)
            self._exact = self._open(model_content=content, **options)
            operators = count_text(len({number for number, _ in weights}), "operator")
            self.note = f"outputs are compared with {self.name} for the weights of {operators} in float32: with integers it rounds their data as it runs"

    def run(self, arrays: Mapping[str, Array]) -> list[Array]:
        self._invoker(self._exact, arrays)()
        return [np.array(self._exact.get_tensor(number)) for number in self._results]

    def prepare(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        return self._invoker(self._interpreter, arrays)

    def _open(self, **options: Any) -> Any:
        from ai_edge_litert.interpreter import Interpreter

        interpreter: Any = Interpreter(**options)
        self._resize(interpreter, self._shapes)
        return interpreter

    def _resize(self, interpreter: Any, shapes: Mapping[str, Sequence[int]]) -> None:
        self._current[id(interpreter)] = shapes
        for name, shape in shapes.items():
            interpreter.resize_tensor_input(self._inputs[name], shape)
        interpreter.allocate_tensors()

    def _invoker(self, interpreter: Any, arrays: Mapping[str, Array]) -> Callable[[], object]:
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        if shapes != self._current[id(interpreter)]:
            self._resize(interpreter, shapes)
        for name, array in arrays.items():
            interpreter.set_tensor(self._inputs[name], array)
        invoke: Callable[[], object] = interpreter.invoke
        return invoke


def _with_float_weights(data: bytes, weights: Sequence[tuple[int, int]]) -> bytes:
    """Return a file in which these weights, by operators and positions of operands, are float32."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(data, 0))
    graph = model.subgraphs[0]
    numbers: dict[int, int] = {}
    for operator, position in weights:
        operands = graph.operators[operator].inputs = graph.operators[operator].inputs.copy()
        source = int(operands[position])
        if source not in numbers:
            tensor = copy.copy(graph.tensors[source])
            array = _dequantized(tensor, model.buffers[tensor.buffer].data)
            model.buffers.append(schema.BufferT(data=np.frombuffer(array.tobytes(), np.uint8)))
            tensor.buffer, tensor.quantization = len(model.buffers) - 1, None
            tensor.type = schema.TensorType.FLOAT32
            graph.tensors.append(tensor)
            numbers[source] = len(graph.tensors) - 1
        operands[position] = numbers[source]
    builder = flatbuffers.Builder(len(data))
    builder.Finish(model.Pack(builder), file_identifier=IDENTIFIER)
    return bytes(builder.Output())


def _dequantized(tensor: Any, data: Array) -> Array:
    """Return the values that the integers of a tensor stand for: scale · (integer − zero point)."""
    from ai_edge_litert import schema_py_generated as schema

    is_signed = tensor.type == schema.TensorType.INT8
    integers = np.frombuffer(bytes(data), np.int8 if is_signed else np.uint8).reshape(tensor.shape)
    meaning = tensor.quantization
    sizes = [1] * integers.ndim
    if len(meaning.scale) > 1:
        sizes[meaning.quantizedDimension] = -1
    scales = np.asarray(meaning.scale, np.float32).reshape(sizes)
    zero_points = np.asarray(meaning.zeroPoint, np.int64).reshape(sizes)
    return np.asarray((integers - zero_points) * scales, np.float32)


if __name__ == "__main__":
    serve(_Interpreter)
