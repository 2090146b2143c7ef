"""Corrects the mean errors of the channels that quantized layers compute.

Rounded weights, and data that are cut off at the ends of their range, shift each channel by a constant on average,
which the bias takes back: Nagel et al. 2019, Data-free quantization through weight equalization and bias correction
(arXiv:1906.04721), section 4.2, with the means that calibration measured. Each layer is corrected for its own error,
on the data of the float model: shifts of earlier layers are corrected there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tvmflow.graph import ir
from tvmflow.stages.quantize.insertion import DataScale, LayerWeights
from tvmflow.stages.quantize.points import Array, Integers, Layer
from tvmflow.stages.quantize.ranges import sum_rows_in_order

# Parts of a step in which float data are added up: sums of integers are exact in any order.
_PARTS: Final = 1 << 12
# About this many values are added at once: they stay in a core's cache.
_CHUNK: Final = 1 << 14
# Corrections have this many significant bits, so that other roundings of the data seldom change them.
_BITS: Final = 12


class Means(NamedTuple):
    """The means of the channels that a layer reads, of the float model and of the integers."""

    exact: Array
    rounded: Array


class ChannelSums:
    """Sums of the channels along an axis of a tensor, exact and rounded to integers."""

    def __init__(self, axis: int, scale: DataScale, integers: Integers) -> None:
        limits = np.iinfo(integers.dtype)
        self._axis, self._scale = axis, scale.scale
        self._low, self._high = limits.min - scale.zero_point, limits.max - scale.zero_point
        self._count = 0
        self._floats: Array = np.zeros(1, np.int64)
        self._integers: Array = np.zeros(1, np.int64)

    def add(self, values: Array, first: int = 0, step: int = 1) -> None:
        """Add the values of a batch: of each channel one in `step`, from the `first` one on."""
        moved = np.moveaxis(values, self._axis, 0)
        rows = moved.reshape(len(moved), -1)[:, first::step]
        self._count += rows.shape[1]
        size = max(_CHUNK // max(rows.shape[1], 1), 1)
        sums = [self._sum_rows(rows[start : start + size]) for start in range(0, len(rows), size)]
        floats, integers = (np.concatenate(own) for own in zip(*sums, strict=True))
        self._floats, self._integers = self._floats + floats, self._integers + integers

    def _sum_rows(self, rows: Array) -> tuple[Array, Array]:
        """Return the sums of some channels: of parts of steps, and of integers."""
        steps = np.divide(rows, self._scale, dtype=np.float64)
        rounded = np.rint(steps)
        np.clip(rounded, self._low, self._high, out=rounded)
        steps *= _PARTS
        np.rint(steps, out=steps)
        return steps.astype(np.int64).sum(axis=1), rounded.astype(np.int64).sum(axis=1)

    def read_means(self) -> Means:
        """Return the mean of each channel."""
        factor = self._scale / max(self._count, 1)
        return Means(self._floats / _PARTS * factor, self._integers * factor)


def find_correction(
    layer: Layer, call: Any, weights: Array, rounded: LayerWeights, means: Means
) -> Array:
    """Return the correction of a layer's result, in a shape that broadcasts to it.

    The layer's `call` reads data with some means, and `rounded` in place of float weights.
    """
    real = rounded.to_real(layer.axis, np.float64)
    if layer.operator == "matmul":
        pairs = real * means.rounded[:, None], weights * means.exact[:, None]
        return _round(-sum_rows_in_order((pairs[0] - pairs[1]).T))
    # weights of transposed convolutions are (in, out, …)
    weights, real = (np.moveaxis(array, layer.axis, 0) for array in (weights, real))
    channels = _list_inputs(weights, int(call.attrs.groups))
    parts = _find_covered_parts(call, weights.shape[2:], is_transposed=layer.is_transposed)
    ones = [1] * parts.ndim
    error = real * means.rounded[channels].reshape(*channels.shape, *ones)
    error -= weights * means.exact[channels].reshape(*channels.shape, *ones)
    return _round(-sum_rows_in_order(error * parts)).reshape(1, -1, *ones)


def _list_inputs(weights: Array, groups: int) -> Array:
    """Return the channels of data that each output of a convolution reads."""
    outputs, inputs = weights.shape[:2]
    first = np.arange(outputs) // (outputs // groups) * inputs
    return np.asarray(first[:, None] + np.arange(inputs))


def _find_covered_parts(call: Any, kernel: Sequence[int], *, is_transposed: bool) -> Array:
    """Return the part of the results for which each weight meets data, and no padding."""
    sizes, results = ir.known_shape(call.args[0])[2:], ir.known_shape(call)[2:]
    # a transposed convolution scatters where a convolution gathers
    counts = results
    if is_transposed:
        sizes, results = results, sizes
    attrs = call.attrs
    axes = []
    for axis, extent in enumerate(kernel):
        first = np.arange(results[axis]) * int(attrs.strides[axis]) - int(attrs.padding[axis])
        places = first[:, None] + np.arange(extent) * int(attrs.dilation[axis])
        axes.append(((places >= 0) & (places < sizes[axis])).sum(axis=0) / counts[axis])
    return np.asarray(functools.reduce(np.multiply.outer, axes))


def _round(values: Array) -> Array:
    mantissas, exponents = np.frexp(values)
    rounded = np.ldexp(np.rint(np.ldexp(mantissas, _BITS)), exponents - _BITS)
    return rounded.astype(np.float32)
