"""Rewrites nodes that TVM's importer lacks or miscomputes as other ONNX operators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, helper

from tvmflow.frontends._dynamic_shapes import SizeRanges
from tvmflow.frontends.onnx.graph import KnownValues, Replacement, is_standard
from tvmflow.frontends.onnx.sizes import read_same_padding

_MAX_IDENTITY_ELEMENTS: Final = 1 << 20
# From this opset on, reductions take their axes as an input.
_AXES_INPUT_OPSET: Final = 18


class Context(NamedTuple):
    """What rewrites need to know about a model; `types` and `producers` map names of values."""

    opset: int
    known: KnownValues
    types: Mapping[str, int]
    producers: Mapping[str, NodeProto]


class Rewriting(Replacement):
    """A node to rewrite, the known facts of its operands, and the nodes that will replace it.

    Attributes:
        element_type: The first known element type of an operand; 0 if none is known. Only operators whose operands
            share one type use it.
    """

    def __init__(self, node: NodeProto, context: Context) -> None:
        super().__init__(node)
        self.context = context
        types = context.types
        self.element_type = next((types[name] for name in node.input if name in types), 0)

    def names(self, count: int) -> list[str]:
        return [name for name in self.node.input[:count] if name]

    def shape(self, position: int) -> tuple[int, ...] | None:
        return self.context.known.shapes.get(self.name(position))

    def type_of(self, position: int) -> int:
        return self.context.types.get(self.name(position), 0)

    def pick(self, *names: str) -> dict[str, Any]:
        """Return the named attributes, except missing ones."""
        return {name: self.attributes[name] for name in names if name in self.attributes}

    def omit(self, *names: str) -> dict[str, Any]:
        return {name: value for name, value in self.attributes.items() if name not in names}

    def replace(self, operator: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add the node that replaces this one, with its name and results."""
        new = helper.make_node(operator, inputs, self.node.output, self.node.name, **attributes)
        self.nodes.append(new)
        return self.result()

    def cast(self, value: str, element_type: int, to: int) -> str:
        """Cast a value from its element type (0 if unknown) to another one, if they differ."""
        return value if element_type == to else self.add("Cast", value, to=to)

    def number(self, value: float) -> str:
        if self.element_type:
            return self.constant(np.asarray(value, _numpy_dtype(self.element_type)))
        return self.add("CastLike", self.constant(np.float32(value)), self.name(0))

    def scaled(self, value: str, factor: float) -> str:
        return value if factor == 1 else self.add("Mul", value, self.number(factor))

    def finish(self, result: str) -> list[NodeProto]:
        """Return the added nodes, and a last one that gives `result` the name of the rewritten node's result."""
        made = next(node for node in self.nodes if result in node.output)
        if result != self.result():
            made.output[0] = self.result()
        return self.nodes


_numpy_dtype = helper.tensor_dtype_to_np_dtype
Rewrite = Callable[[Rewriting], str | None]
"""Adds the replacement nodes, and returns the name of the first result; None if the node stays."""


def rewrite_cast_like(node: Rewriting) -> str | None:
    """Rewrite CastLike as Cast once the type of the other value is known."""
    to = node.type_of(1)
    return node.add("Cast", node.name(0), to=to) if to else None


def rewrite_windows(node: Rewriting) -> str | None:
    """Rewrite SAME padding as explicit padding: TVM pads too little for SAME_LOWER."""
    attributes, shape = node.attributes, node.shape(0)
    kernel = attributes.get("kernel_shape") or (node.shape(1) or ())[2:]
    is_same = attributes.get("auto_pad", "").startswith("SAME")
    if not is_same or shape is None or not kernel:
        return None
    pads = read_same_padding(attributes, shape[2:], kernel, SizeRanges(()))
    new = {**attributes, "auto_pad": "NOTSET", "pads": pads}
    return node.replace(node.node.op_type, node.node.input, **new)


