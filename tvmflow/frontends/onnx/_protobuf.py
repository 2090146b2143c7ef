"""Reads protobuf's wire format without importing protobuf, which takes a second with onnx."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Final, NamedTuple

from tvmflow.frontends._reading import NotAModel

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_INT64_SIGN: Final = 1 << 63


class Field(NamedTuple):
    """One field of a message: the bytes `start` to `end` of a length-delimited one, the value of a varint.

    `begin` is the position of its number, before `start`.
    """

    number: int
    start: int
    end: int
    value: int = 0
    begin: int = 0


def fields(data: mmap.mmap, position: int, end: int) -> Iterator[Field]:
    """Give each length-delimited field and each varint of a message, and skip all others.

    Raises:
        NotAModel: when the bytes are not in protobuf format.
    """
    while position < end:
        begin = position
        tag, position = _varint(data, position, end)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH:
            size, position = _varint(data, position, end)
            if position + size > end:
                raise NotAModel("it is truncated")
            yield Field(number, position, position + size, 0, begin)
            position += size
        elif kind == _VARINT:
            value, position = _varint(data, position, end)
            yield Field(number, 0, 0, _signed(value), begin)
        elif kind in (_FIXED32, _FIXED64):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise NotAModel("it is not in protobuf format")
    if position != end:
        raise NotAModel("it is truncated")


def _signed(value: int) -> int:
    """Return a varint as the int64 that it stands for."""
    value &= (_INT64_SIGN << 1) - 1
    return value - (_INT64_SIGN << 1) if value >= _INT64_SIGN else value


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
