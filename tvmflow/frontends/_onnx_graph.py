"""Builder of ONNX graphs for TFLite and MXNet models, with the shape and dtype of every value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import tirx

from tvmflow.core.dimensions import is_name
from tvmflow.core.types import Array, Dimension, TensorSpec
from tvmflow.frontends._dynamic_shapes import NO_END, DynamicShapeProblem, SizeRanges
from tvmflow.frontends.base import MAX_ELEMENTS, LoadedModel
from tvmflow.frontends.frontend import ImportCall
from tvmflow.frontends.onnx.custom_nodes import NO_OPERATORS, CustomNodes
from tvmflow.frontends.onnx.graph import (
    CUSTOM_DOMAIN,
    FROM_START,
    NUMBER,
    OWN_DOMAIN,
    Place,
    attributes_of,
    can_stay,
    dtype_of,
    leave_in_file,
    make_evaluator,
    make_single,
    value_info,
)
from tvmflow.frontends.onnx.importer import import_prepared, infer_results
from tvmflow.frontends.onnx.operators import compute_sizes
from tvmflow.frontends.onnx.prepare import prepare
from tvmflow.frontends.onnx.sizes import SizeValue
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, read_size, size_text

OPSET: Final = 21
"""The opset of the graph: the first with 16-bit quantization."""

# Constant folding is for shape computations: larger constants, such as weights, are not folded.
_MAX_EVALUATED: Final = 1 << 16


class Value(NamedTuple):
    """A tensor of the graph.

    Attributes:
        shape: Sizes, which may be symbolic.
        array: Elements of a constant, or of a tensor of symbolic sizes (an object array); otherwise None.
        place: Position of the elements in a file, if they are not copied.
        is_number: Whether it is a scalar of a converter, which kernels contain as a constant, not as a weight.
    """

    name: str
    shape: tuple[IrSize, ...]
    dtype: str
    array: Array | None = None
    place: Place | None = None
    is_number: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_dynamic(self) -> bool:
        """True if the shape or the known elements depend on dimensions."""
        return any(map(is_dynamic, self.shape)) or self.has_dynamic_elements

    @property
    def has_dynamic_elements(self) -> bool:
        """True if the elements are expressions of dimensions."""
        return self.array is not None and self.array.dtype == object


NOTHING: Final = Value("", (), "float32")
"""An omitted operand."""


Operand = Value | float
"""An operand of a node; a number becomes a constant with the dtype of the first value."""


class Graph:
    """An ONNX graph under construction, with constant folding."""

    def __init__(self, dimensions: Sequence[Dimension] = ()) -> None:
        self.ranges = SizeRanges(dimensions)
        self._dimensions = tuple(dimensions)
        self._indices: dict[str, tuple[Value, int]] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._own_results: list[onnx.ValueInfoProto] = []
        self._names: set[str] = set()
        self._computed: set[str] = set()
        self.prefix = ""
        """The name of the operator being converted, which is the `doc_string` of its nodes."""

    @property
    def is_dynamic(self) -> bool:
        return bool(self._dimensions)

    def input(self, spec: TensorSpec) -> Value:
        self._names.add(spec.name)
        sizes = spec.sizes or spec.shape
        self._inputs.append(value_info(spec.name, spec.dtype, sizes))
        for axis, size in enumerate(sizes):
            if is_name(size):
                largest = Value(spec.name, spec.shape, spec.dtype)
                self._indices.setdefault(size, (largest, axis))
        shape = [read_size(size, self.ranges.symbols) for size in sizes]
        return Value(spec.name, self._see(shape), spec.dtype)

    def _see(self, sizes: Sequence[IrSize]) -> tuple[IrSize, ...]:
        """Return sizes, each as the expression of an equal size seen earlier, and remember them."""
        return tuple(self.ranges.see([self.ranges.as_seen(size) for size in sizes]))

    def constant(self, array: Any, dtype: str = "", name: str = "") -> Value:
        """Return a constant, named `name` if that is free; it is added to the graph when a node reads it."""
        name = self.new_name(name)
        if isinstance(array, np.ndarray) and array.dtype == object:
            if any(map(is_dynamic, array.flat)):
                return Value(name, array.shape, dtype, array)
            array = array.astype(dtype)
        elements = np.ascontiguousarray(array, dtype or None).reshape(np.shape(array))
        return Value(name, elements.shape, str(elements.dtype), elements)

    def number(self, number: float, dtype: str) -> Value:
        """Return a scalar that kernels contain as a constant, not as a weight."""
        return self.constant(number, dtype)._replace(is_number=True)

    def add(self, operator: str, *operands: Operand, **attributes: Any) -> Value:
        [result] = self.add_several(operator, 1, *operands, **attributes)
        return result

    def add_several(
        self, operator: str, count: int, *operands: Operand, **attributes: Any
    ) -> list[Value]:
        """Add a node with `count` results, or fold it if all operands are constant."""
        dtype = next((value.dtype for value in operands if isinstance(value, Value)), "")
        values = [v if isinstance(v, Value) else self.number(v, dtype) for v in operands]
        node = self._node(operator, count, values, attributes)
        if operator.startswith("Gather"):
            node.metadata_props.add(key=FROM_START)
        is_constant = all(v.array is not None for v in values if v.name)
        if any(value.is_dynamic for value in values):
            if is_constant and (computed := self._compute(node, values)):
                return computed
            return self._add_dynamic(node, values)
        single = _single(node, values)
        inferred = onnx.shape_inference.infer_shapes(single, strict_mode=True, data_prop=True)
        results = _read_results(inferred)
        elements = max((math.prod(v.shape) for v in (*results, *values)), default=0)
        # DequantizeLinear is not folded, so that 8-bit weights stay quantized.
        is_small = elements <= _MAX_EVALUATED and operator != "DequantizeLinear"
        if is_constant and is_small:
            arrays = map(np.asarray, make_evaluator(single)({}))
            return [
                v._replace(array=a, dtype=str(a.dtype))
                for v, a in zip(results, arrays, strict=True)
            ]
        self._append(node, values)
        return results

    def add_own(
        self, operator: str, like: Value, dtype: str, *operands: Value, **attributes: Any
    ) -> Value:
        """Add a node of an internal operator; its result has the shape of `like`."""
        sizes = _static_sizes(like)
        if None not in sizes:
            _check_elements(like.shape)
        node = self._node(operator, 1, operands, attributes)
        node.domain = OWN_DOMAIN
        self._append(node, operands)
        [name] = node.output
        # ONNX cannot infer the shape of this result, which later shapes depend on.
        self._own_results.append(value_info(name, dtype, sizes))
        return Value(name, like.shape, dtype)

    def add_custom(
        self,
        operator: tuple[str, str],
        count: int,
        operands: Sequence[Value],
        attributes: Mapping[str, Any],
        custom: CustomNodes,
    ) -> list[Value]:
        """Add a node of a custom operator, given by (domain, name), with `count` results."""
        domain, name = operator
        node = self._node(name, count, operands, attributes)
        node.domain, node.name = domain, self.prefix
        single = _single(node, operands)
        custom.mark(single)
        self._append(single.graph.node[0], operands)
        return _read_results(custom.infer_shapes(single))

    def _node(
        self,
        operator: str,
        count: int,
        operands: Sequence[Value],
        attributes: Mapping[str, Any],
    ) -> onnx.NodeProto:
        names = [self.new_name() for _ in range(count)]
        inputs = [operand.name for operand in operands]
        # Nodes stay unnamed, because names would have to be unique.
        node = helper.make_node(operator, inputs, names, doc_string=self.prefix)
        node.attribute.extend(helper.make_attribute(*entry) for entry in attributes.items())
        return node

    def _append(self, node: onnx.NodeProto, operands: Sequence[Value]) -> None:
        self._materialize(operands)
        self._nodes.append(node)

    # ------------------------------------------------------------ dynamic shapes

    def _add_dynamic(self, node: onnx.NodeProto, operands: Sequence[Value]) -> list[Value]:
        single = _single(node, [v for v in operands if not v.has_dynamic_elements])
        known = {
            v.name: SizeValue(v.array, v.dtype)
            for v in operands
            if v.array is not None and v.has_dynamic_elements
        }
        kinds = infer_results(single, known, self.ranges.symbols, self._dimensions)
        self._append(node, operands)
        return [
            Value(name, self._see(kind.shape.values), str(kind.dtype))
            for name, kind in zip(node.output, kinds, strict=True)
        ]

    def _compute(self, node: onnx.NodeProto, operands: Sequence[Value]) -> list[Value]:
        """Return the results of a node that computes with symbolic sizes; empty if they are unknown."""
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
        """Add operands that are constants or symbolic sizes to the graph."""
        for value in operands:
            if value.array is None or value.name in self._initializers:
                continue
            if value.has_dynamic_elements:
                self._compute_at_run_time(value)
                continue
            kind = _element_type(value.dtype)
            tensor = TensorProto(name=value.name, data_type=kind, dims=value.shape)
            if value.place and can_stay(tensor, value.place):
                leave_in_file(tensor, value.place)
            else:
                tensor = numpy_helper.from_array(value.array, value.name)
            if value.is_number:
                tensor.doc_string = NUMBER
            self._initializers[value.name] = tensor

    def _compute_at_run_time(self, value: Value) -> None:
        """Add nodes that compute symbolic sizes from the shapes of the inputs."""
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
        """Return a size as a tensor of shape [1]."""
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

    def expand_dims(self, value: Value, axis: int) -> Value:
        """Insert an axis of size 1."""
        return self.reshape(value, [*value.shape[:axis], 1, *value.shape[axis:]])

    def stack(self, values: Sequence[Value], axis: int) -> Value:
        """Join values along a new axis."""
        return self.add("Concat", *(self.expand_dims(value, axis) for value in values), axis=axis)

    def transpose(self, value: Value, axes: Sequence[int]) -> Value:
        if list(axes) == list(range(value.rank)):
            return value
        if value.array is not None:
            return self.constant(value.array.transpose(axes), value.dtype, value.name)
        return self.add("Transpose", value, perm=list(axes))

    def reshape(self, value: Value, shape: Sequence[IrSize]) -> Value:
        if value.shape == tuple(shape):
            return value
        if value.array is not None:
            return self.constant(value.array.reshape(shape), value.dtype, value.name)
        return self.add("Reshape", value, self.integers(shape), allowzero=1)

    def cast(self, value: Value, dtype: str) -> Value:
        if value.dtype == dtype:
            return value
        if value.array is not None:
            array = value.array if value.has_dynamic_elements else value.array.astype(dtype)
            return self.constant(array, dtype, value.name)
        return self.add("Cast", value, to=_element_type(dtype))

    def integers(self, values: Sequence[IrSize]) -> Value:
        """Return a 1-D int64 constant, as ONNX requires for shapes and axes."""
        if any(map(is_dynamic, values)):
            array = np.empty(len(values), object)
            array[:] = [self.ranges.simplify(value) for value in values]
            return self.constant(array, "int64")
        return self.constant(np.asarray(values, np.int64))

    def cut(self, value: Value, slices: Mapping[int, slice]) -> Value:
        """Slice a value along axes; dynamic bounds must be non-negative or None."""
        cuts: list[tuple[IrSize, IrSize, int, int]] = []
        for axis, part in sorted(slices.items()):
            size = value.shape[axis]
            start, stop, step = self.bounds(part, size)
            if (start, stop, step) == (0, size, 1):
                continue
            if not any(map(is_dynamic, (size, start, stop))) and stop < 0:
                # In ONNX, a negative end counts from the end, so the end before entry 0 is -size - 1.
                stop = -size - 1
            cuts.append((start, stop, axis, step))
        if not cuts:
            return value
        lists = (list(bounds) for bounds in zip(*cuts, strict=True))
        return self.add("Slice", value, *map(self.integers, lists))

    def bounds(self, part: slice, size: IrSize) -> tuple[IrSize, IrSize, int]:
        """Return start, stop and step of a slice of an axis, like `slice.indices`, for symbolic sizes."""
        if not any(is_dynamic(n) for n in (size, part.start, part.stop) if n is not None):
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
        if len(sizes) == 1:
            return [value]
        return self.add_several("Split", len(sizes), value, self.integers(sizes), axis=axis)

    def finish(self, outputs: Sequence[tuple[str, Value]]) -> onnx.ModelProto:
        infos = []
        for name, value in outputs:
            source = value.name
            self._materialize([value])
            self._nodes.append(helper.make_node("Identity", [source], [name]))
            infos.append(value_info(name, value.dtype, _static_sizes(value)))
        graph = helper.make_graph(
            self._nodes,
            "main",
            self._inputs,
            infos,
            list(self._initializers.values()),
            value_info=self._own_results,
        )
        domains = {node.domain for node in self._nodes}
        own = [helper.make_opsetid(n, 1) for n in (CUSTOM_DOMAIN, OWN_DOMAIN) if n in domains]
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET), *own])

    def reserve(self, names: Sequence[str]) -> None:
        self._names.update(names)

    def new_name(self, name: str = "") -> str:
        """Return a free name, by default with the converted operator's name as prefix."""
        base, count = name or self.prefix, 1
        name = base if name else f"{base}.0"
        while name in self._names:
            name = f"{base}.{count}"
            count += 1
        self._names.add(name)
        return name


