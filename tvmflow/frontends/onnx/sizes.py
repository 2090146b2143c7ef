"""Sizes in a graph with dimensions: values computed from shapes, and operators that take them.

An exporter computes shapes in the graph: `Shape`, then `Gather`, `Concat` and the like. Here such values are
numbers and expressions of the dimensions, so that tensors of these shapes keep their sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from onnx import NodeProto, helper, numpy_helper
from tvm import relax, te, tirx, topi

from tvmflow.compiler.tir_kernels.resize import Interpolation, is_computed, resize_image
from tvmflow.core.formatting import names_text
from tvmflow.core.types import Dimension
from tvmflow.frontends._dynamic_shapes import NO_END, DynamicShapeProblem, SizeRanges, shape_text
from tvmflow.frontends.onnx._arithmetic import read_interpolation
from tvmflow.frontends.onnx.graph import attribute_text, attributes_of, dtype_of
from tvmflow.graph.dynamic_shapes import NoSize, same_size, same_sizes
from tvmflow.graph.ir import OPAQUE

_MAX_ELEMENTS: Final = 1024
# Those of real models have less than ten.
_MAX_TERMS: Final = 100
_Array = np.ndarray[Any, Any]
# Matrix products; an operand of one axis is a vector, whose terms TVM compares.
_PRODUCTS: Final = ("MatMul", "Gemm")
_MATRIX_RANK: Final = 2


class SizeValue(NamedTuple):
    """A small tensor of constants and expressions of the dimensions.

    Attributes:
        values: The elements: an array of objects, each an int, an expression, or a `_Quotient`.
        dtype: The dtype that the graph gives it.
    """

    values: _Array
    dtype: str


class _Quotient(NamedTuple):
    """A fractional multiple of an expression: between a Cast to float and one back, or before Floor."""

    expr: Any
    factor: Fraction


class _Unknown(Exception):
    """A value does not follow from the dimensions."""


class Sizes(SizeRanges):
    """The values of a graph that follow from the dimensions; `nodes` compute those needed as tensors."""

    def __init__(
        self,
        builder: relax.BlockBuilder,
        nodes: dict[str, Any],
        weights: Mapping[str, tuple[Any, _Array]],
        dimensions: Sequence[Dimension],
    ) -> None:
        super().__init__(dimensions)
        self._builder = builder
        self._nodes = nodes
        self._weights = weights
        self._known: dict[str, SizeValue] = {}

    # ------------------------------------------------------------ values

    def evaluate(self, node: NodeProto) -> bool:
        """Return whether the results of a node are such values; they are remembered."""
        reads_shape = node.op_type in ("Shape", "Size")
        if not reads_shape and not any(name in self._known for name in node.input):
            return False
        read = self._shape_value if reads_shape else self._value
        try:
            operands = [read(name) if name else None for name in node.input]
        except _Unknown:
            return False
        result = compute_sizes(self, node, operands)
        if result is None:
            return False
        self._known[node.output[0]] = result
        return True

    def find(self, name: str) -> SizeValue | None:
        """Return a value that is known; None for others."""
        try:
            return self._value(name)
        except _Unknown:
            return None

    def materialize(self, names: Sequence[str]) -> None:
        """Let these values be tensors of the model, as operators read them that compute with data."""
        for name in names:
            if name in self._known and name not in self._nodes:
                self._nodes[name] = self.tensor(self._known[name])

    def check_results(self, node: NodeProto) -> None:
        """Check that the sizes of a node's results follow from the dimensions, and remember them."""
        for name in node.output:
            kind = getattr(self._nodes.get(name), "ty", None)
            if not isinstance(kind, relax.TensorType):
                continue
            if not isinstance(kind.shape, relax.ShapeExpr):
                raise DynamicShapeProblem(self._unknown_text(node))
            sizes = [self.simplify(size) for size in kind.shape.values]
            if not self.check_result(sizes):
                raise DynamicShapeProblem(self._unknown_text(node))
            seen = list(map(self.as_seen, sizes))
            self.see(seen)
            if not same_sizes(seen, sizes):
                # so that it matches sizes that are equal as multiples
                reshaped = relax.op.reshape(self._nodes[name], _shape_expr(seen))
                self._nodes[name] = self._builder.emit(reshaped)

    def _unknown_text(self, node: NodeProto) -> str:
        return f"{self.unknown_text()}{self._operands_text(node)}"

    def fixed_text(self, node: NodeProto) -> str:
        """Return that an operator needs fixed sizes; nothing if it has them."""
        text = self._operands_text(node)
        has_dynamic = any(name in text for name in self._dimensions)
        return f"it is imported with fixed sizes alone{text}" if has_dynamic else ""

    def _operands_text(self, node: NodeProto) -> str:
        shapes = []
        for name in node.input:
            shape = getattr(getattr(self._nodes.get(name), "ty", None), "shape", None)
            if isinstance(shape, relax.ShapeExpr) and shape.values:
                try:
                    shapes.append(shape_text(list(map(self.simplify, shape.values))))
                except NoSize:
                    continue
        return f"; its operands have the shapes {names_text(shapes)}" if shapes else ""

    def remember(self, names: Sequence[str]) -> None:
        """Remember the sizes of the inputs."""
        for name in names:
            self.shape_of(self._nodes[name])

    def fix_padding(self, node: NodeProto) -> None:
        """Replace a padding by the size of an image by one that is the same for all sizes."""
        attributes = attributes_of(node)
        mode = attribute_text(attributes, "auto_pad", "NOTSET")
        if not mode.startswith("SAME") or node.op_type == "ConvTranspose":
            return
        extents = self.shape_of(self.data(node.input[0]))[2:]
        if _are_fixed(*extents):
            return
        kernel = attributes.get("kernel_shape") or self.shape_of(self.data(node.input[1]))[2:]
        ones = [1] * len(extents)
        steps, gaps = attributes.get("strides", ones), attributes.get("dilations", ones)
        pads = self.same_padding(extents, kernel, steps, gaps, is_lower=mode == "SAME_LOWER")
        kept = [a for a in node.attribute if a.name not in ("auto_pad", "pads")]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("pads", pads)])

    def shape_of(self, expr: Any) -> list[Any]:
        """Return the sizes of a tensor."""
        shape = getattr(expr.ty, "shape", None)
        if not isinstance(shape, relax.ShapeExpr):
            raise DynamicShapeProblem("the shape of its operand is known only when the model runs")
        return self.see(shape.values)

    def _value(self, name: str) -> SizeValue:
        if name in self._known:
            return self._known[name]
        node = self._nodes.get(name)
        if isinstance(node, tvm.ir.Constant):
            array = node.value.numpy()
        elif name in self._weights:
            array = self._weights[name][1]
        else:
            raise _Unknown
        if array.size > _MAX_ELEMENTS or array.dtype.kind not in "iubf":
            raise _Unknown
        return SizeValue(_map(_from_number, array), str(array.dtype))

    def _shape_value(self, name: str) -> SizeValue:
        try:
            known = self._known.get(name)
            shape = list(known.values.shape) if known else self.shape_of(self._nodes[name])
            return SizeValue(_objects(shape), "int64")
        except (DynamicShapeProblem, KeyError, AttributeError):
            raise _Unknown from None

    def tensor(self, value: SizeValue) -> Any:
        """Return a value as a tensor, which a kernel computes if it is not constant."""
        shape, dtype = value.values.shape, value.dtype
        elements = value.values.ravel().tolist()
        if all(isinstance(element, int | bool) for element in elements):
            return relax.const(np.array(elements, dtype).reshape(shape), dtype)

        def fill(*sizes: Any) -> Any:
            def element(*place: Any) -> Any:
                flat: Any = 0
                for index, extent in zip(place, shape, strict=True):
                    flat = flat * extent + index
                result = _cast(sizes[-1], dtype)
                for at in range(len(sizes) - 2, -1, -1):
                    result = tirx.Select(tirx.EQ(flat, at), _cast(sizes[at], dtype), result)
                return result

            return te.compute(shape, element, name="sizes")

        parts = [_plain_expr(element, dtype) for element in elements]
        # TVM cannot fuse a kernel that takes a dimension as a scalar with one that has it in a shape (apache-tvm 0.27)
        return self._builder.emit_te(
            fill, *parts, primfunc_name_hint="sizes", primfunc_attrs=OPAQUE
        )

    # ------------------------------------------------------------ operators that take sizes

    def convert(self, node: NodeProto) -> Any:
        """Return the result, or results, of an operator that takes sizes; None if the importer converts it."""
        self.fix_padding(node)
        if node.op_type in _PRODUCTS and node.domain in ("", "ai.onnx"):
            self._check_terms(node)
        converter = _CONVERTERS.get(node.op_type)
        if converter is None or node.domain not in ("", "ai.onnx"):
            return None
        return converter(self, node)

    def _check_terms(self, node: NodeProto) -> None:
        """Check that the operands of a matrix product have the same number of terms."""
        shapes = [self.shape_of(self.data(name)) for name in node.input[:2]]
        if min(map(len, shapes)) < _MATRIX_RANK:
            return
        attributes = attributes_of(node)
        left = shapes[0][-2 if attributes.get("transA", 0) else -1]
        right = shapes[1][-1 if attributes.get("transB", 0) else -2]
        self.check_equal(left, right, "the terms of its operands")

    def find_operand(self, node: NodeProto, position: int) -> SizeValue | None:
        """Return the value of an operand; None if it is missing, or not known."""
        name = node.input[position] if position < len(node.input) else ""
        return self.find(name) if name else None

    def operand(self, node: NodeProto, position: int) -> list[Any] | None:
        """Return the sizes that a node takes; None for an operand that is missing."""
        value = self.find_operand(node, position)
        if value is None:
            if not any(node.input[position : position + 1]):
                return None
            raise DynamicShapeProblem("its sizes depend on values, and not on the dimensions alone")
        return [self.simplify(size) for size in value.values.ravel().tolist()]

    def dynamic_operand(self, node: NodeProto, position: int) -> list[Any] | None:
        """Return the sizes that a node takes, as `operand` does; None if all are constant."""
        taken = self.operand(node, position)
        return None if taken is None or _are_fixed(*taken) else taken

    def data(self, name: str) -> Any:
        """Return an operand as a tensor with a type."""
        self.materialize([name])
        return self._builder.normalize(self._nodes[name])

    def emit(self, expr: Any) -> Any:
        """Return an expression with a type."""
        return self._builder.normalize(expr)

    def kernel(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Emit a kernel of TE."""
        name = str(getattr(function, "func", function).__name__)
        return self._builder.emit_te(function, *arguments, primfunc_name_hint=name)


def compute_sizes(
    ranges: SizeRanges, node: NodeProto, operands: Sequence[SizeValue | None]
) -> SizeValue | None:
    """Return the result of a node for constants and expressions of dimensions; None if it has none.

    The operand of `Shape` and `Size` is the shape.
    """
    rule = _RULES.get(node.op_type)
    if rule is None or node.domain not in ("", "ai.onnx") or len(node.output) != 1:
        return None
    call = _Call(node, operands, attributes_of(node), ranges)
    try:
        result = rule(call)
        if not isinstance(result, SizeValue):
            result = SizeValue(_as_array(result), call.dtype())
    except (_Unknown, IndexError, ValueError, TypeError, ZeroDivisionError):
        return None
    is_large = result.values.size > _MAX_ELEMENTS or not all(map(_is_small, result.values.flat))
    return None if is_large else result


def _is_small(value: Any) -> bool:
    """Return whether a value is not an expression that grows without end, as that of a hostile model."""
    parts = [value.expr if isinstance(value, _Quotient) else value]
    for _ in range(_MAX_TERMS):
        if not parts:
            return True
        part = parts.pop()
        parts += [getattr(part, name) for name in ("a", "b", "value") if hasattr(part, name)]
    return False


def _objects(values: Sequence[Any]) -> _Array:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _as_array(values: Any) -> _Array:
    """Return an element, such as NumPy takes out of its array, as an array."""
    if isinstance(values, np.ndarray):
        return values
    array = np.empty((), object)
    array[()] = values
    return array


def _from_number(number: Any) -> Any:
    """Return a constant: an int, or a quotient of ints."""
    if isinstance(number, float):
        if not math.isfinite(number):
            raise _Unknown
        if number.is_integer():
            return int(number)
        fraction = Fraction(number).limit_denominator(1 << 20)
        if not math.isclose(fraction, number, rel_tol=1e-6):
            raise _Unknown
        return _Quotient(1, fraction)
    return number


def _plain_expr(element: Any, dtype: str) -> Any:
    if isinstance(element, _Quotient):
        if "float" not in dtype:
            raise DynamicShapeProblem("a size is not a whole number")
        whole = element.expr * element.factor.numerator
        as_float = tirx.Cast(dtype, tirx.convert(whole))
        return as_float / tirx.FloatImm(dtype, element.factor.denominator)
    return tirx.IntImm("int64", int(element)) if isinstance(element, int) else element


def _cast(value: Any, dtype: str) -> Any:
    return tirx.Cast(dtype, value) if str(value.ty) != dtype else value


# ---------------------------------------------------------------- rules of values


class _Call(NamedTuple):
    """A node to evaluate, with its operands and attributes."""

    node: NodeProto
    operands: Sequence[SizeValue | None]
    attributes: Mapping[str, Any]
    sizes: SizeRanges

    def array(self, position: int) -> _Array:
        operand = self.operands[position] if position < len(self.operands) else None
        if operand is None:
            raise _Unknown
        return operand.values

    def dtype(self, position: int = 0) -> str:
        operand = self.operands[position]
        if operand is None:
            raise _Unknown
        return operand.dtype

    def optional(self, position: int, attribute: str = "") -> list[int] | None:
        """Return an operand, or an attribute, that is constant; None if it is missing."""
        if attribute in self.attributes:
            return [int(n) for n in np.atleast_1d(self.attributes[attribute])]
        if position >= len(self.operands) or self.operands[position] is None:
            return None
        values = self.array(position).ravel().tolist()
        if not _are_fixed(*values):
            raise _Unknown
        return list(values)

    def integers(self, position: int, attribute: str = "") -> list[int]:
        values = self.optional(position, attribute)
        if values is None:
            raise _Unknown
        return values

    def small_shape(self, position: int) -> tuple[int, ...]:
        shape = tuple(self.integers(position))
        if math.prod(shape) > _MAX_ELEMENTS:
            raise _Unknown
        return shape


def _shape(call: _Call) -> Any:
    shape = call.array(0)
    return shape[call.attributes.get("start", 0) : call.attributes.get("end", len(shape))]


def _gather(call: _Call) -> Any:
    indices = np.array(call.array(1).tolist(), np.int64)
    return np.take(call.array(0), indices, int(call.attributes.get("axis", 0)))


def _concat(call: _Call) -> Any:
    parts = [call.array(position) for position in range(len(call.operands))]
    return np.concatenate(parts, int(call.attributes["axis"]))


def _slice(call: _Call) -> Any:
    data, starts, ends = call.array(0), call.integers(1, "starts"), call.integers(2, "ends")
    axes = call.optional(3, "axes") or range(len(starts))
    steps = call.optional(4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        stop = None if step < 0 and end < -data.shape[axis] else end
        cut = [slice(None)] * data.ndim
        cut[axis] = slice(start, stop, step)
        data = data[tuple(cut)]
    return data


def _squeeze(call: _Call) -> Any:
    axes = call.optional(1, "axes")
    return np.squeeze(call.array(0), None if axes is None else tuple(axes))


def _reshape(call: _Call) -> Any:
    data = call.array(0)
    shape = [data.shape[axis] if n == 0 else n for axis, n in enumerate(call.integers(1))]
    return data.reshape(shape)


def _cast_value(call: _Call) -> SizeValue:
    dtype = dtype_of(call.attributes["to"])
    if dtype == "bool":
        raise _Unknown
    return SizeValue(_each(_floor)(call) if "int" in dtype else call.array(0), dtype)


def _ceil(sizes: SizeRanges, value: Any) -> Any:
    if not isinstance(value, _Quotient):
        return value
    return sizes.simplify(0 - _floor(sizes, _Quotient(value.expr, -value.factor)))


def _floor(sizes: SizeRanges, value: Any) -> Any:
    if not isinstance(value, _Quotient):
        return value
    whole = value.expr * value.factor.numerator
    if isinstance(whole, int):
        return whole // value.factor.denominator
    return sizes.simplify(tirx.floordiv(whole, value.factor.denominator))


def _map(function: Callable[..., Any], *arrays: _Array) -> _Array:
    """Return the results of a function for the elements of arrays, which are broadcast."""
    return _as_array(np.frompyfunc(function, len(arrays), 1)(*arrays))


_Rule = Callable[[_Call], Any]
"""Returns a value, or only its elements if these have the dtype of the first operand."""


def _each(function: Callable[[SizeRanges, Any], Any]) -> _Rule:
    """Return the rule of a unary elementwise operator."""
    return lambda call: _map(functools.partial(function, call.sizes), call.array(0))


_Pairwise = Callable[[_Call, Any, Any], Any]


def _pairwise(compute: _Pairwise) -> _Rule:
    """Return the rule of a binary elementwise operator."""

    def rule(call: _Call) -> Any:
        if len(call.operands) != 2:
            raise _Unknown
        return _map(functools.partial(compute, call), call.array(0), call.array(1))

    return rule


def _whole(function: Callable[[Any, Any], Any]) -> _Rule:
    """Return the rule of a function of two whole numbers, whose results are simplified."""

    def compute(call: _Call, left: Any, right: Any) -> Any:
        if isinstance(left, _Quotient) or isinstance(right, _Quotient):
            raise _Unknown
        return call.sizes.simplify(function(left, right))

    return _pairwise(compute)


def _multiply(call: _Call, left: Any, right: Any) -> Any:
    (left, left_factor), (right, right_factor) = _split(left), _split(right)
    return _joined(call.sizes, call.sizes.simplify(left * right), left_factor * right_factor)


def _divide(call: _Call, left: Any, right: Any) -> Any:
    if "float" not in call.dtype():
        if isinstance(left, int) and isinstance(right, int):
            return math.trunc(Fraction(left, right))
        return _divided(call, left, right, tirx.floordiv)
    (expr, factor), (divisor, right_factor) = _split(left), _split(right)
    if isinstance(divisor, int):
        return _joined(call.sizes, expr, factor / (right_factor * divisor))
    if call.sizes.is_equal(expr, divisor):
        return _joined(call.sizes, 1, factor / right_factor)
    raise _Unknown


def _modulo(call: _Call, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        return left % right
    return _divided(call, left, right, tirx.floormod)


def _divided(call: _Call, left: Any, right: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return the result of a division of sizes, which are not negative."""
    if not call.sizes.is_certain(left >= 0) or not call.sizes.is_certain(right > 0):
        raise _Unknown
    return call.sizes.simplify(function(left, right))


def _split(value: Any) -> tuple[Any, Fraction]:
    return tuple(value) if isinstance(value, _Quotient) else (value, Fraction(1))


def _joined(sizes: SizeRanges, expr: Any, factor: Fraction) -> Any:
    if isinstance(expr, int):
        factor, expr = factor * expr, 1
    if factor.denominator == 1:
        return sizes.simplify(expr * factor.numerator)
    return _Quotient(expr, factor)


def _extreme(of_numbers: Callable[..., Any], of_sizes: Callable[..., Any]) -> _Rule:
    return _whole(lambda x, y: (of_numbers if _are_fixed(x, y) else of_sizes)(x, y))


def _compare(call: _Call, left: Any, right: Any) -> bool:
    if isinstance(left, _Quotient) or isinstance(right, _Quotient):
        raise _Unknown
    name = call.node.op_type
    if name == "Equal" and call.sizes.is_equal(left, right):
        return True
    holds, opposites = {
        "Equal": (False, (left < right, left > right)),
        "Less": (left < right, (left >= right,)),
        "Greater": (left > right, (left <= right,)),
        "LessOrEqual": (left <= right, (left > right,)),
        "GreaterOrEqual": (left >= right, (left < right,)),
    }[name]
    if call.sizes.is_certain(holds):
        return True
    if any(map(call.sizes.is_certain, opposites)):
        return False
    raise _Unknown


def _where(call: _Call) -> SizeValue:
    operands = (call.array(n) for n in range(3))
    chosen = _map(lambda condition, one, other: one if condition else other, *operands)
    return SizeValue(chosen, call.dtype(1))


def _constant_of_shape(call: _Call) -> SizeValue:
    value = _value_of_shape(call.attributes)
    return SizeValue(_map(_from_number, np.full(call.small_shape(0), value)), str(value.dtype))


def _value_of_shape(attributes: Mapping[str, Any]) -> Any:
    """Return the number that a ConstantOfShape gives to every element, as NumPy has it."""
    value = attributes.get("value")
    return np.float32(0) if value is None else numpy_helper.to_array(value).ravel()[0]


def _expand_value(call: _Call) -> Any:
    data, shape = call.array(0), call.small_shape(1)
    return np.broadcast_to(data, np.broadcast_shapes(data.shape, shape))


def _product(call: _Call) -> Any:
    data = call.array(0)
    if data.ndim != 1 or call.optional(1, "axes") not in (None, [0], [-1]):
        raise _Unknown
    result = _as_array(call.sizes.simplify(math.prod(data)))
    return result.reshape(1) if call.attributes.get("keepdims", 1) else result


_COMPARISONS: Final = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(_COMPARISONS, lambda call: SizeValue(_pairwise(_compare)(call), "bool")),
    "Add": _whole(operator.add),
    "Cast": _cast_value,
    "Ceil": _each(_ceil),
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": _pairwise(_divide),
    "Expand": _expand_value,
    "Floor": _each(_floor),
    "Gather": _gather,
    "Identity": lambda call: call.array(0),
    "Max": _extreme(max, tirx.max),
    "Min": _extreme(min, tirx.min),
    "Mod": _pairwise(_modulo),
    "Mul": _pairwise(_multiply),
    "Neg": _each(lambda sizes, value: sizes.simplify(0 - value)),
    "Not": _each(lambda _, value: not value),
    "ReduceProd": _product,
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": lambda call: call.sizes.simplify(math.prod(call.array(0))),
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _whole(operator.sub),
    "Unsqueeze": lambda call: np.expand_dims(call.array(0), tuple(call.integers(1, "axes"))),
    "Where": _where,
}
"""Operator -> its result for constants and expressions."""


