"""Converters of recurrent operators, whose variable tensors are operands and results (see `_model`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from tvmflow.frontends._onnx_graph import Value
from tvmflow.frontends.tflite._operation import Converter, Operation, limit

# Sequences are unrolled: each step becomes separate nodes.
_MAX_STEPS: Final = 256

_Step = Callable[[Value], Value]


def _unroll(operation: Operation, projected: Value, step: _Step) -> None:
    """Apply `step` along the time axis of `projected`, and write the results."""
    graph = operation.graph
    is_sequence = operation.name.startswith("UNIDIRECTIONAL")
    if not is_sequence:
        _write(operation, step(projected))
        return
    axis = 0 if operation.options["time_major"] else 1
    [steps] = operation.fixed([projected.shape[axis]])
    if not 0 < steps <= _MAX_STEPS:
        raise operation.refusal(f"of {steps} steps, and the limit is {_MAX_STEPS}")
    axes = graph.integers([axis])
    results = [
        graph.add("Unsqueeze", step(graph.add("Squeeze", part, axes)), axes)
        for part in graph.split(projected, axis, [1] * steps)
    ]
    _write(operation, graph.add("Concat", *results, axis=axis) if steps > 1 else results[0])


def _write(operation: Operation, value: Value) -> None:
    """Set the result to values that include the activation already."""
    operation.tensors.write(operation.outputs[0], value)


def _rnn(operation: Operation) -> None:
    """Convert RNN: h = activation(x W + h R + b)."""
    graph, hidden = operation.graph, operation.real(4)
    recurrent = operation.weight(2, (1, 0))

    def step(projected: Value) -> Value:
        nonlocal hidden
        total = graph.add("Add", projected, graph.add("MatMul", hidden, recurrent))
        hidden = operation.activate(total)
        return hidden

    projected = graph.add("MatMul", operation.real(), operation.weight(1, (1, 0)))
    _unroll(operation, graph.add("Add", projected, operation.real(3)), step)
    operation.write_states([hidden])


# Gates in the order of the operands: input, forget, cell, output.
_INPUT, _FORGET, _CELL, _OUTPUT = range(4)


def _lstm(operation: Operation) -> None:
    """Convert LSTM; without operands for the input gate, it is 1 - forget gate (CIFG)."""
    if operation.options.get("kernel_type") or any(map(operation.has, range(20, 24))):
        raise operation.refusal("of the kind `basic` or with layer normalization")
    graph, options = operation.graph, operation.options
    gates = [gate for gate in range(4) if operation.has(1 + gate)]
    hidden, cell = operation.real(18), operation.real(19)
    peepholes = {
        gate: operation.real(9 + place)
        for place, gate in enumerate((_INPUT, _FORGET, _OUTPUT))
        if operation.has(9 + place)
    }
    inward, recurrent = (
        _join(operation, [operation.weight(first + gate, (1, 0)) for gate in gates], 1)
        for first in (1, 5)
    )
    biases = _join(operation, [operation.real(12 + gate) for gate in gates], 0)

    def gate_of(parts: Mapping[int, Value], gate: int) -> Value:
        value = parts[gate]
        if gate in peepholes:
            value = graph.add("Add", value, graph.add("Mul", cell, peepholes[gate]))
        return graph.add("Sigmoid", value)

    def step(projected: Value) -> Value:
        nonlocal hidden, cell
        total = graph.add("Add", projected, graph.add("MatMul", hidden, recurrent))
        units = operation.fixed([cell.shape[-1]])
        parts = dict(zip(gates, graph.split(total, 1, units * len(gates)), strict=True))
        forget = gate_of(parts, _FORGET)
        new = (
            gate_of(parts, _INPUT)
            if _INPUT in parts
            else graph.add("Sub", graph.constant(1.0, "float32"), forget)
        )
        candidate = operation.activate(parts[_CELL])
        cell = graph.add("Add", graph.add("Mul", forget, cell), graph.add("Mul", new, candidate))
        cell = _clip(operation, cell, options["cell_clip"])
        hidden = graph.add("Mul", gate_of(parts, _OUTPUT), operation.activate(cell))
        if operation.has(16):
            hidden = graph.add("MatMul", hidden, operation.weight(16, (1, 0)))
            if operation.has(17):
                hidden = graph.add("Add", hidden, operation.real(17))
            hidden = _clip(operation, hidden, options["proj_clip"])
        return hidden

    projected = graph.add("MatMul", operation.real(), inward)
    _unroll(operation, graph.add("Add", projected, biases), step)
    operation.write_states([hidden, cell])


def _join(operation: Operation, parts: Sequence[Value], axis: int) -> Value:
    arrays = [part.array for part in parts if part.array is not None]
    if len(arrays) == len(parts):
        return operation.graph.constant(np.concatenate(arrays, axis))
    return operation.graph.add("Concat", *parts, axis=axis)


def _clip(operation: Operation, value: Value, most: float) -> Value:
    return limit(operation.graph, value, -most, most) if most > 0 else value


def _svdf(operation: Operation) -> None:
    """Convert SVDF: weighted features of the last steps, summed over `rank` filters per unit."""
    graph, rank = operation.graph, int(operation.options["rank"])
    features, times = operation.weight(1, (1, 0)), operation.weight(2, (0, 1))
    filters, steps = operation.fixed(times.shape)
    batch = operation.real().shape[0]
    if rank < 1 or filters % rank:
        raise operation.refusal(f"of rank {rank} with {filters} filters")
    past = graph.reshape(operation.real(4), [batch, filters, steps])
    now = graph.reshape(graph.add("MatMul", operation.real(), features), [batch, filters, 1])
    history = graph.add("Concat", graph.cut(past, {2: slice(1, None)}), now, axis=2)
    weighted = graph.add("Mul", history, times)
    weighted = graph.reshape(weighted, [batch, filters // rank, rank * steps])
    total = graph.add("ReduceSum", weighted, graph.integers([2]), keepdims=0)
    if operation.has(3):
        total = graph.add("Add", total, operation.real(3))
    operation.write(total)
    operation.write_states([history])


CONVERTERS: Final[Mapping[str, Converter]] = {
    **dict.fromkeys(("LSTM", "UNIDIRECTIONAL_SEQUENCE_LSTM"), _lstm),
    **dict.fromkeys(("RNN", "UNIDIRECTIONAL_SEQUENCE_RNN"), _rnn),
    "SVDF": _svdf,
}
