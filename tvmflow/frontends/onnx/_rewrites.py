"""Rewrites nodes that TVM's importer lacks or miscomputes into other operators of ONNX."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from tvmflow.core.formatting import excerpt
from tvmflow.frontends._open_sizes import SizeRanges
from tvmflow.frontends.onnx._grouped_weights import DOMAIN as GROUPED_DOMAIN
from tvmflow.frontends.onnx._header import NARROW_TYPES, name_of
from tvmflow.frontends.onnx._loops import MAX_UNROLLED_NODES
from tvmflow.frontends.onnx.graph import (
    OWN_DOMAIN,
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
    replace_nodes(model.graph, nodes)
    return model


def _rewrite(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    if is_standard(node) or node.domain == "com.microsoft":
        if node.op_type in QOPERATORS:
            return _rewrite_qoperator(node, context.known)
        if node.op_type in FUSED_OPERATORS:
            return _rewrite_fused(node, context)
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
    is_lower = mode != "SAME_UPPER"
    pads = SizeRanges(()).same_padding(shape[2:], kernel, strides, gaps, is_lower=is_lower)
    new = {**attributes, "auto_pad": "NOTSET", "pads": pads}
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
    shape = context.known.shapes.get(node.input[0])
    if len(node.output) < 2 or shape is None or _trains(node, context.known):
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
        nodes += [node] if product is None else _Converter(node, *product).convert()
    replace_nodes(model.graph, nodes)
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
        return cls(left, right, result, batch, rows, columns, summed)


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
    def __init__(self, node: NodeProto, product: _Product, sizes: Mapping[str, int]) -> None:
        self._node, self._product, self._sizes = node, product, sizes
        self._new = Replacement(node, "/einsum")

    def convert(self) -> list[NodeProto]:
        """Return the nodes; the last one has the name and the output of the sum."""
        product = self._product
        left, right = (
            self._arrange(name, labels, groups)
            for name, labels, groups in (
                (self._node.input[0], product.left, (product.rows, product.summed)),
                (self._node.input[1], product.right, (product.summed, product.columns)),
            )
        )
        value = self._new.add("MatMul", left, right)
        order = product.batch + product.rows + product.columns
        if len(product.rows) != 1 or len(product.columns) != 1:
            value = self._reshape(value, [self._sizes[label] for label in order])
        self._transpose(value, order, product.result)
        last = self._new.nodes[-1]
        last.name, last.output[0] = self._node.name, self._node.output[0]
        return self._new.nodes

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
        return self._new.add("Transpose", value, perm=[labels.index(label) for label in order])

    def _reshape(self, value: str, shape: Sequence[int]) -> str:
        return self._new.add("Reshape", value, self._new.constant(np.array(shape, np.int64)))


# ---------------------------------------------------------------- qoperators
# Rewrites operators of ONNX Runtime's QOperator format as the same operators between
# DequantizeLinear and QuantizeLinear.


# From this opset on, Softmax normalizes along one axis.
_SOFTMAX_OPSET: Final = 13
_POOL_ATTRIBUTES: Final = "auto_pad ceil_mode count_include_pad kernel_shape pads strides".split()


class _Operands:
    """A node to rewrite, with its operands, and the nodes that replace it."""

    def __init__(self, node: NodeProto, known: KnownValues) -> None:
        self.attributes = attributes_of(node)
        self.new = Replacement(node)
        self._node = node
        self._known = known

    def name(self, position: int) -> str:
        return self._node.input[position] if position < len(self._node.input) else ""

    def shape(self, position: int) -> tuple[int, ...] | None:
        return self._known.shapes.get(self.name(position))


class _Quantized(_Operands):
    def parameters(self, scale: int) -> list[str]:
        """Return the names of all scales and zero points, those of the result at `scale`."""
        last = len(self._node.input) if scale == 0 else scale
        places = [
            n for start in range(2 if scale == 0 else 0, last, 3) for n in (start + 1, start + 2)
        ]
        return [self.name(position) for position in (scale, scale + 1, *places)]

    def is_vector(self, position: int) -> bool:
        return max(self._known.shapes[self.name(position)], default=1) > 1

    def real(self, position: int, axis: int = 1) -> str:
        """Return the numbers that an operand stands for, which its scale and zero point follow.

        Where the scale has several elements, `axis` is that of the channels.
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

    def quantize(self, value: str, scale: int) -> list[NodeProto]:
        """Quantize the result, whose scale is the operand `scale`, and return all nodes."""
        operands = (value, self._parameter(scale), self._parameter(scale + 1))
        self.new.add("QuantizeLinear", *operands, output=self._node.output[0])
        return self.new.nodes

    def _parameter(self, position: int) -> str:
        """Return a scale or a zero point; one of a single element is a scalar."""
        name = self.name(position)
        if self._known.shapes[name] == () or self.is_vector(position):
            return name
        return self.new.add("Reshape", name, self.new.constant(np.zeros(0, np.int64)))