def rewrite_conv_transpose(node: Rewriting) -> str | None:
    """Rewrite an explicit output shape as padding."""
    attributes, shape, weights = node.attributes, node.shape(0), node.shape(1)
    if "output_shape" not in attributes or shape is None or weights is None:
        return None
    rank = len(shape) - 2
    ones = [1] * rank
    strides, gaps = attributes.get("strides", ones), attributes.get("dilations", ones)
    extra = list(attributes.get("output_padding", [0] * rank))
    totals = []
    for axis, wanted in enumerate(attributes["output_shape"][-rank:]):
        reach = (weights[2 + axis] - 1) * gaps[axis] + 1
        length = strides[axis] * (shape[2 + axis] - 1) + extra[axis] + reach
        totals.append(max(0, length - wanted))
        extra[axis] += max(0, wanted - length)
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    pads = small + large if attributes.get("auto_pad") == "SAME_UPPER" else large + small
    # TVM supports output padding only below the stride.
    if any(pad and pad >= stride for pad, stride in zip(extra, strides, strict=True)):
        return None
    kept = node.omit("output_shape", "auto_pad", "pads", "output_padding")
    return node.add("ConvTranspose", *node.node.input, **kept, pads=pads, output_padding=extra)


def rewrite_dropout(node: Rewriting) -> str | None:
    """Rewrite a Dropout whose mask is read: in inference, the mask keeps all elements."""
    shape = node.shape(0)
    if len(node.node.output) < 2 or shape is None or trains(node.node, node.context.known):
        return None
    kept, size = node.constant(True), node.constant(np.array(shape, np.int64))
    node.add("Expand", kept, size, output=node.result(1))
    return node.add("Identity", node.name(0))


def rewrite_concat(node: Rewriting) -> str | None:
    """Remove operands without elements, such as an empty key cache; a single operand is the result."""
    kept = [name for name in node.node.input if 0 not in node.context.known.shapes.get(name, ())]
    if len(kept) == 1:
        return node.replace("Identity", kept)
    if not 0 < len(kept) < len(node.node.input):
        return None
    return node.replace("Concat", kept, **node.attributes)


def rewrite_split(node: Rewriting) -> str | None:
    """Rewrite a split into a single part, or with empty parts, which become constants."""
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


def rewrite_top_k(node: Rewriting) -> str | None:
    """Rewrite a TopK with unsorted results as one with sorted results."""
    if node.attributes.get("sorted", 1):
        return None
    return node.replace("TopK", node.node.input, **node.omit("sorted"))


def rewrite_eye_like(node: Rewriting) -> str | None:
    shape, kind = node.shape(0), node.attributes.get("dtype", node.type_of(0) or TensorProto.FLOAT)
    if shape is None or len(shape) != 2 or math.prod(shape) > _MAX_IDENTITY_ELEMENTS:
        return None
    return node.constant(np.eye(*shape, k=node.attributes.get("k", 0), dtype=_numpy_dtype(kind)))


def rewrite_tanh(node: Rewriting) -> str | None:
    """Rewrite tanh(softplus(x)), as in Mish."""
    x = _operand_of(node, "Softplus")
    kind = node.context.types.get(x)
    return _add_tanh_of_softplus(node, x, kind) if kind else None


def _operand_of(node: Rewriting, operator: str) -> str:
    """Return the operand of the preceding node if that is the given operator; otherwise an empty string."""
    producer = node.context.producers.get(node.name(0))
    if producer is None or producer.op_type != operator or not is_standard(producer):
        return ""
    return str(producer.input[0])


def rewrite_log(node: Rewriting) -> str | None:
    """Rewrite ln(sigmoid(x)) as -softplus(-x), which stays finite where the sigmoid is 0."""
    x = _operand_of(node, "Sigmoid")
    return node.add("Neg", node.add("Softplus", node.add("Neg", x))) if x else None


def rewrite_mish(node: Rewriting) -> str | None:
    """Rewrite x · tanh(ln(1 + eˣ)) so that it needs neither tanh nor ln."""
    [x], kind = node.node.input, node.type_of(0)
    return node.add("Mul", x, _add_tanh_of_softplus(node, x, kind)) if kind else None


def _add_tanh_of_softplus(node: Rewriting, x: str, kind: int) -> str:
    """Add tanh(ln(1 + eˣ)) = p / (2 - p) with p = s·(2 - s), s = sigmoid(x), which loses no digits."""
    two = node.constant(np.array(2, _numpy_dtype(kind)))
    s = node.add("Sigmoid", x)
    p = node.add("Mul", s, node.add("Sub", two, s))
    return node.add("Div", p, node.add("Sub", two, p))


