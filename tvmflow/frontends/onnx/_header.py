"""Reads an ONNX model's inputs, outputs and external files, without onnx and without its weights.

Field numbers are from onnx.proto3.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.files import map_file
from tvmflow.frontends.base import ModelFacts, ModelInput, ModelOutput, NotAModel, unsupported_dtype
from tvmflow.frontends.inputs import MAX_SIGNATURE

# ---------------------------------------------------------------- element types


# The names of element types in the order of `TensorProto.DataType`.
_TYPE_NAMES: Final = (
    "undefined float32 uint8 int8 uint16 int16 int32 int64 string bool float16 float64 uint32 uint64 "
    "complex64 complex128 bfloat16 float8e4m3fn float8e4m3fnuz float8e5m2 float8e5m2fnuz uint4 int4 "
    "float4e2m1 float8e8m0 uint2 int2"
).split()
_ELEMENT_TYPES: Final[Mapping[int, str]] = {
    number: _TYPE_NAMES[number] for number in (*range(1, 8), *range(9, 14))
}
"""The dtype of each element type that an input can have."""

NARROW_TYPES: Final = frozenset(range(17, 27))
"""The float8 element types, and those with less than 8 bits."""


def name_of(element_type: int) -> str:
    is_known = 0 < element_type < len(_TYPE_NAMES)
    return _TYPE_NAMES[element_type] if is_known else f"number {element_type} of ONNX"


def model_input(
    name: str, element_type: int | None, dims: tuple[int | str, ...] | None, *, is_required: bool
) -> ModelInput:
    """Return an input of a graph; its element type is None if it is not a tensor."""
    dtype, problem = _ELEMENT_TYPES.get(element_type or 0), ""
    if element_type is None:
        problem = "is not a tensor"
    elif dtype is None:
        problem = unsupported_dtype(name_of(element_type))
    return ModelInput(name=name, dtype=dtype, dims=dims, is_required=is_required, problem=problem)


# ---------------------------------------------------------------- the header


# Message -> field number -> kind of the message in that field.
_CHILDREN: Final[Mapping[str, Mapping[int, str]]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external"},
}
_GRAPH: Final = 7
MAX_NODES: Final = 100_000
"""The maximum number of nodes in all graphs and functions of a model: TVM takes hours for more."""

MAX_WEIGHTS: Final = 100_000
"""The maximum number of weights of a model."""

# The maximum number of messages (nodes, attributes, tensors, …) and fields, over all graphs and functions. The
# shortest message takes 2 bytes in a file, but some 200 bytes in protobuf's memory.
_MAX_MESSAGES: Final = 800_000
_MAX_FIELDS: Final = 2_000_000

# The field numbers of an operator's name, domain and overload, in a node and in a function.
_OPERATOR: Final[Mapping[str, tuple[int, int, int]]] = {"node": (4, 7, 8), "function": (1, 10, 13)}
_STANDARD: Final = "ai.onnx"
# The nesting limit of protobuf's own readers.
_MAX_DEPTH: Final = 100


def read_header(path: Path) -> ModelFacts:
    """Return the inputs, outputs, and sorted names of external data files; NotAModel if it is not a model."""
    if path.stat().st_size == 0:
        raise NotAModel("the file is empty")
    with path.open("rb") as stream, map_file(stream) as data:
        reader = _Reader(data)
        data_files = set(reader.data_files(Field(0, 0, len(data)), "model"))
        reader.check_inlined()
        inputs, outputs = tuple(reader.inputs()), tuple(reader.outputs())
        return ModelFacts(inputs, tuple(sorted(data_files)), outputs=outputs)


_Operator = tuple[str, str, str]


def _as_operator(parts: list[str]) -> _Operator:
    name, domain, overload = parts
    return name, "" if domain == _STANDARD else domain, overload


def _count_nodes(calls: Mapping[_Operator, int], functions: Mapping[_Operator, int]) -> int:
    """Return how many nodes calls expand to, with the nodes of functions; stops one above the limit."""
    count = sum(times * functions.get(operator, 1) for operator, times in calls.items())
    return min(count, MAX_NODES + 1)


class _Reader:
    """Reads one file; visits each message once."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._weights: set[str] = set()
        self._inputs: list[Field] = []
        self._outputs: list[Field] = []
        self._nodes = 0
        self._visited = self._messages = 0
        # The calls of each operator, by the main graph and by each function.
        self._calls: Counter[_Operator] = Counter()
        self._functions: dict[_Operator, Counter[_Operator]] = {}

    def data_files(self, message: Field, kind: str, depth: int = 0) -> Iterator[str]:
        """Yield the location of each tensor with external data; record the main graph's inputs and weights."""
        if depth > _MAX_DEPTH:
            raise NotAModel(f"it is nested more than {_MAX_DEPTH} levels deep")
        if kind == "external":
            entry = {field.number: field for field in self._fields(message)}
            if 1 in entry and self._text(entry[1]) == "location":
                yield self._text(entry[2]) if 2 in entry else ""
            return
        children, numbers = _CHILDREN[kind], _OPERATOR.get(kind, ())
        has_graph = False
        operator = ["", "", ""]
        outer = self._calls
        if kind == "function":
            self._calls = Counter()
        for field in self._fields(message):
            child = children.get(field.number, "")
            self._count(child)
            if field.number in numbers:
                operator[numbers.index(field.number)] = self._text(field)
            has_graph = has_graph or field.number == _GRAPH
            if kind == "graph" and depth == 1:
                self._record(field)
            if child and field.start < field.end:
                yield from self.data_files(field, child, depth + 1)
        if kind == "model" and not has_graph:
            raise NotAModel("it has no graph")
        if kind == "node":
            self._calls[_as_operator(operator)] += 1
        elif kind == "function":
            self._functions[_as_operator(operator)] = self._calls
            self._calls = outer

    def check_inlined(self) -> None:
        """Check that the model is not too large once its function calls are replaced by the functions' nodes."""
        counts: dict[_Operator, int] = {}
        active: set[_Operator] = set()
        pending = [operator for operator in self._calls if operator in self._functions]
        while pending:
            operator = pending[-1]
            calls = self._functions[operator]
            missing = [o for o in calls if o in self._functions and o not in counts]
            if operator in counts or not missing:
                counts.setdefault(operator, _count_nodes(calls, counts))
                active.discard(operator)
                pending.pop()
            elif operator in active:
                raise NotAModel("one of its functions calls itself")
            else:
                active.add(operator)
                pending += missing
        if self._functions and _count_nodes(self._calls, counts) > MAX_NODES:
            raise NotAModel(
                f"it has more than {MAX_NODES:,} nodes when its functions are inlined, which tvmflow does not import"
            )

    def _count(self, child: str) -> None:
        self._visited += 1
        if child:
            self._messages += 1
            _check_count(self._messages, _MAX_MESSAGES, "nodes, attributes and tensors")
        if child == "node":
            self._nodes += 1
            _check_count(self._nodes, MAX_NODES, "nodes")
        _check_count(self._visited, _MAX_FIELDS, "fields of nodes, attributes and tensors")

    def _record(self, field: Field) -> None:
        """Record a field of the main graph (`initializer`, `input` or `output`)."""
        if field.number == 5:
            self._weights.add(self._name(field, 8))
            _check_count(len(self._weights), MAX_WEIGHTS, "weights")
        elif field.number == 11:
            self._inputs.append(field)
            # Old models list their weights as inputs, too.
            _check_count(len(self._inputs), MAX_SIGNATURE + MAX_WEIGHTS, "inputs")
        elif field.number == 12:
            self._outputs.append(field)
            _check_count(len(self._outputs), MAX_SIGNATURE, "outputs")

    def inputs(self) -> Iterator[ModelInput]:
        for field in self._inputs:
            name = self._name(field, 1)
            yield model_input(name, *self._type(field), is_required=name not in self._weights)

    def outputs(self) -> Iterator[ModelOutput]:
        for field in self._outputs:
            element_type, dims = self._type(field)
            yield ModelOutput(self._name(field, 1), _ELEMENT_TYPES.get(element_type or 0), dims)

    def _type(self, value: Field) -> tuple[int | None, tuple[int | str, ...] | None]:
        """Return element type and shape of a value; None for both if it is not a tensor."""
        # ValueInfoProto.type, TypeProto.tensor_type
        tensor = self._last(self._last(value, 2), 1)
        if tensor is None:
            return None, None
        parts = list(self._fields(tensor))
        types = [part.value for part in parts if part.number == 1]
        shape = next((part for part in reversed(parts) if part.number == 2), None)
        dims = None if shape is None else tuple(map(self._dim, self._fields(shape)))
        return types[-1] if types else 0, dims

    def _dim(self, dim: Field) -> int | str:
        """Return the fixed size of a dimension, or the name of a dynamic one."""
        size: int | str = ""
        for part in self._fields(dim):
            if part.number in (1, 2):
                size = part.value if part.number == 1 else self._text(part)
        return size

    def _last(self, message: Field | None, number: int) -> Field | None:
        matching = [f for f in self._fields(message) if f.number == number] if message else []
        return matching[-1] if matching else None

    def _name(self, message: Field, number: int) -> str:
        """Return a name; invalid UTF-8 becomes surrogates, which no valid name contains."""
        field = self._last(message, number)
        return self._text(field, "surrogateescape") if field else ""

    def _text(self, field: Field, errors: str = "replace") -> str:
        return self._data[field.start : field.end].decode("utf-8", errors)

    def _fields(self, message: Field) -> Iterator[Field]:
        return fields(self._data, message.start, message.end)


