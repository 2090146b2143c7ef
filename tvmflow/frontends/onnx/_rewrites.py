"""Rewrites nodes that TVM's importer lacks or miscomputes in other operators of ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmflow.frontends.onnx._fused_operators import FUSED_OPERATORS, rewrite_fused
from tvmflow.frontends.onnx._operators import QOPERATORS
from tvmflow.frontends.onnx.graph import (
    KnownValues,
    Replacement,
    attributes_of,
    element_types,
    is_standard,
    known_values,
    opset_of,
    replace_nodes,
)

# Older ones are converted to it where possible; the mask of Dropout is boolean then.
_MIN_OPSET: Final = 13
_MAX_IDENTITY_ELEMENTS: Final = 1 << 20


class _Context(NamedTuple):
    """The facts of a model that rewrites need.

    Element types, and the nodes that compute values, are by the names of values.
    """

    opset: int
    known: KnownValues
    types: Mapping[str, int]
    producers: Mapping[str, NodeProto]


def rewrite_nodes(model: ModelProto) -> ModelProto:
    """Replace the nodes of the main graph that have a rewrite, as far as shapes and types are known."""
    rewritten = {*_REWRITES, *QOPERATORS, *FUSED_OPERATORS}
    is_old = opset_of(model) < _MIN_OPSET
    if is_old or rewritten.isdisjoint(node.op_type for node in model.graph.node):
        return model
    producers = {name: node for node in model.graph.node for name in node.output}
    context = _Context(opset_of(model), known_values(model), element_types(model), producers)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        nodes += _rewrite(node, context) or [node]
    replace_nodes(model, nodes)
    return model


def _rewrite(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Return the nodes that replace one; None where it stays."""
    if is_standard(node) or node.domain == "com.microsoft":
        if node.op_type in QOPERATORS:
            return rewrite_qoperator(node, context.known)
        if node.op_type in FUSED_OPERATORS:
            return rewrite_fused(node, context.known, context.types, context.opset)
    rewrite = _REWRITES.get(node.op_type) if is_standard(node) else None
    return rewrite(node, context) if rewrite else None