# ---------------------------------------------------------------- einsum
# Einstein sums of two tensors become matmuls, which have optimized kernels.


def rewrite_einsum(node: Rewriting) -> str | None:
    """Rewrite an Einstein sum of two static tensors as transposes, reshapes and a matmul.

    The result has the labels `batch` of both tensors, `rows` of the left and `columns` of the right one.
    """
    operands, arrow, result = node.attributes["equation"].replace(" ", "").partition("->")
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
    sizes: dict[str, int] = {}
    for position, labels in enumerate((left, right)):
        shape = node.shape(position)
        # ONNX broadcasts axes of length 1, which these reshapes cannot.
        if shape is None or len(labels) != len(shape):
            return None
        if any(sizes.setdefault(label, n) != n for label, n in zip(labels, shape, strict=True)):
            return None

    def transpose(value: str, labels: str, order: str) -> str:
        if labels == order:
            return value
        return node.add("Transpose", value, perm=[labels.index(label) for label in order])

    def reshape(value: str, *groups: str) -> str:
        """Reshape a tensor so that each group of labels is one axis."""
        shape = [math.prod(sizes[label] for label in group) for group in groups]
        return node.add("Reshape", value, node.constant(np.array(shape, np.int64)))

    def arrange(value: str, labels: str, *groups: str) -> str:
        """Transpose and reshape a tensor to its batch axes and one axis for each of two groups of labels."""
        value = transpose(value, labels, batch + "".join(groups))
        is_arranged = all(len(group) == 1 for group in groups)
        return value if is_arranged else reshape(value, *batch, *groups)

    matrices = (
        arrange(node.name(0), left, rows, summed),
        arrange(node.name(1), right, summed, columns),
    )
    value, order = node.add("MatMul", *matrices), batch + rows + columns
    if len(rows) != 1 or len(columns) != 1:
        value = reshape(value, *order)
    value = transpose(value, order, result)
    node.nodes[-1].name = node.node.name
    return value


# ---------------------------------------------------------------- qoperators
# Operators of ONNX Runtime's QOperator format become float operators between DequantizeLinear and QuantizeLinear.


# From this opset on, Softmax normalizes along one axis.
_SOFTMAX_OPSET: Final = 13


def _list_parameters(node: Rewriting, scale: int) -> list[str]:
    """Return the names of all scales and zero points; the result's scale is the operand at `scale`."""
    starts = range(2, len(node.node.input), 3) if scale == 0 else range(0, scale, 3)
    parameters = [start + n for start in starts for n in (1, 2)]
    return [node.name(position) for position in (scale, scale + 1, *parameters)]


def _is_vector(node: Rewriting, position: int) -> bool:
    return max(node.shape(position) or (), default=1) > 1


def _parameter(node: Rewriting, position: int) -> str:
    """Return a scale or a zero point, as a scalar if it has a single element."""
    name = node.name(position)
    if node.shape(position) == () or _is_vector(node, position):
        return name
    return node.add("Reshape", name, node.constant(np.zeros(0, np.int64)))


def _real(node: Rewriting, position: int, axis: int = 1) -> str:
    """Return an operand, dequantized by the next two operands along the `axis` of channels."""
    parameters = (_parameter(node, position + 1), _parameter(node, position + 2))
    return node.add("DequantizeLinear", node.name(position), *parameters, axis=axis)


def _bias(node: Rewriting, position: int, factor: float = 1.0) -> list[str]:
    """Return the dequantized bias, if any; its scale is the data's scale times the weights' scale."""
    if not node.name(position):
        return []
    scale = node.add("Mul", _parameter(node, 1), _parameter(node, 4))
    if factor != 1.0:
        scale = node.add("Mul", scale, node.constant(np.float32(factor)))
    return [node.add("Mul", node.add("Cast", node.name(position), to=1), scale)]


def rewrite_quantized_convolution(node: Rewriting) -> str:
    operands = [_real(node, 0), _real(node, 3, axis=0), *_bias(node, 8)]
    return node.add("Conv", *operands, **node.attributes)


