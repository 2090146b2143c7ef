"""Unrolls Scan and Loop, which TVM's importer lacks.

An iteration that a computed condition may end becomes an If.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmflow.frontends.onnx._large_tensors import array_of
from tvmflow.frontends.onnx.graph import (
    KnownValues,
    Replacement,
    attributes_of,
    branch_nodes,
    is_if,
    is_standard,
    known_values,
    list_branches,
    make_evaluator,
    names_read,
    opset_of,
    rename_captured,
    replace_nodes,
    subgraphs,
)

# Older ones have another form, with a batch.
_OLDEST_SCAN_OPSET: Final = 9
# Unsqueeze takes its axes as an input from here on.
_AXES_INPUT_OPSET: Final = 13
MAX_UNROLLED_NODES: Final = 4096
"""The most nodes of an unrolled loop: more take minutes to compile."""

# Of a model, when loops in loops become many.
_MAX_NODES: Final = 4 * MAX_UNROLLED_NODES


def unroll_loops(model: ModelProto) -> ModelProto:
    """Replace each Scan and Loop of the main graph by its iterations.

    Others stay: those whose number of iterations is unknown or too large.
    """
    if not any(node.op_type in _UNROLLERS for node in model.graph.node):
        return model
    known, opset = known_values(model), opset_of(model)
    _drop_unused_outputs(model)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        can_unroll = is_standard(node) and len(nodes) <= _MAX_NODES
        unroll = _UNROLLERS.get(node.op_type) if can_unroll else None
        iterations = unroll(node, known, opset) if unroll else None
        nodes += [node] if iterations is None else iterations.nodes
        model.graph.initializer.extend(iterations.weights if iterations else [])
    replace_nodes(model.graph, nodes)
    # branches in a body are the same graphs in every iteration
    return name_branch_values(model) if any(list_branches(model.graph)) else model


def _drop_unused_outputs(model: ModelProto) -> None:
    """Remove the names of those outputs of loops that nothing reads."""
    used = {value.name for value in model.graph.output}
    for node in model.graph.node:
        used |= names_read(node)
    for node in model.graph.node:
        if node.op_type in _UNROLLERS and is_standard(node):
            node.output[:] = [name if name in used else "" for name in node.output]


class _Iterations(Replacement):
    """The iterations of a loop, as nodes of the main graph, and the weights of its body."""

    def __init__(self, node: NodeProto, body: GraphProto, opset: int) -> None:
        super().__init__(node)
        self._body = body
        self._opset = opset
        self.weights: list[TensorProto] = []
        for tensor in body.initializer:
            self.weights.append(TensorProto.FromString(tensor.SerializeToString()))
            self.weights[-1].name = f"{self._prefix}.{tensor.name}"

    def run_body(self, iteration: int, arguments: Sequence[str]) -> list[str]:
        inputs = (value.name for value in self._body.input)
        names = dict(zip(inputs, arguments, strict=True))
        names |= {t.name: f"{self._prefix}.{t.name}" for t in self._body.initializer}
        for node in self._body.node:
            names |= {n: f"{self._prefix}.{iteration}.{n}" for n in node.output if n}
            copy = NodeProto.FromString(node.SerializeToString())
            copy.input[:] = [names.get(name, name) for name in node.input]
            copy.output[:] = [names.get(name, name) for name in node.output]
            for graph in subgraphs(copy):
                rename_captured(graph, names)
            self.nodes.append(copy)
        return [names.get(value.name, value.name) for value in self._body.output]

    def run_body_if(self, iteration: int, arguments: Sequence[str], count: int) -> list[str]:
        """Add an If that runs one iteration while the loop lasts, and return the names of its results.

        The arguments are the number of the iteration, the condition, and the states; the first `count` results, the condition
        and the states, are kept.
        """
        start = len(self.nodes)
        results = self.run_body(iteration, arguments)[:count]
        nodes = self.nodes[start:]
        del self.nodes[start:]
        false = numpy_helper.from_array(np.asarray(False))
        names = [f"{self._prefix}.{iteration}.state{n}" for n in range(count)]
        stop = helper.make_node("Constant", [], [f"{names[0]}.kept"], value=false)
        branches = {
            "then_branch": (nodes, [self._as_condition(results[0], nodes), *results[1:]], "new"),
            "else_branch": ([stop], [stop.output[0], *arguments[2:]], "kept"),
        }
        graphs = {
            branch: _branch(content, values, [f"{name}.{suffix}.out" for name in names])
            for branch, (content, values, suffix) in branches.items()
        }
        label = f"{self._prefix} iteration {iteration}"
        self.nodes.append(helper.make_node("If", [arguments[1]], names, label, **graphs))
        return names

    def _as_condition(self, name: str, nodes: list[NodeProto]) -> str:
        """Return a condition, which may be a vector of one element, as a scalar."""
        shape = numpy_helper.from_array(np.zeros(0, np.int64))
        nodes.append(helper.make_node("Constant", [], [f"{name}.scalar"], value=shape))
        nodes.append(helper.make_node("Reshape", [name, f"{name}.scalar"], [f"{name}.reshaped"]))
        return f"{name}.reshaped"

    def stack(self, values: Sequence[str], axis: int, output: str) -> None:
        if not output:
            return
        if self._opset >= _AXES_INPUT_OPSET:
            axes = self.constant([axis])
            wide = [self.add("Unsqueeze", value, axes) for value in values]
        else:
            wide = [self.add("Unsqueeze", value, axes=[axis]) for value in values]
        self.add("Concat", *wide, output=output, axis=axis)

    def finish(self, states: Sequence[str], outputs: Sequence[str]) -> None:
        """Give the last states the names of the loop's outputs."""
        for state, output in zip(states, outputs, strict=False):
            if output:
                self.add("Identity", state, output=output)


