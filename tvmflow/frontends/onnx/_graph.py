"""Reads and changes ONNX graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    helper,
)
from onnx.defs import onnx_opset_version

from tvmflow.core.formatting import quoted
from tvmflow.frontends.onnx._large_tensors import array_of

OWN_DOMAIN: Final = "tvmflow.operators"
"""The domain of the nodes that a recipe's own operators implement (see `_own_operators`)."""

_MAX_KNOWN_ELEMENTS: Final = 64


class KnownValues(NamedTuple):
    """Small constants and static shapes of the values in a model."""

    constants: Mapping[str, np.ndarray[Any, Any]]
    shapes: Mapping[str, tuple[int, ...]]


def known_values(model: ModelProto) -> KnownValues:
    """Return the small constants and the static shapes of a model, whose branches have names of their own."""
    graphs = list(all_graphs(model.graph))
    values = [v for graph in graphs for v in (*graph.input, *graph.value_info, *graph.output)]
    shapes = {}
    for value in values:
        tensor = value.type.tensor_type
        if value.type.HasField("tensor_type") and tensor.HasField("shape"):
            sizes = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
            if all(size >= 0 for size in sizes):
                shapes[value.name] = tuple(sizes)
    shapes.update({tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer})
    initializers = model.graph.initializer
    small = [t for t in initializers if math.prod(t.dims) <= _MAX_KNOWN_ELEMENTS]
    return KnownValues({tensor.name: array_of(tensor) for tensor in small}, shapes)


def is_if(node: NodeProto) -> bool:
    """Return whether a node is ONNX's conditional operator."""
    return bool(node.op_type == "If" and is_standard(node))


def list_branches(graph: GraphProto) -> Iterator[GraphProto]:
    """Give the branches of every If in a graph, without those inside them."""
    for node in graph.node:
        if is_if(node):
            yield from (attribute.g for attribute in node.attribute)


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Give a graph, and all branches in it."""
    yield graph
    for branch in list_branches(graph):
        yield from all_graphs(branch)


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """Return the node's attributes as Python values; strings as str."""
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    texts = {k: v.decode("utf-8", "replace") for k, v in values.items() if isinstance(v, bytes)}
    return values | texts


def opset_of(model: ModelProto) -> int:
    """Return the version of the standard opset that the model uses; the newest for one that uses none."""
    versions = [entry.version for entry in model.opset_import if is_standard(entry)]
    return int(max(versions, default=onnx_opset_version()))


def is_standard(entry: NodeProto | OperatorSetIdProto) -> bool:
    """Return whether an operator, or an opset, is of ONNX's standard domain."""
    return entry.domain in ("", "ai.onnx")


def node_name(node: NodeProto) -> str:
    """Return the name of a node for messages, or that of its output when it has none."""
    if node.name:
        return quoted(node.name)
    return f"with output {quoted(node.output[0])}" if node.output else "without a name"


def replace_nodes(model: ModelProto, nodes: Sequence[NodeProto]) -> None:
    """Set the nodes of the main graph, which may be some of its present ones."""
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def captured_names(attribute: AttributeProto) -> set[str]:
    """Return all names in the subgraphs of an attribute, which may be those of outer values."""
    has_graph = attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS)
    graphs = [attribute.g, *attribute.graphs] if has_graph else []
    names: set[str] = set()
    for graph in graphs:
        names.update(value.name for value in graph.output)
        for node in graph.node:
            names.update(node.input)
            for inner in node.attribute:
                names |= captured_names(inner)
    return names


def rename_captured(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename values where a graph, or a subgraph in it, reads them or returns them.

    Args:
        graph: The graph; it is changed.
        names: The old name -> the new one.
    """
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                rename_captured(inner, names)
