"""Finds the external data files of an ONNX model without importing onnx, in protobuf's wire format.

Planning needs the name of every file of a model, and importing onnx takes a second. Field
numbers are those of onnx.proto3. The bytes of weights are skipped by their length, never read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

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
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class NotAModel(ValueError):
    """The bytes are not an ONNX model."""


def external_locations(path: Path) -> tuple[str, ...]:
    """Return the sorted `location`s of tensors whose data is in other files.

    Raises:
        NotAModel: when the file is not an ONNX model.
    """
    if path.stat().st_size == 0:
        raise NotAModel("the file is empty")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        locations = set(_locations(data, 0, len(data), "model"))
    return tuple(sorted(locations))


def _locations(data: mmap.mmap, start: int, end: int, message: str) -> Iterator[str]:
    if message == "external":
        entry = {number: data[a:b] for number, a, b in _fields(data, start, end)}
        if entry.get(1) == b"location":
            yield entry.get(2, b"").decode("utf-8", "replace")
        return
    children = _CHILDREN[message]
    has_graph = False
    for number, a, b in _fields(data, start, end):
        has_graph = has_graph or number == _GRAPH
        if number in children:
            yield from _locations(data, a, b, children[number])
    if message == "model" and not has_graph:
        raise NotAModel("it has no graph")


def _fields(data: mmap.mmap, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Give `(field number, start, end)` of each length-delimited field, and skip all others."""
    while position < end:
        tag, position = _varint(data, position, end)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH:
            size, position = _varint(data, position, end)
            if position + size > end:
                raise NotAModel("it is truncated")
            yield number, position, position + size
            position += size
        elif kind == _VARINT:
            _, position = _varint(data, position, end)
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