def _quantized_convolution(node: _Quantized) -> str:
    operands = [node.real(0), node.real(3, axis=0)]
    if node.name(8):
        operands.append(node.bias(8, (1, 4)))
    return node.new.add("Conv", *operands, **node.attributes)


def _quantized_product(node: _Quantized) -> str | None:
    rank = len(node.shape(3) or ())
    if node.is_vector(1) or not rank:
        return None
    return node.new.add("MatMul", node.real(0), node.real(3, axis=rank - 1))


def _quantized_gemm(node: _Quantized) -> str | None:
    if node.is_vector(1):
        return None
    axis = 0 if node.attributes.get("transB", 0) else 1
    operands = [node.real(0), node.real(3, axis=axis)]
    if node.name(6):
        operands.append(node.bias(6, (1, 4), node.attributes.get("alpha", 1.0)))
    return node.new.add("Gemm", *operands, **node.attributes)


def _binary(operator: str) -> Callable[[_Quantized], str]:
    return lambda node: node.new.add(operator, node.real(0), node.real(3))


def _unary(operator: str, attributes: Sequence[str] = ()) -> Callable[[_Quantized], str | None]:
    def rewrite(node: _Quantized) -> str | None:
        if node.attributes.get("channels_last", 0):
            return None
        kept = {name: node.attributes[name] for name in attributes if name in node.attributes}
        return node.new.add(operator, node.real(0), **kept)

    return rewrite


def _quantized_softmax(node: _Quantized) -> str | None:
    shape, axis = node.shape(0), node.attributes.get("axis", -1)
    is_last = axis == -1 or (shape is not None and axis == len(shape) - 1)
    if node.attributes.get("opset", 1) < _SOFTMAX_OPSET and not is_last:
        return None
    return node.new.add("Softmax", node.real(0), axis=axis)


def _quantized_concat(node: _Quantized) -> str:
    count = 2
    values = []
    while node.name(count):
        values.append(node.real(count))
        count += 3
    return node.new.add("Concat", *values, axis=node.attributes["axis"])


# The position of the scale of the result, and the function that returns the result as real numbers.
_QUANTIZED_REWRITES: Final[Mapping[str, tuple[int, Callable[[_Quantized], str | None]]]] = {
    "QGemm": (7, _quantized_gemm),
    "QLinearAdd": (6, _binary("Add")),
    "QLinearAveragePool": (3, _unary("AveragePool", _POOL_ATTRIBUTES)),
    "QLinearConcat": (0, _quantized_concat),
    "QLinearConv": (6, _quantized_convolution),
    "QLinearGlobalAveragePool": (3, _unary("GlobalAveragePool")),
    "QLinearLeakyRelu": (3, _unary("LeakyRelu", ["alpha"])),
    "QLinearMatMul": (6, _quantized_product),
    "QLinearMul": (6, _binary("Mul")),
    "QLinearSigmoid": (3, _unary("Sigmoid")),
    "QLinearSoftmax": (3, _quantized_softmax),
}

QOPERATORS: Final = frozenset(_QUANTIZED_REWRITES)
"""Operators of ONNX, and of the domain com.microsoft, that TVM lacks; what cannot be rewritten is refused."""


def _rewrite_qoperator(node: NodeProto, known: KnownValues) -> list[NodeProto] | None:
    """Return the nodes that replace a QOperator; None where it cannot be rewritten."""
    scale, rewrite = _QUANTIZED_REWRITES[node.op_type]
    quantized = _Quantized(node, known)
    names = quantized.parameters(scale)
    if "" in names or any(name not in known.shapes for name in names):
        return None
    result = rewrite(quantized)
    return None if result is None else quantized.quantize(result, scale)


