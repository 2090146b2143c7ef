"""Rewrites nodes that TVM's importer lacks or miscomputes in other operators of ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from tvmflow.frontends.onnx._fused_operators import FUSED_OPERATORS, rewrite_fused
from tvmflow.frontends.onnx._graph import (
    KnownValues,
    attributes_of,
    element_types,
    is_standard,
    known_values,
    opset_of,
    replace_nodes,
)
from tvmflow.frontends.onnx._operators import QOPERATORS
from tvmflow.frontends.onnx._qoperators import rewrite_qoperator
from tvmflow.frontends.onnx._replacement import Replacement

# Older ones are converted to it where possible; the mask of Dropout is boolean then.
_MIN_OPSET: Final = 13
_MAX_IDENTITY_ELEMENTS: Final = 1 << 20
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


class _Context(NamedTuple):
    """The facts of a model: its opset, known values and shapes, and by name the element types and the nodes that compute values."""

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
    """Rewrite padding that keeps ceil(size / stride) windows as numbers: TVM takes too little of SAME_LOWER."""
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


def _lp_normalization(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite a division by the norm along an axis; zeros stay zeros."""
    kind, attributes = context.types.get(node.input[0]), attributes_of(node)
    if kind is None:
        return None
    nodes = Replacement(node)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    reduction = {1: "ReduceL1", 2: "ReduceL2"}[attributes.get("p", 2)]
    norm = nodes.reduce(reduction, node.input[0], [attributes.get("axis", -1)], context.opset)
    is_zero = nodes.add("Equal", norm, nodes.constant(np.zeros((), dtype)))
    divisor = nodes.add("Where", is_zero, nodes.constant(np.ones((), dtype)), norm)
    nodes.add("Div", node.input[0], divisor, output=node.output[0])
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
    """Add tanh(ln(1 + eˣ)) = p / (2 - p) with p = s·(2 - s) and s = sigmoid(x), which loses no digits and does not overflow."""
    two = nodes.constant(np.array(2, helper.tensor_dtype_to_np_dtype(kind)))
    s = nodes.add("Sigmoid", x)
    p = nodes.add("Mul", s, nodes.add("Sub", two, s))
    return nodes.add("Div", p, nodes.add("Sub", two, p), output=output)


def _col2im(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite sums of overlapping blocks as a transposed convolution that puts each number in its place."""
    constants, attributes = context.known.constants, attributes_of(node)
    columns, kind = context.known.shapes.get(node.input[0]), context.types.get(node.input[0])
    sizes = [constants.get(name) for name in node.input[1:]]
    if columns is None or kind not in _FLOATS or any(size is None for size in sizes):
        return None
    image, block = (size.tolist() for size in sizes if size is not None)
    rank, places = len(block), math.prod(block)
    ones = [1] * rank
    strides, gaps = attributes.get("strides", ones), attributes.get("dilations", ones)
    pads = attributes.get("pads", [0] * rank * 2)
    # how far a block can move along each axis
    rooms = [
        size + before + after - gap * (edge - 1) - 1
        for size, before, after, gap, edge in zip(
            image, pads[:rank], pads[rank:], gaps, block, strict=True
        )
    ]
    counts = [room // stride + 1 for room, stride in zip(rooms, strides, strict=True)]
    channels = columns[1] // places
    weights = np.zeros((channels, places, 1, places), helper.tensor_dtype_to_np_dtype(kind))
    weights[:, range(places), :, range(places)] = 1
    nodes = Replacement(node)
    nodes.add(
        "ConvTranspose",
        nodes.add(
            "Reshape", node.input[0], nodes.constant(np.array([*columns[:2], *counts], np.int64))
        ),
        nodes.constant(weights.reshape(columns[1], 1, *block)),
        output=node.output[0],
        group=channels,
        strides=strides,
        dilations=gaps,
        pads=pads,
        output_padding=[room % stride for room, stride in zip(rooms, strides, strict=True)],
    )
    return nodes.nodes


_Rewrite = Callable[[NodeProto, _Context], list[NodeProto] | None]

_REWRITES: Final[Mapping[str, _Rewrite]] = {
    "AveragePool": _same_padding,
    "CastLike": _cast_like,
    "Col2Im": _col2im,
    "Concat": _concat,
    "Conv": _same_padding,
    "ConvInteger": _same_padding,
    "ConvTranspose": _conv_transpose,
    "Dropout": _dropout,
    "EyeLike": _eye_like,
    "LpNormalization": _lp_normalization,
    "LpPool": _same_padding,
    "MaxPool": _same_padding,
    "Mish": _mish,
    "Split": _split,
    "Tanh": _tanh,
    "TopK": _top_k,
}
