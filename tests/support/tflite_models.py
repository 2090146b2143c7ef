"""Builds small TFLite files with the schema's own package, and runs them in LiteRT."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

Array = np.ndarray[Any, Any]

_TYPES = {
    "float32": 0,
    "float16": 1,
    "int32": 2,
    "uint8": 3,
    "int64": 4,
    "string": 5,
    "bool": 6,
    "int16": 7,
    "int8": 9,
    "resource": 13,
}
# The versions of operators that LiteRT has no kernel for under the first.
_VERSIONS = {"BROADCAST_TO": 2}


class Quantized(NamedTuple):
    """Scales and zero points of a tensor, along one axis if there are several."""

    scale: Any
    zero_point: Any = 0
    axis: int = 0


class TfliteBuilder:
    """A TFLite model while it grows. Tensors are numbers."""

    def __init__(self) -> None:
        self._buffers: list[bytes] = [b""]
        self._tensors: list[dict[str, Any]] = []
        self._operators: list[dict[str, Any]] = []
        self._inputs: list[int] = []
        self._initial: list[tuple[int, int]] = []
        self.signature: tuple[Mapping[str, int], Mapping[str, int]] | None = None

    def tensor(
        self,
        shape: Sequence[int],
        dtype: str = "float32",
        quantized: Quantized | None = None,
        *,
        name: str = "",
        data: bytes = b"",
        **more: Any,
    ) -> int:
        """Add a tensor. Sizes of −1 are free."""
        if data:
            self._buffers.append(data)
        self._tensors.append(
            {
                "shape": shape,
                "dtype": dtype,
                "quantized": quantized,
                "name": name or f"t{len(self._tensors)}",
                "buffer": len(self._buffers) - 1 if data else 0,
                **more,
            }
        )
        return len(self._tensors) - 1

    def set_shape(self, tensor: int, shape: Sequence[int]) -> None:
        """Set the shape that the file has for a tensor."""
        self._tensors[tensor]["shape"] = shape

    def input(self, name: str, *args: Any, **more: Any) -> int:
        """Add an input."""
        self._inputs.append(self.tensor(*args, name=name, **more))
        return self._inputs[-1]

    def constant(self, array: Any, dtype: str = "", quantized: Quantized | None = None) -> int:
        """Add a constant."""
        elements = np.asarray(array, dtype or None)
        return self.tensor(elements.shape, str(elements.dtype), quantized, data=elements.tobytes())

    def integers(self, values: Any) -> int:
        """Add a constant of int32, as TFLite has shapes and axes."""
        return self.constant(values, "int32")

    def add(
        self,
        operator: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        options: str = "",
        custom: str = "",
        **fields: Any,
    ) -> None:
        """Add an operator; `options` is the name of the table of its options without `Options`."""
        self._operators.append(
            {
                "operator": operator,
                "inputs": inputs,
                "outputs": outputs,
                "options": options,
                "fields": fields,
                "custom": custom,
            }
        )

    def handle(self, name: str, initial: Array | None = None) -> int:
        """Add the handle of a variable, which begins with these values."""
        fields: dict[str, Any] = {"SharedName": name, "Container": ""}
        handle = self.result("VAR_HANDLE", [], 0, "VarHandle", "resource", **fields)
        if initial is not None:
            self._initial.append((handle, self.constant(initial)))
        return handle

    def read(self, handle: int, shape: Sequence[int], dtype: str = "float32") -> int:
        """Add an operator that reads a variable."""
        return self.result("READ_VARIABLE", [handle], shape, "ReadVariable", dtype)

    def assign(self, handle: int, value: int) -> None:
        """Add an operator that assigns to a variable."""
        self.add("ASSIGN_VARIABLE", [handle, value], [], "AssignVariable")

    def result(
        self,
        operator: str,
        inputs: Sequence[int],
        rank: int | Sequence[int],
        options: str = "",
        dtype: str = "float32",
        quantized: Quantized | None = None,
        **fields: Any,
    ) -> int:
        """Add an operator with one result, and return that.

        Its shape in the file is a placeholder of that rank, or as LiteRT needs it for a few operators.
        """
        shape = [1] * rank if isinstance(rank, int) else rank
        output = self.tensor(shape, dtype, quantized)
        self.add(operator, inputs, [output], options, **fields)
        return output

    def build(self, *outputs: int) -> bytes:
        """Return the file."""
        import flatbuffers

        b = flatbuffers.Builder(1024)
        main, first = self._operators, list[dict[str, Any]]()
        if self._initial:
            more = {"options": "CallOnce", "fields": {"InitSubgraphIndex": 1}, "custom": ""}
            call = {"operator": "CALL_ONCE", "inputs": [], "outputs": [], **more}
            main = [call, *main]
            handles = [handle for handle, _ in self._initial]
            first += [
                o for o in main if o["operator"] == "VAR_HANDLE" and o["outputs"][0] in handles
            ]
            more = {"options": "AssignVariable", "fields": {}, "custom": "", "outputs": []}
            for handle, value in self._initial:
                first.append({"operator": "ASSIGN_VARIABLE", "inputs": [handle, value], **more})
        codes = list(dict.fromkeys((o["operator"], o["custom"]) for o in (*main, *first)))
        parts = {
            "Version": 3,
            "OperatorCodes": _vector(b, [_code(b, *code) for code in codes]),
            "Buffers": _vector(b, [_buffer(b, data) for data in self._buffers]),
            "SignatureDefs": _vector(b, self._signatures(b)),
        }
        sides = [(self._inputs, outputs, main), *([((), (), first)] if first else [])]
        graphs = [self._graph(b, *side, codes) for side in sides]
        model = _table(b, "Model", Subgraphs=_vector(b, graphs), **parts)
        b.Finish(model, b"TFL3")
        return bytes(b.Output())

    def _graph(
        self,
        b: Any,
        inputs: Sequence[int],
        outputs: Sequence[int],
        operators: Sequence[Mapping[str, Any]],
        codes: Sequence[tuple[str, str]],
    ) -> int:
        return _table(
            b,
            "SubGraph",
            Tensors=_vector(b, [_tensor(b, tensor) for tensor in self._tensors]),
            Inputs=b.CreateNumpyVector(np.asarray(inputs, np.int32)),
            Outputs=b.CreateNumpyVector(np.asarray(outputs, np.int32)),
            Operators=_vector(b, [_operator(b, operator, codes) for operator in operators]),
        )

    def save(self, folder: Path, *outputs: int) -> Path:
        """Write the file into a folder."""
        path = folder / "model.tflite"
        path.write_bytes(self.build(*outputs))
        return path

    def _signatures(self, b: Any) -> list[int]:
        if self.signature is None:
            return []
        sides = [
            _vector(
                b,
                [
                    _table(b, "TensorMap", Name=b.CreateString(n), TensorIndex=i)
                    for n, i in side.items()
                ],
            )
            for side in self.signature
        ]
        key = b.CreateString("serving_default")
        return [_table(b, "SignatureDef", Inputs=sides[0], Outputs=sides[1], SignatureKey=key)]


def _table(b: Any, name: str, **fields: Any) -> int:
    """Write a table with the schema's own functions."""
    module = importlib.import_module(f"tflite.{name}")
    module.Start(b)
    for field, value in fields.items():
        getattr(module, f"Add{field}")(b, value)
    return int(module.End(b))


