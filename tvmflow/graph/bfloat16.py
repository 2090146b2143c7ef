"""bfloat16, the upper half of a float32, stored as 16-bit integers.

TVM's code generator for LLVM has no bfloat16 type (apache-tvm 0.27).
"""

from __future__ import annotations

from typing import Any, Final

from tvm import te, tirx

DTYPE: Final = "uint16"
"""The dtype of tensors that hold bfloat16 values."""

BITS: Final = 16
ROUNDING_BIAS: Final = 0x7FFF
QUIET_NAN: Final = 0x00400000
_INFINITY: Final = 0x7F800000


def to_float32(value: Any) -> Any:
    """Convert a bfloat16 value to float32."""
    return tirx.reinterpret("float32", value.astype("uint32") << _number(BITS))


def from_float32(value: Any) -> Any:
    """Round a float32 to the nearest bfloat16, ties to even. NaN stays NaN."""
    bits = tirx.Var("bits", "uint32")
    even = (bits >> _number(BITS)) & _number(1)
    is_nan = (bits & _number(0x7FFFFFFF)) > _number(_INFINITY)
    nearest = bits + (_number(ROUNDING_BIAS) + even)
    rounded = tirx.Select(is_nan, bits | _number(QUIET_NAN), nearest) >> _number(BITS)
    return tirx.Let(bits, tirx.reinterpret("uint32", value), rounded.astype(DTYPE))


def _number(value: int) -> Any:
    return tirx.const(value, "uint32")


def round_data(x: Any) -> Any:
    """Round a float32 tensor to bfloat16."""
    return te.compute(
        x.shape, lambda *index: from_float32(x(*index)), name="rounded", tag="elemwise"
    )
