"""Inlines the functions of an ONNX model: default attributes, opsets of their own, scopes of names."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import onnx
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    ValueInfoProto,
    helper,
    version_converter,
)

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import count_text, excerpt, quoted, size_text
from tvmflow.frontends.onnx._header import MAX_NODES
from tvmflow.frontends.onnx.graph import (
    graphs_in,
    is_standard,
    node_name,
    opset_of,
    replace_nodes,
    subgraphs,
    versions_of,
    with_inner_nodes,
)
from tvmflow.operators.definition import standard_domain

_Id = tuple[str, str, str]
# Hides operators from ONNX's converter.
_LATER_DOMAIN: Final = "tvmflow.later"
_GRAPHS: Final = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
# What calls may become. Protobuf reads messages in 100 others, of which each graph in a node is three.
_MAX_BYTES: Final = 1 << 28
_MAX_DEPTH: Final = 30


def inline_functions(model: ModelProto) -> ModelProto:
    """Replace calls of the model's own functions by their bodies, all in one opset.

    That is the newest opset that the model and its functions use: older operators are converted.

    Raises:
        ImportFailed: when a call does not fit its function, or an opset cannot be converted.
    """
    if not model.functions:
        return model
    inlined = ModelProto.FromString(model.SerializeToString())
    functions = {function_id(function): function for function in inlined.functions}
    called = list(_list_called(inlined.graph.node, functions))
    opsets = [versions_of(owner.opset_import).get("") for owner in (model, *called)]
    opset = max((version for version in opsets if version is not None), default=opset_of(model))
    if versions_of(model.opset_import).get("", opset) != opset:
        inlined = _convert(inlined, opset, "the model")
    inliner = _Inliner(inlined, functions, opset)
    # each round inlines the calls that are there, and shows those inside the functions
    for _ in range(len(functions)):
        if not inliner.inline_calls():
            break
    else:
        if any(function_id(node) in functions for node in with_inner_nodes(inlined.graph.node)):
            raise ImportFailed("one of the model's functions calls itself")
    versions = {"": opset}
    for function in called:
        versions = {**versions_of(function.opset_import), **versions}
    versions |= {k: v for k, v in versions_of(model.opset_import).items() if k}
    del inlined.functions[:], inlined.opset_import[:]
    inlined.opset_import.extend(helper.make_opsetid(*entry) for entry in versions.items())
    return inlined


def mixes_opsets(model: ModelProto) -> bool:
    """Return whether an operator of a called function has other semantics in the model's opset."""
    functions = {function_id(function): function for function in model.functions}
    opset = opset_of(model)
    return any(
        _changes(function.node, versions_of(function.opset_import).get("", opset), opset)
        for function in _list_called(model.graph.node, functions)
    )


def function_id(entry: FunctionProto | NodeProto) -> _Id:
    """Return what a function, or a call of it, is known by."""
    is_function = isinstance(entry, FunctionProto)
    name = entry.name if is_function else entry.op_type
    return standard_domain(entry.domain), str(name), str(entry.overload)


def _list_called(
    nodes: Iterable[NodeProto], functions: Mapping[_Id, FunctionProto]
) -> Iterator[FunctionProto]:
    """Give each function that nodes call, or that these functions call."""
    seen: set[_Id] = set()
    pending = list(with_inner_nodes(nodes))
    while pending:
        name = function_id(pending.pop())
        if name in functions and name not in seen:
            seen.add(name)
            yield functions[name]
            pending += with_inner_nodes(functions[name].node)


