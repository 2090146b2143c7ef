"""Rewrites nodes that TVM's importer lacks or miscomputes into other operators of ONNX."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from tvmflow.core.formatting import excerpt
from tvmflow.frontends._dynamic_shapes import SizeRanges
from tvmflow.frontends.onnx._block_quantized import DOMAIN as BLOCK_QUANTIZED_DOMAIN
from tvmflow.frontends.onnx._header import NARROW_TYPES, name_of
from tvmflow.frontends.onnx._inlining import MAX_UNROLLED_NODES
from tvmflow.frontends.onnx.graph import (
    CUSTOM_DOMAIN,
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


class _Rewriting(Replacement):
    """A node to rewrite, known facts of its operands, and the nodes that replace it.

    Attributes:
        element_type: The type of the first operand that has a known one, 0 if none has. Operands are
            of one type in those operators that ask for it.
    """

    def __init__(self, node: NodeProto, context: _Context) -> None:
        super().__init__(node)
        self.node, self.context, self.attributes = node, context, attributes_of(node)
        types = context.types
        self.element_type = next((types[name] for name in node.input if name in types), 0)

    def name(self, position: int) -> str:
        return self.node.input[position] if position < len(self.node.input) else ""

    def names(self, count: int) -> list[str]:
        """Return the names of those of the first operands that are there."""
        return [name for name in self.node.input[:count] if name]

    def result(self, position: int = 0) -> str:
        return self.node.output[position] if position < len(self.node.output) else ""

    def shape(self, position: int) -> tuple[int, ...] | None:
        return self.context.known.shapes.get(self.name(position))

    def type_of(self, position: int) -> int:
        return self.context.types.get(self.name(position), 0)

    def pick(self, *names: str) -> dict[str, Any]:
        """Return those of some attributes that the node has."""
        return {name: self.attributes[name] for name in names if name in self.attributes}

    def omit(self, *names: str) -> dict[str, Any]:
        """Return all attributes but some."""
        return {name: value for name, value in self.attributes.items() if name not in names}

    def replace(self, operator: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add one node with the name and the results of this one."""
        new = helper.make_node(operator, inputs, self.node.output, self.node.name, **attributes)
        self.nodes.append(new)
        return self.result()

    def cast(self, value: str, element_type: int, to: int) -> str:
        """Return a value of one element type, or of an unknown one, as another one."""
        return value if element_type == to else self.add("Cast", value, to=to)

    def number(self, value: float) -> str:
        if self.element_type:
            return self.constant(np.asarray(value, _numpy_dtype(self.element_type)))
        return self.add("CastLike", self.constant(np.float32(value)), self.name(0))

    def scaled(self, value: str, factor: float) -> str:
        return value if factor == 1 else self.add("Mul", value, self.number(factor))

    def finish(self, result: str) -> list[NodeProto]:
        """Return the nodes, including the one of the result."""
        made = next(node for node in self.nodes if result in node.output)
        if result != self.result():
            made.output[0] = self.result()
        return self.nodes


_numpy_dtype = helper.tensor_dtype_to_np_dtype
_Rewrite = Callable[[_Rewriting], str | None]
"""Adds the nodes, and returns the name of the first result; None if the node stays."""


def rewrite_nodes(model: ModelProto) -> ModelProto:
    """Replace the nodes of the main graph that have a rewrite, as far as shapes and types are known."""
    # Einsum is the same in all opsets.
    names = _REWRITES.keys() if opset_of(model) >= _MIN_OPSET else {"Einsum"}
    if names.isdisjoint(node.op_type for node in model.graph.node):
        return model
    producers = {name: node for node in model.graph.node for name in node.output}
    context = _Context(opset_of(model), known_values(model), element_types(model), producers)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        nodes += _rewrite(node, context) if node.op_type in names else [node]
    replace_nodes(model.graph, nodes)
    return model


def _rewrite(node: NodeProto, context: _Context) -> list[NodeProto]:
    is_microsoft = node.domain == "com.microsoft" and node.op_type in QOPERATORS | FUSED_OPERATORS
    if not (is_standard(node) or is_microsoft):
        return [node]
    rewriting = _Rewriting(node, context)
    # constants of the type of an operand wait until that is known
    waits = context.opset < _CAST_LIKE_OPSET and not rewriting.element_type
    if node.op_type in FUSED_OPERATORS and waits:
        return [node]
    result = _REWRITES[node.op_type](rewriting)
    return [node] if result is None else rewriting.finish(result)


