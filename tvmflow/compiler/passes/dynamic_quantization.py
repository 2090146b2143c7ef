"""Products of bytes that the model converts to float32, as products of quantized data.

Dynamic quantization makes such products.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.passes.quantization import BYTES, shift_between, shift_bytes
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main

_CAST: Final = "relax.astype"
_MATMUL: Final = "relax.matmul"
_PRODUCTS: Final = frozenset({_MATMUL, *(f"relax.nn.conv{rank}d" for rank in (1, 2, 3))})
_MATRIX_RANK: Final = 2


def convert_integer_products(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite products of bytes minus zero points to products of dequantized data.

    The int32 of the products is read as float32.

    Weights become int8, of matrices minus a zero point that only a dot product of bytes subtracts from
    its sums. Where no instruction multiplies bytes, sums beyond 2²⁴ are rounded as float32.
    """
    return rewrite_main(mod, _IntegerProductRewriter)


class _Difference(NamedTuple):
    """Bytes minus a zero point, as int32.

    Attributes:
        integers: The bytes.
        zero_point: The zero point; None where nothing is subtracted.
    """

    integers: Any
    zero_point: Any


class _IntegerProductRewriter(MainRewriter):
    """Rewrites conversions of int32 to float32."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._real = self.new_memo()

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        if ir.as_call(call, _CAST) is None or not ir.is_float32(call):
            return rewritten
        product = self.flow.value_if_used_once(call.args[0])
        if ir.operator_name(product) not in _PRODUCTS or ir.dtype_of(product) != "int32":
            return rewritten
        left, right = (self._find_difference(operand) for operand in product.args)
        if left is None or right is None:
            return rewritten
        data = self._to_real(product.args[0], left)
        weights = self._to_weights(product, right)
        return _as_float32(product, data, weights)

    def _find_difference(self, expr: Any) -> _Difference | None:
        """Return the bytes and the zero point of which a tensor of int32 is the difference; None for others."""
        value: Any = self.flow.values.get(expr)
        zero_point = None
        if ir.as_call(value, "relax.subtract") is None:
            integers = self._find_source(expr)
        else:
            left, right = value.args
            expanded: Any = ir.as_call(self.flow.values.get(right), "relax.expand_dims")
            integers = self._find_source(left)
            zero_point = self._find_source(right if expanded is None else expanded.args[0])
            if zero_point is None:
                return None
        if integers is None:
            return None
        dtype = ir.dtype_of(integers)
        has_one_dtype = zero_point is None or ir.dtype_of(zero_point) == dtype
        return _Difference(integers, zero_point) if dtype in BYTES and has_one_dtype else None

    def _find_source(self, expr: Any) -> Any:
        """Return what was converted to a tensor; None for tensors that are no conversions."""
        call: Any = ir.as_call(self.flow.values.get(expr), _CAST)
        return None if call is None else call.args[0]

    def _to_real(self, expr: Any, difference: _Difference) -> Any:
        """Emit a difference as float32, once."""
        if difference in self._real:
            return self._real[difference]
        integers, zero_point = difference
        if zero_point is None:
            zero_point = relax.const(0, ir.dtype_of(integers))
        if ir.shape_of(zero_point) == ():
            scale = relax.const(1.0, "float32")
            operands = (self.visit_expr(integers), scale, self.visit_expr(zero_point))
            real = relax.op.dequantize(*operands)
        else:
            real = relax.op.astype(self.visit_expr(expr), "float32")
        self._real[difference] = self.emit(real)
        return self._real[difference]

    def _to_weights(self, product: Any, difference: _Difference) -> Any:
        """Emit the second operand of a product as float32."""
        expr = product.args[1]
        integers, zero_point = difference
        is_known = zero_point is None or isinstance(zero_point, tvm.ir.Constant)
        if not is_known or not self.flow.is_weight(integers):
            return self._to_real(expr, difference)
        zeros = np.asarray(0 if zero_point is None else zero_point.value.numpy(), np.int32)
        zeros = np.asarray(zeros + shift_between(ir.dtype_of(integers), "int8"))
        is_matrix = ir.operator_name(product) == _MATMUL
        is_matrix = is_matrix and len(ir.known_shape(integers)) == _MATRIX_RANK
        if zeros.any() and not is_matrix:
            return self.cast(self.visit_expr(expr), "float32")
        weights = self.visit_expr(integers)
        if ir.dtype_of(weights) != "int8":
            weights = shift_bytes(self, weights, "int8")
        weights = self.cast(weights, "float32")
        if zeros.any():
            weights = self.emit(relax.op.subtract(weights, relax.const(zeros, "float32")))
        return weights


def _as_float32(product: Any, data: Any, weights: Any) -> Any:
    """Return a product of integers as the same of float32."""
    if ir.operator_name(product) == _MATMUL:
        return relax.op.matmul(data, weights)
    return relax.Call(product.op, [data, weights], product.attrs)