class _Inliner:
    """Replaces calls in a model by nodes of one opset."""

    def __init__(
        self, model: ModelProto, functions: Mapping[_Id, FunctionProto], opset: int
    ) -> None:
        self._model, self._functions, self._opset = model, functions, opset
        self._taken = {tensor.name for tensor in model.graph.initializer}
        self._taken |= {value.name for value in model.graph.input}
        for node in with_inner_nodes(model.graph.node):
            self._taken.update(node.output)
            for graph in subgraphs(node):
                self._taken.update(value.name for value in (*graph.input, *graph.initializer))
        self._types: Mapping[str, ValueInfoProto] = {}
        self._numbers: Counter[str] = Counter()
        self._nodes = len(list(with_inner_nodes(model.graph.node)))
        self._bytes = 0

    def inline_calls(self) -> bool:
        """Replace all calls that are in the graph; return whether there were any."""
        nodes = with_inner_nodes(self._model.graph.node)
        called = [f for node in nodes if (f := self._functions.get(function_id(node)))]
        if any(self._needs_conversion(function) for function in called):
            self._types = _infer_types(self._model)
        self._inline(self._model.graph)
        return bool(called)

    def _inline(self, graph: GraphProto, depth: int = 0) -> None:
        """Replace the calls in a graph and in its subgraphs, but not those that this adds."""
        nodes: list[NodeProto] = []
        for node in graph.node:
            for inner in subgraphs(node):
                self._inline(inner, depth + 1)
            function = self._functions.get(function_id(node))
            if function is None:
                nodes.append(node)
            else:
                self._check_growth(node, function, depth)
                nodes += self._expand(node, function)
        replace_nodes(graph, nodes)

    def _check_growth(self, call: NodeProto, function: FunctionProto, depth: int) -> None:
        """Count what a call becomes, before it does."""
        given = {a.name: a for a in (*function.attribute_proto, *call.attribute)}
        body = list(with_inner_nodes(function.node))
        used = [
            given[a.ref_attr_name] for n in body for a in n.attribute if a.ref_attr_name in given
        ]
        copied = [n for graph in graphs_in(used) for n in with_inner_nodes(graph.node)]
        self._nodes += len(body) + len(copied) - len(list(with_inner_nodes([call])))
        names = sum(len(node.input) + len(node.output) for node in (*body, *copied))
        self._bytes += function.ByteSize() + sum(a.ByteSize() for a in used)
        self._bytes += len(_prefix(call, function)) * names
        start = f"the call of the function {quoted(function.name)} by node {node_name(call)} makes the model"
        if self._nodes > MAX_NODES:
            problem = f"one of {self._nodes:,} nodes, and the limit is {MAX_NODES:,}"
        elif self._bytes > _MAX_BYTES:
            problem = (
                f"hold copies of {size_text(self._bytes)}, and the limit is {size_text(_MAX_BYTES)}"
            )
        elif depth + _depth(function.node) + _depth([call]) > _MAX_DEPTH:
            problem = f"one of graphs nested more than {_MAX_DEPTH} levels deep"
        else:
            return
        raise ImportFailed(f"{start} {problem}", fix="export the model without functions")

    def _needs_conversion(self, function: FunctionProto) -> bool:
        version = versions_of(function.opset_import).get("", self._opset)
        return version != self._opset and _changes(function.node, version, self._opset)

    def _expand(self, call: NodeProto, function: FunctionProto) -> list[NodeProto]:
        _check_call(call, function)
        attributes = {a.name: a for a in (*function.attribute_proto, *call.attribute)}
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in function.node]
        needs_conversion = self._needs_conversion(function)
        _bind(nodes, {k: a for k, a in attributes.items() if a.type not in _GRAPHS})
        if needs_conversion:
            nodes = self._convert_nodes(nodes, call, function)
        actual = [*call.input, *[""] * (len(function.input) - len(call.input))]
        scope = dict(zip(function.input, actual, strict=True))
        returned = dict(zip(function.output, call.output, strict=False))
        scope |= {name: to for name, to in returned.items() if to and name not in function.input}
        prefix = _prefix(call, function)
        self._rename(nodes, scope, prefix)
        for node in nodes:
            node.name = f"{call.name}/{node.name}" if call.name and node.name else node.name
        # graphs that the caller gives are in the scope of the caller
        self._bind_graphs(nodes, {k: a for k, a in attributes.items() if a.type in _GRAPHS}, prefix)
        for name, to in returned.items():
            if to and name in function.input:
                nodes.append(helper.make_node("Identity", [scope[name]], [to]))
        return nodes

    def _rename(self, nodes: Iterable[NodeProto], scope: dict[str, str], prefix: str) -> None:
        """Give all values that nodes make names of their own, which are added to the scope."""
        for node in nodes:
            node.input[:] = [scope.get(name, name) for name in node.input]
            for graph in subgraphs(node):
                self._rename_graph(graph, scope, prefix)
            for name in node.output:
                if name and name not in scope:
                    scope[name] = self._new_name(f"{prefix}{name}")
            node.output[:] = [scope.get(name, name) for name in node.output]

    def _rename_graph(self, graph: GraphProto, outer: Mapping[str, str], prefix: str) -> None:
        scope = dict(outer)
        for value in (*graph.input, *graph.initializer):
            scope[value.name] = value.name = self._new_name(f"{prefix}{value.name}")
        for node in graph.node:
            # what it makes hides a value of the same name outside
            for name in node.output:
                scope.pop(name, None)
            self._rename([node], scope, prefix)
        # shapes would be those of other inputs
        del graph.value_info[:]
        for value in graph.output:
            value.name = scope.get(value.name, value.name)
            value.type.tensor_type.ClearField("shape")

    def _new_name(self, name: str) -> str:
        free = name
        while free in self._taken:
            self._numbers[name] += 1
            free = f"{name}.{self._numbers[name]}"
        self._taken.add(free)
        return free

    def _bind_graphs(
        self, nodes: Iterable[NodeProto], attributes: Mapping[str, AttributeProto], prefix: str
    ) -> None:
        """Replace references to attributes that are graphs, each by a copy with names of its own."""
        used = [node for node in with_inner_nodes(nodes) if any(map(_refers, node.attribute))]
        _bind(used, attributes, drops_missing=True)
        for node in used:
            for graph in subgraphs(node):
                self._rename_graph(graph, {}, prefix)

    def _convert_nodes(
        self, nodes: Sequence[NodeProto], call: NodeProto, function: FunctionProto
    ) -> list[NodeProto]:
        """Return the nodes of a function in the opset of the others."""
        title = f"the function {quoted(function.name)} (called by node {node_name(call)})"
        versions = versions_of(function.opset_import)
        if any(map(_refers, (a for node in with_inner_nodes(nodes) for a in node.attribute))):
            raise ImportFailed(
                f"{title} has the opset {versions['']} and a graph as an attribute, which cannot be converted",
                fix=f"export its functions with opset {self._opset}",
            )
        inputs = []
        for formal, actual in zip(function.input, call.input, strict=False):
            value = ValueInfoProto(name=formal)
            if actual in self._types:
                value.type.CopyFrom(self._types[actual].type)
            inputs.append(value)
        inputs += [ValueInfoProto(name=name) for name in function.input[len(inputs) :]]
        outputs = [ValueInfoProto(name=name) for name in function.output]
        graph = helper.make_graph(nodes, function.name, inputs, outputs)
        imports = [helper.make_opsetid(*entry) for entry in versions.items()]
        made = helper.make_model(graph, opset_imports=imports, ir_version=self._model.ir_version)
        converted = _convert(made, self._opset, title).graph
        constants = converted.initializer
        return [
            *(helper.make_node("Constant", [], [c.name], value=c) for c in constants),
            *converted.node,
        ]