def _cast_like(node: _Rewriting) -> str | None:
    """Rewrite a cast to the type of another value, which constants then need not wait for."""
    to = node.type_of(1)
    return node.add("Cast", node.name(0), to=to) if to else None


def _same_padding(node: _Rewriting) -> str | None:
    """Rewrite padding for ceil(size / stride) windows as constants: TVM has too little for SAME_LOWER."""
    attributes, shape = node.attributes, node.shape(0)
    mode = attributes.get("auto_pad", "NOTSET")
    kernel = attributes.get("kernel_shape") or (node.shape(1) or ())[2:]
    if not mode.startswith("SAME") or shape is None or not kernel:
        return None
    ones = [1] * len(kernel)
    strides, gaps = attributes.get("strides", ones), attributes.get("dilations", ones)
    is_lower = mode != "SAME_UPPER"
    pads = SizeRanges(()).same_padding(shape[2:], kernel, strides, gaps, is_lower=is_lower)
    new = {**attributes, "auto_pad": "NOTSET", "pads": pads}
    return node.replace(node.node.op_type, node.node.input, **new)


def _conv_transpose(node: _Rewriting) -> str | None:
    """Rewrite the size of the result as padding."""
    attributes, shape, weights = node.attributes, node.shape(0), node.shape(1)
    if "output_shape" not in attributes or shape is None or weights is None:
        return None
    rank = len(shape) - 2
    ones = [1] * rank
    sizes = attributes["output_shape"][-rank:]
    strides, gaps = attributes.get("strides", ones), attributes.get("dilations", ones)
    extra = list(attributes.get("output_padding", [0] * rank))
    before, after = [], []
    for axis, (size, edge) in enumerate(zip(shape[2:], weights[2:], strict=True)):
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
    kept = node.omit("output_shape", "auto_pad", "pads", "output_padding")
    new = {**kept, "pads": before + after, "output_padding": extra}
    return node.add("ConvTranspose", *node.node.input, **new)


def _dropout(node: _Rewriting) -> str | None:
    """Rewrite Dropout with its mask, which keeps all elements in inference."""
    shape = node.shape(0)
    if len(node.node.output) < 2 or shape is None or _trains(node.node, node.context.known):
        return None
    kept, size = node.constant(True), node.constant(np.array(shape, np.int64))
    node.add("Expand", kept, size, output=node.result(1))
    return node.add("Identity", node.name(0))


def _concat(node: _Rewriting) -> str | None:
    """Rewrite a concatenation without the operands that have no elements, such as an empty cache of keys."""
    kept = [name for name in node.node.input if 0 not in node.context.known.shapes.get(name, ())]
    if not 0 < len(kept) < len(node.node.input):
        return None
    return node.replace("Concat", kept, **node.attributes)


def _split(node: _Rewriting) -> str | None:
    """Rewrite a split that has one part, or parts without elements, which become constants."""
    parts = node.node.output
    if len(parts) == 1:
        return node.replace("Identity", node.names(1))
    kind, known = node.type_of(0), node.context.known
    sizes = known.constants.get(node.name(1))
    if not kind or sizes is None or sizes.all() or not sizes.any():
        return None
    for name in (name for name, size in zip(parts, sizes, strict=True) if not size):
        if name in known.shapes:
            node.constant(np.zeros(known.shapes[name], _numpy_dtype(kind)), output=name)
            continue
        zero = node.constant(np.zeros(1, np.int64))
        axis = node.constant(np.array([node.attributes.get("axis", 0)], np.int64))
        node.add("Slice", node.name(0), zero, zero, axis, output=name)
    left = [name for name, size in zip(parts, sizes, strict=True) if size]
    others = node.constant(sizes[sizes > 0].astype(np.int64))
    operands, attributes = [node.name(0), others], node.omit("num_outputs")
    node.nodes.append(helper.make_node("Split", operands, left, **attributes))
    return node.result()


def _top_k(node: _Rewriting) -> str | None:
    """Rewrite a TopK that may return its results in any order as one that sorts them."""
    if node.attributes.get("sorted", 1):
        return None
    return node.replace("TopK", node.node.input, **node.omit("sorted"))


