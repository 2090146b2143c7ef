"""Rewrites the fused operators in models that ONNX Runtime's optimizer saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from onnx import NodeProto, TensorProto, helper

from tvmflow.frontends.onnx.graph import KnownValues, Replacement, attributes_of

# Before, constants of the type of an operand wait until that is known.
_CAST_LIKE_OPSET: Final = 15
# α·f(β·x), which ONNX's first versions had as operators.
_SCALED_ACTIVATIONS: Final = {"ParametricSoftplus": "Softplus", "ScaledTanh": "Tanh"}


class _Fused:
    """A node of a fused operator, and the nodes that replace it.

    Args:
        node: The node.
        known: Known shapes.
        types: Known element types by the names of values.
        opset: The version of the model's operator set.

    Attributes:
        element_type: The type of the first operand that has a known one, 0 if none has. Operands are
            of one type in those operators that ask for it.
    """

    def __init__(
        self, node: NodeProto, known: KnownValues, types: Mapping[str, int], opset: int
    ) -> None:
        self.attributes = attributes_of(node)
        self.new = Replacement(node)
        self.opset = opset
        self.element_type = next((types[name] for name in node.input if name in types), 0)
        self._node = node
        self._known = known
        self._types = types

    def name(self, position: int) -> str:
        """Return the name of an operand; empty for one that is left out."""
        return self._node.input[position] if position < len(self._node.input) else ""

    def rank(self, position: int) -> int | None:
        """Return the number of axes of an operand; None if it is unknown."""
        shape = self._known.shapes.get(self.name(position))
        return None if shape is None else len(shape)

    def type_of(self, position: int) -> int:
        """Return the element type of an operand; 0 if it is unknown."""
        return self._types.get(self.name(position), 0)

    def result(self, position: int = 0) -> str:
        """Return the name of a result; empty for one that is left out."""
        return self._node.output[position] if position < len(self._node.output) else ""

    def scaled(self, value: str, factor: float) -> str:
        """Return a value times a number."""
        return value if factor == 1 else self.new.add("Mul", value, self.number(factor))

    def cast(self, value: str, element_type: int, to: int) -> str:
        """Return a value of one element type, or of an unknown one, as another one."""
        return value if element_type == to else self.new.add("Cast", value, to=to)

    def finish(
        self, operator: str, values: Sequence[str], own: int, to: int, output: str = ""
    ) -> None:
        """Add a node that computes a result, in its own element type, and the cast to another one."""
        output = output or self.result()
        if own == to:
            self.new.add(operator, *values, output=output)
        else:
            self.new.add("Cast", self.new.add(operator, *values), output=output, to=to)

    def number(self, value: float) -> str:
        """Return the name of a constant of the type of the operands."""
        if self.element_type:
            dtype = helper.tensor_dtype_to_np_dtype(self.element_type)
            return self.new.constant(np.asarray(value, dtype))
        return self.new.add("CastLike", self.new.constant(np.float32(value)), self.name(0))

    def activated(self, value: str, parameters: Mapping[str, Any]) -> None:
        """Apply the activation of a fused operator, which gives the result."""
        name = self.attributes.get("activation", "")
        if name == "Clip":
            limits = [self.number(limit) for limit in parameters.values()]
            self.new.add(name, value, *limits, output=self.result())
        elif name in _SCALED_ACTIVATIONS:
            inner = self.scaled(value, parameters.get("beta", 1.0))
            outer = self.number(parameters.get("alpha", 1.0))
            activated = self.new.add(_SCALED_ACTIVATIONS[name], inner)
            self.new.add("Mul", outer, activated, output=self.result())
        elif name:
            self.new.add(name, value, output=self.result(), **parameters)
        else:
            self.new.add("Identity", value, output=self.result())

    def finish_product(self, integers: str, scales: tuple[str, str], bias: str) -> list[NodeProto]:
        """Return all nodes, with the scales and the bias of a product of bytes applied."""
        real = self.new.add("Cast", integers, to=TensorProto.FLOAT)
        scale = self.new.add("Mul", *scales)
        if not bias:
            self.new.add("Mul", real, scale, output=self.result())
        else:
            self.new.add("Add", self.new.add("Mul", real, scale), bias, output=self.result())
        return self.new.nodes


def _dynamic_matmul(node: _Fused) -> list[NodeProto]:
    """Rewrite a product of data that are quantized for it with weights of bytes."""
    data, weights, scale = (node.name(position) for position in range(3))
    integers, data_scale, zero = node.new.add_all("DynamicQuantizeLinear", data, results=3)
    operands = [integers, weights, zero, *filter(None, [node.name(3)])]
    product = node.new.add("MatMulInteger", *operands)
    return node.finish_product(product, (data_scale, scale), node.name(4))


def _matmul_to_float(node: _Fused) -> list[NodeProto]:
    """Rewrite a product of bytes that is converted to float32."""
    zeros = [node.name(4), node.name(5)]
    while zeros and not zeros[-1]:
        zeros.pop()
    product = node.new.add("MatMulInteger", node.name(0), node.name(1), *zeros)
    return node.finish_product(product, (node.name(2), node.name(3)), node.name(6))


def _matmul(node: _Fused) -> list[NodeProto] | None:
    """Rewrite a product of matrices that are transposed and scaled."""
    operands = [_transposed(node, position, side) for position, side in enumerate("AB")]
    known = [name for name in operands if name is not None]
    if len(known) < len(operands):
        return None
    factor = node.attributes.get("alpha", 1.0)
    if factor == 1:
        node.new.add("MatMul", *known, output=node.result())
    else:
        product = node.new.add("MatMul", *known)
        node.new.add("Mul", product, node.number(factor), output=node.result())
    return node.new.nodes


def _transposed(node: _Fused, position: int, side: str) -> str | None:
    """Return an operand transposed by the attributes of its side; None while its rank is unknown."""
    name, rank = node.name(position), node.rank(position)
    moves_batch, swaps = (
        bool(node.attributes.get(f"{attribute}{side}", 0)) for attribute in ("transBatch", "trans")
    )
    if not moves_batch and not swaps:
        return name
    if rank is None:
        # an equation for any rank, so that what depends on the result need not wait for this one's
        return None if moves_batch else node.new.add("Einsum", name, equation="...ij->...ji")
    order = [*range(1, rank - 1), 0, rank - 1] if moves_batch else [*range(rank)]
    # a vector stays as it is
    if swaps and rank > 1:
        order[-2:] = reversed(order[-2:])
    return node.new.add("Transpose", name, perm=order)


def _gemm(node: _Fused) -> list[NodeProto]:
    """Rewrite a matrix product with its activation."""
    names = ("alpha", "beta", "transA", "transB")
    own = {name: node.attributes[name] for name in names if name in node.attributes}
    operands = [name for name in (node.name(position) for position in range(3)) if name]
    product = node.new.add("Gemm", *operands, **own)
    parameters = {
        name: node.attributes[f"activation_{name}"]
        for name in ("alpha", "beta", "gamma")
        if f"activation_{name}" in node.attributes
    }
    node.activated(product, parameters)
    return node.new.nodes


def _convolution(node: _Fused) -> list[NodeProto]:
    """Rewrite a convolution with a sum and an activation."""
    own = {
        name: value
        for name, value in node.attributes.items()
        if name not in ("activation", "activation_params")
    }
    operands = [name for name in (node.name(position) for position in range(3)) if name]
    result = node.new.add("Conv", *operands, **own)
    if node.name(3):
        result = node.new.add("Add", result, node.name(3))
    values = node.attributes.get("activation_params", [])
    node.activated(result, dict(zip(("alpha", "beta"), values, strict=False)))
    return node.new.nodes


def _quick_gelu(node: _Fused) -> list[NodeProto]:
    """Rewrite x · sigmoid(α·x)."""
    x = node.name(0)
    gate = node.new.add("Sigmoid", node.scaled(x, node.attributes.get("alpha", 1.702)))
    node.new.add("Mul", x, gate, output=node.result())
    return node.new.nodes


def _rms_norm(node: _Fused) -> list[NodeProto] | None:
    """Rewrite a norm of the last axes without mean."""
    axis, rank = node.attributes.get("axis", -1), node.rank(0)
    if axis >= 0:
        if rank is None:
            return None
        axis -= rank
    return _add_rms_norm(node, node.name(0), 1, axis, node.result(1))


def _skip_rms_norm(node: _Fused) -> list[NodeProto] | None:
    """Rewrite a sum and its norm without mean."""
    if node.result(1) or node.result(2):
        return None
    total = node.new.add(
        "Add", node.name(0), node.name(1), output="" if node.name(3) else node.result(3)
    )
    if node.name(3):
        total = node.new.add("Add", total, node.name(3), output=node.result(3))
    return _add_rms_norm(node, total, 2)


def _add_rms_norm(
    node: _Fused, x: str, scale: int, axis: int = -1, inverse: str = ""
) -> list[NodeProto] | None:
    """Add x / √(mean(x²) + ε) · scale, of float16 in float32; None where no type is known yet.

    Args:
        node: The node.
        x: What is normalized, of the type of the first operand.
        scale: The place of the factors among the operands; the result has their type.
        axis: The first axis of the mean, negative.
        inverse: The name of 1 / √(mean(x²) + ε), which is float32, where the node results in it.
    """
    types, known = (node.type_of(0), node.type_of(scale)), node.element_type
    if not known:
        return None
    element_type = TensorProto.DOUBLE if known == TensorProto.DOUBLE else TensorProto.FLOAT
    operands = zip((x, node.name(scale)), types, strict=True)
    x, factors = (node.cast(name, own_type, element_type) for name, own_type in operands)
    dtype = helper.tensor_dtype_to_np_dtype(element_type)
    epsilon = node.new.constant(np.asarray(node.attributes.get("epsilon", 1e-5), dtype))
    mean = node.new.reduce("ReduceMean", node.new.add("Mul", x, x), range(axis, 0), node.opset)
    deviation = node.new.add("Sqrt", node.new.add("Add", mean, epsilon))
    node.finish(
        "Mul", (node.new.add("Div", x, deviation), factors), element_type, types[1] or known
    )
    if inverse:
        node.finish("Reciprocal", (deviation,), element_type, TensorProto.FLOAT, inverse)
    return node.new.nodes


FUSED_OPERATORS: Final[Mapping[str, Callable[[_Fused], list[NodeProto] | None]]] = {
    "DynamicQuantizeMatMul": _dynamic_matmul,
    "FusedConv": _convolution,
    "FusedGemm": _gemm,
    "FusedMatMul": _matmul,
    "MatMulIntegerToFloat": _matmul_to_float,
    "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _rms_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "TransposeMatMul": _matmul,
}
"""Operators of the domain com.microsoft, and `SimplifiedLayerNormalization` of no domain, and how they are rewritten."""


def rewrite_fused(
    node: NodeProto, known: KnownValues, types: Mapping[str, int], opset: int
) -> list[NodeProto] | None:
    """Return the nodes that replace a fused operator.

    None where it cannot be rewritten, or not before its shapes are known.

    Args:
        node: The node.
        known: Known values and shapes.
        types: Known element types by the names of values.
        opset: The version of the model's operator set.
    """
    fused = _Fused(node, known, types, opset)
    if not fused.element_type and opset < _CAST_LIKE_OPSET:
        return None
    return FUSED_OPERATORS[node.op_type](fused)
