"""Inlines the functions of an ONNX model, unrolls its loops, and simplifies its branches."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, helper, version_converter

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import count_text, excerpt, quoted, size_text
from tvmflow.core.types import Array
from tvmflow.custom_operators.definition import standard_domain
from tvmflow.frontends.onnx._header import MAX_NODES
from tvmflow.frontends.onnx.graph import (
    KnownValues,
    Replacement,
    all_graphs,
    array_of,
    attributes_of,
    branch_nodes,
    declare,
    graphs_in,
    is_if,
    is_standard,
    known_values,
    list_branches,
    make_evaluator,
    make_single,
    names_read,
    names_used,
    node_name,
    opset_of,
    rename_captured,
    rename_node,
    replace_nodes,
    set_entries,
    subgraphs,
    versions_of,
    with_inner_graphs,
    with_inner_nodes,
)

# ---------------------------------------------------------------- functions


_Id = tuple[str, str, str]
# A domain that hides operators from ONNX's version converter.
_LATER_DOMAIN: Final = "tvmflow.later"
_GRAPHS: Final = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
# Limits for inlined calls. Protobuf reads 100 nested messages, and each graph inside a node adds 3 levels.
_MAX_BYTES: Final = 1 << 28
_MAX_DEPTH: Final = 30


def inline_functions(model: ModelProto) -> ModelProto:
    """Replace calls of the model's functions by their bodies, in the newest opset that any of them uses."""
    if not model.functions:
        return model
    inlined = copy.deepcopy(model)
    functions = {function_id(function): function for function in inlined.functions}
    called = list(_list_called(inlined.graph.node, functions))
    opsets = [versions_of(owner.opset_import).get("") for owner in (model, *called)]
    opset = max((version for version in opsets if version is not None), default=opset_of(model))
    if versions_of(model.opset_import).get("", opset) != opset:
        inlined = _convert(inlined, opset, "the model")
    inliner = _Inliner(inlined, functions, opset)
    # Each round inlines the visible calls, which makes the calls inside those functions visible.
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
    """Return whether an operator of a called function behaves differently in the model's own opset."""
    functions = {function_id(function): function for function in model.functions}
    opset = opset_of(model)
    return any(
        _changes(function.node, versions_of(function.opset_import).get("", opset), opset)
        for function in _list_called(model.graph.node, functions)
    )


def function_id(entry: FunctionProto | NodeProto) -> _Id:
    """Return the key that a function and its calls share: domain, name and overload."""
    is_function = isinstance(entry, FunctionProto)
    name = entry.name if is_function else entry.op_type
    return standard_domain(entry.domain), str(name), str(entry.overload)


