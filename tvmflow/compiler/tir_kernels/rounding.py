"""Rounding of float32 to the integers of quantized models, and sums of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from tvm import te, tirx

_FLOAT: Final = "float32"
_INTEGER_BITS: Final = 0x4B400000
"""The bits of 1.5 · 2²³: a small number that is added to it is rounded to an integer, in the last bits of the sum."""


def fake_quantize(x: Any, scale: float, zero_point: int, dtype: str, *, has_fma: bool) -> Any:
    """Return `x` as quantization to integers and the conversion back make it: rounded to multiples of the scale.

    Args:
        x: A tensor of float32.
        scale: The scale of the whole tensor.
        zero_point: The integer that stands for 0.
        dtype: The dtype of the integers, of at most 16 bits.
        has_fma: Whether the CPU multiplies and adds with one rounding.
    """

    def element(*index: Any) -> Any:
        rounded = tirx.round(_divide_clamped(x(*index), scale, zero_point, dtype, has_fma=has_fma))
        return rounded * tirx.const(scale, _FLOAT)

    return te.compute(x.shape, element, name="rounded", tag="elemwise")


def quantize(x: Any, scale: float, zero_point: int, dtype: str, *, has_fma: bool) -> Any:
    """Return the integers round(x / scale) + zero_point, clamped to a dtype of at most 16 bits.

    Args:
        x: A tensor of float32.
        scale: The scale of the whole tensor.
        zero_point: The integer that stands for 0.
        dtype: The dtype of the integers.
        has_fma: Whether the CPU multiplies and adds with one rounding.
    """

    def element(*index: Any) -> Any:
        quotient = _divide_clamped(x(*index), scale, zero_point, dtype, has_fma=has_fma)
        bits = tirx.reinterpret("int32", quotient + tirx.const(1.5 * 2**23, _FLOAT))
        return (bits - (_INTEGER_BITS - zero_point)).astype(dtype)

    return te.compute(x.shape, element, name="quantized", tag="elemwise")


def add(left: Any, right: Any, parameters: Sequence[tuple[float, int] | None]) -> Any:
    """Return the sum of two tensors of one shape: floats, or integers with a scale and a zero point each."""

    def read(operand: Any, known: tuple[float, int] | None, index: Any) -> Any:
        if known is None:
            return operand(*index)
        scale, zero_point = known
        shifted = operand(*index).astype("int32") - zero_point
        return shifted.astype(_FLOAT) * tirx.const(scale, _FLOAT)

    operands = tuple(zip((left, right), parameters, strict=True))
    return te.compute(
        left.shape,
        lambda *index: read(*operands[0], index) + read(*operands[1], index),
        name="sum",
        tag="elemwise",
    )


def _divide_clamped(x: Any, scale: float, zero_point: int, dtype: str, *, has_fma: bool) -> Any:
    """Return x / scale, x being clamped to what the integers of a dtype stand for, with the rounding of a division.

    A division takes ten times as long as a multiplication. The quotient is a product with the
    reciprocal of the scale and then corrected by its remainder, which one instruction computes without
    an error (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor",
    1990). Rounded to an integer, a clamped quotient lies within the limits.
    """
    divisor, limits = np.float32(scale), np.iinfo(dtype)
    multiples = (np.float32(int(limit) - zero_point) for limit in (limits.min, limits.max))
    lower, upper = (tirx.const(float(multiple * divisor), _FLOAT) for multiple in multiples)
    clamped = tirx.max(tirx.min(x, upper), lower)
    if not has_fma:
        return clamped / tirx.const(float(divisor), _FLOAT)
    reciprocal = tirx.const(float(np.float32(1) / divisor), _FLOAT)
    value, quotient = tirx.Var("value", _FLOAT), tirx.Var("quotient", _FLOAT)
    remainder = value - quotient * tirx.const(float(divisor), _FLOAT)
    corrected = tirx.Let(quotient, value * reciprocal, quotient + remainder * reciprocal)
    return tirx.Let(value, clamped, corrected)
