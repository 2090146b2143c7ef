"""One operator of a TFLite model while it is converted: its operands, options and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import quoted
from tvmflow.frontends.tflite._graph import Array, Graph, Value
from tvmflow.frontends.tflite._model import Operator
from tvmflow.frontends.tflite._operators import FIX
from tvmflow.frontends.tflite._tensors import Tensors, first_axes, to_first

MAX_COUNT: Final = 1 << 24
"""The most numbers of a constant that a few numbers of a model make."""

_SAME: Final = 0
_NO_ACTIVATION: Final = 0


class Operation:
    """An operator, the tensors that it reads, and the graph to which it adds nodes."""

    def __init__(self, operator: Operator, tensors: Tensors) -> None:
        self.name = operator.name
        self.options = operator.options
        self.inputs = operator.inputs
        self.outputs = operator.outputs
        self.tensors = tensors
        self.graph: Graph = tensors.graph

    def has(self, position: int) -> bool:
        """Return whether an operand exists: some may be left out."""
        return position < len(self.inputs) and self.inputs[position] >= 0

    def number(self, position: int) -> int:
        """Return the number of the tensor of an operand.

        Raises:
            ImportFailed: when it is left out.
        """
        if not self.has(position):
            raise self.refusal(f"without operand {position}")
        return self.inputs[position]

    def real(self, position: int = 0, *, first: bool = False) -> Value:
        """Return an operand as the numbers that it stands for, with channels first or last."""
        return self.tensors.real(self.number(position), first=first)

    def is_first(self, position: int = 0) -> bool:
        """Return whether an operand exists with channels first alone."""
        return self.tensors.is_first(self.number(position))

    def rank(self, position: int = 0) -> int:
        """Return the number of axes of an operand."""
        return self.tensors.rank(self.number(position))

    def constant(self, position: int) -> Array:
        """Return the values of an operand that must be constant: a shape, axes.

        Raises:
            ImportFailed: when they are known only when the model runs.
        """
        array = self.tensors.stored(self.number(position)).array
        if array is None:
            raise self.refusal(f"with operand {position} that is computed when the model runs")
        return array

    def integers(self, position: int) -> list[int]:
        """Return the values of a constant operand as a list."""
        return [int(value) for value in np.ravel(self.constant(position))]

    def axis(self, position: int, rank: int) -> int:
        """Return a constant operand that is an axis, which may count from the end."""
        return self.checked_axis(self.integers(position)[0], rank)

    def checked_axis(self, axis: int, rank: int) -> int:
        """Return an axis counted from the start."""
        if not -rank <= axis < rank:
            raise self.refusal(f"with axis {axis} of {rank}")
        return axis % rank

    def write(self, value: Value, position: int = 0, *, first: bool = False) -> None:
        """Set a result to real numbers, after the activation that the operator has."""
        activation = self.options.get("activation", _NO_ACTIVATION)
        if activation != _NO_ACTIVATION:
            if activation not in ACTIVATIONS:
                raise self.refusal(f"with activation {activation}")
            value = ACTIVATIONS[activation](self.graph, value)
        self.tensors.write(self.outputs[position], value, first=first)

    def output_dtype(self, position: int = 0) -> str:
        """Return the dtype of a result."""
        return self.tensors.tensor(self.outputs[position]).dtype

    def weight(self, position: int, axes: Sequence[int]) -> Value:
        """Return weights as the numbers that they stand for, with their axes in another order."""
        number = self.number(position)
        quantization = self.tensors.quantization(number)
        value = self.graph.transpose(self.tensors.stored(number), axes)
        if quantization is None:
            return value
        if len(quantization.scales) > 1 and quantization.axis not in axes:
            raise self.refusal(f"with weights quantized along axis {quantization.axis}")
        axis = list(axes).index(quantization.axis) if len(quantization.scales) > 1 else 0
        return self.tensors.dequantize(value, quantization, axis)

    def bias(self, position: int, data: int, weights: int) -> Value | None:
        """Return a bias as real numbers; None where it is left out.

        Args:
            position: That of the operand.
            data: The position of the data.
            weights: The position of the weights. The integers of a bias have the product of both scales.
        """
        if not self.has(position):
            return None
        number = self.inputs[position]
        value = self.tensors.stored(number)
        if value.dtype == "float32":
            return value
        scales = [self.tensors.quantization(self.number(p)) for p in (data, weights)]
        if value.array is None or scales[0] is None or scales[1] is None:
            raise self.refusal("with a bias that is computed when the model runs")
        factors = np.float64(scales[0].scales[0]) * np.asarray(scales[1].scales, np.float64)
        name = self.tensors.tensor(number).name
        return self.graph.constant(value.array * factors, "float32", name)

    def refusal(self, case: str) -> ImportFailed:
        """Return the error for a case of the operator that is not imported."""
        where = quoted(self.graph.prefix)
        text = f"tvmflow does not import the TFLite operator {self.name} {case} (tensor {where})"
        return ImportFailed(text, fix=FIX)


def pads(
    operation: Operation,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[int]:
    """Return the padding of a window along each axis, first all before, then all after the data.

    With `SAME` padding there are ⌈size / stride⌉ results, and one more pixel behind than before.
    """
    if operation.options["padding"] != _SAME:
        return [0] * (2 * len(sizes))
    befores, afters = [], []
    for size, taps, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        reach = (-(-size // stride) - 1) * stride + (taps - 1) * dilation + 1
        total = max(reach - size, 0)
        befores.append(total // 2)
        afters.append(total - total // 2)
    return [*befores, *afters]


def limit(graph: Graph, value: Value, low: float, high: float) -> Value:
    """Add a limit to both sides."""
    bounds = (graph.constant(low, value.dtype), graph.constant(high, value.dtype))
    return graph.add("Clip", value, *bounds)


ACTIVATIONS: Final[dict[int, Callable[[Graph, Value], Value]]] = {
    1: lambda graph, value: graph.add("Relu", value),
    2: lambda graph, value: limit(graph, value, -1.0, 1.0),
    3: lambda graph, value: limit(graph, value, 0.0, 6.0),
    4: lambda graph, value: graph.add("Tanh", value),
}
"""The activations that are part of other operators, by their numbers in `ActivationFunctionType`."""


def aligned(operation: Operation, positions: Sequence[int]) -> tuple[list[Value], bool]:
    """Return operands that broadcast against each other in one order of axes, and whether channels are first.

    They are where one of them is there alone, so that nothing is reordered between convolutions.
    """
    rank = max(operation.rank(position) for position in positions)
    first = any(operation.is_first(p) and operation.rank(p) == rank for p in positions)
    if not first:
        return [operation.real(position) for position in positions], False
    return [_with_channels_first(operation, position, rank) for position in positions], True


def _with_channels_first(operation: Operation, position: int, rank: int) -> Value:
    """Return an operand with channels first; one with fewer axes gets those that it lacks."""
    if operation.rank(position) == rank:
        return operation.real(position, first=True)
    value = operation.real(position)
    if value.rank == 0:
        return value
    value = operation.graph.reshape(value, [1] * (rank - value.rank) + list(value.shape))
    return operation.graph.transpose(value, first_axes(rank))


def axis_in(axis: int, rank: int, first: bool) -> int:
    """Return where an axis of the file is in the order that a value has."""
    return to_first(axis, rank) if first else axis


Converter = Callable[[Operation], Any]
"""Adds the nodes of an operator and writes its results."""
