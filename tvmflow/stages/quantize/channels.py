"""Equalization of activation channels (smoothing), and bias correction for quantization errors.

Smoothing divides each channel of a layer's input by a factor, and multiplies the weights by it. This combines
SmoothQuant for matmuls after layer norms (Xiao et al. 2023, arXiv:2211.10438) with the equalization of
channels between convolutions (Nagel et al. 2019, Data-free quantization through weight equalization and bias
correction, arXiv:1906.04721), with ranges from calibration. Factors are powers of two, so every bit of the float result
is unchanged.

Rounded weights and clipped inputs shift the mean of each output channel. A changed bias corrects this shift:
section 4.2 of the second paper, with means from calibration. Each layer is corrected only for its own error on the
float model's data, because the layers before it are corrected, too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.core.types import Array
from tvmflow.graph import ir, marks
from tvmflow.graph.dynamic_shapes import known_sizes
from tvmflow.graph.rewriter import rewrite_main
from tvmflow.stages.quantize.insertion import DataScale, LayerRewriter, LayerWeights
from tvmflow.stages.quantize.points import FloatModel, Integers, Layer, take_nodes
from tvmflow.stages.quantize.ranges import sum_in_order, sum_rows_in_order

# SmoothQuant's α in quarters: the part of the channel differences that moves into weights. For a depthwise
# convolution it can be 1 (four quarters), because each channel has its own weight scale.
_PARTS: Final = (1, 2, 3, 4)
# Smoothing costs a multiplication of the input: it must reduce the estimated error to less than this share.
_WORTH: Final = 0.5
# Small channels are scaled up by at most 2 to this power.
_MAX_EXPONENT: Final = 8
# The root mean square of activations is about their largest value divided by this.
_PARTS_OF_LARGEST: Final = 4
_STEPS: Final = 127


def list_smoothable(model: FloatModel, layers: Sequence[Layer]) -> dict[Any, list[Layer]]:
    """Return the tensors that only layers read, with these layers, if their channels can be scaled."""
    flow = ir.DataFlow(model.main)
    found: dict[Any, list[Layer]] = {}
    for layer in layers:
        if layer.source.same_as(layer.data) and not layer.is_recurrent:
            found.setdefault(layer.data, []).append(layer)
    return {
        var: own
        for var, own in found.items()
        if flow.value_if_used(var, len(own)) is not None
        and len({layer.operator == "matmul" for layer in own}) == 1
        and all(input_axis(layer, flow) is not None for layer in own)
    }


def channel_axis(layer: Layer) -> int:
    """Return the channel axis of a layer's input."""
    return -1 if layer.operator == "matmul" else 1


def find_factors(
    model: FloatModel,
    smoothable: Mapping[Any, Sequence[Layer]],
    weights: Mapping[Any, Array],
    largest: Mapping[Any, Array],
) -> dict[Any, Array]:
    """Return the factors of the tensors for which smoothing greatly reduces the estimated error.

    `largest` holds the per-channel largest absolute values of each tensor.
    """
    flow = ir.DataFlow(model.main)
    found = {}
    for var, layers in smoothable.items():
        sizes = largest[var].astype(np.float64)
        if not sizes.max(initial=0.0) or any(layer.var not in weights for layer in layers):
            continue
        # one row for each input channel
        moved = [
            np.moveaxis(weights[layer.var], input_axis(layer, flow) or 0, 0) for layer in layers
        ]
        matrices = [array.reshape(len(array), -1).astype(np.float64) for array in moved]
        own = np.max([np.abs(matrix).max(axis=1) for matrix in matrices], axis=0)
        candidates = [_make_factors(sizes, own, part) for part in _PARTS]
        is_depthwise = [layer.operator.startswith("depthwise") for layer in layers]
        pairs = list(zip(matrices, is_depthwise, strict=True))
        errors = [_estimate_error(sizes, pairs, factors) for factors in candidates]
        best = int(np.argmin(errors))
        if errors[best] < _WORTH * _estimate_error(sizes, pairs, np.ones_like(sizes)):
            found[var] = candidates[best]
    return found