def _vector(b: Any, offsets: Sequence[int]) -> int:
    b.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        b.PrependUOffsetTRelative(offset)
    return int(b.EndVector())


def _code(b: Any, operator: str, custom: str) -> int:
    from tflite.BuiltinOperator import BuiltinOperator

    number = getattr(BuiltinOperator, operator)
    more = {"CustomCode": b.CreateString(custom)} if custom else {}
    deprecated = min(number, 127)
    return _table(
        b,
        "OperatorCode",
        DeprecatedBuiltinCode=deprecated,
        BuiltinCode=number,
        Version=_VERSIONS.get(operator, 1),
        **more,
    )


def _buffer(b: Any, data: bytes) -> int:
    # Values are aligned to 16 bytes, as converters write them.
    b.StartVector(1, len(data), 16)
    b.head -= len(data)
    b.Bytes[b.head : b.head + len(data)] = data
    return _table(b, "Buffer", Data=b.EndVector())


def _tensor(b: Any, tensor: Mapping[str, Any]) -> int:
    fields: dict[str, Any] = {"Name": b.CreateString(tensor["name"])}
    shape = np.asarray(tensor["shape"], np.int32)
    fields["Shape"] = b.CreateNumpyVector(np.abs(shape))
    if (shape < 0).any():
        fields["ShapeSignature"] = b.CreateNumpyVector(shape)
    if tensor["quantized"]:
        scale, zero_point, axis = tensor["quantized"]
        parameters = {
            "Scale": b.CreateNumpyVector(np.atleast_1d(np.asarray(scale, np.float32))),
            "ZeroPoint": b.CreateNumpyVector(np.atleast_1d(np.asarray(zero_point, np.int64))),
        }
        fields["Quantization"] = _table(
            b, "QuantizationParameters", QuantizedDimension=axis, **parameters
        )
    if tensor.get("is_variable"):
        fields["IsVariable"] = True
    if tensor.get("is_sparse"):
        fields["Sparsity"] = _table(b, "SparsityParameters")
    return _table(
        b, "Tensor", Type=_TYPES[tensor["dtype"]], Buffer=tensor["buffer"], HasRank=True, **fields
    )