# ---------------------------------------------------------------- fused operators


# Before, constants of the type of an operand wait until that is known.
_CAST_LIKE_OPSET: Final = 15
# α·f(β·x), which ONNX's first versions had as operators.
_SCALED_ACTIVATIONS: Final = {"ParametricSoftplus": "Softplus", "ScaledTanh": "Tanh"}


class _Fused(_Operands):
    """A node of a fused operator, and the nodes that replace it.

    Attributes:
        opset: The version of the model's operator set.
        element_type: The type of the first operand that has a known one, 0 if none has. Operands are
            of one type in those operators that ask for it.
    """

    def __init__(self, node: NodeProto, context: _Context) -> None:
        super().__init__(node, context.known)
        self.opset = context.opset
        types = self._types = context.types
        self.element_type = next((types[name] for name in node.input if name in types), 0)

    def rank(self, position: int) -> int | None:
        shape = self.shape(position)
        return None if shape is None else len(shape)

    def type_of(self, position: int) -> int:
        return self._types.get(self.name(position), 0)

    def result(self, position: int = 0) -> str:
        return self._node.output[position] if position < len(self._node.output) else ""

    def scaled(self, value: str, factor: float) -> str:
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
        if self.element_type:
            dtype = helper.tensor_dtype_to_np_dtype(self.element_type)
            return self.new.constant(np.asarray(value, dtype))
        return self.new.add("CastLike", self.new.constant(np.float32(value)), self.name(0))

    def activated(self, value: str, parameters: Mapping[str, Any]) -> None:
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


def _fused_gemm(node: _Fused) -> list[NodeProto]:
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


def _fused_convolution(node: _Fused) -> list[NodeProto]:
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
    "FusedConv": _fused_convolution,
    "FusedGemm": _fused_gemm,
    "FusedMatMul": _matmul,
    "MatMulIntegerToFloat": _matmul_to_float,
    "QuickGelu": _quick_gelu,
    "SimplifiedLayerNormalization": _rms_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "TransposeMatMul": _matmul,
}
"""Operators of the domain com.microsoft, and `SimplifiedLayerNormalization` of no domain, and how they are rewritten."""