def _eye_like(node: _Rewriting) -> str | None:
    shape, kind = node.shape(0), node.attributes.get("dtype", node.type_of(0) or TensorProto.FLOAT)
    if shape is None or len(shape) != 2 or math.prod(shape) > _MAX_IDENTITY_ELEMENTS:
        return None
    return node.constant(np.eye(*shape, k=node.attributes.get("k", 0), dtype=_numpy_dtype(kind)))


def _tanh(node: _Rewriting) -> str | None:
    """Rewrite the hyperbolic tangent of a softplus, as in Mish."""
    producer = node.context.producers.get(node.name(0))
    if producer is None or producer.op_type != "Softplus" or not is_standard(producer):
        return None
    kind = node.context.types.get(producer.input[0])
    return _add_tanh_of_softplus(node, producer.input[0], kind) if kind else None


def _log(node: _Rewriting) -> str | None:
    """Rewrite ln(sigmoid(x)) as -softplus(-x), which is finite where the sigmoid is 0."""
    producer = node.context.producers.get(node.name(0))
    if producer is None or producer.op_type != "Sigmoid" or not is_standard(producer):
        return None
    return node.add("Neg", node.add("Softplus", node.add("Neg", producer.input[0])))


def _mish(node: _Rewriting) -> str | None:
    """Rewrite x · tanh(ln(1 + eˣ)) without the tangent and the logarithm."""
    [x], kind = node.node.input, node.type_of(0)
    return node.add("Mul", x, _add_tanh_of_softplus(node, x, kind)) if kind else None


def _add_tanh_of_softplus(node: _Rewriting, x: str, kind: int) -> str:
    """Add tanh(ln(1 + eˣ)) = p / (2 - p) with p = s·(2 - s) and s = sigmoid(x).

    This loses no digits and does not overflow.
    """
    two = node.constant(np.array(2, _numpy_dtype(kind)))
    s = node.add("Sigmoid", x)
    p = node.add("Mul", s, node.add("Sub", two, s))
    return node.add("Div", p, node.add("Sub", two, p))


# ---------------------------------------------------------------- einsum
# Rewrites Einstein sums of two tensors to matrix products, which have optimized kernels.