# ---------------------------------------------------------------- operators that take sizes


def _convert_reshape(sizes: Sizes, node: NodeProto) -> Any:
    data = sizes.data(node.input[0])
    old, new = sizes.shape_of(data), sizes.operand(node, 1)
    if new is None or _are_fixed(*old, *new):
        return None
    if not attributes_of(node).get("allowzero", 0):
        new = [old[axis] if _is(size, 0) else size for axis, size in enumerate(new)]
    total = sizes.simplify(math.prod(old))
    for axis, size in enumerate(new):
        if _is(size, -1):
            rest = math.prod([*new[:axis], *new[axis + 1 :]])
            new[axis] = _quotient(sizes, total, sizes.simplify(rest))
    elements = sizes.simplify(math.prod(new))
    sizes.check_equal(total, elements, "the elements of its operand and result")
    return relax.op.reshape(data, _shape_expr(new))


def _quotient(sizes: Sizes, total: Any, rest: Any) -> Any:
    if isinstance(total, int) and isinstance(rest, int):
        return total // rest
    return sizes.simplify(tirx.floordiv(tirx.convert(total), tirx.convert(rest)))


def _are_fixed(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _is(size: Any, number: int) -> bool:
    return isinstance(size, int) and size == number


def _shape_expr(sizes: Sequence[Any]) -> relax.ShapeExpr:
    return relax.ShapeExpr([tirx.IntImm("int64", s) if isinstance(s, int) else s for s in sizes])


def _convert_expand(sizes: Sizes, node: NodeProto) -> Any:
    data = sizes.data(node.input[0])
    old, new = sizes.shape_of(data), sizes.operand(node, 1)
    if new is None or _are_fixed(*old, *new):
        return None
    rank = max(len(old), len(new))
    old, new = [1] * (rank - len(old)) + old, [1] * (rank - len(new)) + new
    shape = []
    for size, other in zip(old, new, strict=True):
        is_kept = _is(other, 1) or _is(other, -1)
        if not is_kept and not _is(size, 1) and not sizes.is_equal(size, other):
            raise DynamicShapeProblem(
                f"a size of {size} cannot become one of {other} for all sizes of the dimensions"
            )
        shape.append(size if is_kept else other)
    return relax.op.broadcast_to(data, _shape_expr(shape))


def _convert_constant_of_shape(sizes: Sizes, node: NodeProto) -> Any:
    shape = sizes.dynamic_operand(node, 0)
    if shape is None:
        return None
    value = _value_of_shape(attributes_of(node))
    dtype = str(value.dtype)
    return relax.op.full(_shape_expr(shape), relax.const(value, dtype), dtype)


def _convert_range(sizes: Sizes, node: NodeProto) -> Any:
    bounds = [sizes.find(name) for name in node.input]
    if any(bound is None for bound in bounds):
        raise DynamicShapeProblem("its bounds depend on values, and not on the dimensions alone")
    dtype = next(bound.dtype for bound in bounds if bound is not None)
    start, limit, step = (bound.values.item() for bound in bounds if bound is not None)
    if _are_fixed(start, limit, step):
        return None
    if not isinstance(step, int) or any(isinstance(v, _Quotient) for v in (start, limit)):
        raise DynamicShapeProblem("its step is not a whole number")
    distance = limit - start if step > 0 else start - limit
    count = _quotient(sizes, sizes.simplify(distance + (abs(step) - 1)), abs(step))
    if not sizes.is_certain(tirx.convert(count) >= 0):
        count = sizes.simplify(tirx.max(tirx.convert(count), tirx.IntImm("int64", 0)))
    places = sizes.emit(relax.op.arange(0, _plain_expr(count, "int64"), 1, "int64"))
    if step != 1:
        places = sizes.emit(places * relax.const(step, "int64"))
    if not _is(start, 0):
        places = sizes.emit(places + sizes.tensor(SizeValue(_as_array(start), "int64")))
    return places if dtype == "int64" else relax.op.astype(places, dtype)


def _convert_slice(sizes: Sizes, node: NodeProto) -> Any:
    data = sizes.data(node.input[0])
    shape = sizes.shape_of(data)
    starts, ends, axes, steps = (sizes.operand(node, position) for position in (1, 2, 3, 4))
    if starts is None or ends is None:
        return None
    places = range(len(starts)) if axes is None else [axis % len(shape) for axis in axes]
    steps = [1] * len(starts) if steps is None else steps
    if _are_fixed(*starts, *ends, *(shape[axis] for axis in places)):
        return None
    begins, stops = [], []
    for start, end, axis, step in zip(starts, ends, places, steps, strict=True):
        extent = shape[axis]
        if not isinstance(step, int) or step < 1:
            if step == -1 and isinstance(extent, int):
                return None
            is_whole = _is(start, -1) and isinstance(end, int) and end <= -NO_END
            if step == -1 and is_whole and len(starts) == 1:
                return relax.op.flip(data, axis)
            raise DynamicShapeProblem("a step below 1 along a dynamic dimension is not supported")
        begin = sizes.clamp(start, extent)
        stop = sizes.at_least(sizes.clamp(end, extent), begin)
        count = sizes.divide_up(sizes.simplify(stop - begin), step)
        if not same_size(seen := sizes.as_seen(count), count):
            # as many, in the form of an earlier size
            stop = sizes.simplify(begin + seen * step - (step - 1))
        begins.append(begin)
        stops.append(stop)
    return relax.op.strided_slice(
        data, list(places), _exprs(begins), _exprs(stops), list(steps), assume_inbound=True
    )


def _exprs(values: Sequence[Any]) -> list[Any]:
    return [_plain_expr(value, "int64") for value in values]


def _convert_tile(sizes: Sizes, node: NodeProto) -> Any:
    data = sizes.data(node.input[0])
    shape, repeats = sizes.shape_of(data), sizes.dynamic_operand(node, 1)
    if repeats is None:
        return None
    pairs = list(zip(repeats, shape, strict=True))
    split = [size for extent in shape for size in (1, extent)]
    wide = list(itertools.chain.from_iterable(pairs))
    whole = [sizes.simplify(repeat * extent) for repeat, extent in pairs]
    data = relax.op.reshape(data, _shape_expr(split))
    data = relax.op.broadcast_to(data, _shape_expr(wide))
    return relax.op.reshape(data, _shape_expr(whole))


def _convert_split(sizes: Sizes, node: NodeProto) -> Any:
    """Convert a Split into parts whose sizes follow from the dimensions."""
    lengths = sizes.dynamic_operand(node, 1)
    if lengths is None:
        return None
    data = sizes.data(node.input[0])
    axis = int(attributes_of(node).get("axis", 0)) % len(sizes.shape_of(data))
    parts, begin = [], 0
    for length in lengths:
        end = sizes.simplify(begin + length)
        bounds = [axis], _exprs([begin]), _exprs([end])
        parts.append(sizes.emit(relax.op.strided_slice(data, *bounds, assume_inbound=True)))
        begin = end
    return parts


def _convert_pad(sizes: Sizes, node: NodeProto) -> Any:
    """Convert a Pad by widths that follow from the dimensions."""
    widths = sizes.dynamic_operand(node, 1)
    if widths is None:
        return None
    if attribute_text(attributes_of(node), "mode", "constant") != "constant":
        raise DynamicShapeProblem("widths that depend on dimensions are those of constants alone")
    data = sizes.data(node.input[0])
    axes = sizes.operand(node, 3) or list(range(len(sizes.shape_of(data))))
    before: list[Any] = [0] * len(sizes.shape_of(data))
    after = list(before)
    for position, axis in enumerate(axes):
        before[axis], after[axis] = widths[position], widths[len(axes) + position]
    for width in (*before, *after):
        if not sizes.is_certain(width >= 0):
            raise DynamicShapeProblem(f"a width of {shape_text([width])} may be negative")
    value = sizes.find_operand(node, 2)
    number = 0 if value is None else value.values.item()
    if isinstance(number, _Quotient):
        number = float(number.factor)
    fill = tirx.const(number, str(data.ty.dtype))
    return sizes.kernel(topi.nn.pad, data, _exprs(before), _exprs(after), fill)


def _convert_top_k(sizes: Sizes, node: NodeProto) -> Any:
    """Refuse a TopK of a dynamic number of elements."""
    count = sizes.dynamic_operand(node, 1)
    if count is not None:
        raise DynamicShapeProblem(f"its K is {shape_text(count)}, and it needs a number")


_COORDINATES: Final = ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
_ROUNDINGS: Final = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def _convert_resize(sizes: Sizes, node: NodeProto) -> Any:
    """Convert a Resize of dynamic height and width to sizes that follow from the dimensions."""
    data = sizes.data(node.input[0])
    shape = sizes.shape_of(data)
    lengths = sizes.operand(node, 3)
    scales: list[float | None] = [None] * len(shape)
    if lengths is None:
        value = sizes.find_operand(node, 2)
        if value is None:
            raise DynamicShapeProblem(
                "its scales depend on values, and not on the dimensions alone"
            )
        factors = [_split(factor) for factor in value.values.ravel().tolist()]
        scales = [float(n) if n != 1 and _is(expr, 1) else None for expr, n in factors]
        products = [
            _joined(sizes, sizes.simplify(expr * extent), factor)
            for (expr, factor), extent in zip(factors, shape, strict=True)
        ]
        lengths = [_floor(sizes, product) for product in products]
    if _are_fixed(*shape, *lengths):
        return None
    lengths = list(map(sizes.as_seen, lengths))
    attributes = attributes_of(node)
    mode = read_interpolation(attributes)
    is_image = len(shape) == 4 and all(map(sizes.is_equal, shape[:2], lengths[:2]))
    odd = {"antialias", "axes", "keep_aspect_ratio_policy"} & attributes.keys()
    if not is_image or odd or mode.coordinates not in _COORDINATES:
        raise DynamicShapeProblem("only height and width of images of dynamic shape can be resized")
    if any(scales[2:]) and mode.coordinates != "align_corners":
        return _resize_by_fractions(sizes, data, lengths[2:], scales[2:], mode)
    is_nearest = mode.method == "nearest_neighbor"
    if is_nearest and mode.rounding not in _ROUNDINGS:
        raise ValueError(f"its nearest_mode is {mode.rounding}")
    return relax.op.image.resize2d(
        data,
        _shape_expr(lengths[2:]),
        layout="NCHW",
        method=mode.method,
        coordinate_transformation_mode=mode.coordinates,
        rounding_method=mode.rounding if is_nearest else "",
        cubic_alpha=mode.cubic_alpha,
        cubic_exclude=int(mode.excludes_outside),
    )


def _resize_by_fractions(
    sizes: Sizes, data: Any, lengths: Any, scales: Sequence[float | None], mode: Interpolation
) -> Any:
    """Return images resized by fractional scales, which define the pixels, not the rounded sizes."""
    dtype = str(data.ty.dtype.dtype)
    if not is_computed(mode) or dtype == "float64":
        text = f"mode {mode.method} by a scale that is not a whole number needs a fixed size"
        raise DynamicShapeProblem(
            f"{text}; `sizes` in place of `scales`, or mode linear, can follow"
        )
    wide = sizes.emit(relax.op.astype(data, "float32")) if dtype != "float32" else data
    function = functools.partial(resize_image, mode=mode, scales=scales)
    resized = sizes.emit(sizes.kernel(function, wide, *_exprs(lengths)))
    return relax.op.astype(resized, dtype) if dtype != "float32" else resized


_CONVERTERS: Final[Mapping[str, Callable[[Sizes, NodeProto], Any]]] = {
    "ConstantOfShape": _convert_constant_of_shape,
    "Expand": _convert_expand,
    "Pad": _convert_pad,
    "Range": _convert_range,
    "Reshape": _convert_reshape,
    "Resize": _convert_resize,
    "Slice": _convert_slice,
    "Split": _convert_split,
    "Tile": _convert_tile,
    "TopK": _convert_top_k,
}
"""Operator -> its converter; None from one leaves the node to the importer."""
