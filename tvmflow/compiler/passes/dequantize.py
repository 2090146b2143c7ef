"""Rewrites quantized graphs before matmuls and convolutions, so that they compute in integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax, te, tirx

from tvmflow.compiler.context import TargetRewriter
from tvmflow.compiler.passes.quantization import (
    BYTES,
    read_scale,
    shift_between,
    shift_bytes,
)
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import same_sizes, sizes_of
from tvmflow.graph.ir import OPAQUE
from tvmflow.graph.rewriter import MainRewriter

_QUANTIZE: Final = "relax.quantize"
_DEQUANTIZE: Final = "relax.dequantize"
_MATMUL: Final = "relax.matmul"

# ---------------------------------------------------------------- dynamic quantization


class _Difference(NamedTuple):
    """8-bit integers minus a zero point, as int32; the zero point is None if nothing is subtracted."""

    integers: Any
    zero_point: Any = None


class IntegerProductRewriter(MainRewriter):
    """Rewrites int32 matmuls and convolutions of 8-bit values to float32 ones of dequantized data.

    Dynamic quantization subtracts zero points from their operands and casts their results to float32. Weights become
    int8. Matrices may keep a zero point, which int8 dot products subtract from their accumulators. Where no instruction
    multiplies int8, accumulators beyond 2²⁴ are rounded as float32.
    """

    OPERATORS = ("relax.astype",)

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._real = self.new_memo()

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        product = self.flow.find_call_used_once(call.args[0], _MATMUL, *ir.CONVOLUTIONS)
        if not ir.is_float32(call) or product is None or ir.dtype_of(product) != "int32":
            return None
        left, right = (self._find_difference(operand) for operand in product.args)
        if left is None or right is None:
            return None
        data = self._to_real(product.args[0], left)
        weights = self._to_weights(product, right)
        if ir.operator_name(product) == _MATMUL:
            return relax.op.matmul(data, weights)
        return relax.Call(product.op, [data, weights], product.attrs)

    def _find_difference(self, expr: Any) -> _Difference | None:
        """Return the 8-bit data and zero point of the int32 difference that computes a tensor, or None."""
        value = self.flow.find_call(expr, "relax.subtract")
        operands = [expr]
        if value is not None:
            left, right = value.args
            expanded = self.flow.find_call(right, "relax.expand_dims")
            operands = [left, right if expanded is None else expanded.args[0]]
        casts = [self.flow.find_call(operand, "relax.astype") for operand in operands]
        if None in casts:
            return None
        sources = [cast.args[0] for cast in casts]
        dtypes = set(map(ir.dtype_of, sources))
        return _Difference(*sources) if len(dtypes) == 1 and dtypes <= {*BYTES} else None

    def _to_real(self, expr: Any, difference: _Difference) -> Any:
        """Emit a difference as float32, once for all its readers."""
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
        expr = product.args[1]
        integers, zero_point = difference
        is_known = zero_point is None or isinstance(zero_point, tvm.ir.Constant)
        if not is_known or not self.flow.is_weight(integers):
            return self._to_real(expr, difference)
        zeros = np.asarray(0 if zero_point is None else zero_point.value.numpy(), np.int32)
        zeros = np.asarray(zeros + shift_between(ir.dtype_of(integers), "int8"))
        is_matmul = ir.operator_name(product) == _MATMUL
        if zeros.any() and not (is_matmul and len(ir.known_shape(integers)) == 2):
            return self.cast(self.visit_expr(expr), "float32")
        weights = self.visit_expr(integers)
        if ir.dtype_of(weights) != "int8":
            weights = shift_bytes(self, weights, "int8")
        weights = self.cast(weights, "float32")
        if zeros.any():
            weights = self.emit(relax.op.subtract(weights, relax.const(zeros, "float32")))
        return weights


# ---------------------------------------------------------------- moved conversions


class DequantizeMover(TargetRewriter):
    """Moves dequantization with one constant scale behind operators that select values.

    8-bit data get the dtype that dot product instructions take. A dequantize that a quantize reverts is removed.
    """

    def visit_call_(self, call: relax.Call) -> Any:
        """Rewrite one call."""
        rewritten = super().visit_call_(call)
        name = ir.operator_name(call)
        if name == _QUANTIZE:
            return self._quantize(call, rewritten)
        if name == _DEQUANTIZE:
            return self._dequantize(call, rewritten)
        if (
            name in ir.SELECTIONS
            and (source := self._find_conversion(rewritten.args[0])) is not None
        ):
            operands = [source.args[0], *rewritten.args[1:]]
            selected = self.emit(relax.Call(call.op, operands, call.attrs))
            return relax.Call(source.op, [selected, *source.args[1:]], source.attrs)
        if name == "relax.concat" and (joined := self._join(rewritten)) is not None:
            return joined
        return self._with_own_conversions(rewritten)

    def _join(self, concat: Any) -> Any:
        """Return the dequantize of concatenated integers; None if scales differ or parts are not 8-bit."""
        sources = list(map(self._find_conversion, self.list_fields(concat.args[0])))
        if any(source is None for source in sources) or len(set(map(_kind_of, sources))) > 1:
            return None
        first = sources[0]
        integers = relax.Tuple([source.args[0] for source in sources])
        joined = self.emit(relax.Call(concat.op, [integers], concat.attrs))
        return relax.Call(first.op, [joined, *first.args[1:]], first.attrs)

    def _quantize(self, call: Any, rewritten: Any) -> Any:
        dtype, axis = self._dtype_of(call), int(call.attrs.axis)
        data, scale, zero_point = rewritten.args
        if dtype != ir.dtype_of(call):
            zero_point = _add(zero_point, shift_between(ir.dtype_of(call), dtype))
        source = self._find_conversion(data)
        if source is not None and _kind_of(source) == (dtype, read_scale(scale, zero_point)):
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
        """Return a call with its own dequantizes of operands, because fusion does not duplicate shared ones."""
        pairs = [(argument, self._find_conversion(argument)) for argument in call.args]
        arguments = [arg if source is None else self.emit(source) for arg, source in pairs]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)

    def _find_conversion(self, expr: Any) -> Any:
        """Return the dequantize of 8-bit data with one scale; None for other data, and for weights."""
        is_var = isinstance(self.resolve(expr), relax.Var)
        call = ir.as_call(self.find_value(expr), _DEQUANTIZE) if is_var else None
        if call is None or not ir.is_float32(call) or ir.dtype_of(call.args[0]) not in BYTES:
            return None
        return call if read_scale(*call.args[1:]) is not None else None

    def _dtype_of(self, quantize: Any) -> str:
        """Return the dtype for quantized data: the dot products' dtype if only dequantizes read them."""
        dtype, calls = ir.dtype_of(quantize), (quantize, *self.flow.list_readers(quantize))
        is_read_as_float = dtype in BYTES and self.flow.is_read_by(quantize, _DEQUANTIZE)
        if is_read_as_float and all(read_scale(*call.args[1:]) is not None for call in calls):
            return str(self._context.dot_dtype)
        return dtype


