"""Builds the ONNX graph that a TFLite or MXNet model becomes, with the shape and dtype of every value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import tirx

from tvmflow.core.dimensions import evaluate_shape, is_name
from tvmflow.core.formatting import names_text
from tvmflow.core.types import Dimension, Size, TensorSpec
from tvmflow.frontends._dynamic_shapes import (
    NO_END,
    DynamicShapeProblem,
    SizeRanges,
    shape_text,
)
from tvmflow.frontends.base import MAX_ELEMENTS
from tvmflow.frontends.onnx.graph import (
    FROM_START,
    Place,
    attributes_of,
    dtype_of,
    leave_in_file,
    make_evaluator,
    make_single,
)
from tvmflow.frontends.onnx.operators import compute_sizes
from tvmflow.frontends.onnx.sizes import SizeValue
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, read_size, size_text

Array = np.ndarray[Any, Any]

OPSET: Final = 21
"""The opset of the graph: the first that quantizes to 16 bits."""

# Shapes and computations on them; weights stay nodes.
_MAX_EVALUATED: Final = 1 << 16


class Value(NamedTuple):
    """A tensor of the graph.

    Attributes:
        name: Its name, which no other has.
        shape: Its sizes.
        dtype: As NumPy names it.
        array: Its elements where they are constant, or expressions of the dimensions: then an array of objects.
        place: The place of the elements in a file, if they stay there.
    """

    name: str
    shape: tuple[IrSize, ...]
    dtype: str
    array: Array | None = None
    place: Place | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_dynamic(self) -> bool:
        """True if sizes, or elements that are known, depend on dimensions."""
        return any(map(is_dynamic, self.shape)) or self.has_dynamic_elements

    @property
    def has_dynamic_elements(self) -> bool:
        """True if its elements are expressions of the dimensions."""
        return self.array is not None and self.array.dtype == object


NOTHING: Final = Value("", (), "float32")
"""An operand that is left out."""


Operand = Value | float
"""An operand of a node: a number becomes a constant with the dtype of the first value."""


class Graph:
    """An ONNX graph to which nodes are added; what depends on constants alone is computed at once."""

    def __init__(self, dimensions: Sequence[Dimension] = ()) -> None:
        self.ranges = SizeRanges(dimensions)
        self._symbols = {entry.name: tirx.Var(entry.name, "int64") for entry in dimensions}
        self._largest = {entry.name: entry.max for entry in dimensions}
        self._indices: dict[str, tuple[Value, int]] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._names: set[str] = set()
        self._computed: set[str] = set()
        self.prefix = ""
        """The name of the converted operator, which its nodes have as their `doc_string`."""

    @property
    def is_dynamic(self) -> bool:
        return bool(self._symbols)

    def input(self, spec: TensorSpec) -> Value:
        self._names.add(spec.name)
        sizes = spec.sizes or spec.shape
        self._inputs.append(_value_info(spec.name, spec.dtype, sizes))
        for axis, size in enumerate(sizes):
            if is_name(size):
                largest = Value(spec.name, spec.shape, spec.dtype)
                self._indices.setdefault(size, (largest, axis))
        shape = tuple(read_size(size, self._symbols) for size in sizes)
        return Value(spec.name, shape, spec.dtype)

    def constant(self, array: Any, dtype: str = "", name: str = "") -> Value:
        """Return a constant, which joins the graph when a node reads it, by that name if it is free."""
        name = self.new_name(name)
        if isinstance(array, np.ndarray) and array.dtype == object:
            if any(map(is_dynamic, array.flat)):
                return Value(name, array.shape, dtype, array)
            array = array.astype(dtype)
        elements = np.ascontiguousarray(array, dtype or None).reshape(np.shape(array))
        return Value(name, elements.shape, str(elements.dtype), elements)

    def add(self, operator: str, *operands: Operand, **attributes: Any) -> Value:
        [result] = self.add_several(operator, 1, *operands, **attributes)
        return result

    def add_several(
        self, operator: str, count: int, *operands: Operand, **attributes: Any
    ) -> list[Value]:
        """Add a node with `count` results, or return constants where all operands are constant.

        Raises:
            ValueError: when the shape of a result depends on values that are known only when the model runs, or has
                too many elements.
        """
        dtype = next((value.dtype for value in operands if isinstance(value, Value)), "")
        values = [v if isinstance(v, Value) else self.constant(v, dtype) for v in operands]
        return self._add(self._node(operator, count, values, attributes), values)

    def _node(
        self,
        operator: str,
        count: int,
        operands: Sequence[Value],
        attributes: Mapping[str, Any],
    ) -> onnx.NodeProto:
        names = [self.new_name() for _ in range(count)]
        inputs = [operand.name for operand in operands]
        # no name, which would have to be unique
        node = helper.make_node(operator, inputs, names, doc_string=self.prefix)
        node.attribute.extend(helper.make_attribute(*entry) for entry in attributes.items())
        return node

    def _append(self, node: onnx.NodeProto, operands: Sequence[Value]) -> None:
        self._materialize(operands)
        self._nodes.append(node)

    def _add(self, node: onnx.NodeProto, operands: Sequence[Value]) -> list[Value]:
        operator = node.op_type
        if operator.startswith("Gather"):
            node.metadata_props.add(key=FROM_START)
        is_constant = all(v.array is not None for v in operands if v.name)
        if any(value.is_dynamic for value in operands):
            if is_constant and (computed := self._compute(node, operands)):
                return computed
            return self._add_dynamic(node, operands)
        results = _infer(node, operands)
        elements = max((math.prod(v.shape) for v in (*results, *operands)), default=0)
        # weights of 8 bits stay quantized
        is_small = elements <= _MAX_EVALUATED and operator != "DequantizeLinear"
        if is_constant and is_small:
            arrays = map(np.asarray, make_evaluator(_single(node, operands))({}))
            return [
                v._replace(array=a, dtype=str(a.dtype))
                for v, a in zip(results, arrays, strict=True)
            ]
        self._append(node, operands)
        return results

    # ------------------------------------------------------------ dynamic shapes

    def _add_dynamic(self, node: onnx.NodeProto, operands: Sequence[Value]) -> list[Value]:
        """Add a node with operands of dynamic shape."""
        largest = [self._at_largest(value) for value in operands]
        known = _infer(node, largest)
        shapes = _infer_dynamic(self.ranges, node, operands)
        for value, shape in zip(known, shapes, strict=True):
            # the same rule as in ONNX
            if self._numbers(shape) != value.shape:
                text = f"{self.ranges.unknown_text()}; its operands have the shapes "
                shown = [shape_text(operand.shape) for operand in operands if operand.name]
                raise DynamicShapeProblem(text + names_text(shown))
        self._append(node, operands)
        return [
            value._replace(shape=tuple(self.ranges.see(shape)))
            for value, shape in zip(known, shapes, strict=True)
        ]

    def _numbers(self, sizes: Sequence[IrSize]) -> tuple[int, ...]:
        """Return sizes where all dimensions have their largest size."""
        return evaluate_shape([size_text(size) for size in sizes], self._largest)

    def _at_largest(self, value: Value) -> Value:
        """Return a value at the maximum of all dimensions."""
        if not value.is_dynamic:
            return value
        array = value.array
        if array is not None:
            numbers = self._numbers(array.ravel().tolist())
            array = np.asarray(numbers, value.dtype).reshape(array.shape)
        return value._replace(shape=self._numbers(value.shape), array=array)

    def _compute(self, node: onnx.NodeProto, operands: Sequence[Value]) -> list[Value]:
        """Return the results of a node for sizes; nothing if they are not known."""
        arrays = [None if v.array is None else v.array.astype(object) for v in operands]
        if node.op_type == "Split" and arrays[0] is not None and arrays[1] is not None:
            indices = np.cumsum(arrays[1].astype(np.int64))[:-1]
            parts = np.split(arrays[0], indices, attributes_of(node)["axis"])
            return [self.constant(part, operands[0].dtype) for part in parts]
        sizes = [
            None if array is None else SizeValue(array, value.dtype)
            for array, value in zip(arrays, operands, strict=True)
        ]
        result = compute_sizes(self.ranges, node, sizes)
        return [self.constant(result.values, result.dtype)] if result else []

    def _materialize(self, operands: Sequence[Value]) -> None:
        """Add the values that a node reads and that are constant, or follow from the dimensions."""
        for value in operands:
            if value.array is None or value.name in self._initializers:
                continue
            if value.has_dynamic_elements:
                self._compute_at_run_time(value)
            elif value.place:
                kind = _element_type(value.dtype)
                tensor = TensorProto(name=value.name, data_type=kind, dims=value.shape)
                leave_in_file(tensor, value.place)
                self._initializers[value.name] = tensor
            else:
                self._initializers[value.name] = numpy_helper.from_array(value.array, value.name)

    def _compute_at_run_time(self, value: Value) -> None:
        """Add nodes that compute a value from the shapes of the inputs."""
        if value.name in self._computed:
            return
        self._computed.add(value.name)
        assert value.array is not None
        parts = [self._size_value(element) for element in value.array.ravel().tolist()]
        whole = self.add("Concat", *parts, axis=0) if len(parts) > 1 else parts[0]
        whole = self.add("Reshape", whole, self.integers(value.array.shape))
        self._nodes.append(
            helper.make_node("Cast", [whole.name], [value.name], to=_element_type(value.dtype))
        )

    def _size_value(self, size: IrSize) -> Value:
        """Return a size as a tensor of one element."""
        if not is_dynamic(size):
            return self.integers([int(size)])
        if isinstance(size, tvm.ir.Var):
            source, axis = self._indices[str(size.name)]
            return self.add("Shape", source, start=axis, end=axis + 1)
        if isinstance(size, tirx.Cast):
            return self._size_value(size.value)
        operator = _SIZE_NODES.get(type(size))
        if operator is None:
            raise DynamicShapeProblem(f"{size} is not an expression of dimensions")
        return self.add(operator, self._size_value(size.a), self._size_value(size.b))

    def transpose(self, value: Value, axes: Sequence[int]) -> Value:
        """Reorder the axes of a value; those of constants at once."""
        if list(axes) == list(range(value.rank)):
            return value
        if value.array is not None:
            return self.constant(value.array.transpose(axes), value.dtype, value.name)
        return self.add("Transpose", value, perm=list(axes))

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Change the shape of a value; that of constants at once."""
        if value.shape == tuple(shape):
            return value
        if value.array is not None:
            return self.constant(value.array.reshape(shape), value.dtype, value.name)
        return self.add("Reshape", value, self.integers(shape), allowzero=1)

    def cast(self, value: Value, dtype: str) -> Value:
        """Convert the elements of a value; those of constants at once."""
        if value.dtype == dtype:
            return value
        if value.array is not None:
            array = value.array if value.has_dynamic_elements else value.array.astype(dtype)
            return self.constant(array, dtype, value.name)
        return self.add("Cast", value, to=_element_type(dtype))

    def integers(self, values: Sequence[IrSize]) -> Value:
        """Return a constant of int64, as ONNX has shapes and axes."""
        if any(map(is_dynamic, values)):
            array = np.empty(len(values), object)
            array[:] = [self.ranges.simplify(value) for value in values]
            return self.constant(array, "int64")
        return self.constant(np.asarray(values, np.int64))

    def cut(self, value: Value, slices: Mapping[int, slice]) -> Value:
        """Return part of a value along some axes; dynamic bounds are not negative, or None for an open end."""
        cuts: list[tuple[IrSize, IrSize, int, int]] = []
        for axis, part in sorted(slices.items()):
            size = value.shape[axis]
            start, stop, step = self.bounds(part, size)
            if (start, stop, step) == (0, size, 1):
                continue
            if not any(map(is_dynamic, (size, start, stop))) and stop < 0:
                # In ONNX, a negative end counts from the end: before the first entry is far below it.
                stop = -size - 1
            cuts.append((start, stop, axis, step))
        if not cuts:
            return value
        lists = (list(numbers) for numbers in zip(*cuts, strict=True))
        return self.add("Slice", value, *map(self.integers, lists))

    def bounds(self, part: slice, size: IrSize) -> tuple[IrSize, IrSize, int]:
        """Return where a slice of an axis begins and ends, and its step, as `slice.indices` does."""
        if not any(map(is_dynamic, (size, part.start or 0, part.stop or 0))):
            return part.indices(int(size))
        step = part.step or 1
        if step == -1 and part.start is None and part.stop is None:
            return -1, -NO_END, -1
        if step < 1:
            raise DynamicShapeProblem(
                f"a step of {step} along a dynamic dimension is not supported"
            )
        start = self.ranges.clamp(0 if part.start is None else part.start, size)
        stop = size if part.stop is None else self.ranges.clamp(part.stop, size)
        return start, self.ranges.at_least(stop, start), step

    def split(self, value: Value, axis: int, sizes: Sequence[IrSize]) -> list[Value]:
        """Return the parts of a value along an axis."""
        if len(sizes) == 1:
            return [value]
        return self.add_several("Split", len(sizes), value, self.integers(sizes), axis=axis)

    def finish(self, outputs: Sequence[tuple[str, Value]]) -> onnx.ModelProto:
        """Return the model with these outputs."""
        infos = []
        for name, value in outputs:
            source = value.name
            self._materialize([value])
            self._nodes.append(helper.make_node("Identity", [source], [name]))
            sizes = [None if is_dynamic(size) else size for size in value.shape]
            infos.append(_value_info(name, value.dtype, sizes))
        graph = helper.make_graph(
            self._nodes, "main", self._inputs, infos, list(self._initializers.values())
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])

    def reserve(self, names: Sequence[str]) -> None:
        self._names.update(names)

    def new_name(self, name: str = "") -> str:
        """Return a free name, by default one that begins with that of the converted operator."""
        base, count = name or self.prefix, 1
        name = base if name else f"{base}.0"
        while name in self._names:
            name = f"{base}.{count}"
            count += 1
        self._names.add(name)
        return name