def _rewrite_fused(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Return the nodes that replace a fused operator.

    None where it cannot be rewritten, or not before its shapes are known.
    """
    fused = _Fused(node, context)
    if not fused.element_type and context.opset < _CAST_LIKE_OPSET:
        return None
    return FUSED_OPERATORS[node.op_type](fused)


# ---------------------------------------------------------------- operators that cannot be imported


_PARAMETER_OPERANDS: Final[Mapping[str, tuple[int, ...]]] = {
    "Clip": (1, 2),
    "DFT": (1, 2),
    "DequantizeLinear": (1, 2),
    "ConvInteger": (3,),
    "MatMulInteger": (3,),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1, 2),
    "Pad": (2,),
    "Pow": (1,),
    "QuantizeLinear": (1, 2),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "STFT": (1, 2, 3),
    "ThresholdedRelu": (1,),
    "Upsample": (1,),
}


def parameter_operands(node: NodeProto) -> Iterator[str]:
    """Give the operands that parametrize the operator, and are no weights though they may be floats."""
    for position in _PARAMETER_OPERANDS.get(node.op_type, ()):
        if position < len(node.input):
            yield node.input[position]


def _has_output(node: NodeProto, position: int) -> bool:
    return position < len(node.output) and bool(node.output[position])


def _find_narrow_cast(node: NodeProto, _: KnownValues) -> str:
    """TVM neither rounds nor saturates as ONNX does in casts to float8 or to less than a byte."""
    to = attributes_of(node).get("to", 0)
    return f"to {name_of(to)}" if to in NARROW_TYPES else ""


def _find_training(node: NodeProto, known: KnownValues) -> str:
    if node.op_type == "Dropout":
        is_training = _trains(node, known)
    else:
        is_training = attributes_of(node).get("training_mode", 0) or _has_output(node, 1)
    return "in training mode" if is_training else ""


def _trains(node: NodeProto, known: KnownValues) -> bool:
    """Return whether a Dropout may drop elements."""
    switch = node.input[2] if len(node.input) > 2 else ""
    return bool(switch) and not (switch in known.constants and not known.constants[switch].any())


def _find_small_indices(node: NodeProto, known: KnownValues) -> str:
    """TVM counts through the axes before and behind as if data and indices had the same sizes there."""
    data, indices = (known.shapes.get(name, ()) for name in node.input[:2])
    axis = attributes_of(node).get("axis", 0) % max(len(data), 1)
    counted = (slice(1, axis), slice(axis + 2, None))
    differs = any(data[part] != indices[part] for part in counted)
    return "with indices of fewer rows than the data" if differs else ""


def _find_norm_of_all(node: NodeProto, known: KnownValues) -> str:
    axis, shape = attributes_of(node).get("axis", -1), known.shapes.get(node.input[0], ())
    return "over all axes" if axis in (0, -len(shape)) else ""


def _find_zero_count(node: NodeProto, known: KnownValues) -> str:
    """TVM takes 0 for all."""
    count = known.constants.get(node.input[1]) if len(node.input) > 1 else None
    return "with K = 0" if count is not None and not count.any() else ""


def _case(text: str, applies: Callable[[NodeProto], object]) -> _Finder:
    """Return a function that returns a text for the nodes to which it applies."""
    return lambda node, _: text if applies(node) else ""


_Finder = Callable[[NodeProto, KnownValues], str]

MISCOMPUTED: Final[Mapping[str, _Finder]] = {
    "BatchNormalization": _find_training,
    "Cast": _find_narrow_cast,
    "ConvTranspose": _case("with output_shape", lambda node: "output_shape" in attributes_of(node)),
    "Dropout": lambda node, known: (
        "with its mask" if _has_output(node, 1) else _find_training(node, known)
    ),
    "LayerNormalization": _case(
        "with its mean and deviation", lambda node: _has_output(node, 1) or _has_output(node, 2)
    ),
    "RMSNormalization": _find_norm_of_all,
    "ScatterElements": _find_small_indices,
    "SequenceErase": _case("at a position", lambda node: len(node.input) > 1 and node.input[1]),
    "SequenceInsert": _case("at a position", lambda node: len(node.input) > 2 and node.input[2]),
    "SpaceToDepth": _case(
        "with mode CRD", lambda node: attributes_of(node).get("mode", "DCR") != "DCR"
    ),
    "TopK": _find_zero_count,
}
"""Operators that TVM 0.27's importer can miscompute; each function returns in which case, or an empty string."""

_UNROLLED: Final[Mapping[str, str]] = {
    "Loop": "a number of iterations that is constant or has a constant limit, at most "
    f"{MAX_UNROLLED_NODES:,} nodes in all, and no stacked outputs where a condition is computed",
    "Scan": f"opset 9, a known length, and at most {MAX_UNROLLED_NODES:,} nodes in all",
}
"""What it takes for a loop to have been replaced by its iterations."""

# The converters of these names are for operators in the domain com.microsoft, which are others.
_MICROSOFT_ONLY: Final = frozenset({"Attention", "RotaryEmbedding"})


@functools.cache
def supported_operators() -> frozenset[str]:
    """Return the operators that TVM's importer or tvmflow's has a converter for."""
    from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

    # it imports TVM
    from tvmflow.frontends.onnx._converters import CONVERTERS

    return frozenset(_get_convert_map()) | {"If", "Constant"} | set(CONVERTERS)


def unsupported_reason(node: NodeProto, known: KnownValues) -> str:
    """Return why TVM's importer cannot import this node correctly, or an empty string."""
    if node.domain in (OWN_DOMAIN, GROUPED_DOMAIN):
        return ""
    if is_standard(node) and node.op_type in _UNROLLED:
        return f"{node.op_type} is unrolled, which needs {_UNROLLED[node.op_type]}"
    name = excerpt(f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type))
    has_converter = node.op_type in supported_operators() and (
        is_standard(node) or node.domain == "com.microsoft"
    )
    if not has_converter or (is_standard(node) and node.op_type in _MICROSOFT_ONLY):
        return f"TVM has no operator {name}"
    case = MISCOMPUTED[node.op_type](node, known) if node.op_type in MISCOMPUTED else ""
    return f"TVM miscomputes {name} {case}" if case else ""
