"""Reads and changes ONNX graphs."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)
from onnx.defs import onnx_opset_version

from tvmflow.core.formatting import quoted
from tvmflow.frontends.onnx._large_tensors import array_of
from tvmflow.operators.definition import standard_domain

OWN_DOMAIN: Final = "tvmflow.operators"
"""The domain of the nodes that a recipe's own operators implement (see `_own_operators`)."""

_MAX_KNOWN_ELEMENTS: Final = 64
_PYTORCH_SCOPES: Final = "pkg.torch.onnx.name_scopes"
"""The property in which PyTorch's exporter lists the modules around a node, and then the operator."""
_QUOTED_WORD: Final = re.compile(r"'([^']*)'")
FROM_START: Final = "tvmflow.from_start"
"""The property of a node that refuses negative indices, which count from the end in ONNX."""


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


def element_types(model: ModelProto) -> dict[str, int]:
    """Return the element type of each value of a model and its branches, as far as it is known."""
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for graph in all_graphs(model.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            if value.type.tensor_type.elem_type:
                types[value.name] = value.type.tensor_type.elem_type
    return types


def dtype_of(element_type: int) -> str:
    """Return the name of an element type."""
    return str(helper.tensor_dtype_to_np_dtype(element_type))


def is_if(node: NodeProto) -> bool:
    """Return whether a node is ONNX's conditional operator."""
    return bool(node.op_type == "If" and is_standard(node))


def list_branches(graph: GraphProto) -> Iterator[GraphProto]:
    """Give the branches of every If in a graph, without those inside them."""
    for node in graph.node:
        if is_if(node):
            yield from subgraphs(node)


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Give a graph, and all branches in it."""
    yield graph
    for branch in list_branches(graph):
        yield from all_graphs(branch)


def branch_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Give the nodes of the main graph and of all branches in it."""
    for graph in all_graphs(model.graph):
        yield from graph.node


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Give the graphs in the attributes of a node, without those inside them."""
    return graphs_in(node.attribute)


def graphs_in(attributes: Iterable[AttributeProto]) -> Iterator[GraphProto]:
    """Give the graphs that attributes are, without those inside them."""
    for attribute in attributes:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Give the nodes of the graph, of its functions and of all subgraphs."""
    yield from with_inner_nodes(model.graph.node)
    for function in model.functions:
        yield from with_inner_nodes(function.node)
        for graph in graphs_in(function.attribute_proto):
            yield from with_inner_nodes(graph.node)


def with_inner_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Give nodes, each followed by the nodes of its subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from with_inner_nodes(graph.node)


def attribute_text(attributes: Mapping[str, Any], name: str, default: str) -> str:
    """Return an attribute that is text, which ONNX has as bytes."""
    value = attributes.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """Return the node's attributes as Python values; strings as str."""
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    texts = {k: v.decode("utf-8", "replace") for k, v in values.items() if isinstance(v, bytes)}
    return values | texts


def opset_of(model: ModelProto) -> int:
    """Return the version of the standard opset that the model uses; the newest for one that uses none."""
    return int(versions_of(model.opset_import).get("", onnx_opset_version()))


def versions_of(imports: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    """Return the version of each domain; the newest of one that is named several times."""
    versions: dict[str, int] = {}
    for entry in imports:
        domain = standard_domain(entry.domain)
        versions[domain] = max(entry.version, versions.get(domain, entry.version))
    return versions


def is_standard(entry: NodeProto | OperatorSetIdProto | FunctionProto) -> bool:
    """Return whether an operator, or an opset, is of ONNX's standard domain."""
    return not standard_domain(entry.domain)


def node_name(node: NodeProto) -> str:
    """Return the name of a node for messages, or that of its output when it has none."""
    if node.name:
        return quoted(node.name)
    return f"with output {quoted(node.output[0])}" if node.output else "without a name"


def node_labels(model: ModelProto) -> dict[str, str]:
    """Return the label of the node that computes each tensor of a model, for people."""
    return {output: _node_label(node) for node in branch_nodes(model) for output in node.output}


def _node_label(node: NodeProto) -> str:
    """Return name, or operator and output, and the module of PyTorch that the node was exported from."""
    label = node.name or f"{node.op_type} ({next(iter(node.output), '')})"
    scopes = next((p.value for p in node.metadata_props if p.key == _PYTORCH_SCOPES), "")
    modules = [name for name in _QUOTED_WORD.findall(scopes)[:-1] if name]
    return f"{label} ({modules[-1]})" if modules else label


def replace_nodes(graph: GraphProto, nodes: Sequence[NodeProto]) -> None:
    """Set the nodes of a graph, which may be some of its present ones."""
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def names_read(node: NodeProto) -> set[str]:
    """Return the names of all values that a node reads, also inner ones of its subgraphs."""
    return {*node.input} | captured_names(node)


def captured_names(node: NodeProto) -> set[str]:
    """Return all names in the subgraphs of a node, which may be those of outer values."""
    names: set[str] = set()
    for graph in subgraphs(node):
        names.update(value.name for value in graph.output)
        for inner in graph.node:
            names.update(inner.input)
            names |= captured_names(inner)
    return names


def rename_captured(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename values where a graph, or a subgraph in it, reads them or returns them."""
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for inner in subgraphs(node):
            rename_captured(inner, names)


def make_single(
    node: NodeProto,
    inputs: Sequence[ValueInfoProto],
    constants: Sequence[TensorProto],
    opsets: Iterable[OperatorSetIdProto],
) -> ModelProto:
    """Return a model of one node, whose outputs have no types."""
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "node", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=list(opsets))


def make_evaluator(model: ModelProto) -> Callable[[Mapping[str, Any]], list[Any]]:
    """Return a function that computes the outputs of a model by ONNX's reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator: Any = ReferenceEvaluator(model)

    def evaluate(values: Mapping[str, Any]) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(evaluator.run(None, dict(values)))

    return evaluate


# ---------------------------------------------------------------- replacement
# The nodes that replace one node of an ONNX graph.


# Reductions take their axes as an input from here on.
_AXES_INPUT_OPSET: Final = 18


class Replacement:
    """The nodes that replace one node; the names of their values begin with that of its first output."""

    def __init__(self, node: NodeProto, suffix: str = "") -> None:
        # of a loop, outputs that nothing reads have no name
        self._prefix = next(filter(None, node.output), "loop") + suffix
        self.nodes: list[NodeProto] = []

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its result."""
        name = output or f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def add_all(self, operator: str, *inputs: str, results: int) -> list[str]:
        """Add a node with several results, and return their names."""
        names = [f"{self._prefix}.{len(self.nodes)}.{n}" for n in range(results)]
        self.nodes.append(helper.make_node(operator, inputs, names))
        return names

    def reduce(self, operator: str, value: str, axes: Sequence[int], opset: int) -> str:
        """Add a reduction over some axes, which become 1 long."""
        if opset < _AXES_INPUT_OPSET:
            return self.add(operator, value, axes=list(axes), keepdims=1)
        return self.add(operator, value, self.constant(np.array(axes, np.int64)), keepdims=1)

    def constant(self, array: Any, output: str = "") -> str:
        """Add a constant."""
        tensor = numpy_helper.from_array(np.asarray(array))
        return self.add("Constant", output=output, value=tensor)