def _add(zero_point: Any, shift: int) -> Any:
    """Return a zero point plus a constant, which may exceed the dtype of the zero point."""
    if not shift:
        return zero_point
    return relax.const(zero_point.value.numpy().astype(np.int32) + np.int32(shift), "int32")


def _kind_of(dequantize: Any) -> tuple[str, tuple[float, int] | None]:
    """Return the dtype, the scale and the zero point of the integers that are dequantized."""
    return ir.dtype_of(dequantize.args[0]), read_scale(*dequantize.args[1:])


# ---------------------------------------------------------------- lookup tables

# A table saves time only if the function has one of these operators, which take many instructions.
_FUNCTIONS: Final = ir.operators(
    "erf exp log power sigmoid sqrt rsqrt tanh sin cos nn.gelu nn.gelu_tanh nn.silu"
)
_ELEMENTWISE: Final = _FUNCTIONS | ir.operators(
    "add subtract multiply divide maximum minimum clip abs negative square nn.relu nn.leakyrelu",
    "quantize dequantize",
)
_BYTES: Final = 256


class LookupTableRewriter(MainRewriter):
    """Evaluates unary int8 functions, such as a quantized GELU, through 256-entry lookup tables."""

    OPERATORS = (_QUANTIZE,)

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._sources: dict[Any, tuple[Any, list[Any]] | None] = {}

    def _replace(self, call: Any) -> Any:
        source, calls = self._find_source(call) or (None, [])
        has_function = any(ir.operator_name(each) in _FUNCTIONS for each in calls)
        return self._look_up(call, source, calls) if has_function else None

    def _find_source(self, call: Any) -> tuple[Any, list[Any]] | None:
        """Return the one 8-bit tensor that a call depends on, and the calls after it in order; else None."""
        if call not in self._sources:
            self._sources[call] = self._search(call)
        return self._sources[call]

    def _search(self, call: Any) -> tuple[Any, list[Any]] | None:
        is_byte = ir.dtype_of(call) in BYTES or ir.is_float32(call)
        if ir.operator_name(call) not in _ELEMENTWISE or not is_byte:
            return None
        shape = sizes_of(call)
        sources: set[Any] = set()
        # a dict, because sets have no order
        calls: dict[Any, None] = {}
        for argument in call.args:
            if self._is_scalar(argument):
                continue
            variable = self.flow.resolve(argument)
            own, value = sizes_of(variable), self.flow.values.get(variable)
            is_alike = shape is not None and own is not None and same_sizes(own, shape)
            if not is_alike or self.flow.is_weight(variable):
                return None
            found = self._find_source(value) if isinstance(value, relax.Call) else None
            if found is None:
                if ir.operator_name(call) != _DEQUANTIZE or ir.dtype_of(variable) not in BYTES:
                    return None
                found = variable, []
            sources.add(found[0])
            calls.update(dict.fromkeys(found[1]))
        return (sources.pop(), [*calls, call]) if len(sources) == 1 else None

    def _is_scalar(self, argument: Any) -> bool:
        """Return whether an argument is a constant with one value."""
        if isinstance(argument, (tirx.IntImm, tirx.FloatImm)):
            return True
        shape = ir.shape_of(argument)
        return shape is not None and {*shape} <= {1} and self.flow.is_weight(argument)

    def _look_up(self, call: Any, source: Any, calls: Sequence[Any]) -> Any:
        rank, dtype = len(sizes_of(source) or ()), np.dtype(ir.dtype_of(source))
        limits = np.iinfo(dtype)
        every = np.arange(limits.min, limits.max + 1).astype(dtype)
        values = {self._name_of(source): relax.const(every.reshape(*[1] * (rank - 1), _BYTES))}
        for each in calls:
            arguments = [
                values[name] if (name := self._name_of(arg)) in values else self.visit_expr(arg)
                for arg in each.args
            ]
            values[self._name_of(each)] = self.emit(relax.Call(each.op, arguments, each.attrs))
        table = self.reshape(values[self._name_of(call)], [_BYTES])
        return self.kernel(_read, "look_up", self.visit_expr(source), table, pattern=OPAQUE)

    def _name_of(self, expr: Any) -> Any:
        """Return the key of an expression: the call that computes it, or else its variable."""
        variable = self.flow.resolve(expr)
        value = self.flow.values.get(variable)
        return value if isinstance(value, relax.Call) else variable


def _read(x: Any, table: Any) -> Any:
    """Return the entries of a table (256) at int8 or uint8 indices; entry 0 is for the smallest value."""
    least = int(np.iinfo(str(x.dtype)).min)

    def element(*index: Any) -> Any:
        return table(x(*index).astype("int32") - least)

    return te.compute(x.shape, element, name="look_up")