def smooth(
    model: FloatModel, smoothable: Mapping[Any, Sequence[Layer]], factors: Mapping[Any, Array]
) -> FloatModel:
    """Return the same model with layer inputs divided by factors and weights multiplied by them."""
    mod = ir.copy_module(model.mod)
    marks.mark_bindings(mod)
    layers = {layer.var: layer for var in factors for layer in smoothable[var]}
    mod = rewrite_main(mod, _Smoother, layers, factors)
    mod = relax.transform.CanonicalizeBindings()(mod)
    return model._replace(mod=mod, nodes=take_nodes(mod, model.nodes))


def broadcast(values: Array, rank: int, axis: int) -> Array:
    """Return `values` as float32, reshaped to broadcast along one axis of a tensor of this rank."""
    shape = [1] * rank
    shape[axis] = len(values)
    return values.astype(np.float32).reshape(shape)


class _Smoother(LayerRewriter):
    def __init__(self, mod: Any, layers: Mapping[Any, Layer], factors: Mapping[Any, Array]) -> None:
        super().__init__(mod, layers)
        self._factors = factors
        self._divided: dict[Any, Any] = {}

    def rewrite_layer(self, call: relax.Call, rewritten: relax.Call, layer: Layer) -> Any:
        factors = self._factors[layer.data]
        if layer.data not in self._divided:
            rank = len(known_sizes(layer.data))
            inverse = relax.const(broadcast(1 / factors, rank, channel_axis(layer)), "float32")
            self._divided[layer.data] = self.emit(relax.op.multiply(rewritten.args[0], inverse))
        weights = rewritten.args[1]
        axis = input_axis(layer, self.flow)
        own = broadcast(factors, len(ir.known_shape(layer.weights)), axis or 0)
        multiplied = self.emit(relax.op.multiply(weights, relax.const(own, "float32")))
        data = self._divided[layer.data]
        return relax.Call(call.op, [data, multiplied], call.attrs, call.ty_args)


def input_axis(layer: Layer, flow: ir.DataFlow) -> int | None:
    """Return the input-channel axis of the weights; None for grouped layers that are not depthwise."""
    if layer.operator == "matmul":
        return 0
    groups = int(flow.values[layer.var].attrs.groups)
    if groups == 1:
        return 1 - layer.axis
    shape = ir.known_shape(layer.weights)
    return 0 if shape[:2] == (groups, 1) else None


def _make_factors(sizes: Array, weights: Array, part: int) -> Array:
    """Return `sizes^(part/4) / weights^(1 - part/4)` as powers of two, at most 1."""
    data = _exponents(sizes)
    exponents = (part * data - (4 - part) * _exponents(weights)) // 4
    exponents -= exponents.max()
    return np.asarray(np.ldexp(1.0, np.maximum(exponents, -_MAX_EXPONENT)))


def _exponents(values: Array) -> Array:
    """Return binary exponents; values far below the largest one get a common lowest exponent."""
    floor = max(float(values.max(initial=0.0)), 2.0**-100) * 2.0**-_MAX_EXPONENT
    return np.asarray(np.frexp(np.maximum(values, floor))[1].astype(np.int64))


def _estimate_error(sizes: Array, matrices: Sequence[tuple[Array, bool]], factors: Array) -> float:
    """Return the expected squared error of layer outputs if rounding errors are uniform.

    `sizes` holds the largest absolute value of each channel. `matrices` holds (weight matrix, is depthwise) of each
    layer.
    """
    step = float((sizes / factors).max()) / _STEPS
    total = 0.0
    for matrix, is_depthwise in matrices:
        data = sum_in_order(step * step * factors * factors * sum_rows_in_order(matrix * matrix))
        spread = matrix * factors[:, None]
        columns = np.abs(spread).max(axis=1 if is_depthwise else 0) / _STEPS
        values = sizes / (factors * _PARTS_OF_LARGEST)
        squares = values * values
        count = matrix.shape[1] if is_depthwise else 1
        rounding = (
            sum_in_order(columns * columns * squares) * count
            if is_depthwise
            else (sum_in_order(columns * columns) * sum_in_order(squares))
        )
        total += data + rounding
    return total


# ---------------------------------------------------------------- bias correction

# Float data are accumulated as integers in this fraction of a step, which is exact in any order.
_PARTS_OF_STEP: Final = 1 << 12
# About this many values are accumulated at once, so that they stay in a core's cache.
_CHUNK: Final = 1 << 14
# Corrections have this many significant bits: a last-bit difference in the data seldom changes them.
_BITS: Final = 12


class Means(NamedTuple):
    """Per-channel means of a layer's input: as float, and after rounding to integers."""

    exact: Array
    rounded: Array


