"""Rewrites nodes that TVM's importer lacks or miscomputes in other operators of ONNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmflow.frontends.onnx._graph import (
    KnownValues,
    all_graphs,
    attributes_of,
    is_standard,
    known_values,
    opset_of,
    replace_nodes,
)

# Older ones are converted to it where possible; the mask of Dropout is boolean then.
_MIN_OPSET: Final = 13
# Reductions take their axes as an input from here on.
_AXES_INPUT_OPSET: Final = 18
_MAX_IDENTITY_ELEMENTS: Final = 1 << 20


class _Context(NamedTuple):
    """The facts of a model: its opset, known values and shapes, and the element types by name."""

    opset: int
    known: KnownValues
    types: Mapping[str, int]


class _Nodes:
    """The nodes that replace one node; the names of their values begin with that of its first output."""

    def __init__(self, node: NodeProto) -> None:
        self._prefix = node.output[0]
        self.nodes: list[NodeProto] = []

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its result."""
        name = output or f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def constant(self, array: Any, output: str = "") -> str:
        """Add a constant."""
        tensor = numpy_helper.from_array(np.asarray(array))
        return self.add("Constant", output=output, value=tensor)


def rewrite_nodes(model: ModelProto) -> ModelProto:
    """Replace the nodes of the main graph that have a rewrite, as far as shapes and types are known."""
    if opset_of(model) < _MIN_OPSET or not any(
        node.op_type in _REWRITES for node in model.graph.node
    ):
        return model
    context = _Context(opset_of(model), known_values(model), _element_types(model))
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        rewrite = _REWRITES.get(node.op_type) if is_standard(node) else None
        nodes += (rewrite(node, context) if rewrite else None) or [node]
    replace_nodes(model, nodes)
    return model


def _element_types(model: ModelProto) -> dict[str, int]:
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for graph in all_graphs(model.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            if value.type.tensor_type.elem_type:
                types[value.name] = value.type.tensor_type.elem_type
    return types


def _cast_like(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite a cast to the type of another value, which constants then need not wait for."""
    to = context.types.get(node.input[1])
    return None if to is None else [helper.make_node("Cast", node.input[:1], node.output, to=to)]


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
    nodes = _Nodes(node)
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
    nodes = _Nodes(node)
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
    nodes = _Nodes(node)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    nodes.constant(np.eye(*shape, k=attributes.get("k", 0), dtype=dtype), output=node.output[0])
    return nodes.nodes


def _lp_normalization(node: NodeProto, context: _Context) -> list[NodeProto] | None:
    """Rewrite a division by the norm along an axis; zeros stay zeros."""
    kind, attributes = context.types.get(node.input[0]), attributes_of(node)
    if kind is None:
        return None
    nodes = _Nodes(node)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    axes = [attributes.get("axis", -1)]
    reduction = {1: "ReduceL1", 2: "ReduceL2"}[attributes.get("p", 2)]
    if context.opset >= _AXES_INPUT_OPSET:
        norm = nodes.add(reduction, node.input[0], nodes.constant(np.array(axes)), keepdims=1)
    else:
        norm = nodes.add(reduction, node.input[0], axes=axes, keepdims=1)
    is_zero = nodes.add("Equal", norm, nodes.constant(np.zeros((), dtype)))
    divisor = nodes.add("Where", is_zero, nodes.constant(np.ones((), dtype)), norm)
    nodes.add("Div", node.input[0], divisor, output=node.output[0])
    return nodes.nodes


_Rewrite = Callable[[NodeProto, _Context], list[NodeProto] | None]

_REWRITES: Final[Mapping[str, _Rewrite]] = {
    "CastLike": _cast_like,
    "Concat": _concat,
    "ConvTranspose": _conv_transpose,
    "Dropout": _dropout,
    "EyeLike": _eye_like,
    "LpNormalization": _lp_normalization,
    "Split": _split,
    "TopK": _top_k,
}
