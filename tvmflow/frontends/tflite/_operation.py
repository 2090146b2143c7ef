"""The tensors of a TFLite file as values of an ONNX graph, and an operator during its conversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.types import Array
from tvmflow.frontends._dynamic_shapes import DynamicShapeProblem, shape_text, unfixed_text
from tvmflow.frontends._onnx_graph import Graph, Value
from tvmflow.frontends.base import DYNAMIC_FIX, OPERATOR_FIX
from tvmflow.frontends.tflite._model import (
    IMPORTED_DTYPES,
    Buffer,
    Operator,
    Quantization,
    Tensor,
)
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic

_QUANTIZED: Final = frozenset({"int8", "uint8", "int16"})


def first_axes(rank: int) -> list[int]:
    """Return the permutation from channels-last to channels-first layout."""
    return [0, rank - 1, *range(1, rank - 1)]


def last_axes(rank: int) -> list[int]:
    """Return the permutation from channels-first to channels-last layout."""
    return [0, *range(2, rank), 1]


class Tensors:
    """The values of all tensors computed so far."""

    def __init__(self, graph: Graph, tensors: Sequence[Tensor], data: Buffer) -> None:
        self.graph = graph
        self._tensors = tensors
        self._data = data
        # (tensor index, whether channels are first) -> stored value, and dequantized value.
        self._stored: dict[tuple[int, bool], Value] = {}
        self._real: dict[tuple[int, bool], Value] = {}
        self.padded: dict[int, tuple[int, list[int]]] = {}
        """Zero-padded image -> (index of the unpadded tensor, ONNX pads)."""

    def tensor(self, number: int) -> Tensor:
        return self._tensors[number]

    def quantization(self, number: int) -> Quantization | None:
        tensor = self._tensors[number]
        return tensor.quantization if tensor.dtype in _QUANTIZED else None

    def is_constant(self, number: int) -> bool:
        return self._tensors[number].data is not None

    def is_first(self, number: int) -> bool:
        """Return whether a tensor exists only in channels-first layout."""
        return (number, True) in self._stored and (number, False) not in self._stored

    def rank(self, number: int) -> int:
        for first in (False, True):
            if (number, first) in self._stored:
                return self._stored[number, first].rank
        return len(self._tensors[number].dims)

    def set_input(self, number: int, value: Value) -> None:
        self._stored[number, False] = value

    def stored(self, number: int, *, first: bool = False) -> Value:
        """Return a tensor in its stored form, in which quantized values are integers."""
        if (number, first) not in self._stored:
            self._stored[number, first] = self._reordered(self._stored, number, first)
        return self._stored[number, first]

    def real(self, number: int, *, first: bool = False) -> Value:
        """Return a tensor with real (dequantized) values."""
        quantization = self.quantization(number)
        if quantization is None:
            return self.stored(number, first=first)
        if (number, first) not in self._real:
            value = self.stored(number, first=first)
            is_moved = first and len(quantization.scales) > 1
            axis = axis_in(quantization.axis, value.rank, is_moved)
            self._real[number, first] = self.dequantize(value, quantization, axis)
        return self._real[number, first]

    def dequantize(self, value: Value, quantization: Quantization, axis: int) -> Value:
        """Dequantize a tensor; `axis` is the channel axis in `value`."""
        parameters = self._parameters(quantization, value.dtype)
        return self.graph.add("DequantizeLinear", value, *parameters, axis=axis)

    def write(self, number: int, value: Value, *, first: bool = False) -> None:
        """Set a tensor to real values, which are quantized if the tensor is."""
        quantization, dtype = self.quantization(number), self._tensors[number].dtype
        if quantization is not None and value.dtype == "float32":
            parameters = self._parameters(quantization, dtype)
            value = self.graph.add("QuantizeLinear", value, *parameters, axis=quantization.axis)
        if value.dtype != dtype:
            raise ImportFailed(
                f"tensor {quoted(self._tensors[number].name)} has dtype {dtype} in the file, "
                f"and its operator computes {value.dtype}"
            )
        self._stored[number, first] = value

    def _parameters(self, quantization: Quantization, dtype: str) -> tuple[Value, Value]:
        scales: Array = np.asarray(quantization.scales, np.float32)
        zero_points: Array = np.asarray(quantization.zero_points, dtype)
        if len(scales) == 1:
            scales, zero_points = scales[0], zero_points[0]
        return self.graph.constant(scales), self.graph.constant(zero_points)

    def _reordered(self, values: dict[tuple[int, bool], Value], number: int, first: bool) -> Value:
        """Return a tensor in the requested layout, transposed from the other layout if necessary."""
        other = values.get((number, not first))
        if other is None:
            other = values[number, False] = self._constant(number)
            if not first:
                return other
        axes = first_axes(other.rank) if first else last_axes(other.rank)
        return self.graph.transpose(other, axes)

    def _constant(self, number: int) -> Value:
        tensor = self._tensors[number]
        name = quoted(tensor.name or str(number))
        if tensor.data is None:
            raise ImportFailed(f"tensor {name} is read before anything computes it")
        if tensor.is_sparse or tensor.dtype not in IMPORTED_DTYPES:
            kind = "sparse values" if tensor.is_sparse else f"dtype {tensor.dtype}"
            raise ImportFailed(f"tensor {name} has {kind}, which tvmflow does not import")
        start, end = tensor.data
        dtype = np.dtype(tensor.dtype)
        array: Any = np.frombuffer(self._data, dtype, (end - start) // dtype.itemsize, start)
        try:
            array = array.reshape(tensor.dims)
        except ValueError:
            raise ImportFailed(
                f"tensor {name} has shape {list(tensor.dims)}, and {array.size} values"
            ) from None
        return self.graph.constant(array, name=tensor.name)


# ---------------------------------------------------------------- an operator that is converted


MAX_COUNT: Final = 1 << 24
"""Maximum number of elements of a constant that expands a small operand, as in Range."""

_SAME: Final = 0
_NO_ACTIVATION: Final = 0


class Operation:
    """An operator during its conversion, with its tensors and the graph to which it adds nodes."""

    def __init__(self, operator: Operator, tensors: Tensors) -> None:
        self.name = operator.name
        self.options = operator.options
        self.inputs = operator.inputs
        self.outputs = operator.outputs
        self.tensors = tensors
        self.graph: Graph = tensors.graph

    def has(self, position: int) -> bool:
        """Return whether an operand exists and is not omitted."""
        return position < len(self.inputs) and self.inputs[position] >= 0

    def number(self, position: int) -> int:
        if not self.has(position):
            raise self.refusal(f"without operand {position}")
        return self.inputs[position]

    def real(self, position: int = 0, *, first: bool = False) -> Value:
        return self.tensors.real(self.number(position), first=first)

    def is_first(self, position: int = 0) -> bool:
        return self.tensors.is_first(self.number(position))

    def in_its_order(self, position: int = 0) -> tuple[Value, bool]:
        """Return an operand in its existing layout, and whether channels are first."""
        first = self.is_first(position)
        return self.real(position, first=first), first

    def rank(self, position: int = 0) -> int:
        return self.tensors.rank(self.number(position))

    def constant(self, position: int) -> Array:
        """Return the values of an operand that must be constant, such as a shape or axes."""
        value = self.tensors.stored(self.number(position))
        if value.array is None:
            raise self.refusal(f"with operand {position} that is computed when the model runs")
        if value.has_dynamic_elements:
            self.fixed(value.array.ravel().tolist())
        return value.array

    def integers(self, position: int) -> list[int]:
        return [int(value) for value in np.ravel(self.constant(position))]

    def sizes(self, position: int) -> list[IrSize]:
        """Return the values of an operand, which must be constant or depend only on dimensions."""
        value = self.tensors.stored(self.number(position))
        if value.has_dynamic_elements:
            assert value.array is not None
            return [self.graph.ranges.simplify(size) for size in value.array.ravel().tolist()]
        return list(self.integers(position))

    def fixed(self, sizes: Sequence[IrSize]) -> list[int]:
        """Return sizes that must be constant; DynamicShapeProblem if any is dynamic."""
        if any(map(is_dynamic, sizes)):
            raise DynamicShapeProblem(f"{unfixed_text(sizes)}: {shape_text(sizes)}")
        return list(map(int, sizes))

    def shapes_text(self) -> str:
        """Return the shapes of the operands that are not constants, for messages."""
        return names_text([shape_text(value.shape) for value in self._computed()])

    def _computed(self) -> list[Value]:
        indices = (n for n in self.inputs if n >= 0 and not self.tensors.is_constant(n))
        return list(map(self.tensors.stored, indices))

    def axis(self, position: int, rank: int) -> int:
        return self.checked_axis(self.integers(position)[0], rank)

    def checked_axis(self, axis: int, rank: int) -> int:
        if not -rank <= axis < rank:
            raise self.refusal(f"with axis {axis} of {rank}")
        return axis % rank

    def write(self, value: Value, position: int = 0, *, first: bool = False) -> None:
        """Apply the operator's fused activation to real values, and set a result."""
        self.tensors.write(self.outputs[position], self.activate(value), first=first)

    def activate(self, value: Value) -> Value:
        activation = self.options.get("activation", _NO_ACTIVATION)
        if activation == _NO_ACTIVATION:
            return value
        if activation not in ACTIVATIONS:
            raise self.refusal(f"with activation {activation}")
        return ACTIVATIONS[activation](self.graph, value)

    def write_states(self, values: Sequence[Value]) -> None:
        """Set the operator's last results, the new values of its variable tensors."""
        if len(self.outputs) != 1 + len(values):
            raise self.refusal("without its variable tensors")
        for number, value in zip(self.outputs[1:], values, strict=True):
            shape = self.tensors.tensor(number).dims
            self.tensors.write(number, self.graph.reshape(value, shape))

    def output_dtype(self, position: int = 0) -> str:
        return self.tensors.tensor(self.outputs[position]).dtype

    def weight(self, position: int, axes: Sequence[int]) -> Value:
        """Return dequantized weights with their axes permuted."""
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
        """Return a bias with real values, or None if it is omitted.

        The scale of an integer bias is the product of the scales of the operands `data` and `weights`.
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
        where = quoted(self.graph.prefix)
        text = f"tvmflow does not import the TFLite operator {self.name} {case} (tensor {where})"
        is_dynamic = any(value.is_dynamic for value in self._computed())
        return ImportFailed(text, fix=DYNAMIC_FIX if is_dynamic else OPERATOR_FIX)


def pads(
    operation: Operation,
    sizes: Sequence[IrSize],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[int]:
    """Return the padding of a window: for each axis before the data, then for each axis after."""
    if operation.options["padding"] != _SAME:
        return [0] * (2 * len(sizes))
    return operation.graph.ranges.same_padding(sizes, kernel, strides, dilations)


def limit(graph: Graph, value: Value, low: float, high: float) -> Value:
    bounds = (graph.constant(low, value.dtype), graph.constant(high, value.dtype))
    return graph.add("Clip", value, *bounds)


ACTIVATIONS: Final[dict[int, Callable[[Graph, Value], Value]]] = {
    1: lambda graph, value: graph.add("Relu", value),
    2: lambda graph, value: limit(graph, value, -1.0, 1.0),
    3: lambda graph, value: limit(graph, value, 0.0, 6.0),
    4: lambda graph, value: graph.add("Tanh", value),
}
"""`ActivationFunctionType` of a fused activation -> its nodes."""


def aligned(operation: Operation, positions: Sequence[int]) -> tuple[list[Value], bool]:
    """Return broadcasting operands in a common layout, and whether channels are first.

    Channels-first layout is chosen if an operand exists only in it, to avoid transposes between convolutions.
    """
    rank = max(operation.rank(position) for position in positions)
    first = any(operation.is_first(p) and operation.rank(p) == rank for p in positions)
    if not first:
        return [operation.real(position) for position in positions], False
    return [_with_channels_first(operation, position, rank) for position in positions], True


def _with_channels_first(operation: Operation, position: int, rank: int) -> Value:
    """Return an operand with channels first, with missing axes added."""
    if operation.rank(position) == rank:
        return operation.real(position, first=True)
    value = operation.real(position)
    if value.rank == 0:
        return value
    value = operation.graph.reshape(value, [1] * (rank - value.rank) + list(value.shape))
    return operation.graph.transpose(value, first_axes(rank))


def axis_in(axis: int, rank: int, first: bool) -> int:
    """Return the index of a file's axis in the layout of a value."""
    return first_axes(rank).index(axis) if first else axis


Converter = Callable[[Operation], Any]
"""Adds the nodes of an operator and writes its results."""
