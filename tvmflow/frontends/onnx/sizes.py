"""Dynamic shapes in a graph: values computed from shapes, and operators that take such values.

Exporters compute shapes in the graph, with `Shape`, then `Gather`, `Concat` and the like. Here such values are
integers and expressions of the dimensions, so that tensors with these shapes keep symbolic sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from onnx import NodeProto
from tvm import relax, te, tirx

from tvmflow.core.formatting import names_text
from tvmflow.core.types import Array, Dimension
from tvmflow.frontends._dynamic_shapes import DynamicShapeProblem, SizeRanges, shape_text
from tvmflow.frontends.onnx.graph import attributes_of
from tvmflow.graph.dynamic_shapes import NoSize, same_sizes
from tvmflow.graph.ir import OPAQUE

_MAX_ELEMENTS: Final = 1024
# The maximum number of terms of an expression; expressions in real models have fewer than ten.
_MAX_TERMS: Final = 100


class SizeValue(NamedTuple):
    """A small tensor whose elements are constants and expressions of the dimensions.

    Attributes:
        values: The elements, an array of objects: ints, expressions or `Quotient`s.
        dtype: The tensor's dtype in the graph.
    """

    values: Array
    dtype: str


class Quotient(NamedTuple):
    """An expression times a fraction: between a Cast to float and one back, or before a Floor."""

    expr: Any
    factor: Fraction


class Unknown(Exception):
    """A value does not follow from the dimensions."""


class Call(NamedTuple):
    """A node to evaluate with its operands and attributes."""

    node: NodeProto
    operands: Sequence[SizeValue | None]
    attributes: Mapping[str, Any]
    sizes: SizeRanges

    def array(self, position: int) -> Array:
        """Return the elements of an operand."""
        return self._operand(position).values

    def dtype(self, position: int = 0) -> str:
        """Return the dtype of an operand."""
        return self._operand(position).dtype

    def _operand(self, position: int) -> SizeValue:
        operand = self.operands[position] if position < len(self.operands) else None
        if operand is None:
            raise Unknown
        return operand

    def optional(self, position: int, attribute: str = "") -> list[int] | None:
        """Return an operand or attribute, which must be constant; None if it is missing."""
        if attribute in self.attributes:
            return [int(n) for n in np.atleast_1d(self.attributes[attribute])]
        if position >= len(self.operands) or self.operands[position] is None:
            return None
        values = self.array(position).ravel().tolist()
        if not are_fixed(*values):
            raise Unknown
        return list(values)

    def integers(self, position: int, attribute: str = "") -> list[int]:
        """Return an operand or attribute, which must be constant and present."""
        values = self.optional(position, attribute)
        if values is None:
            raise Unknown
        return values

    def small_shape(self, position: int) -> tuple[int, ...]:
        """Return the shape in an operand; raises Unknown if such a tensor would have many elements."""
        shape = tuple(self.integers(position))
        if math.prod(shape) > _MAX_ELEMENTS:
            raise Unknown
        return shape


SizeRule = Callable[[Call], Any]
"""Returns a value; or only its elements, whose dtype is then the first operand's."""