def _prefix(call: NodeProto, function: FunctionProto) -> str:
    """Return the beginning of the names of values that a call makes."""
    return f"{call.name or next(filter(None, call.output), function.name)}/"


def _depth(nodes: Iterable[NodeProto]) -> int:
    return max((1 + _depth(g.node) for node in nodes for g in subgraphs(node)), default=0)


def _check_call(call: NodeProto, function: FunctionProto) -> None:
    """Raise ImportFailed where a call has more inputs or outputs than its function."""
    for given, known, noun in (
        (call.input, function.input, "input"),
        (call.output, function.output, "output"),
    ):
        if len(given) > len(known):
            raise ImportFailed(
                f"the model is not valid ONNX: the node {node_name(call)} has {count_text(len(given), noun)}, "
                f"and its function {quoted(function.name)} has {len(known)}"
            )


def _refers(attribute: AttributeProto) -> bool:
    return bool(attribute.ref_attr_name)


def _bind(
    nodes: Iterable[NodeProto],
    attributes: Mapping[str, AttributeProto],
    *,
    drops_missing: bool = False,
) -> None:
    """Replace references to attributes of a function by their values.

    An attribute without a value is missing in the node, too; references to graphs stay unless `drops_missing`.
    """
    for node in with_inner_nodes(nodes):
        bound = []
        for attribute in node.attribute:
            value = attributes.get(attribute.ref_attr_name) if _refers(attribute) else attribute
            if value is None:
                if attribute.type in _GRAPHS and not drops_missing:
                    bound.append(attribute)
                continue
            copy = AttributeProto.FromString(value.SerializeToString())
            copy.name = attribute.name
            bound.append(copy)
        del node.attribute[:]
        node.attribute.extend(bound)


