"""Finds the external data files of an ONNX model without onnx: a walk over protobuf's wire format.

Planning must know every file that a model consists of, and must not take the second that
importing onnx takes. Field numbers are those of onnx.proto3. Weight bytes are skipped by
their length, never read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

# message -> field number -> message in that field
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
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class NotAModel(ValueError):
    """The bytes are not an ONNX model."""


def external_locations(path: Path) -> tuple[str, ...]:
    """The `location` of every tensor whose data is in another file, each once, sorted. Raises NotAModel."""
    if path.stat().st_size == 0:
        raise NotAModel("the file is empty")
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = set(_locations(data, 0, len(data), "model"))
    return tuple(sorted(found))


def _locations(data: mmap.mmap, start: int, end: int, message: str) -> Iterator[str]:
    if message == "external":
        entry = {number: data[a:b] for number, a, b in _fields(data, start, end)}
        if entry.get(1) == b"location":
            yield entry.get(2, b"").decode("utf-8", "replace")
        return
    children = _CHILDREN[message]
    seen = False
    for number, a, b in _fields(data, start, end):
        seen = seen or number == 7
        if number in children:
            yield from _locations(data, a, b, children[number])
    if message == "model" and not seen:
        raise NotAModel("it holds no graph")


def _fields(data: mmap.mmap, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """`(field number, start, end)` of each length-delimited field; all others are stepped over."""
    while position < end:
        tag, position = _varint(data, position, end)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH:
            size, position = _varint(data, position, end)
            if position + size > end:
                raise NotAModel("it is cut off")
            yield number, position, position + size
            position += size
        elif kind == _VARINT:
            _, position = _varint(data, position, end)
        elif kind in (_FIXED32, _FIXED64):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise NotAModel("it is not in protobuf's format")
    if position != end:
        raise NotAModel("it is cut off")


def _varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise NotAModel("it is cut off, or not in protobuf's format")
