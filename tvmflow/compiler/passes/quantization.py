"""Passes for quantized models: weights stay int8, and data between operators are rounded in float32."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax, te, tirx

from tvmflow.compiler.context import LoweringContext, TargetRewriter
from tvmflow.compiler.tir_kernels.definitions import ROUNDING, ROUNDING_BITS
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import same_size, same_sizes, sizes_of
from tvmflow.graph.rewriter import MainRewriter

_MATMUL: Final = "relax.matmul"
_WEIGHT_DTYPE: Final = "int8"
BYTES: Final = ("int8", "uint8")
"""The dtypes that dot product instructions multiply."""
# For values of these dtypes, float32 represents each difference to a zero point exactly.
_DATA_DTYPES: Final = ("int8", "uint8", "int16", "uint16")
# Between these scales, reciprocals, and the errors of products with them, are normal numbers.
_MIN_SCALE: Final = 2.0**-100
_MAX_SCALE: Final = 2.0**100
# The difference of two 8-bit values.
_MAX_ZERO_POINT: Final = 255
# Operators that fuse into their producer's kernel if their other operands are weights.
_EPILOGUE: Final = ir.operators(
    "add subtract multiply divide maximum minimum clip quantize sigmoid tanh erf sqrt",
    "nn.relu nn.leakyrelu nn.gelu nn.silu",
)
# Operators that move weights, or pad them with zeros.
_MOVES: Final = ir.operators("reshape permute_dims nn.pad")
# Products of the same scales may differ by rounding, up to this relative error.
_SAME_SCALE: Final = 1e-6


def integer_weight_dtype(flow: ir.DataFlow, weights: Any) -> str:
    """Return the integer dtype from which weights were converted; empty for other weights."""
    return "" if find_integer_weights(flow, weights) is None else _WEIGHT_DTYPE


class QuantizedData(NamedTuple):
    """8-bit integers from which data were computed: data = scale · (integers − zero_point).

    The zero point is an int, or a scalar tensor of the integers' dtype if the model computes it.
    """

    integers: Any
    scale: float
    zero_point: Any

    def visit(self, rewriter: MainRewriter) -> QuantizedData:
        """Return the same data in the rewritten graph."""
        zero_point = self.zero_point
        if not isinstance(zero_point, int):
            zero_point = rewriter.visit_expr(zero_point)
        return QuantizedData(rewriter.visit_expr(self.integers), self.scale, zero_point)

    def emit_zero_point(self, rewriter: MainRewriter) -> Any:
        """Emit the zero point as int32."""
        if isinstance(self.zero_point, int):
            return relax.const(self.zero_point, "int32")
        return rewriter.cast(self.zero_point, "int32")


def read_scale(scale: Any, zero_point: Any) -> tuple[float, int] | None:
    """Return a scale and a zero point that are constants of one element, else None."""
    arrays = [ir.constant_array(value) for value in (scale, zero_point)]
    values = [array.item() for array in arrays if array is not None and array.size == 1]
    return (float(values[0]), int(values[1])) if len(values) == len(arrays) else None


def find_quantized_data(flow: ir.DataFlow, data: Any) -> QuantizedData | None:
    """Return the 8-bit integers that were dequantized to data with one scale; None for other data."""
    call = flow.find_call(flow.resolve(data), "relax.dequantize")
    if call is None or not ir.is_float32(call):
        return None
    integers, scale, zero_point = call.args
    if ir.dtype_of(integers) not in BYTES or sizes_of(integers) is None:
        return None
    scales, known = ir.constant_array(scale), ir.constant_array(zero_point)
    if known is None:
        is_byte = ir.dtype_of(zero_point) == ir.dtype_of(integers)
        is_scalar = is_byte and ir.shape_of(zero_point) == ()
    else:
        is_scalar = known.size == 1
    if scales is None or scales.size > 1 or not is_scalar:
        return None
    zero_point = zero_point if known is None else int(known.item())
    return QuantizedData(integers, float(scales.item()), zero_point)


def find_integer_weights(flow: ir.DataFlow, weights: Any) -> WeightSource | None:
    """Return the call that converted weights from int8; None for other weights."""
    source = _find_source("relax.astype", weights, flow)
    is_integer = source is not None and ir.dtype_of(source.call.args[0]) == _WEIGHT_DTYPE
    return source if is_integer else None


def split_zero_point(flow: ir.DataFlow, weights: Any) -> tuple[Any, np.ndarray[Any, Any] | None]:
    """Return a matrix before its zero point is subtracted, and the zero point.

    The zero point is int32, one for all columns or one for each. For other weights, return them and None.
    """
    difference = flow.find_call(weights, "relax.subtract")
    zeros = None if difference is None else ir.constant_array(difference.args[1])
    if zeros is None:
        return weights, None
    integers = np.clip(np.rint(zeros), -_MAX_ZERO_POINT, _MAX_ZERO_POINT).astype(np.int32)
    is_of_columns = all(extent == 1 for extent in zeros.shape[:-1])
    if not is_of_columns or not np.array_equal(integers, zeros):
        return weights, None
    return difference.args[0], integers.reshape(-1)


def to_dot_data(rewriter: MainRewriter, data: QuantizedData, dtype: str | None) -> QuantizedData:
    """Return the same data in the 8-bit dtype that an instruction takes."""
    source = ir.dtype_of(data.integers)
    if dtype is None or source == dtype:
        return data
    integers, zero_point = shift_bytes(rewriter, data.integers, dtype), data.zero_point
    if isinstance(zero_point, int):
        zero_point += shift_between(source, dtype)
    else:
        zero_point = shift_bytes(rewriter, zero_point, dtype)
    return data._replace(integers=integers, zero_point=zero_point)


def shift_between(dtype: str, other: str) -> int:
    """Return the offset that converts int8 to uint8, or the reverse."""
    return int(np.iinfo(other).min) - int(np.iinfo(dtype).min)


def shift_bytes(rewriter: MainRewriter, data: Any, dtype: str) -> Any:
    """Convert between int8 and uint8 by an offset, which keeps the order."""
    shift = relax.const(shift_between(ir.dtype_of(data), dtype), "int32")
    moved = rewriter.emit(relax.op.add(rewriter.cast(data, "int32"), shift))
    return rewriter.cast(moved, dtype)


def scale_accumulators(
    rewriter: MainRewriter, accumulators: Any, weights: Any, shape: list[int], data: QuantizedData
) -> Any:
    """Emit int32 accumulators of data times integer weights as float32, with data's scale and zero point.

    The first axis of the weights is the axis of the results; sums over the other axes are reshaped to `shape`.
    """
    zero_point = data.zero_point
    if not isinstance(zero_point, int) or zero_point:
        axes = list(range(1, len(ir.known_shape(weights))))
        totals = rewriter.emit(relax.op.sum(rewriter.cast(weights, "int32"), axes))
        totals = rewriter.reshape(totals, shape)
        offset = relax.op.multiply(totals, data.emit_zero_point(rewriter))
        accumulators = rewriter.emit(relax.op.subtract(accumulators, rewriter.emit(offset)))
    real = rewriter.cast(accumulators, "float32")
    if data.scale == 1:
        return real
    return rewriter.emit(relax.op.multiply(real, relax.const(data.scale, "float32")))


class WeightSource(NamedTuple):
    """The call that computes weights, and whether its result, a matrix, is transposed afterwards."""

    call: Any
    is_transposed: bool


def _find_source(name: str, weights: Any, flow: ir.DataFlow) -> WeightSource | None:
    value = flow.values.get(weights)
    transposed = ir.as_call(value, "relax.permute_dims")
    if transposed is not None and len(ir.shape_of(transposed) or ()) == 2:
        axes = transposed.attrs.axes
        value = flow.values.get(transposed.args[0]) if axes is None or int(axes[0]) else None
    call = ir.as_call(value, name)
    return None if call is None else WeightSource(call, transposed is not None)


class WeightDequantizeFolder(MainRewriter):
    """Rewrites matmuls and convolutions with weights s·w: first with int8 weights w, then times s."""

    OPERATORS = tuple(ir.WEIGHT_RANKS)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        name = ir.operator_name(call)
        if len(ir.shape_of(call.args[1]) or ()) != ir.WEIGHT_RANKS[name]:
            return None
        source = _find_source("relax.dequantize", call.args[1], self.flow)
        is_transposed = name in ir.TRANSPOSED_CONVOLUTIONS
        if source is None or (is_transposed and int(call.attrs.groups) > 1):
            return None
        dequantize = source.call
        integers, scale, zero_point = dequantize.args
        scales, is_integer = ir.constant_array(scale), ir.dtype_of(integers) == _WEIGHT_DTYPE
        if not is_integer or not self.flow.is_weight(integers) or scales is None:
            return None
        # the scale must be one value, or one for each output channel
        axis = int(is_transposed or (name == _MATMUL and not source.is_transposed))
        shape = ir.known_shape(integers)
        is_along = int(dequantize.attrs.axis) % len(shape) == axis and scales.size == shape[axis]
        if not ir.is_zero(zero_point) or not (scales.size == 1 or is_along):
            return None
        weights = self.emit(relax.op.astype(self.visit_expr(integers), "float32"))
        if source.is_transposed:
            weights = self.emit(relax.op.permute_dims(weights))
        product = self.emit(relax.Call(call.op, [rewritten.args[0], weights], call.attrs))
        factor = scales.reshape(-1, *[1] * (ir.WEIGHT_RANKS[name] - 2))
        return relax.op.multiply(product, relax.const(factor, "float32"))


def _find_parameters(call: Any) -> tuple[float, int] | None:
    """Return the one scale and zero point of a quantize or dequantize of 8 or 16 bits; None for others."""
    data, *parameters = call.args
    dtype, known = ir.dtype_of(call if ir.is_float32(data) else data), read_scale(*parameters)
    if dtype not in _DATA_DTYPES or known is None or not _MIN_SCALE < known[0] < _MAX_SCALE:
        return None
    return known


class RequantizeFuser(TargetRewriter):
    """Rewrites quantize-dequantize pairs to rounding in float32, without divisions.

    It also rewrites single quantize operators, and additions of quantized data. The results are the same, except that
    a zero may be −0. Where the CPU has dot products, tensors between kernels stay int8.
    """

    OPERATORS = ir.operators("quantize dequantize add multiply")

    def __init__(self, mod: tvm.IRModule, context: LoweringContext) -> None:
        super().__init__(mod, context)
        self._keeps_bytes = context.has_dot_products()
        self._by_reciprocal = self._cpu.multiplicand_lanes > 0
        self._positions = {value: n for n, value in enumerate(self.flow.values.values())}

    def _replace(self, call: Any) -> Any:
        match ir.operator_name(call):
            case "relax.quantize":
                return self._rewrite_quantize(call)
            case "relax.dequantize":
                # the preceding quantize has been rewritten as rounding, so nothing remains to be done
                return self.visit_expr(call.args[0]) if self._is_rounded(call) else None
            case "relax.add":
                return self._rewrite_sum(call) if self._keeps_bytes else None
        return self._merge_scales(call)

    def _rewrite_quantize(self, call: relax.Call) -> Any:
        """Return the float32 data rounded, or quantized without a division; None for other tensors."""
        data, parameters = call.args[0], _find_parameters(call)
        if parameters is None or not ir.is_float32(data) or self.flow.is_weight(data):
            return None
        readers = self.flow.list_readers(call)
        is_rounded = bool(readers) and self._is_rounded(readers[0])
        function, name = (fake_quantize, "rounded") if is_rounded else (quantize, "quantize")
        dtype, by_reciprocal = ir.dtype_of(call), self._by_reciprocal
        rounding = Rounding(*parameters, dtype, self._cpu.has_fma, by_reciprocal=by_reciprocal)
        scaled = self._scale_accumulators(data, parameters[0]) if by_reciprocal else None
        operands = scaled or [self.visit_expr(data)]
        kernel = functools.partial(function, rounding=rounding)
        return self.kernel(kernel, name, operands, pattern=None)

    def _scale_accumulators(self, data: Any, scale: float) -> list[Any] | None:
        """Emit the accumulators from which data are computed, their factors and, if any, their offsets.

        Factors and offsets are divided by the scale. None for data that are not scaled accumulators.
        """
        factors: list[Any] = []
        offsets: list[Any] = []
        while True:
            value = self._used_once(data)
            name = ir.operator_name(value)
            if name not in ("relax.multiply", "relax.add") or not ir.is_float32(value):
                break
            inner, weights = value.args
            if self.flow.is_weight(inner) or not self.flow.is_weight(weights):
                break
            if name == "relax.add" and (factors or offsets):
                return None
            (offsets if name == "relax.add" else factors).append(weights)
            data = inner
        if not factors or ir.shape_of(value) is None or not ir.is_float32(data):
            return None
        accumulators = self._add_integers(data, offsets[0], factors) if offsets else None
        if accumulators is None:
            accumulators = self.visit_expr(data)
        else:
            offsets = []

        def scaled(weights: Sequence[Any]) -> Any:
            # The scale is computed in float64 and rounded once, because its error affects all elements of a channel.
            product = relax.const(1 / np.float64(np.float32(scale)), "float64")
            for weight in map(self.visit_expr, weights):
                product = self.emit(relax.op.multiply(self.cast(weight, "float64"), product))
            return self.cast(product, _FLOAT)

        return [accumulators, scaled(factors), *(scaled([offset]) for offset in offsets)]

    def _add_integers(self, data: Any, bias: Any, factors: Sequence[Any]) -> Any:
        """Emit integer accumulators plus an int32 bias dequantized with the same scale; None for others."""
        cast = self._find_cast(data)
        moves, source = self._find_moved(bias)
        known = ir.as_call(source, "relax.dequantize")
        if cast is None or known is None:
            return None
        integers, *parameters = known.args
        scales = [self._find_moved(factor)[1] for factor in factors]
        arrays = [ir.constant_array(value) for value in (*parameters, *scales)]
        constants = [array.ravel() for array in arrays if array is not None]
        if ir.dtype_of(integers) != "int32" or len(constants) != len(arrays):
            return None
        scale, zero, *others = constants
        # scales can be broadcast together if all sizes other than 1 are equal
        if zero.any() or len({scale.size, *(other.size for other in others), 1}) > 2:
            return None
        if not np.allclose(scale, functools.reduce(np.multiply, others), rtol=_SAME_SCALE, atol=0):
            return None
        moved = self.visit_expr(integers)
        for move in reversed(moves):
            moved = self.emit(relax.Call(move.op, [moved, *move.args[1:]], move.attrs))
        accumulators, offset = cast.args[0], relax.const(0, "int32")
        difference = ir.as_call(self._used_once(accumulators), "relax.subtract")
        if difference is not None and self.flow.is_weight(difference.args[1]):
            accumulators, offset = difference.args[0], self.visit_expr(difference.args[1])
        offset = self.emit(relax.op.subtract(offset, moved))
        accumulators = self.emit(relax.op.subtract(self.visit_expr(accumulators), offset))
        return self.emit(relax.op.astype(accumulators, _FLOAT))

    def _find_moved(self, weights: Any) -> tuple[list[Any], Any]:
        """Return the reshapes, transposes and pads of weights, the last one first, and their source."""
        moves: list[Any] = []
        while True:
            weights = self.flow.resolve(weights)
            value = self.flow.values.get(weights, weights)
            if ir.operator_name(value) not in _MOVES:
                return moves, value
            moves.append(value)
            weights = value.args[0]

    def _merge_scales(self, call: relax.Call) -> Any:
        """Return accumulators times one constant, the product of the scales of data and weights, or None."""
        inner = ir.as_call(self._used_once(call.args[0]), "relax.multiply")
        if inner is None or not ir.is_float32(call) or not self.flow.is_weight(call.args[1]):
            return None
        data, scale = inner.args
        is_scalar = isinstance(scale, tvm.ir.Constant) and ir.shape_of(scale) == ()
        if not is_scalar or self._find_cast(data) is None:
            return None
        factors = self.emit(relax.op.multiply(self.visit_expr(call.args[1]), scale))
        return relax.op.multiply(self.visit_expr(data), factors)

    def _used_once(self, var: Any) -> Any:
        """Return the value of a variable, or of its alias, that is used once; None for others."""
        return self.flow.value_if_used_once(self.flow.resolve(var))

    def _find_cast(self, data: Any) -> Any:
        """Return the cast from int32 that computes data, if data are used once; None for others."""
        cast = ir.as_call(self._used_once(data), "relax.astype")
        return cast if cast is not None and ir.dtype_of(cast.args[0]) == "int32" else None

    def _rewrite_sum(self, call: relax.Call) -> Any:
        """Return an addition of quantized operands, so that producers need not dequantize them; or None."""
        sizes = sizes_of(call)
        operands, parameters = [], []
        for argument in call.args:
            value, known = self.flow.find_call(argument, "relax.dequantize"), None
            is_data = value is not None and not self.flow.is_weight(argument)
            if is_data and ir.is_float32(value) and not self._is_rounded(value):
                known = _find_parameters(value)
            source = argument if known is None else value.args[0]
            own = sizes_of(source)
            if sizes is None or own is None or not same_sizes(own, sizes):
                return None
            if not ir.is_float32(argument):
                return None
            operands.append(self.visit_expr(source))
            parameters.append(known)
        if parameters == [None, None]:
            return None
        return self.kernel(add, "add", *operands, parameters, pattern=None)

    def _is_rounded(self, call: Any) -> bool:
        """Return whether a quantize-dequantize pair is computed as rounding (fake quantization)."""
        pair = self._find_pair(call)
        if pair is None or not self._keeps_bytes:
            return pair is not None
        readers = self.flow.list_readers(call)
        if len(readers) != 1 or ir.operator_name(readers[0]) not in _EPILOGUE:
            return False
        # fusion appends an operator to the kernel of its data, and an addition to its first operand's kernel
        data = [value for value in readers[0].args if not self.flow.is_weight(value)]
        if len(data) == 1:
            return True
        # the operands that a kernel's epilogue computes, with or without rounding
        computed = []
        for value in map(self.flow.value_if_used_once, data):
            other = self._find_pair(value)
            if other is not None or ir.operator_name(value) in _EPILOGUE:
                computed.append(value if other is None else other)
        first = min(computed, key=self._positions.__getitem__, default=None)
        return ir.operator_name(readers[0]) == "relax.add" and pair.same_as(first)

    def _find_pair(self, call: Any) -> Any:
        """Return the quantize that a dequantize reverts, if nothing else reads it; None for others."""
        if (dequantize := ir.as_call(call, "relax.dequantize")) is None:
            return None
        quantize = self.flow.find_call_used_once(dequantize.args[0], "relax.quantize")
        if quantize is None or not (ir.is_float32(quantize.args[0]) and ir.is_float32(dequantize)):
            return None
        parameters = _find_parameters(quantize)
        is_pair = parameters is not None and parameters == _find_parameters(dequantize)
        return quantize if is_pair and not self.flow.is_weight(quantize.args[0]) else None


# ---------------------------------------------------------------- rounding
# Quantization of float32 values, and of sums of quantized values.

_FLOAT: Final = "float32"


class Rounding(NamedTuple):
    """A quantization of float32 to a dtype of at most 16 bits, and the division by its scale.

    Attributes:
        has_fma: Whether the CPU multiplies and adds with one rounding.
        by_reciprocal: Whether values are multiplied by the reciprocal of the scale, which may be off by 1 ULP.
            Then the quotient is clamped as an integer.
    """

    scale: float
    zero_point: int
    dtype: str
    has_fma: bool
    by_reciprocal: bool

    def round_to_bits(self, data: Sequence[Any], index: Any, *, at: int) -> Any:
        """Return the bits of a float32 whose low bits are the rounded, clamped quotient plus `at`.

        As int32, the bits of positive values have the order of the values, and the bits of negative values are less.
        """
        accumulators, *others = data
        one = [tirx.const(float(np.float32(1) / np.float32(self.scale)), _FLOAT)]
        factor, *offsets = [read_broadcast(other, index) for other in others] or one
        quotient = sum(offsets, accumulators(*index) * factor) + tirx.const(ROUNDING + at, _FLOAT)
        limits, lowest = np.iinfo(self.dtype), ROUNDING_BITS - self.zero_point + at
        lower, upper = (tirx.const(lowest + int(n), "int32") for n in (limits.min, limits.max))
        return tirx.max(tirx.min(tirx.reinterpret("int32", quotient), upper), lower)

    def divide_clamped(self, x: Any) -> Any:
        """Return x / scale with the rounding of a division, x clamped to the range of the integers.

        A division takes ten times as long as a multiplication. So x is multiplied by the reciprocal of the scale, and
        the quotient is corrected by its remainder, which one FMA computes exactly (Markstein, "Computation of elementary
        functions on the IBM RISC System/6000 processor", 1990). Rounded, the quotient of a clamped x lies within the
        limits of the integers.
        """
        divisor, limits = np.float32(self.scale), np.iinfo(self.dtype)
        multiples = (np.float32(int(n) - self.zero_point) for n in (limits.min, limits.max))
        lower, upper = (tirx.const(float(multiple * divisor), _FLOAT) for multiple in multiples)
        clamped = tirx.max(tirx.min(x, upper), lower)
        if not self.has_fma:
            return clamped / tirx.const(float(divisor), _FLOAT)
        reciprocal = tirx.const(float(np.float32(1) / divisor), _FLOAT)
        value, quotient = tirx.Var("value", _FLOAT), tirx.Var("quotient", _FLOAT)
        remainder = value - quotient * tirx.const(float(divisor), _FLOAT)
        corrected = tirx.Let(quotient, value * reciprocal, quotient + remainder * reciprocal)
        return tirx.Let(value, clamped, corrected)


def fake_quantize(data: Sequence[Any], rounding: Rounding) -> Any:
    """Return data, given as for `quantize`, rounded to multiples of the scale (fake quantization)."""

    def element(*index: Any) -> Any:
        if rounding.by_reciprocal:
            bits = rounding.round_to_bits(data, index, at=0)
            rounded = tirx.reinterpret(_FLOAT, bits) - tirx.const(ROUNDING, _FLOAT)
        else:
            rounded = tirx.round(rounding.divide_clamped(data[0](*index)))
        return rounded * tirx.const(rounding.scale, _FLOAT)

    return te.compute(data[0].shape, element, name="rounded", tag="elemwise")


def quantize(data: Sequence[Any], rounding: Rounding) -> Any:
    """Return the integers round(x / scale) + zero_point, clamped to their dtype.

    The data are one float32 tensor x. With `by_reciprocal`, they may also be accumulators, their factors and, if there
    are any, offsets.
    """
    zero_point, dtype = rounding.zero_point, rounding.dtype

    def element(*index: Any) -> Any:
        if rounding.by_reciprocal:
            # the offset must be even: an odd one would round ties to odd integers
            odd = zero_point % 2
            return (rounding.round_to_bits(data, index, at=zero_point - odd) + odd).astype(dtype)
        quotient = rounding.divide_clamped(data[0](*index))
        bits = tirx.reinterpret("int32", quotient + tirx.const(ROUNDING, _FLOAT))
        return (bits - (ROUNDING_BITS - zero_point)).astype(dtype)

    return te.compute(data[0].shape, element, name="quantized", tag="elemwise")


def read_broadcast(tensor: Any, index: Sequence[Any]) -> Any:
    """Return the element of a broadcast tensor at a position in the result."""
    shape = tensor.shape
    positions = zip(shape, index[len(index) - len(shape) :], strict=True)
    return tensor(*(0 if same_size(extent, 1) else position for extent, position in positions))


def add(left: Any, right: Any, parameters: Sequence[tuple[float, int] | None]) -> Any:
    """Return the sum of two tensors of one shape: each float32, or integers with scale and zero point."""

    def element(*index: Any) -> Any:
        values = []
        for operand, known in zip((left, right), parameters, strict=True):
            value = operand(*index)
            if known is not None:
                scale, zero_point = known
                real = (value.astype("int32") - zero_point).astype(_FLOAT)
                value = real * tirx.const(scale, _FLOAT)
            values.append(value)
        return values[0] + values[1]

    return te.compute(left.shape, element, name="sum", tag="elemwise")