def rewrite_quantized_product(node: Rewriting) -> str | None:
    rank = len(node.shape(3) or ())
    if _is_vector(node, 1) or not rank:
        return None
    return node.add("MatMul", _real(node, 0), _real(node, 3, axis=rank - 1))


def rewrite_quantized_gemm(node: Rewriting) -> str | None:
    if _is_vector(node, 1):
        return None
    axis = 0 if node.attributes.get("transB", 0) else 1
    factor = node.attributes.get("alpha", 1.0)
    operands = [_real(node, 0), _real(node, 3, axis=axis), *_bias(node, 6, factor)]
    return node.add("Gemm", *operands, **node.attributes)


def rewrite_binary(operator: str) -> Rewrite:
    return lambda node: node.add(operator, _real(node, 0), _real(node, 3))


def rewrite_unary(operator: str, *attributes: str) -> Rewrite:
    def rewrite(node: Rewriting) -> str | None:
        if node.attributes.get("channels_last", 0):
            return None
        return node.add(operator, _real(node, 0), **node.pick(*attributes))

    return rewrite


def rewrite_quantized_softmax(node: Rewriting) -> str | None:
    shape, axis = node.shape(0), node.attributes.get("axis", -1)
    is_last = axis == -1 or (shape is not None and axis == len(shape) - 1)
    if node.attributes.get("opset", 1) < _SOFTMAX_OPSET and not is_last:
        return None
    return node.add("Softmax", _real(node, 0), axis=axis)


def rewrite_quantized_concat(node: Rewriting) -> str:
    values = [_real(node, n) for n in itertools.takewhile(node.name, itertools.count(2, 3))]
    return node.add("Concat", *values, axis=node.attributes["axis"])


def rewrite_quantized(node: Rewriting, scale: int, rewrite: Rewrite) -> str | None:
    """Rewrite a QOperator by `rewrite`, then quantize the result with the scale in operand `scale`."""
    names = _list_parameters(node, scale)
    if "" in names or any(name not in node.context.known.shapes for name in names):
        return None
    result = rewrite(node)
    if result is None:
        return None
    return node.add("QuantizeLinear", result, _parameter(node, scale), _parameter(node, scale + 1))


# ---------------------------------------------------------------- fused operators


# ONNX's first versions had operators for α·f(β·x).
_SCALED_ACTIVATIONS: Final = {"ParametricSoftplus": "Softplus", "ScaledTanh": "Tanh"}


def _activate(node: Rewriting, value: str, parameters: Mapping[str, Any]) -> str:
    name = node.attributes.get("activation", "")
    if name == "Clip":
        return node.add(name, value, *map(node.number, parameters.values()))
    if name in _SCALED_ACTIVATIONS:
        inner = node.scaled(value, parameters.get("beta", 1.0))
        outer = node.number(parameters.get("alpha", 1.0))
        return node.add("Mul", outer, node.add(_SCALED_ACTIVATIONS[name], inner))
    return node.add(name, value, **parameters) if name else node.add("Identity", value)


def _scale_product(node: Rewriting, integers: str, scales: tuple[str, str], bias: str) -> str:
    """Apply the scales and the bias to an int8 matmul's result."""
    real = node.add("Cast", integers, to=TensorProto.FLOAT)
    product = node.add("Mul", real, node.add("Mul", *scales))
    return node.add("Add", product, bias) if bias else product


def rewrite_dynamic_matmul(node: Rewriting) -> str:
    """Rewrite a matmul of int8 weights with data that are quantized at run time."""
    data, weights, scale = (node.name(position) for position in range(3))
    integers, data_scale, zero = node.add_all("DynamicQuantizeLinear", data, results=3)
    operands = [integers, weights, zero, *filter(None, [node.name(3)])]
    product = node.add("MatMulInteger", *operands)
    return _scale_product(node, product, (data_scale, scale), node.name(4))


def rewrite_matmul_to_float(node: Rewriting) -> str:
    """Rewrite an int8 matmul whose result is converted to float32."""
    zeros = [node.name(4), node.name(5)]
    while zeros and not zeros[-1]:
        zeros.pop()
    product = node.add("MatMulInteger", node.name(0), node.name(1), *zeros)
    return _scale_product(node, product, (node.name(2), node.name(3)), node.name(6))


