"""Unrolls Scan and Loop: TVM's importer has neither. An iteration that a computed condition may end becomes an If."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmflow.frontends.onnx._branches import name_branch_values
from tvmflow.frontends.onnx._graph import (
    KnownValues,
    attributes_of,
    captured_names,
    is_standard,
    known_values,
    list_branches,
    opset_of,
    rename_captured,
    replace_nodes,
    subgraphs,
)
from tvmflow.frontends.onnx._trips import count_trips

# Older ones have another form, with a batch.
_OLDEST_SCAN_OPSET: Final = 9
# Unsqueeze takes its axes as an input from here on.
_AXES_INPUT_OPSET: Final = 13
MAX_UNROLLED_NODES: Final = 4096
"""The most nodes of an unrolled loop: more take minutes to compile."""

# Of a model, when loops in loops become many.
_MAX_NODES: Final = 4 * MAX_UNROLLED_NODES


def unroll_loops(model: ModelProto) -> ModelProto:
    """Replace each Scan and Loop of the main graph by its iterations, where their number is known and not too large."""
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
    replace_nodes(model, nodes)
    # branches in a body are the same graphs in every iteration
    return name_branch_values(model) if any(list_branches(model.graph)) else model


def _drop_unused_outputs(model: ModelProto) -> None:
    """Remove the names of those outputs of loops that nothing reads."""
    used = {value.name for value in model.graph.output}
    for node in model.graph.node:
        used.update(node.input, captured_names(node))
    for node in model.graph.node:
        if node.op_type in _UNROLLERS and is_standard(node):
            node.output[:] = [name if name in used else "" for name in node.output]


class _Iterations:
    """The iterations of a loop, as nodes of the main graph.

    Attributes:
        nodes: The nodes.
        weights: The weights of the body.
    """

    def __init__(self, node: NodeProto, body: GraphProto, opset: int) -> None:
        self._prefix = next(filter(None, node.output), "loop")
        self._body = body
        self._opset = opset
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        for tensor in body.initializer:
            self.weights.append(TensorProto.FromString(tensor.SerializeToString()))
            self.weights[-1].name = f"{self._prefix}.{tensor.name}"

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its result."""
        name = output or f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def constant(self, value: Any) -> str:
        """Add a constant of int64."""
        tensor = numpy_helper.from_array(np.asarray(value, np.int64))
        return self.add("Constant", value=tensor)

    def run_body(self, iteration: int, arguments: Sequence[str]) -> list[str]:
        """Add the nodes of one iteration, and return the names of its results."""
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
        """Add an If with the nodes of one iteration where the loop still runs, and return the names of its results.

        Args:
            iteration: The number of the iteration.
            arguments: Its number, the condition, and the states, as names of values.
            count: How many results are kept: the condition and the states.
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
        """Add values of all iterations along a new axis."""
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
    """Return a branch of an If that returns values, which may be those of the graph around it, by new names."""
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
    """Return whether the iterations of a body are few enough."""
    return 0 < count * _count_nodes(body) <= MAX_UNROLLED_NODES


def _count_nodes(graph: GraphProto) -> int:
    """Return the number of nodes of a graph and of all graphs in it; at least 1."""
    inner = (inner for node in graph.node for inner in subgraphs(node))
    return max(1, len(graph.node) + sum(_count_nodes(graph) for graph in inner if graph.node))


_UNROLLERS: Final[Mapping[str, Callable[[NodeProto, KnownValues, int], _Iterations | None]]] = {
    "Loop": _loop,
    "Scan": _scan,
}