def _element_type(dtype: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


_SIZE_NODES: Final[Mapping[type, str]] = {
    tirx.Add: "Add",
    tirx.Sub: "Sub",
    tirx.Mul: "Mul",
    # Sizes are non-negative, so truncating division is floor division.
    tirx.FloorDiv: "Div",
    tirx.FloorMod: "Mod",
    tirx.Min: "Min",
    tirx.Max: "Max",
}


def _single(node: onnx.NodeProto, operands: Sequence[Value]) -> onnx.ModelProto:
    """Return a model of a single node, which contains small constants."""
    by_name = {value.name: value for value in operands if value.name}
    constants = [
        numpy_helper.from_array(value.array, name)
        for name, value in by_name.items()
        if value.array is not None and value.array.size <= _MAX_EVALUATED
    ]
    known = {tensor.name for tensor in constants}
    inputs = [
        value_info(name, v.dtype, list(map(size_text, v.shape)))
        for name, v in by_name.items()
        if name not in known
    ]
    return make_single(node, inputs, constants, [helper.make_opsetid("", OPSET)])


def _read_results(model: onnx.ModelProto) -> list[Value]:
    results = []
    for info in model.graph.output:
        kind = info.type.tensor_type
        sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
        if not kind.HasField("shape") or min(sizes, default=0) < 0:
            raise ValueError("its shape depends on values that are known only when the model runs")
        _check_elements(sizes)
        results.append(Value(info.name, tuple(sizes), dtype_of(kind.elem_type)))
    return results


def _check_elements(sizes: Sequence[IrSize]) -> None:
    """Raise ValueError for a static shape with too many elements."""
    if (elements := math.prod(sizes)) > MAX_ELEMENTS:
        raise ValueError(f"its result has {elements:,} elements, and the limit is {MAX_ELEMENTS:,}")


def _static_sizes(value: Value) -> list[int | None]:
    """Return the sizes of a value, with None for dynamic sizes."""
    return [None if is_dynamic(size) else int(size) for size in value.shape]


def import_graph(
    model: onnx.ModelProto,
    inner_outputs: int,
    inputs: tuple[TensorSpec, ...],
    call: ImportCall,
    custom: CustomNodes = NO_OPERATORS,
) -> LoadedModel:
    """Import a model from `Graph.finish`; its last `inner_outputs` outputs are intermediate tensors."""
    labels = {o: node.doc_string for node in model.graph.node for o in node.output}
    return import_prepared(
        prepare(model, inputs, custom=custom),
        inner_outputs,
        custom,
        labels,
        call.dimensions,
        counts_rows=call.counts_rows,
    )