def rewrite_matmul(node: Rewriting) -> str | None:
    left, right = (_transposed(node, position, side) for position, side in enumerate("AB"))
    if left is None or right is None:
        return None
    return node.scaled(node.add("MatMul", left, right), node.attributes.get("alpha", 1.0))


def _transposed(node: Rewriting, position: int, side: str) -> str | None:
    """Return an operand, transposed as the attributes of its side say; None while its rank is unknown."""
    name, shape = node.name(position), node.shape(position)
    moves_batch, swaps = (node.attributes.get(f"{a}{side}", 0) for a in ("transBatch", "trans"))
    if not moves_batch and not swaps:
        return name
    if shape is None:
        # This equation needs no rank, so later nodes need not wait until the rank is known.
        return None if moves_batch else node.add("Einsum", name, equation="...ij->...ji")
    rank = len(shape)
    order = [*range(1, rank - 1), 0, rank - 1] if moves_batch else [*range(rank)]
    # A vector is not transposed.
    if swaps and rank > 1:
        order[-2:] = reversed(order[-2:])
    return node.add("Transpose", name, perm=order)


def rewrite_fused_gemm(node: Rewriting) -> str:
    own = node.pick("alpha", "beta", "transA", "transB")
    product = node.add("Gemm", *node.names(3), **own)
    parameters = node.pick(*(f"activation_{name}" for name in ("alpha", "beta", "gamma")))
    named = {name.removeprefix("activation_"): value for name, value in parameters.items()}
    return _activate(node, product, named)


def rewrite_fused_convolution(node: Rewriting) -> str:
    kept = node.omit("activation", "activation_params")
    result = node.add("Conv", *node.names(3), **kept)
    if node.name(3):
        result = node.add("Add", result, node.name(3))
    values = node.attributes.get("activation_params", [])
    return _activate(node, result, dict(zip(("alpha", "beta"), values, strict=False)))


def rewrite_quick_gelu(node: Rewriting) -> str:
    x = node.name(0)
    gate = node.add("Sigmoid", node.scaled(x, node.attributes.get("alpha", 1.702)))
    return node.add("Mul", x, gate)


def rewrite_rms_norm(node: Rewriting) -> str | None:
    axis, shape = node.attributes.get("axis", -1), node.shape(0)
    if axis >= 0:
        if shape is None:
            return None
        axis -= len(shape)
    return _add_rms_norm(node, node.name(0), 1, axis, node.result(1))


def rewrite_skip_rms_norm(node: Rewriting) -> str | None:
    if node.result(1) or node.result(2):
        return None
    names = [node.name(0), node.name(1)]
    if node.name(3):
        names = [node.add("Add", *names), node.name(3)]
    return _add_rms_norm(node, node.add("Add", *names, output=node.result(3)), 2)


def _add_rms_norm(
    node: Rewriting, x: str, scale: int, axis: int = -1, inverse: str = ""
) -> str | None:
    """Add x / √(mean(x²) + ε) · scale, in float32 for float16; None if no type is known yet.

    The first operand has the type of x, and the factors (position `scale`) have the type of the result. The mean is
    over the axes from `axis` (negative) on. If `inverse` is given, a result of this name is
    1 / √(mean(x²) + ε) as float32.
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
    axes = list(range(axis, 0))
    if node.context.opset < _AXES_INPUT_OPSET:
        mean = node.add("ReduceMean", square, axes=axes)
    else:
        mean = node.add("ReduceMean", square, node.constant(np.array(axes, np.int64)))
    deviation = node.add("Sqrt", node.add("Add", mean, offset))
    product = node.add("Mul", node.add("Div", x, deviation), factors)
    result = node.cast(product, wide, types[1] or known)
    if inverse and wide == TensorProto.FLOAT:
        node.add("Reciprocal", deviation, output=inverse)
    elif inverse:
        exact = node.add("Reciprocal", deviation)
        node.add("Cast", exact, output=inverse, to=TensorProto.FLOAT)
    return result


def trains(node: NodeProto, known: KnownValues) -> bool:
    """Return whether a Dropout is in training mode, where it may drop elements."""
    switch = node.input[2] if len(node.input) > 2 else ""
    return bool(switch) and not (switch in known.constants and not known.constants[switch].any())