class Sizes(SizeRanges):
    """The values in a graph that follow from the dimensions; `nodes` computes those needed as tensors."""

    def __init__(
        self,
        builder: relax.BlockBuilder,
        nodes: dict[str, Any],
        weights: Mapping[str, tuple[Any, Array]],
        dimensions: Sequence[Dimension],
        known: Mapping[str, SizeValue],
        symbols: Mapping[str, Any],
    ) -> None:
        super().__init__(dimensions, symbols)
        self._builder = builder
        self._nodes = nodes
        self._weights = weights
        self._known = dict(known)

    # ------------------------------------------------------------ values

    def evaluate(self, node: NodeProto, rule: SizeRule) -> bool:
        """Return whether a node's result follows from the dimensions; if so, it is remembered."""
        reads_shape = node.op_type in ("Shape", "Size")
        if not reads_shape and not any(name in self._known for name in node.input):
            return False
        read = self._shape_value if reads_shape else self._value
        try:
            operands = [read(name) if name else None for name in node.input]
        except Unknown:
            return False
        result = apply_rule(rule, self, node, operands)
        if result is None:
            return False
        self._known[node.output[0]] = result
        return True

    def find(self, name: str) -> SizeValue | None:
        """Return the value of a name; None if it does not follow from the dimensions."""
        try:
            return self._value(name)
        except Unknown:
            return None

    def materialize(self, names: Sequence[str]) -> None:
        """Make tensors of the values that follow from dimensions, for operators that compute with data."""
        for name in names:
            if name in self._known and name not in self._nodes:
                self._nodes[name] = self.tensor(self._known[name])

    def check_results(self, node: NodeProto) -> None:
        """Check that the sizes of a node's results follow from the dimensions, and remember the sizes."""
        for name in node.output:
            kind = getattr(self._nodes.get(name), "ty", None)
            if not isinstance(kind, relax.TensorType):
                continue
            is_known = isinstance(kind.shape, relax.ShapeExpr)
            sizes = [self.simplify(size) for size in kind.shape.values] if is_known else []
            if not is_known or not self.check_result(sizes):
                raise DynamicShapeProblem(
                    f"its sizes do not follow from {names_text(sorted(self._dimensions))}{self._operands_text(node)}"
                )
            seen = list(map(self.as_seen, sizes))
            self.see(seen)
            if not same_sizes(seen, sizes):
                # Reshaped to the earlier form, so that TVM can match both sizes although their expressions differ.
                reshaped = relax.op.reshape(self._nodes[name], shape_expr(seen))
                self._nodes[name] = self._builder.emit(reshaped)

    def fixed_text(self, node: NodeProto) -> str:
        """Return a text that the operator needs fixed sizes; empty if its operands have fixed sizes."""
        text = self._operands_text(node)
        has_dynamic = any(name in text for name in self._dimensions)
        return f"it is supported only with fixed sizes{text}" if has_dynamic else ""

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

    def shape_of(self, expr: Any) -> list[Any]:
        """Return the sizes of a tensor, and remember them for later comparisons."""
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
            raise Unknown
        if array.size > _MAX_ELEMENTS or array.dtype.kind not in "iubf":
            raise Unknown
        return SizeValue(map_elements(read_number, array), str(array.dtype))

    def _shape_value(self, name: str) -> SizeValue:
        try:
            known = self._known.get(name)
            shape = list(known.values.shape) if known else self.shape_of(self._nodes[name])
            return SizeValue(as_array(shape), "int64")
        except (DynamicShapeProblem, KeyError, AttributeError):
            raise Unknown from None

    def tensor(self, value: SizeValue) -> Any:
        """Return a value as a tensor; a kernel computes it unless it is constant."""
        shape, dtype = value.values.shape, value.dtype
        elements = value.values.ravel().tolist()
        if are_fixed(*elements):
            return relax.const(np.array(elements, dtype).reshape(shape), dtype)

        def fill(*sizes: Any) -> Any:
            def element(*indices: Any) -> Any:
                flat: Any = 0
                for index, extent in zip(indices, shape, strict=True):
                    flat = flat * extent + index
                result = _cast(sizes[-1], dtype)
                for at in range(len(sizes) - 2, -1, -1):
                    result = tirx.Select(tirx.EQ(flat, at), _cast(sizes[at], dtype), result)
                return result

            return te.compute(shape, element, name="sizes")

        parts = [plain_expr(element, dtype) for element in elements]
        # TVM cannot fuse a kernel with a dimension as a scalar with one that has it in a shape (apache-tvm 0.27).
        return self._builder.emit_te(
            fill, *parts, primfunc_name_hint="sizes", primfunc_attrs=OPAQUE
        )

    # ------------------------------------------------------------ operators that take sizes

    def find_operand(self, node: NodeProto, position: int) -> SizeValue | None:
        """Return the value of an operand; None if the operand is missing or its value unknown."""
        name = node.input[position] if position < len(node.input) else ""
        return self.find(name) if name else None

    def operand(self, node: NodeProto, position: int) -> list[Any] | None:
        """Return the sizes in a node's operand; None if the operand is missing."""
        value = self.find_operand(node, position)
        if value is None:
            if not any(node.input[position : position + 1]):
                return None
            raise DynamicShapeProblem("its sizes depend on values, not only on dimensions")
        return [self.simplify(size) for size in value.values.ravel().tolist()]

    def dynamic_operand(self, node: NodeProto, position: int) -> list[Any] | None:
        """Return the sizes in a node's operand, as `operand` does; None if they are all constant."""
        taken = self.operand(node, position)
        return None if taken is None or are_fixed(*taken) else taken

    def data(self, name: str) -> Any:
        """Return an operand as a tensor whose type is known."""
        self.materialize([name])
        return self.emit(self._nodes[name])

    def emit(self, expr: Any) -> Any:
        """Return the normalized expression, whose type is then known."""
        return self._builder.normalize(expr)

    def kernel(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Emit a TE kernel."""
        name = str(getattr(function, "func", function).__name__)
        return self._builder.emit_te(function, *arguments, primfunc_name_hint=name)


def apply_rule(
    rule: SizeRule, ranges: SizeRanges, node: NodeProto, operands: Sequence[SizeValue | None]
) -> SizeValue | None:
    """Return a node's value from constants and symbolic dimensions; None if unknown or too large.

    For `Shape` and `Size`, the operand is the shape of their tensor.
    """
    if len(node.output) != 1:
        return None
    call = Call(node, operands, attributes_of(node), ranges)
    try:
        result = rule(call)
        if not isinstance(result, SizeValue):
            result = SizeValue(as_array(result), call.dtype())
    except (Unknown, IndexError, ValueError, TypeError, ZeroDivisionError):
        return None
    is_large = result.values.size > _MAX_ELEMENTS or not all(map(_is_small, result.values.flat))
    return None if is_large else result


def _is_small(value: Any) -> bool:
    """Return whether an expression is small; in a hostile model, it could grow without limit."""
    parts = [value.expr if isinstance(value, Quotient) else value]
    for _ in range(_MAX_TERMS):
        if not parts:
            return True
        part = parts.pop()
        parts += [getattr(part, name) for name in ("a", "b", "value") if hasattr(part, name)]
    return False


def as_array(values: Any) -> Array:
    """Return a list or a single element as an array of objects."""
    if isinstance(values, np.ndarray):
        return values
    array = np.empty(len(values) if isinstance(values, list) else (), object)
    array[()] = values
    return array


def map_elements(function: Callable[..., Any], *arrays: Array) -> Array:
    """Apply a function to the elements of arrays, which are broadcast; return the results."""
    return as_array(np.frompyfunc(function, len(arrays), 1)(*arrays))


def read_number(number: Any) -> Any:
    """Return a constant as an int, or as a quotient of ints."""
    if not isinstance(number, float):
        return number
    if not math.isfinite(number):
        raise Unknown
    if number.is_integer():
        return int(number)
    fraction = Fraction(number).limit_denominator(1 << 20)
    if not math.isclose(fraction, number, rel_tol=1e-6):
        raise Unknown
    return Quotient(1, fraction)


def plain_expr(element: Any, dtype: str) -> Any:
    """Return an element as a TVM expression."""
    if isinstance(element, Quotient):
        if "float" not in dtype:
            raise DynamicShapeProblem("a size is not a whole number")
        whole = element.expr * element.factor.numerator
        as_float = tirx.Cast(dtype, tirx.convert(whole))
        return as_float / tirx.FloatImm(dtype, element.factor.denominator)
    return tirx.IntImm("int64", int(element)) if isinstance(element, int) else element


def _cast(value: Any, dtype: str) -> Any:
    return tirx.Cast(dtype, value) if str(value.ty) != dtype else value


def are_fixed(*sizes: Any) -> bool:
    """Return whether all sizes are integers, not expressions."""
    return all(isinstance(size, int) for size in sizes)


def shape_expr(sizes: Sequence[Any]) -> relax.ShapeExpr:
    """Return sizes as a Relax shape."""
    return relax.ShapeExpr([tirx.IntImm("int64", s) if isinstance(s, int) else s for s in sizes])


def read_same_padding(
    attributes: Mapping[str, Any], extents: Sequence[Any], kernel: Sequence[int], ranges: SizeRanges
) -> list[int]:
    """Return the explicit padding for an operator whose `auto_pad` is SAME_UPPER or SAME_LOWER."""
    ones = [1] * len(kernel)
    strides, dilations = (attributes.get(name, ones) for name in ("strides", "dilations"))
    is_lower = attributes["auto_pad"] == "SAME_LOWER"
    return ranges.same_padding(extents, kernel, strides, dilations, is_lower=is_lower)
