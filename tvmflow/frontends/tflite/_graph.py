"""Builds an ONNX graph in which every shape is known: nodes on constants are evaluated at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import quoted
from tvmflow.core.types import TensorSpec
from tvmflow.frontends.base import MAX_ELEMENTS
from tvmflow.frontends.onnx.graph import dtype_of

Array = np.ndarray[Any, Any]

OPSET: Final = 21
"""The opset of the graph: the first that quantizes to 16 bits."""

# Shapes and what is computed from them; weights stay nodes.
_MAX_EVALUATED: Final = 1 << 16


class Value(NamedTuple):
    """A tensor of the graph.

    Attributes:
        name: Its name, which no other has.
        shape: Its sizes.
        dtype: As NumPy names it.
        array: Its elements where they are constant.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    array: Array | None = None

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)


NOTHING: Final = Value("", (), "float32")
"""An operand that is left out."""


class Graph:
    """An ONNX graph while it grows."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._names: set[str] = set()
        self.prefix = ""
        """The name of the operator that is converted; what it adds is named after it."""

    def input(self, spec: TensorSpec) -> Value:
        """Add an input."""
        self._names.add(spec.name)
        self._inputs.append(_value_info(spec.name, spec.dtype, spec.shape))
        return Value(spec.name, spec.shape, spec.dtype)

    def constant(self, array: Any, dtype: str = "", name: str = "") -> Value:
        """Return a constant, which becomes part of the graph when a node reads it.

        Args:
            array: Its elements.
            dtype: Their dtype; by default that of `array`.
            name: The name that it has where no other value has it.
        """
        elements = np.ascontiguousarray(array, dtype or None).reshape(np.shape(array))
        return Value(self._new_name(name), elements.shape, str(elements.dtype), elements)

    def add(self, operator: str, *operands: Value, **attributes: Any) -> Value:
        """Add a node with one result."""
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
        results = _infer(node, operands, self.prefix)
        elements = max((math.prod(v.shape) for v in (*results, *operands)), default=0)
        is_constant = all(v.array is not None for v in operands if v.name)
        # weights of 8 bits stay as they are
        is_small = elements <= _MAX_EVALUATED and operator != "DequantizeLinear"
        if is_constant and is_small:
            arrays = _evaluate(node, operands)
            return [
                v._replace(array=a, dtype=str(a.dtype))
                for v, a in zip(results, arrays, strict=True)
            ]
        for value in operands:
            if value.array is not None and value.name not in self._initializers:
                tensor = numpy_helper.from_array(value.array, value.name)
                self._initializers[value.name] = tensor
        self._nodes.append(node)
        return results

    def transpose(self, value: Value, axes: Sequence[int]) -> Value:
        """Reorder the axes of a value; those of constants at once."""
        if list(axes) == list(range(value.rank)):
            return value
        if value.array is not None:
            return self.constant(value.array.transpose(axes), name=value.name)
        return self.add("Transpose", value, perm=list(axes))

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Change the shape of a value; that of constants at once."""
        if value.shape == tuple(shape):
            return value
        if value.array is not None:
            return self.constant(value.array.reshape(shape), name=value.name)
        return self.add("Reshape", value, self.integers(shape), allowzero=1)

    def cast(self, value: Value, dtype: str) -> Value:
        """Convert the elements of a value; those of constants at once."""
        if value.dtype == dtype:
            return value
        if value.array is not None:
            return self.constant(value.array.astype(dtype), name=value.name)
        return self.add("Cast", value, to=_element_type(dtype))

    def integers(self, values: Sequence[int]) -> Value:
        """Return a constant of int64, as ONNX has shapes and axes."""
        return self.constant(np.asarray(values, np.int64))

    def finish(self, outputs: Sequence[tuple[str, Value]]) -> onnx.ModelProto:
        """Return the model with these outputs by name."""
        infos = []
        for name, value in outputs:
            source = value.name
            if value.array is not None:
                self._initializers[source] = numpy_helper.from_array(value.array, source)
            self._nodes.append(helper.make_node("Identity", [source], [name]))
            infos.append(_value_info(name, value.dtype, value.shape))
        graph = helper.make_graph(
            self._nodes, "tflite", self._inputs, infos, list(self._initializers.values())
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])

    def reserve(self, names: Sequence[str]) -> None:
        """Keep names for outputs."""
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


def _value_info(name: str, dtype: str, shape: Sequence[int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _element_type(dtype), list(shape))


def _single(
    node: onnx.NodeProto, operands: Sequence[Value], outputs: Sequence[onnx.ValueInfoProto]
) -> onnx.ModelProto:
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
    graph = helper.make_graph([node], "node", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])


def _infer(node: onnx.NodeProto, operands: Sequence[Value], where: str) -> list[Value]:
    """Return the results of a node with their shapes; `where` is its name in messages."""
    single = _single(node, operands, [helper.make_empty_tensor_value_info(n) for n in node.output])
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


def _evaluate(node: onnx.NodeProto, operands: Sequence[Value]) -> list[Array]:
    from onnx.reference import ReferenceEvaluator

    single = _single(node, operands, [helper.make_empty_tensor_value_info(n) for n in node.output])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [np.asarray(array) for array in ReferenceEvaluator(single).run(None, {})]
