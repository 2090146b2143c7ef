"""Estimates the share of a model's time that each layer saves in int8, from a CPU model.

Nothing is measured, because a recipe must give the same bytes on every build machine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Final

from tvmflow.compiler import CpuModel
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import known_sizes
from tvmflow.graph.ir_operators import Recurrent, RecurrentOperands
from tvmflow.stages.quantize.points import Layer

# How much faster int8 products are than those of float32, as counted for ResNet-18 and MobileNet v2 on Neoverse
# V1 (matrices), Neoverse N1 (sums of four products) and Cortex-A72 (sums of two), and measured with AVX2 (weights of
# 7 bits).
_MATRICES: Final = 6.0
_QUADS: Final = 3.6
_PAIRS: Final = 1.9
_NARROW: Final = 1.7
_DEPTHWISE: Final = 1.5
# That of float32 products with recurrent weights of int8, which become floats in registers.
_CONVERTED: Final = 0.8
_NARROW_DEPTHWISE: Final = 0.7
# How much faster Winograd's algorithm makes convolutions of 3×3 in float32; those of integers are direct.
_WINOGRAD: Final = {1: 1.8, 2: 1.3}
"""By the stride; with 2, where that algorithm has it."""
_WINOGRAD_KERNEL: Final = (3, 3)
_WINOGRAD_CHANNELS: Final = 16
# Two SIMD pipelines multiply, at this share of their peak.
_UTILIZATION: Final = 0.7
_PIPELINES: Final = 2
# Bytes that a core reads from memory in a cycle where weights do not stay in its cache.
_BYTES_PER_CYCLE: Final = 4.0
_FLOAT_BYTES: Final = 4


def estimate_gains(
    layers: Sequence[Layer], flow: ir.DataFlow, cpu: CpuModel, states: Collection[Any] = ()
) -> list[float]:
    """Return the share of all layers' time that each layer saves in int8.

    It is negative if int8 is slower. `states` are the recurrent layers whose state is rounded, by their
    variables.
    """
    pairs = [_estimate(layer, flow, cpu, layer.var in states) for layer in layers]
    total = sum(exact for exact, _ in pairs)
    return [(exact - rounded) / total for exact, rounded in pairs]


def _estimate(
    layer: Layer, flow: ir.DataFlow, cpu: CpuModel, is_rounded: bool
) -> tuple[float, float]:
    """Return the cycles of a layer in float32 and in int8."""
    call, weights = flow.values[layer.var], ir.known_shape(layer.weights)
    size, steps = math.prod(weights), 1
    # dynamic shapes are those of all layers, about
    if layer.is_recurrent:
        # each step reads all weights
        sizes = known_sizes(RecurrentOperands(*call.args).x)[:2]
        steps, batch = (extent if isinstance(extent, int) else 1 for extent in sizes)
        if Recurrent.read(call).is_batch_first:
            steps, batch = batch, steps
        products = batch * size
        speedups = (1.0, _multiply_speedup(cpu) if is_rounded else _CONVERTED)
    else:
        results = math.prod(s for s in known_sizes(layer.var) if isinstance(s, int))
        products = results * (size // weights[layer.axis])
        if layer.is_transposed:
            # each result meets one tap of each stride
            products //= math.prod(map(int, call.attrs.strides))
        speedups = (_winograd_speedup(layer, weights, flow, cpu), _speedup(layer, cpu))
    cycles = products / (cpu.lanes * _PIPELINES * _UTILIZATION)
    exact, rounded = (
        steps * max(cycles / speedup, _read_cycles(size * width, cpu))
        for speedup, width in zip(speedups, (_FLOAT_BYTES, 1), strict=True)
    )
    return exact, rounded


def _speedup(layer: Layer, cpu: CpuModel) -> float:
    if not layer.multiplies_bytes:
        return 1.0
    if layer.operator.startswith("depthwise"):
        # AVX2 needs more instructions to convert 8-bit values to float32 than int8 saves
        return _NARROW_DEPTHWISE if cpu.has_pair_dots else _DEPTHWISE
    return _MATRICES if cpu.has_matrices and not cpu.has_pair_dots else _multiply_speedup(cpu)


def _multiply_speedup(cpu: CpuModel) -> float:
    """Return how much faster int8 dot products are than those of float32."""
    if cpu.has_pair_dots:
        return _NARROW
    return _QUADS if cpu.has_quads and cpu.dot_dtype else _PAIRS


def _winograd_speedup(
    layer: Layer, weights: Sequence[int], flow: ir.DataFlow, cpu: CpuModel
) -> float:
    is_large = tuple(weights[-2:]) == _WINOGRAD_KERNEL and min(weights[:2]) >= _WINOGRAD_CHANNELS
    if layer.operator not in ("conv2d", "conv3d") or not is_large:
        return 1.0
    *front, height, width = map(int, flow.values[layer.var].attrs.strides)
    is_possible = height == width in cpu.winograd_strides and all(stride == 1 for stride in front)
    return _WINOGRAD[width] if is_possible else 1.0


def _read_cycles(size: int, cpu: CpuModel) -> float:
    """Return the cycles that reading weights takes, where they do not stay in the cache."""
    return size / _BYTES_PER_CYCLE if size > cpu.cached_weight_bytes else 0.0
