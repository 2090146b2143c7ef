"""Rewrites operators of ONNX Runtime's QOperator format as the same operators between DequantizeLinear and QuantizeLinear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from onnx import NodeProto

from tvmflow.frontends.onnx._graph import KnownValues, attributes_of
from tvmflow.frontends.onnx._replacement import Replacement

# From this opset on, Softmax normalizes along one axis.
_SOFTMAX_OPSET: Final = 13
_POOL_ATTRIBUTES: Final = "auto_pad ceil_mode count_include_pad kernel_shape pads strides".split()


class _Quantized:
    """A node of a QOperator, and the nodes that replace it.

    Args:
        node: The node.
        known: The shapes of scales.
    """

    def __init__(self, node: NodeProto, known: KnownValues) -> None:
        self.attributes = attributes_of(node)
        self.new = Replacement(node)
        self._node = node
        self._known = known

    def name(self, position: int) -> str:
        """Return the name of an operand; empty for one that is left out."""
        return self._node.input[position] if position < len(self._node.input) else ""

    def sizes(self, position: int) -> tuple[int, ...] | None:
        """Return the shape of an operand."""
        return self._known.shapes.get(self.name(position))

    def parameters(self, scale: int) -> list[str]:
        """Return the names of all scales and zero points, those of the result at `scale`."""
        last = len(self._node.input) if scale == 0 else scale
        places = [
            n for start in range(2 if scale == 0 else 0, last, 3) for n in (start + 1, start + 2)
        ]
        return [self.name(position) for position in (scale, scale + 1, *places)]

    def is_vector(self, position: int) -> bool:
        """Return whether a scale has several elements."""
        return max(self._known.shapes[self.name(position)], default=1) > 1

    def real(self, position: int, axis: int = 1) -> str:
        """Return the numbers that an operand stands for, which its scale and zero point follow.

        Args:
            position: That of the operand.
            axis: The axis of the channels, where the scale has several elements.
        """
        parameters = (self._parameter(position + 1), self._parameter(position + 2))
        return self.new.add("DequantizeLinear", self.name(position), *parameters, axis=axis)

    def bias(self, position: int, scales: tuple[int, int], factor: float = 1.0) -> str:
        """Return a bias of int32, whose scale is the product of those of data and weights."""
        scale = self.new.add("Mul", *(self._parameter(place) for place in scales))
        if factor != 1.0:
            scale = self.new.add("Mul", scale, self.new.constant(np.float32(factor)))
        number = self.new.add("Cast", self.name(position), to=1)
        return self.new.add("Mul", number, scale)

    def finish(self, value: str, scale: int) -> list[NodeProto]:
        """Quantize the result, and return all nodes.

        Args:
            value: The result as real numbers.
            scale: The position of its scale, which its zero point follows.
        """
        operands = (value, self._parameter(scale), self._parameter(scale + 1))
        self.new.add("QuantizeLinear", *operands, output=self._node.output[0])
        return self.new.nodes

    def _parameter(self, position: int) -> str:
        """Return a scale or a zero point; one of a single element is a scalar."""
        name = self.name(position)
        if self._known.shapes[name] == () or self.is_vector(position):
            return name
        return self.new.add("Reshape", name, self.new.constant(np.zeros(0, np.int64)))


def _convolution(node: _Quantized) -> list[NodeProto]:
    operands = [node.real(0), node.real(3, axis=0)]
    if node.name(8):
        operands.append(node.bias(8, (1, 4)))
    return node.finish(node.new.add("Conv", *operands, **node.attributes), 6)


def _matrix_product(node: _Quantized) -> list[NodeProto] | None:
    rank = len(node.sizes(3) or ())
    if node.is_vector(1) or not rank:
        return None
    return node.finish(node.new.add("MatMul", node.real(0), node.real(3, axis=rank - 1)), 6)


def _gemm(node: _Quantized) -> list[NodeProto] | None:
    if node.is_vector(1):
        return None
    axis = 0 if node.attributes.get("transB", 0) else 1
    operands = [node.real(0), node.real(3, axis=axis)]
    if node.name(6):
        operands.append(node.bias(6, (1, 4), node.attributes.get("alpha", 1.0)))
    return node.finish(node.new.add("Gemm", *operands, **node.attributes), 7)


def _binary(operator: str) -> Callable[[_Quantized], list[NodeProto]]:
    def rewrite(node: _Quantized) -> list[NodeProto]:
        return node.finish(node.new.add(operator, node.real(0), node.real(3)), 6)

    return rewrite


def _unary(
    operator: str, attributes: Sequence[str] = ()
) -> Callable[[_Quantized], list[NodeProto] | None]:
    def rewrite(node: _Quantized) -> list[NodeProto] | None:
        if node.attributes.get("channels_last", 0):
            return None
        kept = {name: node.attributes[name] for name in attributes if name in node.attributes}
        return node.finish(node.new.add(operator, node.real(0), **kept), 3)

    return rewrite


def _softmax(node: _Quantized) -> list[NodeProto] | None:
    shape, axis = node.sizes(0), node.attributes.get("axis", -1)
    is_last = axis == -1 or (shape is not None and axis == len(shape) - 1)
    if node.attributes.get("opset", 1) < _SOFTMAX_OPSET and not is_last:
        return None
    return node.finish(node.new.add("Softmax", node.real(0), axis=axis), 3)


def _concatenation(node: _Quantized) -> list[NodeProto]:
    count = 2
    values = []
    while node.name(count):
        values.append(node.real(count))
        count += 3
    result = node.new.add("Concat", *values, axis=node.attributes["axis"])
    return node.finish(result, 0)


class _Rewrite(NamedTuple):
    """The function that rewrites an operator, and the position of the scale of its result."""

    rewrite: Callable[[_Quantized], list[NodeProto] | None]
    scale: int


_REWRITES: Final[Mapping[str, _Rewrite]] = {
    "QGemm": _Rewrite(_gemm, 7),
    "QLinearAdd": _Rewrite(_binary("Add"), 6),
    "QLinearAveragePool": _Rewrite(_unary("AveragePool", _POOL_ATTRIBUTES), 3),
    "QLinearConcat": _Rewrite(_concatenation, 0),
    "QLinearConv": _Rewrite(_convolution, 6),
    "QLinearGlobalAveragePool": _Rewrite(_unary("GlobalAveragePool"), 3),
    "QLinearLeakyRelu": _Rewrite(_unary("LeakyRelu", ["alpha"]), 3),
    "QLinearMatMul": _Rewrite(_matrix_product, 6),
    "QLinearMul": _Rewrite(_binary("Mul"), 6),
    "QLinearSigmoid": _Rewrite(_unary("Sigmoid"), 3),
    "QLinearSoftmax": _Rewrite(_softmax, 3),
}
"""Operators of ONNX, and of the domain com.microsoft."""


def rewrite_qoperator(node: NodeProto, known: KnownValues) -> list[NodeProto] | None:
    """Return the nodes that replace a QOperator; None where it is none, or cannot be rewritten.

    Args:
        node: The node.
        known: Known values and shapes.
    """
    rewrite = _REWRITES.get(node.op_type)
    if rewrite is None:
        return None
    quantized = _Quantized(node, known)
    names = quantized.parameters(rewrite.scale)
    if "" in names or any(name not in known.shapes for name in names):
        return None
    return rewrite.rewrite(quantized)