def _operator(b: Any, operator: Mapping[str, Any], codes: Sequence[tuple[str, str]]) -> int:
    from tflite.BuiltinOptions import BuiltinOptions

    more: dict[str, Any] = {}
    if operator["options"]:
        name = f"{operator['options']}Options"
        fields = {
            key: b.CreateNumpyVector(np.asarray(value, np.int32))
            if isinstance(value, list)
            else b.CreateString(value)
            if isinstance(value, str)
            else value
            for key, value in operator["fields"].items()
        }
        more = {
            "BuiltinOptionsType": getattr(BuiltinOptions, name),
            "BuiltinOptions": _table(b, name, **fields),
        }
    inputs, outputs = (
        b.CreateNumpyVector(np.asarray(operator[side], np.int32)) for side in ("inputs", "outputs")
    )
    index = codes.index((operator["operator"], operator["custom"]))
    return _table(b, "Operator", OpcodeIndex=index, Inputs=inputs, Outputs=outputs, **more)


def open_litert(data: bytes, feed: Mapping[str, Array]) -> Any:
    """Return LiteRT's interpreter with inputs of these shapes, or skip the test when it is not installed."""
    pytest.importorskip(
        "ai_edge_litert", reason="LiteRT is not installed (pip install 'tvmflow[tflite]')"
    )
    from ai_edge_litert.interpreter import Interpreter

    interpreter: Any = Interpreter(model_content=data, num_threads=1)
    numbers = {entry["name"]: entry["index"] for entry in interpreter.get_input_details()}
    for name, number in numbers.items():
        interpreter.resize_tensor_input(number, feed[name].shape)
    interpreter.allocate_tensors()
    return interpreter


def invoke(interpreter: Any, feed: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of the next call."""
    for entry in interpreter.get_input_details():
        interpreter.set_tensor(entry["index"], feed[entry["name"]])
    interpreter.invoke()
    return [np.array(interpreter.get_tensor(e["index"])) for e in interpreter.get_output_details()]


def run_litert(data: bytes, feed: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of LiteRT for inputs of any shape, and its variable tensors in `feed` after the call."""
    interpreter = open_litert(data, feed)
    inputs = {entry["name"] for entry in interpreter.get_input_details()}
    numbers = {entry["name"]: entry["index"] for entry in interpreter.get_tensor_details()}
    held = [numbers[name] for name in feed if name not in inputs]
    for name in feed.keys() - inputs:
        interpreter.set_tensor(numbers[name], feed[name])
    outputs = invoke(interpreter, feed)
    return [*outputs, *(np.array(interpreter.get_tensor(number)) for number in held)]