class _Product(NamedTuple):
    """The roles of the labels in an Einstein sum of two tensors, each in the order of the result.

    Attributes:
        left: The labels of the left tensor.
        right: The labels of the right tensor.
        result: The labels of the result.
        batch: Labels of both tensors and the result.
        rows: Labels of the left tensor and the result.
        columns: Labels of the right tensor and the result.
        summed: Labels of both tensors that the result lacks.
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
        """Return the roles; None if the sum is not a matrix product, as with a diagonal or an ellipsis."""
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


def _einsum(node: _Rewriting) -> str | None:
    """Rewrite an Einstein sum of two static tensors by transposes, reshapes and a matrix product."""
    shapes = [node.shape(position) for position in range(len(node.node.input))]
    product = _Product.parse(node.attributes["equation"]) if len(shapes) == 2 else None
    if product is None:
        return None
    sizes: dict[str, int] = {}
    for labels, shape in zip((product.left, product.right), shapes, strict=True):
        # ONNX broadcasts an axis of length 1
        if shape is None or len(labels) != len(shape):
            return None
        if any(sizes.setdefault(label, n) != n for label, n in zip(labels, shape, strict=True)):
            return None

    def transpose(value: str, labels: str, order: str) -> str:
        if labels == order:
            return value
        return node.add("Transpose", value, perm=[labels.index(label) for label in order])

    def reshape(value: str, *groups: str) -> str:
        """Reshape a tensor to one axis for each group of labels."""
        shape = [math.prod(sizes[label] for label in group) for group in groups]
        return node.add("Reshape", value, node.constant(np.array(shape, np.int64)))

    def arrange(value: str, labels: str, *groups: str) -> str:
        """Transpose and reshape a tensor to batch axes and one axis for each of two groups of labels."""
        value = transpose(value, labels, product.batch + "".join(groups))
        is_arranged = all(len(group) == 1 for group in groups)
        return value if is_arranged else reshape(value, *product.batch, *groups)

    left = arrange(node.name(0), product.left, product.rows, product.summed)
    right = arrange(node.name(1), product.right, product.summed, product.columns)
    value, order = node.add("MatMul", left, right), product.batch + product.rows + product.columns
    if len(product.rows) != 1 or len(product.columns) != 1:
        value = reshape(value, *order)
    value = transpose(value, order, product.result)
    node.nodes[-1].name = node.node.name
    return value


# ---------------------------------------------------------------- qoperators
# Rewrites operators of ONNX Runtime's QOperator format as the same operators between
# DequantizeLinear and QuantizeLinear.


# From this opset on, Softmax normalizes along one axis.
_SOFTMAX_OPSET: Final = 13
_POOL_ATTRIBUTES: Final = "auto_pad ceil_mode count_include_pad kernel_shape pads strides".split()


def _list_parameters(node: _Rewriting, scale: int) -> list[str]:
    """Return the names of all scales and zero points, those of the result at `scale`."""
    starts = range(2, len(node.node.input), 3) if scale == 0 else range(0, scale, 3)
    places = [place for start in starts for place in (start + 1, start + 2)]
    return [node.name(position) for position in (scale, scale + 1, *places)]


def _is_vector(node: _Rewriting, position: int) -> bool:
    return max(node.shape(position) or (), default=1) > 1


def _parameter(node: _Rewriting, position: int) -> str:
    """Return a scale or a zero point; one of a single element is a scalar."""
    name = node.name(position)
    if node.shape(position) == () or _is_vector(node, position):
        return name
    return node.add("Reshape", name, node.constant(np.zeros(0, np.int64)))


def _real(node: _Rewriting, position: int, axis: int = 1) -> str:
    """Return the values that an operand stands for, which its scale and zero point follow.

    Where the scale has several elements, `axis` is that of the channels.
    """
    parameters = (_parameter(node, position + 1), _parameter(node, position + 2))
    return node.add("DequantizeLinear", node.name(position), *parameters, axis=axis)


def _bias(node: _Rewriting, position: int, factor: float = 1.0) -> list[str]:
    """Return the bias, if there is one; its scale is the product of those of data and weights."""
    if not node.name(position):
        return []
    scale = node.add("Mul", *(_parameter(node, place) for place in (1, 4)))
    if factor != 1.0:
        scale = node.add("Mul", scale, node.constant(np.float32(factor)))
    return [node.add("Mul", node.add("Cast", node.name(position), to=1), scale)]


def _quantized_convolution(node: _Rewriting) -> str:
    operands = [_real(node, 0), _real(node, 3, axis=0), *_bias(node, 8)]
    return node.add("Conv", *operands, **node.attributes)


def _quantized_product(node: _Rewriting) -> str | None:
    rank = len(node.shape(3) or ())
    if _is_vector(node, 1) or not rank:
        return None
    return node.add("MatMul", _real(node, 0), _real(node, 3, axis=rank - 1))


def _quantized_gemm(node: _Rewriting) -> str | None:
    if _is_vector(node, 1):
        return None
    axis = 0 if node.attributes.get("transB", 0) else 1
    factor = node.attributes.get("alpha", 1.0)
    operands = [_real(node, 0), _real(node, 3, axis=axis), *_bias(node, 6, factor)]
    return node.add("Gemm", *operands, **node.attributes)


def _binary(operator: str) -> _Rewrite:
    return lambda node: node.add(operator, _real(node, 0), _real(node, 3))


def _unary(operator: str, *attributes: str) -> _Rewrite:
    def rewrite(node: _Rewriting) -> str | None:
        if node.attributes.get("channels_last", 0):
            return None
        return node.add(operator, _real(node, 0), **node.pick(*attributes))

    return rewrite


def _quantized_softmax(node: _Rewriting) -> str | None:
    shape, axis = node.shape(0), node.attributes.get("axis", -1)
    is_last = axis == -1 or (shape is not None and axis == len(shape) - 1)
    if node.attributes.get("opset", 1) < _SOFTMAX_OPSET and not is_last:
        return None
    return node.add("Softmax", _real(node, 0), axis=axis)


def _quantized_concat(node: _Rewriting) -> str:
    places = itertools.takewhile(node.name, itertools.count(2, 3))
    values = [_real(node, place) for place in places]
    return node.add("Concat", *values, axis=node.attributes["axis"])


# The position of the scale of the result, and the function that returns the result as real values.
_QUANTIZED_REWRITES: Final[Mapping[str, tuple[int, _Rewrite]]] = {
    "QGemm": (7, _quantized_gemm),
    "QLinearAdd": (6, _binary("Add")),
    "QLinearAveragePool": (3, _unary("AveragePool", *_POOL_ATTRIBUTES)),
    "QLinearConcat": (0, _quantized_concat),
    "QLinearConv": (6, _quantized_convolution),
    "QLinearGlobalAveragePool": (3, _unary("GlobalAveragePool")),
    "QLinearLeakyRelu": (3, _unary("LeakyRelu", "alpha")),
    "QLinearMatMul": (6, _quantized_product),
    "QLinearMul": (6, _binary("Mul")),
    "QLinearSigmoid": (3, _unary("Sigmoid")),
    "QLinearSoftmax": (3, _quantized_softmax),
}

QOPERATORS: Final = _QUANTIZED_REWRITES.keys()
"""Operators of ONNX, and of the domain com.microsoft, that TVM lacks; others are refused."""


def _quantized(node: _Rewriting) -> str | None:
    """Rewrite a QOperator."""
    scale, rewrite = _QUANTIZED_REWRITES[node.node.op_type]
    names = _list_parameters(node, scale)
    if "" in names or any(name not in node.context.known.shapes for name in names):
        return None
    result = rewrite(node)
    if result is None:
        return None
    return node.add("QuantizeLinear", result, _parameter(node, scale), _parameter(node, scale + 1))


# ---------------------------------------------------------------- fused operators


_CAST_LIKE_OPSET: Final = 15
# α·f(β·x), which ONNX's first versions had as operators.
_SCALED_ACTIVATIONS: Final = {"ParametricSoftplus": "Softplus", "ScaledTanh": "Tanh"}


def _activate(node: _Rewriting, value: str, parameters: Mapping[str, Any]) -> str:
    name = node.attributes.get("activation", "")
    if name == "Clip":
        return node.add(name, value, *map(node.number, parameters.values()))
    if name in _SCALED_ACTIVATIONS:
        inner = node.scaled(value, parameters.get("beta", 1.0))
        outer = node.number(parameters.get("alpha", 1.0))
        return node.add("Mul", outer, node.add(_SCALED_ACTIVATIONS[name], inner))
    return node.add(name, value, **parameters) if name else node.add("Identity", value)


def _scale_product(node: _Rewriting, integers: str, scales: tuple[str, str], bias: str) -> str:
    """Apply the scales and the bias of an int8 product."""
    real = node.add("Cast", integers, to=TensorProto.FLOAT)
    product = node.add("Mul", real, node.add("Mul", *scales))
    return node.add("Add", product, bias) if bias else product


def _dynamic_matmul(node: _Rewriting) -> str:
    """Rewrite a product of data that are quantized for it with weights of bytes."""
    data, weights, scale = (node.name(position) for position in range(3))
    integers, data_scale, zero = node.add_all("DynamicQuantizeLinear", data, results=3)
    operands = [integers, weights, zero, *filter(None, [node.name(3)])]
    product = node.add("MatMulInteger", *operands)
    return _scale_product(node, product, (data_scale, scale), node.name(4))


def _matmul_to_float(node: _Rewriting) -> str:
    """Rewrite an int8 product that is converted to float32."""
    zeros = [node.name(4), node.name(5)]
    while zeros and not zeros[-1]:
        zeros.pop()
    product = node.add("MatMulInteger", node.name(0), node.name(1), *zeros)
    return _scale_product(node, product, (node.name(2), node.name(3)), node.name(6))


def _matmul(node: _Rewriting) -> str | None:
    """Rewrite a product of matrices that are transposed and scaled."""
    operands = [_transposed(node, position, side) for position, side in enumerate("AB")]
    known = [name for name in operands if name is not None]
    if len(known) < len(operands):
        return None
    return node.scaled(node.add("MatMul", *known), node.attributes.get("alpha", 1.0))


def _transposed(node: _Rewriting, position: int, side: str) -> str | None:
    """Return an operand transposed by the attributes of its side; None while its rank is unknown."""
    name, shape = node.name(position), node.shape(position)
    moves_batch, swaps = (node.attributes.get(f"{a}{side}", 0) for a in ("transBatch", "trans"))
    if not moves_batch and not swaps:
        return name
    if shape is None:
        # an equation for any rank, so that its readers need not wait for this one's
        return None if moves_batch else node.add("Einsum", name, equation="...ij->...ji")
    rank = len(shape)
    order = [*range(1, rank - 1), 0, rank - 1] if moves_batch else [*range(rank)]
    # a vector stays as it is
    if swaps and rank > 1:
        order[-2:] = reversed(order[-2:])
    return node.add("Transpose", name, perm=order)


def _fused_gemm(node: _Rewriting) -> str:
    """Rewrite a matrix product with its activation."""
    own = node.pick("alpha", "beta", "transA", "transB")
    product = node.add("Gemm", *node.names(3), **own)
    parameters = node.pick(*(f"activation_{name}" for name in ("alpha", "beta", "gamma")))
    named = {name.removeprefix("activation_"): value for name, value in parameters.items()}
    return _activate(node, product, named)


def _fused_convolution(node: _Rewriting) -> str:
    """Rewrite a convolution with a sum and an activation."""
    own = node.omit("activation", "activation_params")
    result = node.add("Conv", *node.names(3), **own)
    if node.name(3):
        result = node.add("Add", result, node.name(3))
    values = node.attributes.get("activation_params", [])
    return _activate(node, result, dict(zip(("alpha", "beta"), values, strict=False)))


def _quick_gelu(node: _Rewriting) -> str:
    x = node.name(0)
    gate = node.add("Sigmoid", node.scaled(x, node.attributes.get("alpha", 1.702)))
    return node.add("Mul", x, gate)


def _rms_norm(node: _Rewriting) -> str | None:
    """Rewrite an RMS normalization of the last axes."""
    axis, shape = node.attributes.get("axis", -1), node.shape(0)
    if axis >= 0:
        if shape is None:
            return None
        axis -= len(shape)
    return _add_rms_norm(node, node.name(0), 1, axis, node.result(1))


def _skip_rms_norm(node: _Rewriting) -> str | None:
    """Rewrite a sum and its norm without mean."""
    if node.result(1) or node.result(2):
        return None
    names = [node.name(0), node.name(1)]
    if node.name(3):
        names = [node.add("Add", *names), node.name(3)]
    return _add_rms_norm(node, node.add("Add", *names, output=node.result(3)), 2)


def _add_rms_norm(
    node: _Rewriting, x: str, scale: int, axis: int = -1, inverse: str = ""
) -> str | None:
    """Add x / √(mean(x²) + ε) · scale, of float16 in float32; None if no type is known yet.

    Args:
        node: The node.
        x: The normalized tensor, of the type of the first operand.
        scale: The place of the factors among the operands; the result has their type.
        axis: The first axis of the mean, negative.
        inverse: The name of 1 / √(mean(x²) + ε), which is float32, where the node results in it.
    """
    types, known = (node.type_of(0), node.type_of(scale)), node.element_type
    if not known:
        return None
    wide = TensorProto.DOUBLE if known == TensorProto.DOUBLE else TensorProto.FLOAT
    x, factors = (
        node.cast(name, own, wide) for name, own in zip((x, node.name(scale)), types, strict=True)
    )
    epsilon = np.asarray(node.attributes.get("epsilon", 1e-5), _numpy_dtype(wide))
    offset, square = node.constant(epsilon), node.add("Mul", x, x)
    mean = node.reduce("ReduceMean", square, range(axis, 0), node.context.opset)
    deviation = node.add("Sqrt", node.add("Add", mean, offset))
    product = node.add("Mul", node.add("Div", x, deviation), factors)
    result = node.cast(product, wide, types[1] or known)
    if inverse and wide == TensorProto.FLOAT:
        node.add("Reciprocal", deviation, output=inverse)
    elif inverse:
        exact = node.add("Reciprocal", deviation)
        node.add("Cast", exact, output=inverse, to=TensorProto.FLOAT)
    return result


FUSED_OPERATORS: Final[Mapping[str, _Rewrite]] = {
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

_REWRITES: Final[Mapping[str, _Rewrite]] = {
    **dict.fromkeys(("AveragePool", "Conv", "ConvInteger", "LpPool", "MaxPool"), _same_padding),
    **dict.fromkeys(_QUANTIZED_REWRITES, _quantized),
    **FUSED_OPERATORS,
    "CastLike": _cast_like,
    "Concat": _concat,
    "ConvTranspose": _conv_transpose,
    "Dropout": _dropout,
    "Einsum": _einsum,
    "EyeLike": _eye_like,
    "Log": _log,
    "Mish": _mish,
    "Split": _split,
    "Tanh": _tanh,
    "TopK": _top_k,
}


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
    """Yield the operands that parametrize the operator, and are not weights though they may be floats."""
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
"""Conditions for a loop to be replaced by its iterations."""

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
    if node.domain in (CUSTOM_DOMAIN, BLOCK_QUANTIZED_DOMAIN):
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