def _list_called(
    nodes: Iterable[NodeProto], functions: Mapping[_Id, FunctionProto]
) -> Iterator[FunctionProto]:
    """Yield each function that the nodes call, directly or through other functions."""
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
        self._taken: set[str] = set()
        for graph in with_inner_graphs(model.graph):
            self._taken.update(value.name for value in (*graph.input, *graph.initializer))
            self._taken.update(name for node in graph.node for name in node.output)
        self._types: Mapping[str, onnx.ValueInfoProto] = {}
        self._numbers: Counter[str] = Counter()
        self._nodes = len(list(with_inner_nodes(model.graph.node)))
        self._bytes = 0

    def inline_calls(self) -> bool:
        """Replace all calls in the graph; return whether there were any."""
        nodes = with_inner_nodes(self._model.graph.node)
        called = [f for node in nodes if (f := self._functions.get(function_id(node)))]
        if any(self._needs_conversion(function) for function in called):
            self._types = _infer_types(self._model)
        self._inline(self._model.graph)
        return bool(called)

    def _inline(self, graph: GraphProto, depth: int = 0) -> None:
        """Replace the calls in a graph and its subgraphs; calls in the inserted bodies stay."""
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
        """Check in advance that the inlined body of a call keeps the model within its limits."""
        given, body = _list_attributes(call, function), list(with_inner_nodes(function.node))
        references = (a.ref_attr_name for node in body for a in node.attribute)
        used = [given[name] for name in references if name in given]
        copied = [n for graph in graphs_in(used) for n in with_inner_nodes(graph.node)]
        self._nodes += len(body) + len(copied) - len(list(with_inner_nodes([call])))
        names = sum(len(node.input) + len(node.output) for node in (*body, *copied))
        self._bytes += function.ByteSize() + sum(a.ByteSize() for a in used)
        self._bytes += len(_prefix(call, function)) * names
        problem = ""
        if self._nodes > MAX_NODES:
            problem = f"one of {self._nodes:,} nodes, and the limit is {MAX_NODES:,}"
        elif self._bytes > _MAX_BYTES:
            sizes = map(size_text, (self._bytes, _MAX_BYTES))
            problem = "hold copies of {}, and the limit is {}".format(*sizes)
        elif depth + _depth(function.node) + _depth([call]) > _MAX_DEPTH:
            problem = f"one of graphs nested more than {_MAX_DEPTH} levels deep"
        if problem:
            start = f"the call of the function {quoted(function.name)} by node {node_name(call)}"
            text = f"{start} makes the model {problem}"
            raise ImportFailed(text, fix="export the model without functions")

    def _needs_conversion(self, function: FunctionProto) -> bool:
        version = versions_of(function.opset_import).get("", self._opset)
        return version != self._opset and _changes(function.node, version, self._opset)

    def _expand(self, call: NodeProto, function: FunctionProto) -> list[NodeProto]:
        _check_call(call, function)
        attributes = _list_attributes(call, function)
        nodes = [copy.deepcopy(node) for node in function.node]
        _bind(nodes, {k: a for k, a in attributes.items() if a.type not in _GRAPHS})
        if self._needs_conversion(function):
            nodes = self._convert_nodes(nodes, call, function)
        actual = [*call.input, *[""] * (len(function.input) - len(call.input))]
        scope = dict(zip(function.input, actual, strict=True))
        returned = dict(zip(function.output, call.output, strict=False))
        scope |= {name: to for name, to in returned.items() if to and name not in function.input}
        prefix = _prefix(call, function)
        self._rename(nodes, scope, prefix)
        for node in nodes:
            node.name = f"{call.name}/{node.name}" if call.name and node.name else node.name
        # Graphs in the call's attributes use the names of the caller's scope.
        self._bind_graphs(nodes, {k: a for k, a in attributes.items() if a.type in _GRAPHS}, prefix)
        for name, to in returned.items():
            if to and name in function.input:
                nodes.append(helper.make_node("Identity", [scope[name]], [to]))
        return nodes

    def _rename(self, nodes: Iterable[NodeProto], scope: dict[str, str], prefix: str) -> None:
        """Give all results of nodes unique names, and record these in the scope."""
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
            # A result shadows an outer value of the same name.
            for name in node.output:
                scope.pop(name, None)
            self._rename([node], scope, prefix)
        # The recorded shapes are for other inputs.
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
        self, nodes: Iterable[NodeProto], attributes: Mapping[str, onnx.AttributeProto], prefix: str
    ) -> None:
        """Replace references to graph attributes by copies of the graphs with unique names."""
        used = [node for node in with_inner_nodes(nodes) if any(map(_refers, node.attribute))]
        _bind(used, attributes, drops_missing=True)
        for node in used:
            for graph in subgraphs(node):
                self._rename_graph(graph, {}, prefix)

    def _convert_nodes(
        self, nodes: Sequence[NodeProto], call: NodeProto, function: FunctionProto
    ) -> list[NodeProto]:
        """Return the nodes of a function, converted to the model's opset."""
        title = f"the function {quoted(function.name)} (called by node {node_name(call)})"
        versions = versions_of(function.opset_import)
        if any(map(_refers, (a for node in with_inner_nodes(nodes) for a in node.attribute))):
            raise ImportFailed(
                f"{title} has the opset {versions['']} and a graph as an attribute, which cannot be converted",
                fix=f"export its functions with opset {self._opset}",
            )
        inputs = [onnx.ValueInfoProto(name=name) for name in function.input]
        for value, actual in zip(inputs, call.input, strict=False):
            if actual in self._types:
                value.type.CopyFrom(self._types[actual].type)
        outputs = [onnx.ValueInfoProto(name=name) for name in function.output]
        graph = helper.make_graph(nodes, function.name, inputs, outputs)
        imports = [helper.make_opsetid(*entry) for entry in versions.items()]
        made = helper.make_model(graph, opset_imports=imports, ir_version=self._model.ir_version)
        converted = _convert(made, self._opset, title).graph
        weights = converted.initializer
        constants = [helper.make_node("Constant", [], [t.name], value=t) for t in weights]
        return [*constants, *converted.node]


