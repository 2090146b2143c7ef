"""Converts 4-bit weights and block-quantized weights to nodes of an operator that tvmflow defines.

ONNX expresses them by `DequantizeLinear`, and ONNX Runtime by `MatMulNBits`. TVM has no 4-bit tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import excerpt
from tvmflow.core.types import Array
from tvmflow.frontends.onnx._header import name_of
from tvmflow.frontends.onnx.graph import (
    Replacement,
    all_graphs,
    array_of,
    attributes_of,
    node_name,
    replace_nodes,
    value_info,
)

OPERATOR: Final = "GroupedWeights"
"""The operator of the added nodes; its result is a float32 matrix (rows, depth)."""
DOMAIN: Final = "tvmflow.weights"
"""The domain of the added nodes."""


_CONVERTED: Final = {
    ("com.microsoft", "MatMulNBits"),
    *((domain, "DequantizeLinear") for domain in ("com.microsoft", "", "ai.onnx")),
}
_HALVES: Final = (TensorProto.UINT4, TensorProto.INT4)
_INTEGERS: Final = {
    TensorProto.UINT4: (4, 0),
    TensorProto.INT4: (4, 8),
    TensorProto.UINT8: (8, 0),
    TensorProto.INT8: (8, 128),
}
"""Element type -> bits per element, and the offset that makes the integers non-negative."""
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16)
_BYTE: Final = 8
_MATRIX_RANK: Final = 2
_MAX_SIZE: Final = (1 << 31) - 1
# A row that is a single group is padded to a multiple of this, so that it fills whole 32-bit words.
_ROW_MULTIPLE: Final = 8
_MIN_BLOCK: Final = 16
_INT8_LEVEL: Final = 4
"""The `accuracy_level` of MatMulNBits from which data may be rounded to int8."""
_FIX: Final = (
    "export the model again, or quantize it with onnxruntime.quantization.matmul_nbits_quantizer"
)


def convert_block_quantized(model: ModelProto) -> ModelProto:
    """Replace the nodes that read constant 4-bit or block-quantized weights."""
    constants: dict[str, TensorProto] = {}
    additions = _Additions(model)
    has_converted = False
    for graph in all_graphs(model.graph):
        constants |= _list_constants(graph)
        additions.made.clear()
        nodes: list[NodeProto] = []
        for node in graph.node:
            is_candidate = (node.domain, node.op_type) in _CONVERTED and bool(node.output)
            converted = _Conversion(additions, node, constants).convert() if is_candidate else None
            has_converted |= converted is not None
            nodes += [node] if converted is None else converted
        if has_converted:
            replace_nodes(graph, nodes)
    if has_converted:
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return model


def _list_constants(graph: GraphProto) -> dict[str, TensorProto]:
    values = {
        node.output[0]: attribute.t
        for node in graph.node
        for attribute in node.attribute
        if node.op_type == "Constant" and attribute.name == "value" and node.output
    }
    return values | {tensor.name: tensor for tensor in graph.initializer}


class _Additions:
    """Constants added to a model; nodes with the same operands share one constant.

    `made` maps operands and attributes to the result of the first node converted with them in the current graph.
    """

    def __init__(self, model: ModelProto) -> None:
        self.graph = model.graph
        self._taken = {
            tensor.name for graph in all_graphs(model.graph) for tensor in graph.initializer
        }
        self._weights: dict[str, str] = {}
        self.made: dict[Any, str] = {}

    @functools.cached_property
    def multiplied(self) -> set[str]:
        """The operands of matrix multiplications; a right operand's first axis is the reduction axis."""
        return {
            name
            for node in self.graph.node
            for name in node.input
            if node.op_type == "MatMul"
            or (node.op_type == "Gemm" and not attributes_of(node).get("transB", 0))
        }

    def add_weight(self, what: str, array: Array, result: str, source: str = "") -> str:
        """Add a constant for `result`, or reuse the one with the same `source` and shape; return its name."""
        wanted = name = f"{source or result}/{what}-{'x'.join(map(str, array.shape))}"
        if source and wanted in self._weights:
            return self._weights[wanted]
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        self._weights[wanted] = name
        tensor = numpy_helper.from_array(np.asarray(array, order="C"), name)
        self.graph.initializer.append(tensor)
        return name


