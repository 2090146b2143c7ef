"""Reads what planning needs of an ONNX file without importing onnx: its external data, inputs and weights by name.

Field numbers are those of onnx.proto3. The bytes of weights are skipped by their length, never read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.frontends._base import ModelInput
from tvmflow.frontends._inputs import MAX_SIGNATURE
from tvmflow.frontends.onnx._element_types import model_input
from tvmflow.frontends.onnx._protobuf import Field, NotAModel, fields

# Message -> number of a field -> message in that field.
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
"""The most nodes of a model: no exporter makes more, and TVM would take hours."""

MAX_WEIGHTS: Final = 100_000
"""The most weights of a model."""

# The limit of protobuf's own readers.
_MAX_DEPTH: Final = 100


class Header(NamedTuple):
    """Facts of a model that stand in its ONNX file.

    Attributes:
        data_files: The sorted `location`s of tensors whose data is in other files.
        inputs: The inputs of the graph; those that have a default, or are weights, are not required.
        outputs: The names of the outputs of the graph.
    """

    data_files: tuple[str, ...]
    inputs: tuple[ModelInput, ...]
    outputs: tuple[str, ...]


def read_header(path: Path) -> Header:
    """Return what an ONNX file says of the model.

    Raises:
        NotAModel: when the file is not an ONNX model.
    """
    if path.stat().st_size == 0:
        raise NotAModel("the file is empty")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        data_files = set(reader.data_files(Field(0, 0, len(data)), "model"))
        return Header(tuple(sorted(data_files)), tuple(reader.inputs()), tuple(reader.outputs()))


class _Reader:
    """Reads one file, whose messages it visits once."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._weights: set[str] = set()
        self._inputs: list[Field] = []
        self._outputs: list[Field] = []
        self._nodes = 0

    def data_files(self, message: Field, kind: str, depth: int = 0) -> Iterator[str]:
        """Give the location of each tensor with external data; record the main graph's inputs and weights."""
        if depth > _MAX_DEPTH:
            raise NotAModel(f"it is nested more than {_MAX_DEPTH} levels deep")
        if kind == "external":
            entry = {field.number: field for field in self._fields(message)}
            if 1 in entry and self._text(entry[1]) == "location":
                yield self._text(entry[2]) if 2 in entry else ""
            return
        children = _CHILDREN[kind]
        has_graph = False
        for field in self._fields(message):
            has_graph = has_graph or field.number == _GRAPH
            if kind == "graph" and depth == 1:
                self._record(field)
            if field.number in children:
                yield from self.data_files(field, children[field.number], depth + 1)
        if kind == "model" and not has_graph:
            raise NotAModel("it has no graph")

    def _record(self, field: Field) -> None:
        """Record a field of the main graph: `node`, `initializer`, `input` or `output`."""
        if field.number == 1:
            self._nodes += 1
        elif field.number == 5:
            self._weights.add(self._name(field, 8))
        elif field.number == 11:
            self._inputs.append(field)
        elif field.number == 12:
            self._outputs.append(field)
        # Old models list their weights as inputs, too.
        for count, limit, noun in (
            (self._nodes, MAX_NODES, "nodes"),
            (len(self._weights), MAX_WEIGHTS, "weights"),
            (len(self._inputs), MAX_SIGNATURE + MAX_WEIGHTS, "inputs"),
            (len(self._outputs), MAX_SIGNATURE, "outputs"),
        ):
            if count > limit:
                raise NotAModel(f"it has more than {limit:,} {noun}, which tvmflow does not import")

    def inputs(self) -> Iterator[ModelInput]:
        """Give the inputs of the main graph."""
        for field in self._inputs:
            name = self._name(field, 1)
            # ValueInfoProto.type, TypeProto.tensor_type
            tensor = self._last(self._last(field, 2), 1)
            yield self._input(name, tensor)

    def outputs(self) -> Iterator[str]:
        """Give the names of the outputs of the main graph."""
        return (self._name(field, 1) for field in self._outputs)

    def _input(self, name: str, tensor: Field | None) -> ModelInput:
        is_required = name not in self._weights
        if tensor is None:
            return model_input(name, None, None, is_required=is_required)
        parts = list(self._fields(tensor))
        types = [part.value for part in parts if part.number == 1]
        shape = next((part for part in reversed(parts) if part.number == 2), None)
        dims = None if shape is None else tuple(map(self._dim, self._fields(shape)))
        return model_input(name, types[-1] if types else 0, dims, is_required=is_required)

    def _dim(self, dim: Field) -> int | str:
        """Return a fixed size, or the name of a free dimension."""
        size: int | str = ""
        for part in self._fields(dim):
            if part.number in (1, 2):
                size = part.value if part.number == 1 else self._text(part)
        return size

    def _last(self, message: Field | None, number: int) -> Field | None:
        """Return the last field of this number in a message, or None."""
        matching = [f for f in self._fields(message) if f.number == number] if message else []
        return matching[-1] if matching else None

    def _name(self, message: Field, number: int) -> str:
        """Return a name; bytes that are no text become halves of characters, so that the name is known as none."""
        field = self._last(message, number)
        return self._text(field, "surrogateescape") if field else ""

    def _text(self, field: Field, errors: str = "replace") -> str:
        return self._data[field.start : field.end].decode("utf-8", errors)

    def _fields(self, message: Field) -> Iterator[Field]:
        return fields(self._data, message.start, message.end)