def _list_attributes(call: NodeProto, function: FunctionProto) -> dict[str, onnx.AttributeProto]:
    return {a.name: a for a in (*function.attribute_proto, *call.attribute)}


def _prefix(call: NodeProto, function: FunctionProto) -> str:
    return f"{call.name or next(filter(None, call.output), function.name)}/"


def _depth(nodes: Iterable[NodeProto]) -> int:
    return max((1 + _depth(g.node) for node in nodes for g in subgraphs(node)), default=0)


def _check_call(call: NodeProto, function: FunctionProto) -> None:
    for noun in ("input", "output"):
        given, known = getattr(call, noun), getattr(function, noun)
        if len(given) > len(known):
            raise ImportFailed(
                f"the model is not valid ONNX: the node {node_name(call)} has {count_text(len(given), noun)}, "
                f"and its function {quoted(function.name)} has {len(known)}"
            )


def _refers(attribute: onnx.AttributeProto) -> bool:
    return bool(attribute.ref_attr_name)


def _bind(
    nodes: Iterable[NodeProto],
    attributes: Mapping[str, onnx.AttributeProto],
    *,
    drops_missing: bool = False,
) -> None:
    """Replace references to attributes of a function by their values.

    A reference without a value is removed; a reference to a graph is removed only with `drops_missing`.
    """
    for node in with_inner_nodes(nodes):
        bound = []
        for attribute in node.attribute:
            value = attributes.get(attribute.ref_attr_name) if _refers(attribute) else attribute
            if value is None and attribute.type in _GRAPHS and not drops_missing:
                value = attribute
            if value is not None:
                bound.append(copy.deepcopy(value))
                bound[-1].name = attribute.name
        set_entries(node.attribute, bound)


# ---------------------------------------------------------------- opsets


def _since(node: NodeProto, opset: int) -> int:
    """Return the opset of an operator's last change up to `opset`; 0 if `opset` lacks the operator."""
    if not onnx.defs.has(node.op_type, opset, ""):
        return 0
    return int(onnx.defs.get_schema(node.op_type, opset, "").since_version)


def _changes(nodes: Iterable[NodeProto], version: int, opset: int) -> bool:
    standard = [node for node in with_inner_nodes(nodes) if is_standard(node)]
    return any(0 < _since(node, version) != _since(node, opset) for node in standard)


def _convert(model: ModelProto, opset: int, title: str) -> ModelProto:
    """Convert a model to a newer opset; operators that its own opset lacks are left unchanged."""
    version = opset_of(model)
    if not _changes(model.graph.node, version, opset):
        return model
    model = copy.deepcopy(model)
    for node in with_inner_nodes(model.graph.node):
        if is_standard(node) and not _since(node, version):
            node.domain = _LATER_DOMAIN
    model.opset_import.append(helper.make_opsetid(_LATER_DOMAIN, 1))
    try:
        converted = version_converter.convert_version(model, opset)
    except Exception as error:
        # The converter raises many types of exceptions.
        raise ImportFailed(
            f"{title} has the opset {version}, which cannot be converted to {opset}, the newest one "
            f"of the model and its functions: {excerpt(str(error))}",
            fix=f"export the model and its functions with opset {opset}",
        ) from error
    for node in with_inner_nodes(converted.graph.node):
        node.domain = "" if node.domain == _LATER_DOMAIN else node.domain
    return converted