def _element_type(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _value_info(name: str, dtype: str, shape: Sequence[Size | None]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _element_type(dtype), list(shape))


_SIZE_NODES: Final[Mapping[type, str]] = {
    tirx.Add: "Add",
    tirx.Sub: "Sub",
    tirx.Mul: "Mul",
    # sizes are not negative
    tirx.FloorDiv: "Div",
    tirx.FloorMod: "Mod",
    tirx.Min: "Min",
    tirx.Max: "Max",
}


def _single(node: onnx.NodeProto, operands: Sequence[Value]) -> onnx.ModelProto:
    """Return a model of one node; small constants are in it."""
    by_name = {value.name: value for value in operands if value.name}
    constants = [
        numpy_helper.from_array(value.array, name)
        for name, value in by_name.items()
        if value.array is not None and value.array.size <= _MAX_EVALUATED
    ]
    known = {tensor.name for tensor in constants}
    inputs = [
        _value_info(name, v.dtype, v.shape) for name, v in by_name.items() if name not in known
    ]
    return make_single(node, inputs, constants, [helper.make_opsetid("", OPSET)])


def _infer(node: onnx.NodeProto, operands: Sequence[Value]) -> list[Value]:
    """Return the results of a node with their shapes."""
    results = []
    single = _single(node, operands)
    inferred = onnx.shape_inference.infer_shapes(single, strict_mode=True, data_prop=True)
    for info in inferred.graph.output:
        kind = info.type.tensor_type
        sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
        if not kind.HasField("shape") or min(sizes, default=0) < 0:
            raise ValueError("its shape depends on values that are known only when the model runs")
        if (elements := math.prod(sizes)) > MAX_ELEMENTS:
            raise ValueError(
                f"its result has {elements:,} elements, and the limit is {MAX_ELEMENTS:,}"
            )
        results.append(Value(info.name, tuple(sizes), dtype_of(kind.elem_type)))
    return results


# ---------------------------------------------------------------- shapes of results that are dynamic
# ONNX infers only numbers.


_Shape = Sequence[IrSize]


class _Call(NamedTuple):
    ranges: SizeRanges
    operands: Sequence[Value]
    attributes: Mapping[str, Any]

    def shape(self, position: int = 0) -> list[IrSize]:
        return list(self.operands[position].shape)

    def numbers(self, position: int) -> list[IrSize]:
        array = self.operands[position].array
        if array is None:
            raise DynamicShapeProblem("its sizes depend on values, and not on the dimensions alone")
        return list(array.ravel().tolist())

    def axis(self) -> int:
        return int(self.attributes.get("axis", -1)) % len(self.shape())

    def around(self, axis: int, *sizes: IrSize) -> list[IrSize]:
        """Return the shape of the first operand with other sizes in place of an axis."""
        return [*self.shape()[:axis], *sizes, *self.shape()[axis + 1 :]]


def _infer_dynamic(
    ranges: SizeRanges, node: onnx.NodeProto, operands: Sequence[Value]
) -> list[list[IrSize]]:
    """Return the shapes of the results of a node."""
    default = _reduce if node.op_type.startswith("Reduce") else _broadcast
    rule: Callable[[_Call], Any] = _RULES.get(node.op_type, default)
    shapes = rule(_Call(ranges, operands, attributes_of(node)))
    results = shapes if shapes and isinstance(shapes[0], list) else [shapes]
    return [[ranges.simplify(size) for size in shape] for shape in results]


def _broadcast(call: _Call) -> _Shape:
    return _broadcast_shapes(call.ranges, [operand.shape for operand in call.operands])


def _broadcast_shapes(ranges: SizeRanges, shapes: Sequence[_Shape]) -> list[IrSize]:
    """Return the broadcast shape of several tensors."""
    rank = max(map(len, shapes))
    result: list[IrSize] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if ranges.is_equal(result[axis], 1):
                result[axis] = size
            elif not (ranges.is_equal(size, 1) or ranges.is_equal(size, result[axis])):
                raise _differ(result[axis], size)
    return result


def _differ(one: IrSize, other: IrSize) -> DynamicShapeProblem:
    text = f"sizes of {one} and {other} are not the same for all sizes of the dimensions"
    return DynamicShapeProblem(text)


def _reshape(call: _Call) -> _Shape:
    if not call.ranges.is_equal(math.prod(call.numbers(1)), math.prod(call.shape())):
        raise DynamicShapeProblem("its result has another number of elements")
    return call.numbers(1)


def _concat(call: _Call) -> _Shape:
    axis, first = call.axis(), call.shape()
    for operand in call.operands[1:]:
        for index, size in enumerate(operand.shape):
            if index == axis:
                first[axis] = first[axis] + size
            elif not call.ranges.is_equal(first[index], size):
                raise _differ(first[index], size)
    return first


def _pad(call: _Call) -> _Shape:
    before, after = np.reshape(np.array(call.numbers(1), object), (2, -1)).tolist()
    return [b + n + a for b, n, a in zip(before, call.shape(), after, strict=True)]


def _slice(call: _Call) -> _Shape:
    shape = call.shape()
    for start, end, axis, step in zip(*(call.numbers(n) for n in range(1, 5)), strict=True):
        if step < 0 and is_dynamic(shape[axis]):
            # the whole axis
            continue
        if step < 0:
            shape[axis] = len(
                range(*slice(start, max(end, 0) if end >= 0 else None, step).indices(shape[axis]))
            )
            continue
        begin = call.ranges.clamp(start, shape[axis])
        length = call.ranges.at_least(call.ranges.clamp(end, shape[axis]), begin) - begin
        shape[axis] = call.ranges.divide_up(length, step)
    return shape


def _matmul(call: _Call) -> _Shape:
    left, right = call.shape(0), call.shape(1)
    if not call.ranges.is_equal(left[-1], right[-2]):
        raise _differ(left[-1], right[-2])
    return [*_broadcast_shapes(call.ranges, [left[:-2], right[:-2]]), left[-2], right[-1]]


def _windows(call: _Call) -> list[IrSize]:
    kernel, strides = call.attributes["kernel_shape"], call.attributes["strides"]
    dilations = call.attributes.get("dilations", [1] * len(kernel))
    around = np.reshape(call.attributes["pads"], (2, -1)).sum(0).tolist()
    # a last window that is not whole counts
    more = call.attributes.get("ceil_mode", 0)
    return [
        (size + width - d * (k - 1) - 1 + more * (s - 1)) // s + 1
        for size, k, s, d, width in zip(
            call.shape()[2:], kernel, strides, dilations, around, strict=True
        )
    ]


def _transposed_convolution(call: _Call) -> _Shape:
    names = ("kernel_shape", "strides", "output_padding")
    around = np.reshape(call.attributes["pads"], (2, -1)).sum(0).tolist()
    lists = (call.shape()[2:], *(call.attributes[name] for name in names), around)
    sizes = [(n - 1) * s + k - width + more for n, k, s, more, width in zip(*lists, strict=True)]
    return [call.shape()[0], call.shape(1)[1], *sizes]


def _reduce(call: _Call) -> _Shape:
    shape = call.shape()
    axes = {int(axis) % len(shape) for axis in call.numbers(1)}
    if call.attributes["keepdims"]:
        return [1 if axis in axes else size for axis, size in enumerate(shape)]
    return [size for axis, size in enumerate(shape) if axis not in axes]


def _depth_to_space(call: _Call) -> _Shape:
    block = int(call.attributes["blocksize"])
    batch, channels, *sizes = call.shape()
    return [batch, channels // block**2, *(size * block for size in sizes)]


def _space_to_depth(call: _Call) -> _Shape:
    block = int(call.attributes["blocksize"])
    batch, channels, *sizes = call.shape()
    for size in sizes:
        if not call.ranges.is_equal(size // block * block, size):
            raise DynamicShapeProblem(
                f"{size} may not be a multiple of {block}; set `multiple_of` in `dimensions`"
            )
    return [batch, channels * block**2, *(size // block for size in sizes)]


def _range(call: _Call) -> _Shape:
    start, limit, step = (call.numbers(position)[0] for position in range(3))
    if is_dynamic(step) or step < 1:
        raise DynamicShapeProblem("its step is not a whole number above 0")
    return [call.ranges.at_least(call.ranges.divide_up(limit - start, step), 0)]


_RULES: Final[Mapping[str, Callable[[_Call], Any]]] = {
    **dict.fromkeys(
        (
            *("BatchNormalization", "Cast", "CumSum", "DequantizeLinear", "InstanceNormalization"),
            *("LayerNormalization", "LRN", "LogSoftmax", "QuantizeLinear", "Softmax"),
        ),
        _Call.shape,
    ),
    **dict.fromkeys(
        ("AveragePool", "LpPool", "MaxPool"), lambda call: [*call.shape()[:2], *_windows(call)]
    ),
    **dict.fromkeys(
        ("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"),
        lambda call: [*call.shape()[:2], *(1 for _ in call.shape()[2:])],
    ),
    "AffineGrid": lambda call: [call.shape()[0], *call.numbers(1)[2:], 2],
    **dict.fromkeys(("ArgMax", "ArgMin"), lambda call: call.around(call.axis())),
    "Concat": _concat,
    "Conv": lambda call: [call.shape()[0], call.shape(1)[0], *_windows(call)],
    "ConvTranspose": _transposed_convolution,
    "DepthToSpace": _depth_to_space,
    "Expand": lambda call: _broadcast_shapes(call.ranges, [call.shape(), call.numbers(1)]),
    "GatherElements": lambda call: call.shape(1),
    "Gemm": lambda call: [call.shape()[0], call.shape(1)[0]],
    "GridSample": lambda call: [*call.shape()[:2], *call.shape(1)[1:-1]],
    "MaxRoiPool": lambda call: [
        *(call.shape(1)[0], call.shape()[1]),
        *call.attributes["pooled_shape"],
    ],
    "RoiAlign": lambda call: [
        *(call.shape(1)[0], call.shape()[1]),
        *(call.attributes[f"output_{name}"] for name in ("height", "width")),
    ],
    "Gather": lambda call: call.around(int(call.attributes.get("axis", 0)), *call.shape(1)),
    "GatherND": lambda call: [*call.shape(1)[:-1], *call.shape()[int(call.shape(1)[-1]) :]],
    "MatMul": _matmul,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": lambda call: call.numbers(3),
    "Slice": _slice,
    "SpaceToDepth": _space_to_depth,
    "Split": lambda call: [call.around(call.axis(), length) for length in call.numbers(1)],
    "Tile": lambda call: [
        n * times for n, times in zip(call.shape(), call.numbers(1), strict=True)
    ],
    "TopK": lambda call: [call.around(call.axis(), *call.numbers(1))] * 2,
    "Transpose": lambda call: [call.shape()[axis] for axis in call.attributes["perm"]],
}
"""Operator -> the shapes of its results; others are broadcast."""
