"""Unrolls Scan, and Loop with a constant number of iterations: TVM's importer has neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmflow.frontends.onnx._branches import name_branch_values
from tvmflow.frontends.onnx._graph import (
    KnownValues,
    attributes_of,
    is_standard,
    known_values,
    list_branches,
    opset_of,
    rename_captured,
    replace_nodes,
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
    """Replace each Scan and Loop of the main graph by its iterations, where their number is known and not too large."""
    if not any(node.op_type in _UNROLLERS for node in model.graph.node):
        return model
    known, opset = known_values(model), opset_of(model)
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


class _Iterations:
    """The iterations of a loop, as nodes of the main graph.

    Attributes:
        nodes: The nodes.
        weights: The weights of the body.
    """

    def __init__(self, node: NodeProto, body: GraphProto, opset: int) -> None:
        self._prefix = next(name for name in node.output if name)
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
            for graph in (graph for a in copy.attribute for graph in (a.g, *a.graphs)):
                rename_captured(graph, names)
            self.nodes.append(copy)
        return [names.get(value.name, value.name) for value in self._body.output]

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
    limit, condition, *states = node.input
    count, start = known.constants.get(limit), known.constants.get(condition)
    if count is None or (condition and (start is None or not start.all())):
        return None
    if not _can_unroll(body, int(count.item())) or not _goes_on(body):
        return None
    unrolled = _Iterations(node, body, opset)
    stacked: list[list[str]] = [[] for _ in node.output[len(states) :]]
    condition = condition or unrolled.add(
        "Constant", value=numpy_helper.from_array(np.asarray(True))
    )
    for step in range(int(count.item())):
        arguments = [unrolled.constant(step), condition, *states]
        _, *results = unrolled.run_body(step, arguments)
        states = results[: len(states)]
        for values, result in zip(stacked, results[len(states) :], strict=True):
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
    inner = (inner for node in graph.node for a in node.attribute for inner in (a.g, *a.graphs))
    return max(1, len(graph.node) + sum(_count_nodes(graph) for graph in inner if graph.node))


def _goes_on(body: GraphProto) -> bool:
    """Return whether the condition that a body returns is always true, given that it was."""
    makers = {name: node for node in body.node for name in node.output}
    constants = {tensor.name: tensor for tensor in body.initializer}
    name = body.output[0].name
    while name in makers and makers[name].op_type == "Identity":
        name = makers[name].input[0]
    if name == body.input[1].name:
        return True
    tensor = constants.get(name)
    if name in makers and makers[name].op_type == "Constant":
        tensor = attributes_of(makers[name]).get("value")
    return tensor is not None and bool(numpy_helper.to_array(tensor).all())


_UNROLLERS: Final[Mapping[str, Callable[[NodeProto, KnownValues, int], _Iterations | None]]] = {
    "Loop": _loop,
    "Scan": _scan,
}