class ChannelSums:
    """Per-channel sums of a tensor along an axis, of the float values and of the rounded integers."""

    def __init__(self, axis: int, scale: DataScale, integers: Integers) -> None:
        limits = np.iinfo(integers.dtype)
        self._axis, self._scale = axis, scale.scale
        self._low, self._high = limits.min - scale.zero_point, limits.max - scale.zero_point
        self._count = 0
        self._floats: Array = np.zeros(1, np.int64)
        self._integers: Array = np.zeros(1, np.int64)

    def add(self, values: Array, first: int = 0, step: int = 1) -> None:
        """Add a batch: every `step`-th value of each channel, starting with index `first`."""
        moved = np.moveaxis(values, self._axis, 0)
        rows = moved.reshape(len(moved), -1)[:, first::step]
        self._count += rows.shape[1]
        size = max(_CHUNK // max(rows.shape[1], 1), 1)
        sums = [self._sum_rows(rows[start : start + size]) for start in range(0, len(rows), size)]
        floats, integers = (np.concatenate(own) for own in zip(*sums, strict=True))
        self._floats, self._integers = self._floats + floats, self._integers + integers

    def _sum_rows(self, rows: Array) -> tuple[Array, Array]:
        """Return the sums of some channels: of floats (in parts of a step), and of integers."""
        steps = np.divide(rows, self._scale, dtype=np.float64)
        rounded = np.rint(steps)
        np.clip(rounded, self._low, self._high, out=rounded)
        steps *= _PARTS_OF_STEP
        np.rint(steps, out=steps)
        return steps.astype(np.int64).sum(axis=1), rounded.astype(np.int64).sum(axis=1)

    def read_means(self) -> Means:
        """Return the mean of each channel."""
        factor = self._scale / max(self._count, 1)
        return Means(self._floats / _PARTS_OF_STEP * factor, self._integers * factor)


def find_correction(
    layer: Layer, call: Any, weights: Array, rounded: LayerWeights, means: Means
) -> Array:
    """Return what to add to a layer's result to correct its mean, in a shape that broadcasts to it.

    `means` are the means of the input of the layer's `call`; `rounded` replaces the float `weights`.
    """
    real = rounded.to_real(layer.axis, np.float64)
    if layer.operator == "matmul":
        pairs = real * means.rounded[:, None], weights * means.exact[:, None]
        return _round_to_bits(-sum_rows_in_order((pairs[0] - pairs[1]).T))
    # weights of transposed convolutions are (in, out, …)
    weights, real = (np.moveaxis(array, layer.axis, 0) for array in (weights, real))
    outputs, inputs = weights.shape[:2]
    first = np.arange(outputs) // (outputs // int(call.attrs.groups)) * inputs
    # the input channels that each output channel reads
    channels = first[:, None] + np.arange(inputs)
    parts = _find_covered_parts(call, weights.shape[2:], is_transposed=layer.is_transposed)
    ones = [1] * parts.ndim
    error = real * means.rounded[channels].reshape(*channels.shape, *ones)
    error -= weights * means.exact[channels].reshape(*channels.shape, *ones)
    return _round_to_bits(-sum_rows_in_order(error * parts)).reshape(1, -1, *ones)


def _find_covered_parts(call: Any, kernel: Sequence[int], *, is_transposed: bool) -> Array:
    """Return, for each kernel position, the share of results for which it reads data and no padding."""
    sizes, results = ir.known_shape(call.args[0])[2:], ir.known_shape(call)[2:]
    # a transposed convolution scatters where a convolution gathers
    counts = results
    if is_transposed:
        sizes, results = results, sizes
    attrs = call.attrs
    axes = []
    for axis, extent in enumerate(kernel):
        first = np.arange(results[axis]) * int(attrs.strides[axis]) - int(attrs.padding[axis])
        positions = first[:, None] + np.arange(extent) * int(attrs.dilation[axis])
        axes.append(((positions >= 0) & (positions < sizes[axis])).sum(axis=0) / counts[axis])
    return np.asarray(functools.reduce(np.multiply.outer, axes))


def _round_to_bits(values: Array) -> Array:
    mantissas, exponents = np.frexp(values)
    rounded = np.ldexp(np.rint(np.ldexp(mantissas, _BITS)), exponents - _BITS)
    return rounded.astype(np.float32)