class _Conversion(Replacement):
    """A node that reads block-quantized weights, and the nodes that replace it."""

    def __init__(
        self, additions: _Additions, node: NodeProto, constants: Mapping[str, TensorProto]
    ) -> None:
        super().__init__(node)
        self._additions, self._constants = additions, constants
        self._add_weight = functools.partial(additions.add_weight, result=self.result())

    def convert(self) -> list[NodeProto] | None:
        if self.node.op_type == "MatMulNBits":
            return self._convert_product()
        tensor = self._constants.get(self.name(0))
        is_blocked = self._integer("block_size", 0) != 0
        if tensor is None:
            if is_blocked:
                raise self._refuse("its integers are computed, and only constants can be in blocks")
            return None
        is_small = tensor.data_type in _HALVES
        if not is_blocked and not is_small:
            return None
        if tensor.data_type not in _INTEGERS:
            raise self._refuse(f"blocks of {name_of(tensor.data_type)} are not supported")
        result = self.node.output[0]
        fields = (self.attributes.get(name) for name in ("axis", "block_size", "output_dtype"))
        key = (*self.node.input, *fields, result in self._additions.multiplied)
        # A constant of the file becomes only one weight, even if several nodes read it.
        if made := self._additions.made.get(key):
            self.add("Identity", made, output=result)
            return self.nodes
        self._additions.made[key] = result
        return self._convert_dequantize(tensor, is_blocked=is_blocked)

    # ------------------------------------------------------------ MatMulNBits

    def _convert_product(self) -> list[NodeProto]:
        columns, depth = self._size("N"), self._size("K")
        block, bits = self._size("block_size"), self._integer("bits", 4)
        if bits not in (4, _BYTE):
            raise self._refuse(f"weights of {bits} bits are not supported, only of 4 and 8")
        if block < _MIN_BLOCK or block & (block - 1):
            raise self._refuse(
                f"block_size is {block}, and must be a power of two from {_MIN_BLOCK}"
            )
        if self.name(4):
            raise self._refuse("g_idx, an order of its own for the weights, is not supported")
        if self._integer("weight_prepacked", 0):
            raise self._refuse("its weights are packed for one machine (weight_prepacked)")
        groups, size = -(-depth // block), block * bits // _BYTE
        packed, scales = self._constant(1, "B"), self._constant(2, "scales")
        self._check("B", packed, (TensorProto.UINT8,), columns * groups * size)
        integers = self.name(1)
        if tuple(packed.dims) != (columns, groups, size):
            array = array_of(packed).reshape(columns, groups, size)
            integers = self._add_weight("B", array, source=integers)
        self._check("scales", scales, _FLOATS, columns * groups)
        zeros = self._read_zeros(columns, groups, bits, scales.data_type)
        attributes = {"bits": bits, "group": block, "depth": depth, "zero": 1 << (bits - 1)}
        attributes["rounds_data"] = int(self._integer("accuracy_level", 0) >= _INT8_LEVEL)
        operands = filter(None, (integers, self.name(2), zeros))
        weights = self._add_node(operands, columns, attributes)
        transposed = self.add("Transpose", weights, perm=[1, 0])
        is_half = scales.data_type == TensorProto.FLOAT16

        def widen(name: str) -> str:
            return self.add("Cast", name, to=TensorProto.FLOAT) if is_half else name

        product = self.add("MatMul", widen(self.name(0)), transposed)
        if self.name(5):
            product = self.add("Add", product, widen(self.name(5)))
        if is_half:
            self.add("Cast", product, to=TensorProto.FLOAT16)
        self.nodes[-1].output[0] = self.node.output[0]
        return self.nodes

    def _read_zeros(self, columns: int, groups: int, bits: int, scale_type: int) -> str:
        """Return the name of the groups' zero points; empty if the node has none."""
        if not self.name(3):
            return ""
        tensor = self._constant(3, "zero_points")
        if tensor.data_type in _FLOATS:
            self._check("zero_points", tensor, (scale_type,), columns * groups)
            real = array_of(tensor).astype(np.float32)
            return self._add_weight(
                "zero_points", real.reshape(columns, groups), source=self.name(3)
            )
        size = -(-groups * bits // _BYTE)
        self._check("zero_points", tensor, (TensorProto.UINT8,), columns * size)
        array = array_of(tensor).reshape(columns, size)
        if bits < _BYTE:
            array = np.stack([array & 15, array >> 4], -1).reshape(columns, 2 * size)[:, :groups]
        return self._add_weight(f"zero_points{bits}", array, source=self.name(3))

    # ------------------------------------------------------------ DequantizeLinear

    def _convert_dequantize(self, tensor: TensorProto, *, is_blocked: bool) -> list[NodeProto]:
        scale = self._constant(1, "x_scale")
        output_type = self._integer("output_dtype", 0) or scale.data_type
        for what, element_type in (("scales", scale.data_type), ("a result", output_type)):
            if element_type not in _FLOATS:
                raise self._refuse(f"{what} of {name_of(element_type)} cannot be used here")
        bits, shift = _INTEGERS[tensor.data_type]
        integers = array_of(tensor).astype(np.int16) + shift
        scales: Array = array_of(scale).astype(np.float32)
        zeros: Array = np.full(scales.shape, shift, np.int16)
        if self.name(2):
            zero_point = self._constant(2, "x_zero_point")
            self._check("x_zero_point", zero_point, (tensor.data_type,), scales.size)
            zeros = array_of(zero_point).astype(np.int16).reshape(scales.shape) + shift
        axis = self._find_axis(integers.shape, scales, is_blocked=is_blocked)
        if axis is None:
            # A weight with one scale is grouped along the reduction axis of the multiplication that reads it.
            along = 0 if self.node.output[0] in self._additions.multiplied else 1
        else:
            along = axis if is_blocked else 1 - axis
        group = 0
        if integers.ndim == _MATRIX_RANK:
            # `block_size` may exceed the axis: then one block covers the whole row
            group = -(-integers.shape[along] // _ROW_MULTIPLE) * _ROW_MULTIPLE
            if is_blocked:
                group = min(group, self._size("block_size"))
            else:
                scales, zeros = (
                    array.reshape(1, 1) if axis is None else np.expand_dims(array.ravel(), along)
                    for array in (scales, zeros)
                )
        if not group or group * bits % _BYTE or not integers.size:
            return self._add_real(integers, scales, zeros, axis, output_type)
        if along == 0:
            integers, scales, zeros = integers.T, scales.T, zeros.T
        value = self._add_groups(integers, scales, zeros, bits, group)
        if along == 0:
            value = self.add("Transpose", value, perm=[1, 0])
        self.add("Cast", value, output=self.node.output[0], to=output_type)
        return self.nodes

    def _find_axis(self, shape: tuple[int, ...], scales: Array, *, is_blocked: bool) -> int | None:
        """Return the axis along which scales differ; None if there is a single scale."""
        if not is_blocked and scales.size == 1:
            return None
        axis = self._integer("axis", 1)
        if not -len(shape) <= axis < len(shape):
            raise self._refuse(f"it has no axis {axis}")
        axis %= len(shape)
        expected = [shape[axis]]
        if is_blocked:
            expected = [*shape]
            expected[axis] = -(-shape[axis] // self._size("block_size"))
        if list(scales.shape) != expected:
            raise self._refuse(
                f"a tensor {list(shape)} needs scales {expected} here, and it has {list(scales.shape)}"
            )
        return axis

    def _add_groups(
        self, integers: Array, scales: Array, zeros: Array, bits: int, group: int
    ) -> str:
        """Add a node for an integer matrix (rows, depth), with scales and zero points of shape (rows, groups)."""
        rows, depth = integers.shape
        groups = -(-depth // group)
        filled: Array = np.zeros((rows, groups * group), np.uint8)
        filled[:, :depth] = integers
        if bits < _BYTE:
            filled = filled[:, 0::2] | filled[:, 1::2] << 4
        packed = self._add_weight("packed", filled.reshape(rows, groups, -1))
        full_scales = np.broadcast_to(scales, (rows, groups))
        operands = [packed, self._add_weight("scales", full_scales)]
        values = np.unique(zeros)
        if values.size > 1:
            full_zeros = np.broadcast_to(zeros, (rows, groups)).astype(np.uint8)
            operands.append(self._add_weight("zeros", full_zeros))
        attributes = {"bits": bits, "group": group, "depth": depth, "zero": int(values[0])}
        return self._add_node(operands, rows, {**attributes, "rounds_data": 0})

    def _add_real(
        self, integers: Array, scales: Array, zeros: Array, axis: int | None, output_type: int
    ) -> list[NodeProto]:
        """Add the dequantized values as a float weight: no kernel reads these integers directly."""
        if axis is not None and scales.ndim == integers.ndim > 0:
            if block := min(self._integer("block_size", 0), integers.shape[axis]):
                blocks = np.arange(integers.shape[axis]) // block
                scales, zeros = (np.take(array, blocks, axis) for array in (scales, zeros))
        elif axis is not None:
            shape = [1] * integers.ndim
            shape[axis] = -1
            scales, zeros = scales.reshape(shape), zeros.reshape(shape)
        real = (integers - zeros).astype(np.float32) * scales
        dtype = helper.tensor_dtype_to_np_dtype(output_type)
        weight = self._add_weight("real", real.reshape(integers.shape).astype(dtype))
        self.add("Identity", weight, output=self.node.output[0])
        return self.nodes

    # ------------------------------------------------------------ operands

    def _integer(self, name: str, default: int) -> int:
        value = self.attributes.get(name, default)
        if not isinstance(value, int):
            raise self._refuse(f"its attribute {name} is not an integer")
        return value

    def _size(self, name: str) -> int:
        value = self._integer(name, 0)
        if not 0 < value <= _MAX_SIZE:
            raise self._refuse(f"{name} is {value}, and must be from 1 to {_MAX_SIZE:,}")
        return value

    def _constant(self, position: int, what: str) -> TensorProto:
        tensor = self._constants.get(self.name(position))
        if tensor is None:
            raise self._refuse(f"its {what} must be a constant of the model")
        return tensor

    def _check(
        self, what: str, tensor: TensorProto, element_types: tuple[int, ...], elements: int
    ) -> None:
        if tensor.data_type not in element_types:
            names = " or ".join(map(name_of, element_types))
            raise self._refuse(f"{what} is {name_of(tensor.data_type)}, and must be {names}")
        if math.prod(tensor.dims) != elements:
            raise self._refuse(
                f"{what} has {math.prod(tensor.dims):,} elements, and the other sizes need {elements:,}"
            )

    def _refuse(self, reason: str) -> ImportFailed:
        name = f"{excerpt(self.node.op_type)} (node {node_name(self.node)})"
        return ImportFailed(f"{name} cannot be imported: {reason}", fix=_FIX)

    # ------------------------------------------------------------ added nodes

    def _add_node(self, operands: Iterable[str], rows: int, attributes: Mapping[str, int]) -> str:
        """Add the node that dequantizes the weights, and declare its result, whose shape ONNX cannot infer."""
        name = f"{self.node.output[0]}/weights"
        result = value_info(name, "float32", (rows, attributes["depth"]))
        self._additions.graph.value_info.append(result)
        return self.add(OPERATOR, *operands, output=name, domain=DOMAIN, **attributes)