def _check_count(count: int, limit: int, noun: str) -> None:
    if count > limit:
        raise NotAModel(f"it has more than {limit:,} {noun}, which tvmflow does not import")


# ---------------------------------------------------------------- protobuf
# Importing protobuf and onnx would take a second.


_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_INT64_SIGN: Final = 1 << 63


class Field(NamedTuple):
    """A field that begins at offset `begin`: either the bytes `start` to `end`, or a varint `value`."""

    number: int
    start: int
    end: int
    value: int = 0
    begin: int = 0


def fields(data: mmap.mmap, position: int, end: int) -> Iterator[Field]:
    """Yield the length-delimited fields and varints of a message; NotAModel for other wire types."""
    while position < end:
        begin = position
        tag, position = _varint(data, position, end)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH:
            size, position = _varint(data, position, end)
            if position + size > end:
                raise NotAModel("it is truncated")
            yield Field(number=number, start=position, end=position + size, value=0, begin=begin)
            position += size
        elif kind == _VARINT:
            value, position = _varint(data, position, end)
            # Negative integers are stored as unsigned 64-bit integers.
            value = (value + _INT64_SIGN) % (2 * _INT64_SIGN) - _INT64_SIGN
            yield Field(number=number, start=0, end=0, value=value, begin=begin)
        elif kind in (_FIXED32, _FIXED64):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise NotAModel("it is not in protobuf format")
    if position != end:
        raise NotAModel("it is truncated")


def _varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise NotAModel("it is truncated or not in protobuf format")
