"""Keeps the data of quantized models in bytes where an operator would read the same from floats."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.passes.quantization import BYTES, shift_between
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main

_QUANTIZE: Final = "relax.quantize"
_DEQUANTIZE: Final = "relax.dequantize"
# Operators that give some of the numbers that they read.
_SELECTING: Final = frozenset(
    f"relax.{name}"
    for name in ("reshape", "permute_dims", "squeeze", "expand_dims", "flatten", "nn.max_pool2d")
)


def move_dequantize(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Move conversions from bytes behind operators that select numbers, and next to each reader.

    Bytes get the dtype that dot product instructions take, and conversion forth and back is removed.
    """
    return rewrite_main(mod, _DequantizeMover, str(context.dot_dtype))


class _DequantizeMover(MainRewriter):
    """Rewrites (de)quantization with one scale, which is a constant."""

    def __init__(self, mod: tvm.IRModule, dtype: str) -> None:
        super().__init__(mod)
        self._dtype = dtype

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        name = ir.operator_name(call)
        if name == _QUANTIZE:
            return self._quantize(call, rewritten)
        if name == _DEQUANTIZE:
            return self._dequantize(call, rewritten)
        if name in _SELECTING and (source := self._find_conversion(rewritten.args[0])) is not None:
            selected = self.emit(
                relax.Call(call.op, [source.args[0], *rewritten.args[1:]], call.attrs)
            )
            return relax.Call(source.op, [selected, *source.args[1:]], source.attrs)
        if name == "relax.concat" and (joined := self._join(rewritten)) is not None:
            return joined
        return self._with_own_conversions(rewritten)

    def _join(self, concat: Any) -> Any:
        """Return a conversion of joined bytes; None where parts have other scales, or are none of bytes."""
        parts = ir.resolve_alias(concat.args[0], self.lookup_binding)
        parts = self.lookup_binding(parts) if isinstance(parts, relax.Var) else parts
        sources = [self._find_conversion(part) for part in parts.fields]
        first = sources[0]
        if first is None or not all(
            source is not None
            and _is_inverse(source, first.args[1], first.args[2], ir.dtype_of(first.args[0]))
            for source in sources
        ):
            return None
        integers = relax.Tuple([source.args[0] for source in sources])
        joined = self.emit(relax.Call(concat.op, [integers], concat.attrs))
        return relax.Call(first.op, [joined, *first.args[1:]], first.attrs)

    def _quantize(self, call: Any, rewritten: Any) -> Any:
        dtype, axis = self._dtype_of(call), int(call.attrs.axis)
        data, scale, zero_point = rewritten.args
        if dtype != ir.dtype_of(call):
            zero_point = _add(zero_point, shift_between(ir.dtype_of(call), dtype))
        source = self._find_conversion(data)
        if source is not None and _is_inverse(source, scale, zero_point, dtype):
            return source.args[0]
        moved = relax.op.quantize(data, scale, zero_point, axis, dtype)
        return self._with_own_conversions(moved)

    def _dequantize(self, call: Any, rewritten: Any) -> Any:
        if ir.dtype_of(rewritten.args[0]) == ir.dtype_of(call.args[0]):
            return rewritten
        integers, scale, zero_point = rewritten.args
        shift = shift_between(ir.dtype_of(call.args[0]), ir.dtype_of(integers))
        arguments = (integers, scale, _add(zero_point, shift))
        return relax.op.dequantize(*arguments, int(call.attrs.axis), str(call.attrs.out_dtype))

    def _with_own_conversions(self, call: Any) -> Any:
        """Return a call with conversions of its own in place of those that it reads.

        Fusion would not repeat shared ones.
        """
        arguments = [
            argument if source is None else self.emit(source)
            for argument in call.args
            for source in [self._find_conversion(argument)]
        ]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)

    def _find_conversion(self, expr: Any) -> Any:
        """Return the call that converted data from bytes with one scale; None for other data, and for weights."""
        var = ir.resolve_alias(expr, self.lookup_binding)
        value = self.lookup_binding(var) if isinstance(var, relax.Var) else None
        call = ir.as_call(value, _DEQUANTIZE)
        if call is None or not ir.is_float32(call) or ir.dtype_of(call.args[0]) not in BYTES:
            return None
        return call if _has_one_scale(call) else None

    def _dtype_of(self, quantize: Any) -> str:
        """Return the dtype for quantized data: that of dot products where nothing but conversions reads them."""
        dtype = ir.dtype_of(quantize)
        is_free = dtype in BYTES and _has_one_scale(quantize)
        is_free = is_free and self.flow.is_read_by(quantize, _DEQUANTIZE)
        is_free = is_free and all(map(_has_one_scale, self.flow.list_readers(quantize)))
        return self._dtype if is_free else dtype


def _has_one_scale(call: Any) -> bool:
    """Return whether the scale and the zero point of a call are one constant each."""
    return all(
        isinstance(expr, tvm.ir.Constant) and expr.value.numpy().size == 1 for expr in call.args[1:]
    )


def _add(zero_point: Any, shift: int) -> Any:
    """Return a zero point plus a number, which may exceed the dtype of the zero point."""
    if not shift:
        return zero_point
    return relax.const(zero_point.value.numpy().astype(np.int32) + np.int32(shift), "int32")


def _is_inverse(dequantize: Any, scale: Any, zero_point: Any, dtype: str) -> bool:
    """Return whether quantization gives the bytes that were converted."""
    parameters = zip(dequantize.args[1:], (scale, zero_point), strict=True)
    return ir.dtype_of(dequantize.args[0]) == dtype and all(
        isinstance(expected, tvm.ir.Constant)
        and np.array_equal(actual.value.numpy().ravel(), expected.value.numpy().ravel())
        for actual, expected in parameters
    )
