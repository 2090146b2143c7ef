"""Reads a model without the bytes of its large weights, which are mapped when they are needed.

Such a tensor is marked as ONNX marks external data: it has no data of its own, and names a file,
an offset and a length. The file may be the ONNX file itself. So passes work on a small model, and
protobuf's limit of 2 GiB holds for the graph alone.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tvmflow.core.files import map_file
from tvmflow.frontends.base import NotAModel
from tvmflow.frontends.onnx._header import Field, fields

_MIN_BYTES: Final = 1 << 16
"""The size from which a tensor stays in its file. It must be larger than what passes read: shapes, axes, scales."""

# Field numbers of onnx.proto3.
_GRAPH, _INITIALIZER = 7, 5
_DATA_TYPE, _FLOAT_DATA, _RAW_DATA, _DOUBLE_DATA, _EXTERNAL_DATA, _DATA_LOCATION = (
    2,
    4,
    9,
    10,
    13,
    14,
)
# Element types whose values have the same bytes in a file and in an array.
_MAPPED_TYPES: Final = frozenset(
    (
        *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16),
        *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    )
)
# Fields with packed values -> the element type whose bytes they hold.
_PACKED_TYPES: Final[Mapping[int, int]] = {
    _FLOAT_DATA: TensorProto.FLOAT,
    _DOUBLE_DATA: TensorProto.DOUBLE,
}


class Place(NamedTuple):
    """The place of the bytes of a tensor in a file."""

    file: str
    offset: int
    length: int


def read_without_large_tensors(path: Path) -> ModelProto:
    """Return the model in an ONNX file; its large weights stay in the file.

    Raises:
        OSError: when the file cannot be read.
        google.protobuf.message.DecodeError: when it is not an ONNX model.
    """
    if path.stat().st_size == 0:
        return ModelProto()
    with path.open("rb") as stream, map_file(stream) as data:
        try:
            content = _Shortener(data, str(path)).shorten(0, len(data), "model")
        except NotAModel:
            # protobuf says what is wrong with it
            content = data[:]
    return ModelProto.FromString(content)


class _Shortener:
    """Copies the messages of a file, without the data of large weights."""

    _CHILDREN: Final[Mapping[str, tuple[int, str]]] = {
        "model": (_GRAPH, "graph"),
        "graph": (_INITIALIZER, "tensor"),
    }

    def __init__(self, data: mmap.mmap, file: str) -> None:
        self._data = data
        self._file = file

    def shorten(self, start: int, end: int, kind: str) -> bytes:
        """Return the bytes of a message of one of the kinds of `_CHILDREN`, or of a tensor."""
        if end - start < _MIN_BYTES:
            return self._data[start:end]
        if kind == "tensor":
            return self._shorten_tensor(start, end)
        number, child = self._CHILDREN[kind]
        parts, copied = [], start
        for field in fields(self._data, start, end):
            if field.number == number and field.end - field.start >= _MIN_BYTES:
                content = self.shorten(field.start, field.end, child)
                head = bytes((*_varint(number << 3 | 2), *_varint(len(content))))
                parts += [self._data[copied : field.begin], head, content]
                copied = field.end
        return b"".join([*parts, self._data[copied:end]])

    def _shorten_tensor(self, start: int, end: int) -> bytes:
        content = list(fields(self._data, start, end))
        data = _find_data(content)
        if data is None:
            return self._data[start:end]
        mark = TensorProto()
        leave_in_file(mark, Place(self._file, data.start, data.end - data.start))
        rest = self._data[start : data.begin] + self._data[data.end : end]
        return rest + bytes(mark.SerializeToString())


def _find_data(content: list[Field]) -> Field | None:
    """Return the field with all of a tensor's values; None if they must be read with the model."""
    types = [field.value for field in content if field.number == _DATA_TYPE]
    data = [
        field for field in content if field.number == _RAW_DATA or field.number in _PACKED_TYPES
    ]
    is_external = any(field.number in (_EXTERNAL_DATA, _DATA_LOCATION) for field in content)
    if len(types) != 1 or types[0] not in _MAPPED_TYPES or len(data) != 1 or is_external:
        return None
    (field,) = data
    is_large = field.end - field.start >= _MIN_BYTES
    return field if is_large and _PACKED_TYPES.get(field.number, types[0]) == types[0] else None


def _varint(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value


# ---------------------------------------------------------------- tensors of a model


def can_stay(tensor: TensorProto, place: Place) -> bool:
    """Return whether a tensor with external data is mapped when it is needed, and not read with the model."""
    return tensor.data_type in _MAPPED_TYPES and place.length >= _MIN_BYTES


def leave_in_file(tensor: TensorProto, place: Place) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (
        ("location", place.file),
        ("offset", place.offset),
        ("length", place.length),
    ):
        tensor.external_data.add(key=key, value=str(value))


def place_of(tensor: TensorProto) -> Place | None:
    """Return where the data of a tensor was left; None for one that has its data."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return Place(entries["location"], int(entries["offset"]), int(entries["length"]))


def array_of(tensor: TensorProto) -> np.ndarray[Any, Any]:
    """Return the values of a tensor. Those in a file are mapped: changes of the array do not reach it."""
    place = place_of(tensor)
    if place is None:
        return np.asarray(numpy_helper.to_array(tensor))
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    # TVM takes arrays that can be written alone
    return np.asarray(
        np.memmap(place.file, dtype, mode="c", offset=place.offset, shape=tuple(tensor.dims))
    )


def with_data(tensor: TensorProto) -> TensorProto:
    return (
        tensor
        if place_of(tensor) is None
        else numpy_helper.from_array(array_of(tensor), tensor.name)
    )