def _infer_types(model: ModelProto) -> Mapping[str, onnx.ValueInfoProto]:
    # The converter needs no types for most operators, so shape inference may fail.
    with contextlib.suppress(Exception):
        model = onnx.shape_inference.infer_shapes(model)
    graphs = list(with_inner_graphs(model.graph))
    values = [v for graph in graphs for v in (*graph.input, *graph.value_info, *graph.output)]
    weights = [tensor for graph in graphs for tensor in graph.initializer]
    types = {value.name: value for value in values if value.HasField("type")}
    return types | {tensor.name: declare(tensor) for tensor in weights}


# ---------------------------------------------------------------- loops
# TVM's importer supports neither Scan nor Loop. If the loop condition is computed, each iteration becomes an If.


# Scan in older opsets has a batch axis.
_OLDEST_SCAN_OPSET: Final = 9
# From this opset on, Unsqueeze takes its axes as an input.
_AXES_INPUT_OPSET: Final = 13
MAX_UNROLLED_NODES: Final = 4096
"""The maximum number of nodes of one unrolled loop: more take minutes to compile."""

# The same limit for all loops of a model, because nested loops multiply.
_MAX_UNROLLED_NODES: Final = 4 * MAX_UNROLLED_NODES


def unroll_loops(model: ModelProto) -> ModelProto:
    """Replace each Scan and Loop of the main graph by its iterations, if these are known and few."""
    if not any(node.op_type in _UNROLLERS for node in model.graph.node):
        return model
    known, opset = known_values(model), opset_of(model)
    used = names_used(model.graph)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.op_type in _UNROLLERS and is_standard(node):
            node.output[:] = [name if name in used else "" for name in node.output]
        can_unroll = is_standard(node) and len(nodes) <= _MAX_UNROLLED_NODES
        unroll = _UNROLLERS.get(node.op_type) if can_unroll else None
        iterations = unroll(node, known, opset) if unroll else None
        nodes += [node] if iterations is None else iterations.nodes
        model.graph.initializer.extend(iterations.weights if iterations else [])
    replace_nodes(model.graph, nodes)
    # A branch inside the body is copied with the same names into every iteration.
    return name_branch_values(model) if any(list_branches(model.graph)) else model


class _Iterations(Replacement):
    """The unrolled iterations of a loop: nodes for the main graph, and the weights of the body."""

    def __init__(self, node: NodeProto, body: GraphProto, opset: int) -> None:
        super().__init__(node)
        self._body = body
        self._opset = opset
        self.weights: list[onnx.TensorProto] = []
        for tensor in body.initializer:
            self.weights.append(copy.deepcopy(tensor))
            self.weights[-1].name = f"{self._prefix}.{tensor.name}"

    def run_body(self, iteration: int, arguments: Sequence[str]) -> list[str]:
        inputs = (value.name for value in self._body.input)
        names = dict(zip(inputs, arguments, strict=True))
        names |= {t.name: f"{self._prefix}.{t.name}" for t in self._body.initializer}
        for node in self._body.node:
            names |= {n: f"{self._prefix}.{iteration}.{n}" for n in node.output if n}
            self.nodes.append(copy.deepcopy(node))
            rename_node(self.nodes[-1], names)
            self.nodes[-1].output[:] = [names.get(name, name) for name in node.output]
        return [names.get(value.name, value.name) for value in self._body.output]

    def run_body_if(self, iteration: int, arguments: Sequence[str], count: int) -> list[str]:
        """Add an If that runs one iteration if the loop's condition still holds; return its results' names.

        The arguments are iteration number, condition and states. The results are the first `count` results of the body:
        the condition, then the states.
        """
        outer, self.nodes = self.nodes, []
        results = self.run_body(iteration, arguments)[:count]
        # The condition may be a vector with one element, but an If needs a scalar.
        scalar = self.constant(np.zeros(0, np.int64), f"{results[0]}.scalar")
        results[0] = self.add("Reshape", results[0], scalar, output=f"{results[0]}.reshaped")
        names = [f"{self._prefix}.{iteration}.state{n}" for n in range(count)]
        new = _branch(self.nodes, results, [f"{name}.new.out" for name in names])
        self.nodes = []
        states = [self.constant(False, f"{names[0]}.kept"), *arguments[2:]]
        kept = _branch(self.nodes, states, [f"{name}.kept.out" for name in names])
        label = f"{self._prefix} iteration {iteration}"
        branches = {"then_branch": new, "else_branch": kept}
        self.nodes = [*outer, helper.make_node("If", [arguments[1]], names, label, **branches)]
        return names

    def finish(
        self,
        states: Sequence[str],
        rows: Sequence[Sequence[str]],
        axes: Iterable[int] = itertools.repeat(0),
        backward: Iterable[int] = itertools.repeat(0),
    ) -> None:
        """Add the loop's results: the last states, and the further results of all iterations, stacked."""
        stacked = self.node.output[len(states) :]
        for output, values, axis, back in zip(
            stacked, zip(*rows, strict=True), axes, backward, strict=False
        ):
            if output:
                self._stack(values[::-1] if back else values, axis, output)
        for state, output in zip(states, self.node.output, strict=False):
            if output:
                self.add("Identity", state, output=output)

    def _stack(self, values: Sequence[str], axis: int, output: str) -> None:
        if self._opset >= _AXES_INPUT_OPSET:
            axes = self.constant([axis])
            wide = [self.add("Unsqueeze", value, axes) for value in values]
        else:
            wide = [self.add("Unsqueeze", value, axes=[axis]) for value in values]
        self.add("Concat", *wide, output=output, axis=axis)