# ---------------------------------------------------------------- opsets


def _since(node: NodeProto, opset: int) -> int:
    """Return the opset that defined an operator as it is in another one; 0 for one that is not in it."""
    if not onnx.defs.has(node.op_type, opset, ""):
        return 0
    return int(onnx.defs.get_schema(node.op_type, opset, "").since_version)


def _changes(nodes: Iterable[NodeProto], version: int, opset: int) -> bool:
    """Return whether an operator that nodes have in an opset is another one in a second opset."""
    standard = [node for node in with_inner_nodes(nodes) if is_standard(node)]
    return any(0 < _since(node, version) != _since(node, opset) for node in standard)


def _convert(model: ModelProto, opset: int, title: str) -> ModelProto:
    """Return a model in a newer opset.

    Operators that came later than the model's own opset mean what they do in the newer one, as in ONNX Runtime.
    """
    version = opset_of(model)
    if not _changes(model.graph.node, version, opset):
        return model
    model = ModelProto.FromString(model.SerializeToString())
    for node in with_inner_nodes(model.graph.node):
        if is_standard(node) and not _since(node, version):
            node.domain = _LATER_DOMAIN
    model.opset_import.append(helper.make_opsetid(_LATER_DOMAIN, 1))
    try:
        converted = version_converter.convert_version(model, opset)
    except Exception as error:
        # the converter raises many kinds of errors
        raise ImportFailed(
            f"{title} has the opset {version}, which cannot be converted to {opset}, the newest one "
            f"of the model and its functions: {excerpt(str(error))}",
            fix=f"export the model and its functions with opset {opset}",
        ) from error
    for node in with_inner_nodes(converted.graph.node):
        node.domain = "" if node.domain == _LATER_DOMAIN else node.domain
    return converted


def _infer_types(model: ModelProto) -> Mapping[str, ValueInfoProto]:
    """Return the type of each value, as far as ONNX can infer it."""
    # the converter does without, where it can
    with contextlib.suppress(Exception):
        model = onnx.shape_inference.infer_shapes(model)
    graphs = [model.graph]
    graphs += [g for node in with_inner_nodes(model.graph.node) for g in subgraphs(node)]
    types = {
        value.name: value
        for graph in graphs
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.HasField("type")
    }
    for graph in graphs:
        for tensor in graph.initializer:
            types[tensor.name] = helper.make_tensor_value_info(
                tensor.name, tensor.data_type, tensor.dims
            )
    return types