def _cast_like(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite a cast to the type of another value, which constants then need not wait for."""
    to = context.types.get(node.input[1])
    return None if to is None else [helper.make_node("Cast", node.input[:1], node.output, to=to)]


def _same_padding(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite padding for ceil(size / stride) windows as numbers: TVM has too little for SAME_LOWER."""
    attributes = attributes_of(node)
    mode = attributes.get("auto_pad", "NOTSET")
    shape = context.known.shapes.get(node.input[0])
    weights = context.known.shapes.get(node.input[1]) if len(node.input) > 1 else None
    kernel = attributes.get("kernel_shape") or (weights or ())[2:]
    if not mode.startswith("SAME") or shape is None or not kernel:
        return None
    ones = [1] * len(kernel)
    strides, gaps = attributes.get("strides", ones), attributes.get("dilations", ones)
    before, after = [], []
    for size, edge, stride, gap in zip(shape[2:], kernel, strides, gaps, strict=True):
        covered = (-(-size // stride) - 1) * stride + (edge - 1) * gap + 1
        total = max(0, covered - size)
        before.append(total // 2 if mode == "SAME_UPPER" else total - total // 2)
        after.append(total - before[-1])
    new = {**attributes, "auto_pad": "NOTSET", "pads": before + after}
    return [helper.make_node(node.op_type, node.input, node.output, node.name, **new)]


def _conv_transpose(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite the size of the result as padding."""
    attributes = attributes_of(node)
    shapes = [context.known.shapes.get(name) for name in node.input[:2]]
    if "output_shape" not in attributes or None in shapes:
        return None
    data, kernel = (list(shape)[2:] for shape in shapes if shape is not None)
    rank = len(data)
    ones, zeros = [1] * rank, [0] * rank
    sizes = attributes["output_shape"][-rank:]
    strides, gaps = attributes.get("strides", ones), attributes.get("dilations", ones)
    extra = list(attributes.get("output_padding", zeros))
    before, after = [], []
    for axis, (size, edge) in enumerate(zip(data, kernel, strict=True)):
        length = strides[axis] * (size - 1) + extra[axis] + (edge - 1) * gaps[axis] + 1
        total = max(0, length - sizes[axis])
        extra[axis] += max(0, sizes[axis] - length)
        smaller, larger = total // 2, total - total // 2
        is_upper = attributes.get("auto_pad") == "SAME_UPPER"
        before.append(smaller if is_upper else larger)
        after.append(larger if is_upper else smaller)
    # TVM pads a result with less than a step.
    if any(pad and pad >= stride for pad, stride in zip(extra, strides, strict=True)):
        return None
    for name in ("output_shape", "auto_pad", "pads", "output_padding"):
        attributes.pop(name, None)
    new = {**attributes, "pads": before + after, "output_padding": extra}
    return [helper.make_node("ConvTranspose", node.input, node.output, **new)]


def _dropout(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite Dropout with its mask, which keeps all elements in inference."""
    shape, constants = context.known.shapes.get(node.input[0]), context.known.constants
    switch = node.input[2] if len(node.input) > 2 else ""
    is_training = switch and not (switch in constants and not constants[switch].any())
    if len(node.output) < 2 or shape is None or is_training:
        return None
    nodes = Replacement(node)
    kept, size = nodes.constant(True), nodes.constant(np.array(shape, np.int64))
    nodes.add("Expand", kept, size, output=node.output[1])
    nodes.add("Identity", node.input[0], output=node.output[0])
    return nodes.nodes


def _concat(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite a concatenation without the operands that have no elements, such as an empty cache of keys."""
    kept = [name for name in node.input if 0 not in context.known.shapes.get(name, ())]
    if not 0 < len(kept) < len(node.input):
        return None
    return [helper.make_node("Concat", kept, node.output, node.name, **attributes_of(node))]


def _split(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite a split that has one part, or parts without elements, which become constants."""
    if len(node.output) == 1:
        return [helper.make_node("Identity", node.input[:1], node.output, node.name)]
    kind, constants = context.types.get(node.input[0]), context.known.constants
    sizes = constants.get(node.input[1]) if len(node.input) > 1 else None
    if kind is None or sizes is None or sizes.all() or not sizes.any():
        return None
    nodes = Replacement(node)
    for name in (name for name, size in zip(node.output, sizes, strict=True) if not size):
        shape = context.known.shapes.get(name)
        if shape is None:
            return None
        nodes.constant(np.zeros(shape, helper.tensor_dtype_to_np_dtype(kind)), output=name)
    parts = [name for name, size in zip(node.output, sizes, strict=True) if size]
    others = nodes.constant(sizes[sizes > 0].astype(np.int64))
    attributes = {name: at for name, at in attributes_of(node).items() if name != "num_outputs"}
    nodes.nodes.append(helper.make_node("Split", [node.input[0], others], parts, **attributes))
    return nodes.nodes


def _top_k(node: NodeProto, _: _Context) -> list[NodeProto] | None:
    """Rewrite a TopK that may return its results in any order as one that sorts them."""
    if attributes_of(node).get("sorted", 1):
        return None
    others = {name: value for name, value in attributes_of(node).items() if name != "sorted"}
    return [helper.make_node("TopK", node.input, node.output, node.name, **others)]


def _eye_like(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite an identity matrix as a constant."""
    shape, attributes = context.known.shapes.get(node.input[0]), attributes_of(node)
    kind = attributes.get("dtype", context.types.get(node.input[0], TensorProto.FLOAT))
    if shape is None or len(shape) != 2 or shape[0] * shape[1] > _MAX_IDENTITY_ELEMENTS:
        return None
    nodes = Replacement(node)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    nodes.constant(np.eye(*shape, k=attributes.get("k", 0), dtype=dtype), output=node.output[0])
    return nodes.nodes


def _tanh(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite the hyperbolic tangent of a softplus, as in Mish."""
    producer = context.producers.get(node.input[0])
    if producer is None or producer.op_type != "Softplus" or not is_standard(producer):
        return None
    kind = context.types.get(producer.input[0])
    if kind is None:
        return None
    nodes = Replacement(node)
    _add_tanh_of_softplus(nodes, producer.input[0], kind, node.output[0])
    return nodes.nodes


def _mish(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite x · tanh(ln(1 + eˣ)) without the tangent and the logarithm."""
    [x] = node.input
    kind = context.types.get(x)
    if kind is None:
        return None
    nodes = Replacement(node)
    nodes.add("Mul", x, _add_tanh_of_softplus(nodes, x, kind), output=node.output[0])
    return nodes.nodes


def _add_tanh_of_softplus(nodes: Replacement, x: str, kind: int, output: str = "") -> str:
    """Add tanh(ln(1 + eˣ)) = p / (2 - p) with p = s·(2 - s) and s = sigmoid(x).

    This loses no digits and does not overflow.
    """
    two = nodes.constant(np.array(2, helper.tensor_dtype_to_np_dtype(kind)))
    s = nodes.add("Sigmoid", x)
    p = nodes.add("Mul", s, nodes.add("Sub", two, s))
    return nodes.add("Div", p, nodes.add("Sub", two, p), output=output)


_Rewrite = Callable[[NodeProto, _Context], list[NodeProto] | None]

_REWRITES: Final[Mapping[str, _Rewrite]] = {
    "AveragePool": _same_padding,
    "CastLike": _cast_like,
    "Concat": _concat,
    "Conv": _same_padding,
    "ConvInteger": _same_padding,
    "ConvTranspose": _conv_transpose,
    "Dropout": _dropout,
    "EyeLike": _eye_like,
    "LpPool": _same_padding,
    "MaxPool": _same_padding,
    "Mish": _mish,
    "Split": _split,
    "Tanh": _tanh,
    "TopK": _top_k,
}


# ---------------------------------------------------------------- einsum
# Rewrites Einstein sums of two tensors to matrix products, which have optimized kernels.


def convert_einsums(model: ModelProto) -> ModelProto:
    """Replace Einstein sums of two static tensors by transposes, reshapes and a matrix product."""
    if not any(node.op_type == "Einsum" for node in model.graph.node):
        return model
    shapes = known_values(model).shapes
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        product = _find_product(node, shapes)
        nodes += [node] if product is None else _Converter(model, node, *product).convert()
    replace_nodes(model, nodes)
    return model


class _Product(NamedTuple):
    """The roles of the labels in an Einstein sum of two tensors, each in the order of the result.

    Attributes:
        left: The labels of the left tensor.
        right: Those of the right tensor.
        result: Those of the result.
        batch: Labels of both tensors and the result.
        rows: Labels of the left tensor and the result.
        columns: Labels of the right tensor and the result.
        summed: Labels of both tensors alone.
    """

    left: str
    right: str
    result: str
    batch: str
    rows: str
    columns: str
    summed: str

    @classmethod
    def parse(cls, equation: str) -> _Product | None:
        """Return the roles; None if the sum is no matrix product, such as one with a diagonal or an ellipsis."""
        operands, arrow, result = equation.replace(" ", "").partition("->")
        left, _, right = operands.partition(",")
        texts = (left, right, result or "a")
        if not arrow or not all(t.isalpha() and len(set(t)) == len(t) for t in texts):
            return None
        batch = "".join(label for label in result if label in left and label in right)
        rows = "".join(label for label in result if label in left and label not in batch)
        columns = "".join(label for label in result if label in right and label not in batch)
        summed = "".join(label for label in left if label not in result)
        if set(left) != set(batch + rows + summed) or set(right) != set(batch + columns + summed):
            return None
        return cls(
            left=left,
            right=right,
            result=result,
            batch=batch,
            rows=rows,
            columns=columns,
            summed=summed,
        )


def _find_product(
    node: NodeProto, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[_Product, dict[str, int]] | None:
    """Return the roles and the lengths of a node's labels; None for other nodes, sums and unknown shapes."""
    if node.op_type != "Einsum" or not is_standard(node) or len(node.input) != 2:
        return None
    product = _Product.parse(attributes_of(node)["equation"])
    if product is None or not all(name in shapes for name in node.input):
        return None
    sizes: dict[str, int] = {}
    for labels, name in zip((product.left, product.right), node.input, strict=True):
        # ONNX broadcasts an axis of length 1
        if len(labels) != len(shapes[name]) or any(
            sizes.setdefault(label, extent) != extent
            for label, extent in zip(labels, shapes[name], strict=True)
        ):
            return None
    return product, sizes


class _Converter:
    """Makes the nodes for one Einstein sum."""

    def __init__(
        self, model: ModelProto, node: NodeProto, product: _Product, sizes: Mapping[str, int]
    ) -> None:
        self._model = model
        self._node = node
        self._product = product
        self._sizes = sizes
        self._nodes: list[NodeProto] = []

    def convert(self) -> list[NodeProto]:
        """Return the nodes; the last one has the name and the output of the sum."""
        product = self._product
        groups = (product.rows, product.summed)
        left = self._arrange(self._node.input[0], product.left, groups)
        groups = (product.summed, product.columns)
        right = self._arrange(self._node.input[1], product.right, groups)
        value = self._add("MatMul", [left, right])
        order = product.batch + product.rows + product.columns
        if len(product.rows) != 1 or len(product.columns) != 1:
            value = self._reshape(value, [self._sizes[label] for label in order])
        self._transpose(value, order, product.result)
        self._nodes[-1].name = self._node.name
        self._nodes[-1].output[0] = self._node.output[0]
        return self._nodes

    def _arrange(self, value: str, labels: str, groups: tuple[str, str]) -> str:
        """Add what gives a tensor the axes of the batch, and one axis for each of two groups of labels."""
        batch = self._product.batch
        value = self._transpose(value, labels, batch + "".join(groups))
        if all(len(group) == 1 for group in groups):
            return value
        lengths = [math.prod(self._sizes[label] for label in group) for group in groups]
        return self._reshape(value, [*(self._sizes[label] for label in batch), *lengths])

    def _transpose(self, value: str, labels: str, order: str) -> str:
        if labels == order:
            return value
        axes = [labels.index(label) for label in order]
        return self._add("Transpose", [value], perm=axes)

    def _reshape(self, value: str, shape: Sequence[int]) -> str:
        name = f"{self._name()}/shape"
        array = np.array(shape, np.int64)
        self._model.graph.initializer.append(numpy_helper.from_array(array, name))
        return self._add("Reshape", [value, name])

    def _add(self, operator: str, inputs: Sequence[str], **attributes: Sequence[int]) -> str:
        node = helper.make_node(operator, inputs, [self._name()], **attributes)
        node.name = node.output[0]
        self._nodes.append(node)
        return str(node.output[0])

    def _name(self) -> str:
        return f"{self._node.output[0]}/einsum/{len(self._nodes)}"


# ---------------------------------------------------------------- qoperators
# Rewrites operators of ONNX Runtime's QOperator format as the same operators between
# DequantizeLinear and QuantizeLinear.


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


class _QuantizedRewrite(NamedTuple):
    """The function that rewrites an operator, and the position of the scale of its result."""

    rewrite: Callable[[_Quantized], list[NodeProto] | None]
    scale: int


_QUANTIZED_REWRITES: Final[Mapping[str, _QuantizedRewrite]] = {
    "QGemm": _QuantizedRewrite(_gemm, 7),
    "QLinearAdd": _QuantizedRewrite(_binary("Add"), 6),
    "QLinearAveragePool": _QuantizedRewrite(_unary("AveragePool", _POOL_ATTRIBUTES), 3),
    "QLinearConcat": _QuantizedRewrite(_concatenation, 0),
    "QLinearConv": _QuantizedRewrite(_convolution, 6),
    "QLinearGlobalAveragePool": _QuantizedRewrite(_unary("GlobalAveragePool"), 3),
    "QLinearLeakyRelu": _QuantizedRewrite(_unary("LeakyRelu", ["alpha"]), 3),
    "QLinearMatMul": _QuantizedRewrite(_matrix_product, 6),
    "QLinearMul": _QuantizedRewrite(_binary("Mul"), 6),
    "QLinearSigmoid": _QuantizedRewrite(_unary("Sigmoid"), 3),
    "QLinearSoftmax": _QuantizedRewrite(_softmax, 3),
}
"""Operators of ONNX, and of the domain com.microsoft."""


def rewrite_qoperator(node: NodeProto, known: KnownValues) -> list[NodeProto] | None:
    """Return the nodes that replace a QOperator; None where it is none, or cannot be rewritten.

    Args:
        node: The node.
        known: Known values and shapes.
    """
    rewrite = _QUANTIZED_REWRITES.get(node.op_type)
    if rewrite is None:
        return None
    quantized = _Quantized(node, known)
    names = quantized.parameters(rewrite.scale)
    if "" in names or any(name not in known.shapes for name in names):
        return None
    return rewrite.rewrite(quantized)