def _branch(nodes: Sequence[NodeProto], values: Sequence[str], names: Sequence[str]) -> GraphProto:
    """Return a branch of an If that returns the given values, which may be outer ones, under new names."""
    copies = [helper.make_node("Identity", [v], [n]) for v, n in zip(values, names, strict=True)]
    outputs = [helper.make_empty_tensor_value_info(name) for name in names]
    return helper.make_graph([*nodes, *copies], names[0], [], outputs)


def _scan(node: NodeProto, known: KnownValues, opset: int) -> _Iterations | None:
    attributes = attributes_of(node)
    body, count = attributes["body"], attributes["num_scan_inputs"]
    states, sequences = list(node.input[:-count]), list(node.input[-count:])
    shapes = [known.shapes.get(name) for name in sequences]
    input_axes = attributes.get("scan_input_axes", [0] * count)
    shape = shapes[0]
    if opset < _OLDEST_SCAN_OPSET or shape is None:
        return None
    length = shape[input_axes[0]]
    if not _can_unroll(body, length):
        return None
    backward = attributes.get("scan_input_directions", [0] * count)
    unrolled = _Iterations(node, body, opset)
    rows = []
    for step in range(length):
        elements = []
        for name, axis, back in zip(sequences, input_axes, backward, strict=True):
            index = unrolled.constant(length - 1 - step if back else step)
            elements.append(unrolled.add("Gather", name, index, axis=axis))
        results = unrolled.run_body(step, [*states, *elements])
        rows.append(results[len(states) :])
        states = results[: len(states)]
    of_outputs = ("scan_output_axes", "scan_output_directions")
    unrolled.finish(states, rows, *(attributes.get(n, itertools.repeat(0)) for n in of_outputs))
    return unrolled


