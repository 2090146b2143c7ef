"""The ONNX graph that a TFLite model becomes: its values, the tensors and the operators of the file."""

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
from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.types import Dimension, Size, TensorSpec
from tvmflow.frontends._dynamic_shapes import (
    DynamicShapeProblem,
    SizeRanges,
    shape_text,
    unfixed_text,
)
from tvmflow.frontends.base import DYNAMIC_FIX, MAX_ELEMENTS
from tvmflow.frontends.onnx.graph import (
    FROM_START,
    attributes_of,
    dtype_of,
    make_evaluator,
    make_single,
)
from tvmflow.frontends.onnx.sizes import SizeValue, compute_sizes
from tvmflow.frontends.tflite._model import (
    FIX,
    IMPORTED_DTYPES,
    Buffer,
    Operator,
    Quantization,
    Tensor,
)
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
    """

    name: str
    shape: tuple[IrSize, ...]
    dtype: str
    array: Array | None = None

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


class Graph:
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
        """The name of the converted operator; its nodes are named after it."""

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
        if isinstance(array, np.ndarray) and array.dtype == object:
            if any(map(is_dynamic, array.flat)):
                return Value(self._new_name(name), array.shape, dtype, array)
            array = array.astype(dtype)
        elements = np.ascontiguousarray(array, dtype or None).reshape(np.shape(array))
        return Value(self._new_name(name), elements.shape, str(elements.dtype), elements)

    def add(self, operator: str, *operands: Value, **attributes: Any) -> Value:
        [result] = self.add_several(operator, 1, *operands, **attributes)
        return result

    def add_several(
        self, operator: str, count: int, *operands: Value, **attributes: Any
    ) -> list[Value]:
        """Add a node with `count` results, or return constants where all operands are constant.

        Raises:
            ImportFailed: when the shape of a result depends on values that are known only when the model runs.
        """
        names = [self._new_name() for _ in range(count)]
        inputs = [v.name for v in operands]
        node = helper.make_node(operator, inputs, names, doc_string=self.prefix, **attributes)
        if operator.startswith("Gather"):
            node.metadata_props.add(key=FROM_START)
        is_constant = all(v.array is not None for v in operands if v.name)
        if any(value.is_dynamic for value in operands):
            if is_constant and (computed := self._compute(node, operands)):
                return computed
            return self._add_dynamic(node, operands)
        results = _infer(node, operands, self.prefix)
        elements = max((math.prod(v.shape) for v in (*results, *operands)), default=0)
        # weights of 8 bits stay quantized
        is_small = elements <= _MAX_EVALUATED and operator != "DequantizeLinear"
        if is_constant and is_small:
            arrays = map(np.asarray, make_evaluator(_single(node, operands))({}))
            return [
                v._replace(array=a, dtype=str(a.dtype))
                for v, a in zip(results, arrays, strict=True)
            ]
        self._materialize(operands)
        self._nodes.append(node)
        return results

    # ------------------------------------------------------------ dynamic shapes

    def _add_dynamic(self, node: onnx.NodeProto, operands: Sequence[Value]) -> list[Value]:
        """Add a node with operands of dynamic shape."""
        largest = [self._at_largest(value) for value in operands]
        known = _infer(node, largest, self.prefix)
        shapes = _infer_dynamic(self.ranges, node, operands)
        for value, shape in zip(known, shapes, strict=True):
            # the same rule as in ONNX
            if self._numbers(shape) != value.shape:
                text = f"{self.ranges.unknown_text()}; its operands have the shapes "
                shown = [shape_text(operand.shape) for operand in operands if operand.name]
                raise DynamicShapeProblem(text + names_text(shown))
        self._materialize(operands)
        self._nodes.append(node)
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
            else:
                tensor = numpy_helper.from_array(value.array, value.name)
                self._initializers[value.name] = tensor

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

    def finish(self, outputs: Sequence[tuple[str, Value]]) -> onnx.ModelProto:
        infos = []
        for name, value in outputs:
            source = value.name
            self._materialize([value])
            self._nodes.append(helper.make_node("Identity", [source], [name]))
            sizes = [None if is_dynamic(size) else size for size in value.shape]
            infos.append(_value_info(name, value.dtype, sizes))
        graph = helper.make_graph(
            self._nodes, "tflite", self._inputs, infos, list(self._initializers.values())
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])

    def reserve(self, names: Sequence[str]) -> None:
        self._names.update(names)

    def _new_name(self, name: str = "") -> str:
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


def _infer(node: onnx.NodeProto, operands: Sequence[Value], where: str) -> list[Value]:
    """Return the results of a node with their shapes; `where` is its name in messages."""
    single = _single(node, operands)
    inferred = onnx.shape_inference.infer_shapes(single, strict_mode=True, data_prop=True)
    results = []
    for info in inferred.graph.output:
        kind = info.type.tensor_type
        sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
        if not kind.HasField("shape") or min(sizes, default=0) < 0:
            raise ImportFailed(
                f"the shape of {quoted(where)} depends on values that are known only when the model runs",
                fix="end the model before it, or convert it with fixed shapes",
            )
        if math.prod(sizes) > MAX_ELEMENTS:
            raise ImportFailed(
                f"{quoted(where)} has {math.prod(sizes):,} elements, and the limit is {MAX_ELEMENTS:,}",
                fix="correct the sizes in the model or in the recipe's `inputs`",
            )
        dtype = dtype_of(kind.elem_type)
        results.append(Value(info.name, tuple(sizes), dtype))
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
    rule: Callable[[_Call], Any] = _RULES.get(node.op_type, _broadcast)
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
    return [
        (size + width - d * (k - 1) - 1) // s + 1
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
    **dict.fromkeys(("Cast", "CumSum", "DequantizeLinear", "LRN", "LogSoftmax"), _Call.shape),
    **dict.fromkeys(("QuantizeLinear", "Softmax"), _Call.shape),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"), _reduce),
    **dict.fromkeys(("ReduceSum", "ReduceSumSquare"), _reduce),
    **dict.fromkeys(("AveragePool", "MaxPool"), lambda call: [*call.shape()[:2], *_windows(call)]),
    **dict.fromkeys(("ArgMax", "ArgMin"), lambda call: call.around(call.axis())),
    "Concat": _concat,
    "Conv": lambda call: [call.shape()[0], call.shape(1)[0], *_windows(call)],
    "ConvTranspose": _transposed_convolution,
    "DepthToSpace": _depth_to_space,
    "Expand": lambda call: _broadcast_shapes(call.ranges, [call.shape(), call.numbers(1)]),
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


# ---------------------------------------------------------------- tensors of the file


_QUANTIZED: Final = frozenset({"int8", "uint8", "int16"})


def first_axes(rank: int) -> list[int]:
    """Return the axes of an image with channels last in the order with channels first."""
    return [0, rank - 1, *range(1, rank - 1)]


def last_axes(rank: int) -> list[int]:
    """Return the axes of an image with channels first in the order with channels last."""
    return [0, *range(2, rank), 1]


class Tensors:
    """The values of all tensors that are computed so far."""

    def __init__(self, graph: Graph, tensors: Sequence[Tensor], data: Buffer) -> None:
        self.graph = graph
        self._tensors = tensors
        self._data = data
        # By number of a tensor, and whether channels are first: as stored, and as real values.
        self._stored: dict[tuple[int, bool], Value] = {}
        self._real: dict[tuple[int, bool], Value] = {}
        self.padded: dict[int, tuple[int, list[int]]] = {}
        """Images with zeros around others: the number of the other tensor, and the widths as ONNX has them."""

    def tensor(self, number: int) -> Tensor:
        return self._tensors[number]

    def quantization(self, number: int) -> Quantization | None:
        tensor = self._tensors[number]
        return tensor.quantization if tensor.dtype in _QUANTIZED else None

    def is_constant(self, number: int) -> bool:
        return self._tensors[number].data is not None

    def is_first(self, number: int) -> bool:
        """Return whether a tensor exists only in channels-first layout."""
        return (number, True) in self._stored and (number, False) not in self._stored

    def rank(self, number: int) -> int:
        for first in (False, True):
            if (number, first) in self._stored:
                return self._stored[number, first].rank
        return len(self._tensors[number].dims)

    def set_input(self, number: int, value: Value) -> None:
        self._stored[number, False] = value

    def stored(self, number: int, *, first: bool = False) -> Value:
        """Return a tensor in its stored form: quantized ones are integers."""
        if (number, first) not in self._stored:
            self._stored[number, first] = self._reordered(self._stored, number, first)
        return self._stored[number, first]

    def real(self, number: int, *, first: bool = False) -> Value:
        """Return a tensor as the values that it stands for."""
        quantization = self.quantization(number)
        if quantization is None:
            return self.stored(number, first=first)
        if (number, first) not in self._real:
            value = self.stored(number, first=first)
            is_moved = first and len(quantization.scales) > 1
            axis = axis_in(quantization.axis, value.rank, is_moved)
            self._real[number, first] = self.dequantize(value, quantization, axis)
        return self._real[number, first]

    def dequantize(self, value: Value, quantization: Quantization, axis: int) -> Value:
        """Dequantize a tensor; `axis` is the channel axis in `value`."""
        parameters = self._parameters(quantization, value.dtype)
        return self.graph.add("DequantizeLinear", value, *parameters, axis=axis)

    def write(self, number: int, value: Value, *, first: bool = False) -> None:
        """Set a tensor to real values, which are quantized as the file says."""
        quantization, dtype = self.quantization(number), self._tensors[number].dtype
        if quantization is not None and value.dtype == "float32":
            parameters = self._parameters(quantization, dtype)
            value = self.graph.add("QuantizeLinear", value, *parameters, axis=quantization.axis)
        if value.dtype != dtype:
            raise ImportFailed(
                f"tensor {quoted(self._tensors[number].name)} has dtype {dtype} in the file, "
                f"and its operator computes {value.dtype}"
            )
        self._stored[number, first] = value

    def _parameters(self, quantization: Quantization, dtype: str) -> tuple[Value, Value]:
        scales: Array = np.asarray(quantization.scales, np.float32)
        zero_points: Array = np.asarray(quantization.zero_points, dtype)
        if len(scales) == 1:
            scales, zero_points = scales[0], zero_points[0]
        return self.graph.constant(scales), self.graph.constant(zero_points)

    def _reordered(self, values: dict[tuple[int, bool], Value], number: int, first: bool) -> Value:
        """Return a tensor in the requested layout, transposed from the other layout or from a constant."""
        other = values.get((number, not first))
        if other is None:
            other = values[number, False] = self._constant(number)
            if not first:
                return other
        axes = first_axes(other.rank) if first else last_axes(other.rank)
        return self.graph.transpose(other, axes)

    def _constant(self, number: int) -> Value:
        tensor = self._tensors[number]
        name = quoted(tensor.name or str(number))
        if tensor.data is None:
            raise ImportFailed(f"tensor {name} is read before anything computes it")
        if tensor.is_sparse or tensor.dtype not in IMPORTED_DTYPES:
            kind = "sparse values" if tensor.is_sparse else f"dtype {tensor.dtype}"
            raise ImportFailed(f"tensor {name} has {kind}, which tvmflow does not import")
        start, end = tensor.data
        dtype = np.dtype(tensor.dtype)
        array: Any = np.frombuffer(self._data, dtype, (end - start) // dtype.itemsize, start)
        try:
            array = array.reshape(tensor.dims)
        except ValueError:
            raise ImportFailed(
                f"tensor {name} has shape {list(tensor.dims)}, and {array.size} values"
            ) from None
        return self.graph.constant(array, name=tensor.name)


# ---------------------------------------------------------------- an operator that is converted


MAX_COUNT: Final = 1 << 24
"""Maximum number of elements of a constant that a small operand expands to (such as Fill)."""

_SAME: Final = 0
_NO_ACTIVATION: Final = 0


class Operation:
    """An operator, the tensors that it reads, and the graph to which it adds nodes."""

    def __init__(self, operator: Operator, tensors: Tensors) -> None:
        self.name = operator.name
        self.options = operator.options
        self.inputs = operator.inputs
        self.outputs = operator.outputs
        self.tensors = tensors
        self.graph: Graph = tensors.graph

    def has(self, position: int) -> bool:
        """Return whether an operand exists: some may be left out."""
        return position < len(self.inputs) and self.inputs[position] >= 0

    def number(self, position: int) -> int:
        """Return the number of the tensor of an operand."""
        if not self.has(position):
            raise self.refusal(f"without operand {position}")
        return self.inputs[position]

    def real(self, position: int = 0, *, first: bool = False) -> Value:
        """Return an operand as the values that it stands for, with channels first or last."""
        return self.tensors.real(self.number(position), first=first)

    def is_first(self, position: int = 0) -> bool:
        """Return whether an operand exists only in channels-first layout."""
        return self.tensors.is_first(self.number(position))

    def in_its_order(self, position: int = 0) -> tuple[Value, bool]:
        """Return an operand in the order of axes that it exists in, and whether channels are first."""
        first = self.is_first(position)
        return self.real(position, first=first), first

    def rank(self, position: int = 0) -> int:
        return self.tensors.rank(self.number(position))

    def constant(self, position: int) -> Array:
        """Return the values of an operand that must be constant: a shape, axes."""
        value = self.tensors.stored(self.number(position))
        if value.array is None:
            raise self.refusal(f"with operand {position} that is computed when the model runs")
        if value.has_dynamic_elements:
            self.fixed(value.array.ravel().tolist())
        return value.array

    def integers(self, position: int) -> list[int]:
        return [int(value) for value in np.ravel(self.constant(position))]

    def sizes(self, position: int) -> list[IrSize]:
        """Return the values of an operand that must be constant, or follow from the dimensions."""
        value = self.tensors.stored(self.number(position))
        if value.has_dynamic_elements:
            assert value.array is not None
            return [self.graph.ranges.simplify(size) for size in value.array.ravel().tolist()]
        return list(self.integers(position))

    def fixed(self, sizes: Sequence[IrSize]) -> list[int]:
        """Return sizes that the operator needs as constants."""
        if any(map(is_dynamic, sizes)):
            raise DynamicShapeProblem(f"{unfixed_text(sizes)}: {shape_text(sizes)}")
        return list(map(int, sizes))

    def shapes_text(self) -> str:
        """Return the shapes of the operands that are computed, for messages."""
        return names_text([shape_text(value.shape) for value in self._computed()])

    def _computed(self) -> list[Value]:
        numbers = (n for n in self.inputs if n >= 0 and not self.tensors.is_constant(n))
        return list(map(self.tensors.stored, numbers))

    def axis(self, position: int, rank: int) -> int:
        """Return a constant operand that is an axis, which may count from the end."""
        return self.checked_axis(self.integers(position)[0], rank)

    def checked_axis(self, axis: int, rank: int) -> int:
        if not -rank <= axis < rank:
            raise self.refusal(f"with axis {axis} of {rank}")
        return axis % rank

    def write(self, value: Value, position: int = 0, *, first: bool = False) -> None:
        """Set a result to real values, after the activation that the operator has."""
        activation = self.options.get("activation", _NO_ACTIVATION)
        if activation != _NO_ACTIVATION:
            if activation not in ACTIVATIONS:
                raise self.refusal(f"with activation {activation}")
            value = ACTIVATIONS[activation](self.graph, value)
        self.tensors.write(self.outputs[position], value, first=first)

    def output_dtype(self, position: int = 0) -> str:
        return self.tensors.tensor(self.outputs[position]).dtype

    def weight(self, position: int, axes: Sequence[int]) -> Value:
        """Return weights as the values that they stand for, with their axes in another order."""
        number = self.number(position)
        quantization = self.tensors.quantization(number)
        value = self.graph.transpose(self.tensors.stored(number), axes)
        if quantization is None:
            return value
        if len(quantization.scales) > 1 and quantization.axis not in axes:
            raise self.refusal(f"with weights quantized along axis {quantization.axis}")
        axis = list(axes).index(quantization.axis) if len(quantization.scales) > 1 else 0
        return self.tensors.dequantize(value, quantization, axis)

    def bias(self, position: int, data: int, weights: int) -> Value | None:
        """Return a bias as real values; None if it is left out.

        Its integers have the product of the scales of the operands `data` and `weights`.
        """
        if not self.has(position):
            return None
        number = self.inputs[position]
        value = self.tensors.stored(number)
        if value.dtype == "float32":
            return value
        scales = [self.tensors.quantization(self.number(p)) for p in (data, weights)]
        if value.array is None or scales[0] is None or scales[1] is None:
            raise self.refusal("with a bias that is computed when the model runs")
        factors = np.float64(scales[0].scales[0]) * np.asarray(scales[1].scales, np.float64)
        name = self.tensors.tensor(number).name
        return self.graph.constant(value.array * factors, "float32", name)

    def refusal(self, case: str) -> ImportFailed:
        """Return the error for a case of the operator that is not imported."""
        where = quoted(self.graph.prefix)
        text = f"tvmflow does not import the TFLite operator {self.name} {case} (tensor {where})"
        is_dynamic = any(value.is_dynamic for value in self._computed())
        return ImportFailed(text, fix=DYNAMIC_FIX if is_dynamic else FIX)


def pads(
    operation: Operation,
    sizes: Sequence[IrSize],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[int]:
    """Return the padding of a window along each axis, first all before, then all after the data.

    With `SAME` padding there are ⌈size / stride⌉ results, and one more pixel behind than before.
    """
    if operation.options["padding"] != _SAME:
        return [0] * (2 * len(sizes))
    return operation.graph.ranges.same_padding(sizes, kernel, strides, dilations)


def limit(graph: Graph, value: Value, low: float, high: float) -> Value:
    bounds = (graph.constant(low, value.dtype), graph.constant(high, value.dtype))
    return graph.add("Clip", value, *bounds)


ACTIVATIONS: Final[dict[int, Callable[[Graph, Value], Value]]] = {
    1: lambda graph, value: graph.add("Relu", value),
    2: lambda graph, value: limit(graph, value, -1.0, 1.0),
    3: lambda graph, value: limit(graph, value, 0.0, 6.0),
    4: lambda graph, value: graph.add("Tanh", value),
}
"""The activations that are part of other operators, by their values in `ActivationFunctionType`."""


def aligned(operation: Operation, positions: Sequence[int]) -> tuple[list[Value], bool]:
    """Return operands that broadcast in one order of axes, and whether channels are first.

    Channels-first layout is chosen if one operand exists only in it, to avoid transposes between convolutions.
    """
    rank = max(operation.rank(position) for position in positions)
    first = any(operation.is_first(p) and operation.rank(p) == rank for p in positions)
    if not first:
        return [operation.real(position) for position in positions], False
    return [_with_channels_first(operation, position, rank) for position in positions], True


def _with_channels_first(operation: Operation, position: int, rank: int) -> Value:
    """Return an operand with channels first, with missing axes added."""
    if operation.rank(position) == rank:
        return operation.real(position, first=True)
    value = operation.real(position)
    if value.rank == 0:
        return value
    value = operation.graph.reshape(value, [1] * (rank - value.rank) + list(value.shape))
    return operation.graph.transpose(value, first_axes(rank))


def axis_in(axis: int, rank: int, first: bool) -> int:
    """Return the position of a file's axis in the layout of a value."""
    return first_axes(rank).index(axis) if first else axis


Converter = Callable[[Operation], Any]
"""Adds the nodes of an operator and writes its results."""
