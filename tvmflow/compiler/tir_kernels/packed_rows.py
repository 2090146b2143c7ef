"""Kernels for rows of int8 values with a float32 scale (`ir_operators.PackRows`).

A row ends with the bytes of its scale, the lowest first, so that appending and copying rows also moves their scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tvm import te, tirx

from tvmflow.core.types import SCALE_BYTES, SCALE_STEPS

# Rows with smaller values become 0: the inverse of their scale could be infinite.
_MIN_VALUE: Final = 1e-30


def read_scale(byte_at: Callable[[int], Any]) -> Any:
    """Return the scale of a row; `byte_at` returns each of its bytes."""
    bits = tirx.const(0, "uint32")
    for n in range(SCALE_BYTES):
        byte = tirx.Cast("uint32", tirx.Cast("uint8", byte_at(n)))
        bits = bits | (byte << tirx.const(8 * n, "uint32"))
    return tirx.reinterpret("float32", bits)


def pack_rows(x: Any) -> Any:
    """Return the quantized rows of a float32 tensor (…, n): int8 (…, n + 4)."""
    *outer, length = x.shape
    k = te.reduce_axis((0, length), name="k")
    largest = te.compute(outer, lambda *i: te.max(tirx.abs(x(*i, k)), axis=k), name="largest")

    def element(*index: Any) -> Any:
        *row, column = index
        most = largest(*row)
        inverse = tirx.Select(most > _MIN_VALUE, SCALE_STEPS / most, tirx.const(0.0, "float32"))
        value = tirx.round(x(*row, tirx.min(column, length - 1)) * inverse)
        bits = tirx.reinterpret("uint32", most * tirx.const(1 / SCALE_STEPS, "float32"))
        shift = tirx.Cast("uint32", tirx.max(column - length, 0) * 8)
        scale = tirx.Cast("int8", tirx.Cast("uint8", bits >> shift))
        return tirx.Select(column < length, tirx.Cast("int8", value), scale)

    return te.compute((*outer, length + SCALE_BYTES), element, name="pack_rows")


def unpack_rows(x: Any) -> Any:
    """Return the float32 values (…, n) of quantized rows, int8 (…, n + 4)."""
    *outer, width = x.shape
    length = width - SCALE_BYTES

    def element(*index: Any) -> Any:
        scale = read_scale(lambda n: x(*index[:-1], length + n))
        return tirx.Cast("float32", x(*index)) * scale

    return te.compute((*outer, length), element, name="unpack_rows")
