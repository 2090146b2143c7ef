"""The reference process of TFLite models: `python -m tvmflow.frontends.tflite._reference_worker`."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow.core.formatting import count_text
from tvmflow.core.types import Array
from tvmflow.frontends._reference_process import LoadedReference, Message, serve
from tvmflow.frontends.tflite._model import (
    IDENTIFIER,
    NAMES,
    VARIABLE_OPERATORS,
    Model,
    list_hybrid_weights,
    read_model,
)


class _Interpreter(LoadedReference):
    """LiteRT on the CPU. Latency is measured with the unchanged file and default delegates.

    Outputs come from a changed copy of the model if necessary. Integer weights of hybrid operators become float32,
    because LiteRT quantizes their data at run time, differently on each CPU. Variables become inputs and outputs. For
    intermediate tensors, delegates that fuse operators are disabled.
    """

    def __init__(self, first: Message) -> None:
        from ai_edge_litert.interpreter import OpResolverType

        self.name = f"LiteRT {importlib.metadata.version('ai-edge-litert')}"
        path = Path(first["model"])
        content = path.read_bytes()
        model = read_model(content)
        self._shapes = {spec["name"]: spec["shape"] for spec in first["inputs"]}
        self._current: dict[int, Mapping[str, Sequence[int]]] = {}
        variables = {n: name for n, name in model.inputs.items() if model.tensors[n].is_variable}
        self._variables = {name: number for number, name in variables.items()}
        self._inputs = {name: n for n, name in model.inputs.items() if n not in variables}
        names = dict(model.outputs)
        # A variable tensor has the same index before and after a call.
        names |= {
            output: n
            for (output, _), n in zip(model.next_values, model.variables, strict=True)
            if n in variables
        }
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
        if model.variables.keys() - variables.keys():
            content = _with_inputs(content, model)
            self._exact = self._open(model_content=content, **options)
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
        inputs = {entry["index"] for entry in interpreter.get_input_details()}
        for name, shape in shapes.items():
            if self._inputs.get(name) in inputs:
                interpreter.resize_tensor_input(self._inputs[name], shape)
        interpreter.allocate_tensors()

    def _invoker(self, interpreter: Any, arrays: Mapping[str, Array]) -> Callable[[], object]:
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        if shapes != self._current[id(interpreter)]:
            self._resize(interpreter, shapes)
        inputs = {entry["index"] for entry in interpreter.get_input_details()}
        indices = {name: n for name, n in self._inputs.items() if n in inputs}
        indices |= self._variables
        for name in arrays.keys() & indices:
            interpreter.set_tensor(indices[name], arrays[name])
        invoke: Callable[[], object] = interpreter.invoke
        return invoke


def _with_inputs(data: bytes, model: Model) -> bytes:
    """Return a copy of a file with variables as inputs and outputs, as in `Model`."""
    from ai_edge_litert import schema_py_generated as schema

    whole = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(data, 0))
    codes = (max(code.deprecatedBuiltinCode, code.builtinCode) for code in whole.operatorCodes)
    graph, names = whole.subgraphs[0], [NAMES[code] for code in codes]
    graph.operators = [o for o in graph.operators if names[o.opcodeIndex] not in VARIABLE_OPERATORS]
    for operator, known in zip(graph.operators, model.operators, strict=True):
        # For a variable tensor that an earlier operator changed, the file's own tensor index is kept.
        operator.inputs = [
            number if number < len(graph.tensors) else operator.inputs[position]
            for position, number in enumerate(known.inputs)
        ]
    for number, tensor in zip(range(len(graph.tensors)), model.tensors, strict=False):
        if number in model.variables:
            graph.tensors[number].shape = graph.tensors[number].shapeSignature = list(tensor.dims)
        elif tensor.data and not graph.tensors[number].buffer:
            # The variable is never assigned to.
            content = np.frombuffer(data[slice(*tensor.data)], np.uint8)
            whole.buffers.append(schema.BufferT(data=content))
            graph.tensors[number].buffer = len(whole.buffers) - 1
            graph.tensors[number].shape = list(tensor.dims)
    graph.inputs = [n for n in model.inputs if not model.tensors[n].is_variable]
    graph.outputs = [number for _, number in model.outputs if number < len(graph.tensors)]
    whole.subgraphs, whole.signatureDefs = [graph], None
    return _pack(whole, len(data))


def _with_float_weights(data: bytes, weights: Sequence[tuple[int, int]]) -> bytes:
    """Return a copy of a file with weights, given as (operator, operand) indices, in float32."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(data, 0))
    graph = model.subgraphs[0]
    copies: dict[int, int] = {}
    for operator, position in weights:
        operands = graph.operators[operator].inputs = graph.operators[operator].inputs.copy()
        source = int(operands[position])
        if source not in copies:
            tensor = copy.copy(graph.tensors[source])
            array = _dequantized(tensor, model.buffers[tensor.buffer].data)
            model.buffers.append(schema.BufferT(data=np.frombuffer(array.tobytes(), np.uint8)))
            tensor.buffer, tensor.quantization = len(model.buffers) - 1, None
            tensor.type = schema.TensorType.FLOAT32
            graph.tensors.append(tensor)
            copies[source] = len(graph.tensors) - 1
        operands[position] = copies[source]
    return _pack(model, len(data))


def _pack(model: Any, size: int) -> bytes:
    import flatbuffers

    builder = flatbuffers.Builder(size)
    builder.Finish(model.Pack(builder), file_identifier=IDENTIFIER)
    return bytes(builder.Output())


def _dequantized(tensor: Any, data: Array) -> Array:
    """Dequantize a tensor: scale · (integer − zero point)."""
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