def _branch(nodes: Sequence[NodeProto], values: Sequence[str], names: Sequence[str]) -> GraphProto:
    """Return a branch of an If that returns values by new names; they may be of the graph around it."""
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
    stacked: list[list[str]] = [[] for _ in node.output[len(states) :]]
    for step in range(length):
        elements = [
            unrolled.add(
                "Gather", name, unrolled.constant(length - 1 - step if back else step), axis=axis
            )
            for name, axis, back in zip(sequences, input_axes, backward, strict=True)
        ]
        results = unrolled.run_body(step, [*states, *elements])
        states = results[: len(states)]
        for values, result in zip(stacked, results[len(states) :], strict=True):
            values.append(result)
    axes = attributes.get("scan_output_axes", [0] * len(stacked))
    reverse = attributes.get("scan_output_directions", [0] * len(stacked))
    outputs = node.output[len(states) :]
    for values, axis, back, output in zip(stacked, axes, reverse, outputs, strict=True):
        unrolled.stack(values[::-1] if back else values, axis, output)
    unrolled.finish(states, node.output[: len(states)])
    return unrolled


def _loop(node: NodeProto, known: KnownValues, opset: int) -> _Iterations | None:
    body = attributes_of(node)["body"]
    condition, *states = node.input[1:]
    stacked: list[list[str]] = [[] for _ in node.output[len(states) :]]
    trips = count_trips(node, known, opset, MAX_UNROLLED_NODES // _count_nodes(body))
    if trips is None or not _can_unroll(body, max(1, trips.most)):
        return None
    # Outputs that are stacked must have a length that is known, and an element.
    if any(node.output[len(states) :]) and not (trips.is_exact and trips.most):
        return None
    unrolled = _Iterations(node, body, opset)
    condition = condition or unrolled.add(
        "Constant", value=numpy_helper.from_array(np.asarray(True))
    )
    for step in range(trips.most):
        arguments = [unrolled.constant(step), condition, *states]
        if trips.is_exact:
            _, *results = unrolled.run_body(step, arguments)
        else:
            condition, *results = unrolled.run_body_if(step, arguments, 1 + len(states))
        states = results[: len(states)]
        for values, result in zip(stacked, results[len(states) :], strict=False):
            values.append(result)
    for values, output in zip(stacked, node.output[len(states) :], strict=True):
        unrolled.stack(values, 0, output)
    unrolled.finish(states, node.output[: len(states)])
    return unrolled


def _can_unroll(body: GraphProto, count: int) -> bool:
    return 0 < count * _count_nodes(body) <= MAX_UNROLLED_NODES


def _count_nodes(graph: GraphProto) -> int:
    """Return the number of nodes of a graph and of all graphs in it; at least 1."""
    inner = (inner for node in graph.node for inner in subgraphs(node))
    return max(1, len(graph.node) + sum(_count_nodes(graph) for graph in inner if graph.node))


_UNROLLERS: Final[Mapping[str, Callable[[NodeProto, KnownValues, int], _Iterations | None]]] = {
    "Loop": _loop,
    "Scan": _scan,
}


# ---------------------------------------------------------------- trips
# Counts the iterations of a Loop, as far as its condition is computed from constants and counters.


# What computes counters and conditions; none of them makes much of little.
_OPERATORS: Final = frozenset(
    "Add And Cast Constant Div Equal Greater GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul "
    "Neg Not Or Reshape Squeeze Sub Unsqueeze".split()
)
_MAX_COUNTER_ELEMENTS: Final = 1024

_Arrays = Mapping[str, np.ndarray[Any, Any]]
_Evaluator = Callable[[_Arrays], list[np.ndarray[Any, Any]]]


class Trips(NamedTuple):
    """The limit of the iterations of a loop, and whether each call reaches it."""

    most: int
    is_exact: bool


def count_trips(node: NodeProto, known: KnownValues, opset: int, limit: int) -> Trips | None:
    """Return the iterations of a Loop up to a limit; None if nothing known limits them."""
    body = attributes_of(node)["body"]
    most, start = (known.constants.get(name) for name in node.input[:2])
    starts = not node.input[1] or (start is not None and bool(start.all()))
    if (most is not None and most.item() <= 0) or (start is not None and not starts):
        return Trips(0, is_exact=True)
    counters = _Counters(node, body, known)
    counts = [int(most.item())] if most is not None else []
    try:
        computed = counters.count(min([limit, *counts]), opset)
    except Exception:
        # The evaluator raises many kinds of errors for operands that do not fit.
        return None
    counts += [computed] if computed is not None else []
    return Trips(min(counts), is_exact=starts and counters.is_whole) if counts else None


class _Counters:
    """The states of a loop that are computed from constants alone, and what is known of its condition.

    Attributes:
        is_whole: Whether the whole condition is known, or else only some of what it combines by And.
    """

    def __init__(self, node: NodeProto, body: GraphProto, known: KnownValues) -> None:
        self._nodes = list(body.node)
        self._makers = {name: n for n in body.node for name in n.output if name}
        self._number, condition, *states = (value.name for value in body.input)
        last, *results = (value.name for value in body.output)
        self._constants = {n: a for n, a in known.constants.items() if n not in states}
        self._constants |= {tensor.name: array_of(tensor) for tensor in body.initializer}
        self._constants[condition] = np.asarray(True)
        initial = zip(states, node.input[2:], results, strict=False)
        self._initial = {s: known.constants[i] for s, i, _ in initial if i in known.constants}
        self._next = dict(zip(states, results, strict=False))
        while unknown := [s for s in self._initial if not self._is_known(self._next[s])]:
            for state in unknown:
                del self._initial[state]
        parts = list(self._conjuncts(last))
        self._parts = [part for part in parts if self._is_known(part)]
        self.is_whole = len(parts) == len(self._parts)

    def count(self, limit: int, opset: int) -> int | None:
        """Return after how many iterations, up to a limit, the condition is known to be false, or None."""
        if not self._parts:
            return None
        values = self._initial
        run = self._evaluator([*self._parts, *(self._next[state] for state in values)], opset)
        for step in range(limit):
            constants = {**self._constants, **values, self._number: np.asarray(step, np.int64)}
            results = run(constants)
            parts = results[: len(self._parts)]
            if not all(part.all() for part in parts):
                return step + 1
            values = dict(zip(values, results[len(parts) :], strict=True))
            if any(value.size > _MAX_COUNTER_ELEMENTS for value in values.values()):
                self.is_whole = False
                return None
        return None

    def _conjuncts(self, name: str) -> Iterator[str]:
        """Give the values of which a condition is the And."""
        node = self._makers.get(name)
        if node is not None and node.op_type in ("And", "Identity") and is_standard(node):
            for operand in node.input:
                yield from self._conjuncts(operand)
        else:
            yield name

    def _is_known(self, name: str) -> bool:
        """Return whether only constants, counters and the number of the iteration make a value."""
        pending, seen = [name], {name}
        while pending:
            value = pending.pop()
            node = self._makers.get(value)
            if node is not None:
                if node.op_type not in _OPERATORS or not is_standard(node):
                    return False
                pending += [n for n in node.input if n and n not in seen]
                seen.update(node.input)
            elif value not in self._initial and value not in (*self._constants, self._number):
                return False
        return True

    def _evaluator(self, values: Sequence[str], opset: int) -> _Evaluator:
        """Return a function that computes values of the body for the number of an iteration."""
        needed, kept = set(values), []
        for node in reversed(self._nodes):
            if not needed.isdisjoint(node.output):
                kept.append(node)
                needed.update(name for name in node.input if name)
        # values that no node of the body computes need one to be outputs
        copies = [
            helper.make_node("Identity", [v], [f"{n} of trips"]) for n, v in enumerate(values)
        ]
        leaves = sorted(needed - self._makers.keys())
        model = helper.make_model(
            helper.make_graph(
                [*reversed(kept), *copies],
                "trips",
                [helper.make_empty_tensor_value_info(name) for name in leaves],
                [helper.make_empty_tensor_value_info(node.output[0]) for node in copies],
            ),
            opset_imports=[helper.make_opsetid("", opset)],
        )
        run = make_evaluator(model)
        return lambda known: list(map(np.asarray, run({name: known[name] for name in leaves})))


# ---------------------------------------------------------------- branches
# The branches of `If`: those whose condition is known are inlined, all others are simplified like
# a model.
#
# Values in branches get names that are unique in the whole model, and constants in them become
# weights of the main graph, which has the parameters of the library.


_Simplify = Callable[[ModelProto], ModelProto]


def name_branch_values(model: ModelProto) -> ModelProto:
    """Give values in branches names that no other graph has; move constants to the main graph."""
    taken = {tensor.name for tensor in model.graph.initializer}
    taken.update(value.name for value in model.graph.input)
    taken.update(name for node in model.graph.node for name in node.output)
    for branch in list_branches(model.graph):
        _name_values(branch, taken)
        _move_constants(branch, model)
    return model


def _name_values(graph: GraphProto, taken: set[str]) -> None:
    names: dict[str, str] = {}
    made = [tensor.name for tensor in graph.initializer]
    made += [name for node in graph.node for name in node.output if name]
    for name in made:
        unique, count = name, 0
        while unique in taken:
            count += 1
            unique = f"{name}_{count}"
        taken.add(unique)
        names[name] = unique
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
    rename_captured(graph, names)
    for branch in list_branches(graph):
        _name_values(branch, taken)


def _move_constants(graph: GraphProto, model: ModelProto) -> None:
    model.graph.initializer.extend(graph.initializer)
    del graph.initializer[:]
    for branch in list_branches(graph):
        _move_constants(branch, model)


def inline_known_branches(model: ModelProto) -> ModelProto:
    """Replace each If with a constant condition by the branch that is taken."""
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


def simplify_branches(model: ModelProto, simplify: _Simplify) -> ModelProto:
    """Simplify every branch as a model of its own, whose inputs are the values that it captures."""
    values = {value.name: value for value in (*model.graph.input, *model.graph.value_info)}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    branches = list(list_branches(model.graph))
    for branch in branches:
        captured = sorted(_captured(branch))
        single = helper.make_model(
            branch, opset_imports=model.opset_import, ir_version=model.ir_version
        )
        for name in captured:
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
    """Return the names that a branch reads, or returns, and does not make."""
    read = {value.name for value in graph.output}
    for node in graph.node:
        read.update(name for name in node.input if name)
    for branch in list_branches(graph):
        read |= _captured(branch)
    return read.difference(*(node.output for node in graph.node))
