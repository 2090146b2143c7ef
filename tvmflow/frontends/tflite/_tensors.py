"""The tensors of a TFLite model as values of an ONNX graph: real numbers, with channels first or last.

TFLite has the channels of images last, ONNX first. A tensor is kept as the operator that computes it left it,
and reordered once where an operator needs the other order, so that none is between convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tvmflow.core.errors import ImportFailed
from tvmflow.core.formatting import quoted
from tvmflow.frontends.tflite._flatbuffer import Buffer
from tvmflow.frontends.tflite._graph import Array, Graph, Value
from tvmflow.frontends.tflite._model import IMPORTED_DTYPES, Quantization, Tensor

_QUANTIZED: Final = frozenset({"int8", "uint8", "int16"})


def first_axes(rank: int) -> list[int]:
    """Return the axes of an image with channels last in the order with channels first."""
    return [0, rank - 1, *range(1, rank - 1)]


def last_axes(rank: int) -> list[int]:
    """Return the axes of an image with channels first in the order with channels last."""
    return [0, *range(2, rank), 1]


def to_first(axis: int, rank: int) -> int:
    """Return where an axis of an image with channels last is when they are first."""
    return first_axes(rank).index(axis)


class Tensors:
    """The values of all tensors that are computed so far.

    Args:
        graph: The graph that grows.
        tensors: The tensors of the file.
        data: The file.
    """

    def __init__(self, graph: Graph, tensors: Sequence[Tensor], data: Buffer) -> None:
        self.graph = graph
        self._tensors = tensors
        self._data = data
        # By number of a tensor, and whether channels are first: as stored, and as real numbers.
        self._stored: dict[tuple[int, bool], Value] = {}
        self._real: dict[tuple[int, bool], Value] = {}
        self.padded: dict[int, tuple[int, list[int]]] = {}
        """Images with zeros around others: the number of the other tensor, and the widths as ONNX has them."""

    def tensor(self, number: int) -> Tensor:
        """Return a tensor of the file."""
        return self._tensors[number]

    def quantization(self, number: int) -> Quantization | None:
        """Return what the integers of a tensor stand for; None for plain numbers."""
        tensor = self._tensors[number]
        return tensor.quantization if tensor.dtype in _QUANTIZED else None

    def is_constant(self, number: int) -> bool:
        """Return whether the file has the values of a tensor."""
        return self._tensors[number].data is not None

    def is_first(self, number: int) -> bool:
        """Return whether a tensor exists with channels first alone."""
        return (number, True) in self._stored and (number, False) not in self._stored

    def rank(self, number: int) -> int:
        """Return the number of axes of a tensor."""
        for first in (False, True):
            if (number, first) in self._stored:
                return self._stored[number, first].rank
        return len(self._tensors[number].dims)

    def set_input(self, number: int, value: Value) -> None:
        """Set an input of the model."""
        self._stored[number, False] = value

    def stored(self, number: int, *, first: bool = False) -> Value:
        """Return a tensor as it is stored: quantized ones are integers."""
        if (number, first) not in self._stored:
            self._stored[number, first] = self._reordered(self._stored, number, first)
        return self._stored[number, first]

    def real(self, number: int, *, first: bool = False) -> Value:
        """Return a tensor as the numbers that it stands for."""
        quantization = self.quantization(number)
        if quantization is None:
            return self.stored(number, first=first)
        if (number, first) not in self._real:
            value = self.stored(number, first=first)
            axis = quantization.axis
            if first and len(quantization.scales) > 1:
                axis = to_first(axis, value.rank)
            self._real[number, first] = self.dequantize(value, quantization, axis)
        return self._real[number, first]

    def dequantize(self, value: Value, quantization: Quantization, axis: int) -> Value:
        """Return the numbers that integers stand for; `axis` is that of the channels in `value`."""
        parameters = self._parameters(quantization, value.dtype)
        return self.graph.add("DequantizeLinear", value, *parameters, axis=axis)

    def write(self, number: int, value: Value, *, first: bool = False) -> None:
        """Set a tensor to real numbers, which are quantized as the file says.

        Raises:
            ImportFailed: when the file has another dtype for it.
        """
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
        """Return a tensor that exists in the other order, or is constant."""
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