def _loop(node: NodeProto, known: KnownValues, opset: int) -> _Iterations | None:
    body = attributes_of(node)["body"]
    condition, *states = node.input[1:]
    trips = _count_trips(node, known, opset, MAX_UNROLLED_NODES // _count_nodes(body))
    if trips is None or not _can_unroll(body, max(1, trips.most)):
        return None
    # Stacked outputs need an exact number of iterations, and at least one.
    if any(node.output[len(states) :]) and not (trips.is_exact and trips.most):
        return None
    unrolled = _Iterations(node, body, opset)
    condition, rows = condition or unrolled.constant(True), []
    for step in range(trips.most):
        arguments = [unrolled.constant(step), condition, *states]
        if trips.is_exact:
            _, *results = unrolled.run_body(step, arguments)
        else:
            condition, *results = unrolled.run_body_if(step, arguments, 1 + len(states))
        rows.append(results[len(states) :])
        states = results[: len(states)]
    unrolled.finish(states, rows)
    return unrolled


def _can_unroll(body: GraphProto, count: int) -> bool:
    return 0 < count * _count_nodes(body) <= MAX_UNROLLED_NODES


def _count_nodes(graph: GraphProto) -> int:
    """Return the number of nodes of a graph, including nested graphs; at least 1."""
    inner = (inner for node in graph.node for inner in subgraphs(node))
    return max(1, len(graph.node) + sum(_count_nodes(graph) for graph in inner if graph.node))


_UNROLLERS: Final[Mapping[str, Callable[[NodeProto, KnownValues, int], _Iterations | None]]] = {
    "Loop": _loop,
    "Scan": _scan,
}


# ---------------------------------------------------------------- trips


# Operators that compute counters and conditions; no result is larger than its operands.
_OPERATORS: Final = frozenset(
    "Add And Cast Constant Div Equal Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul "
    "Neg Not Or Reshape Squeeze Sub Unsqueeze".split()
)
_MAX_COUNTER_ELEMENTS: Final = 1024


class Trips(NamedTuple):
    """The largest possible number of a loop's iterations, and whether it always runs that many."""

    most: int
    is_exact: bool


def _count_trips(node: NodeProto, known: KnownValues, opset: int, limit: int) -> Trips | None:
    """Return a Loop's iterations, up to a limit; None if they do not follow from constants and counters.

    The condition may be an And with some known operands: the first false one ends the loop at the latest.
    """
    body = attributes_of(node)["body"]
    most, start = (known.constants.get(name) for name in node.input[:2])
    starts = not node.input[1] or (start is not None and bool(start.all()))
    if (most is not None and most.item() <= 0) or (start is not None and not starts):
        return Trips(0, is_exact=True)
    counts = [int(most.item())] if most is not None else []
    parts, is_whole = list(_conjuncts(body, body.output[0].name)), True
    iterations = range(min([limit, *counts]))
    for step, values in zip(iterations, _follow_counters(node, body, known, opset), strict=False):
        found = [values[part] for part in parts if part in values]
        is_whole = is_whole and len(found) == len(parts)
        if not found:
            break
        if not all(part.all() for part in found):
            counts.append(step + 1)
            break
    return Trips(min(counts), is_exact=starts and is_whole) if counts else None


def _conjuncts(body: GraphProto, name: str) -> Iterator[str]:
    """Yield the operands of a condition that is an And; otherwise the condition itself."""
    node = next((node for node in body.node if name in node.output), None)
    if node is not None and node.op_type in ("And", "Identity") and is_standard(node):
        for operand in node.input:
            yield from _conjuncts(body, operand)
    else:
        yield name


def _follow_counters(
    node: NodeProto, body: GraphProto, known: KnownValues, opset: int
) -> Iterator[Mapping[str, Array]]:
    """Yield for each iteration of a Loop the small values that follow from constants and counters."""
    number, condition, *states = (value.name for value in body.input)
    made = {*states, *(name for inner in body.node for name in inner.output)}
    constants = {name: array for name, array in known.constants.items() if name not in made}
    constants |= {tensor.name: array_of(tensor) for tensor in body.initializer}
    constants[condition] = np.asarray(True)
    arguments = zip(states, node.input[2:], strict=False)
    counters = {s: known.constants[name] for s, name in arguments if name in known.constants}
    computed = [n for n in body.node if n.op_type in _OPERATORS and is_standard(n)]
    evaluators: dict[str, Callable[[Mapping[str, Any]], list[Any]]] = {}
    for step in itertools.count():
        values = {**constants, **counters, number: np.asarray(step, np.int64)}
        values = {name: v for name, v in values.items() if v.size <= _MAX_COUNTER_ELEMENTS}
        for inner in computed:
            read = {name: values.get(name) for name in inner.input if name}
            if all(array is not None for array in read.values()):
                # The evaluator raises many types of exceptions for operands that it cannot combine.
                with contextlib.suppress(Exception):
                    output = inner.output[0]
                    if output not in evaluators:
                        inputs = [helper.make_empty_tensor_value_info(name) for name in read]
                        single = make_single(inner, inputs, [], [helper.make_opsetid("", opset)])
                        evaluators[output] = make_evaluator(single)
                    values[output] = np.asarray(*evaluators[output](read))
        yield values
        following = zip(states, body.output[1:], strict=False)
        counters = {s: values[v.name] for s, v in following if s in counters and v.name in values}


# ---------------------------------------------------------------- branches
# If a condition is known, its branch is inlined. Other branches are simplified like models. Constants in branches
# become weights of the main graph, because only the main graph's weights become parameters of the library.


def name_branch_values(model: ModelProto) -> ModelProto:
    """Make the names of values in branches unique, and move constants to the main graph."""
    taken = {tensor.name for tensor in model.graph.initializer}
    taken.update(value.name for value in model.graph.input)
    taken.update(name for node in model.graph.node for name in node.output)
    for branch in list_branches(model.graph):
        _name_values(branch, taken)
        for graph in all_graphs(branch):
            model.graph.initializer.extend(graph.initializer)
            del graph.initializer[:]
    return model


def _name_values(graph: GraphProto, taken: set[str]) -> None:
    names: dict[str, str] = {}
    made = [tensor.name for tensor in graph.initializer]
    made += [name for node in graph.node for name in node.output if name]
    for name in made:
        numbered = (f"{name}_{count}" for count in itertools.count(1))
        names[name] = next(n for n in itertools.chain([name], numbered) if n not in taken)
        taken.add(names[name])
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
    rename_captured(graph, names)
    for branch in list_branches(graph):
        _name_values(branch, taken)


def inline_known_branches(model: ModelProto) -> ModelProto:
    known = known_values(model)
    kept: list[NodeProto] = []
    for node in model.graph.node:
        condition = known.constants.get(node.input[0]) if is_if(node) else None
        if condition is None or condition.size != 1:
            kept.append(node)
            continue
        branch = attributes_of(node)["then_branch" if condition.item() else "else_branch"]
        kept.extend(branch.node)
        for inner, outer in zip(branch.output, node.output, strict=True):
            if outer:
                kept.append(helper.make_node("Identity", [inner.name], [outer]))
    replace_nodes(model.graph, kept)
    return model


def simplify_branches(
    model: ModelProto, simplify: Callable[[ModelProto], ModelProto]
) -> ModelProto:
    """Simplify every branch as a separate model, whose inputs are the values that the branch captures."""
    values = {value.name: value for value in (*model.graph.input, *model.graph.value_info)}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    branches = list(list_branches(model.graph))
    own = {"opset_imports": model.opset_import, "ir_version": model.ir_version}
    for branch in branches:
        single = helper.make_model(branch, **own)
        for name in sorted(_captured(branch)):
            if name in constants:
                single.graph.initializer.append(constants[name])
            else:
                value = values.get(name) or helper.make_empty_tensor_value_info(name)
                single.graph.input.append(value)
        simple = simplify(single).graph
        new = [tensor for tensor in simple.initializer if tensor.name not in constants]
        constants.update((tensor.name, tensor) for tensor in new)
        model.graph.initializer.extend(new)
        del simple.initializer[:], simple.input[:]
        branch.CopyFrom(simple)
    return name_branch_values(model) if branches else model


def list_inputs_of(model: ModelProto, condition: str) -> list[str]:
    """Return the inputs of a model on which a condition depends."""
    makers = {name: node for node in branch_nodes(model) for name in node.output}
    pending, seen = [condition], {condition}
    while pending:
        node = makers.get(pending.pop())
        read = names_read(node) if node else set()
        pending += read - seen
        seen |= read
    return [value.name for value in model.graph.input if value.name in seen]


def _captured(graph: GraphProto) -> set[str]:
    """Return the names that a branch reads or returns without computing them."""
    read = {value.name for value in graph.output}.union(*(node.input for node in graph.node))
    read = read.union(*map(_captured, list_branches(graph)))
    return read.difference([""], *(node.output for node in graph.node))
