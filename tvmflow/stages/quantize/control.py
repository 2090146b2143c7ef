"""The choice of layers to quantize: their cost on samples, the recipe's limits, their estimated gain.

The choice is the same on every machine of an architecture: it depends on outputs that have the same bits on each of
them, and errors are accumulated in a fixed order. For the same reason, gains are estimated and not measured.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from tvmflow.compiler import CpuModel
from tvmflow.core.errors import StageError
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Array
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import known_sizes
from tvmflow.graph.ir_operators import Recurrent, RecurrentOperands
from tvmflow.runtime.samples import Samples, compare_labels, join_outputs
from tvmflow.stages.quantize.points import Layer
from tvmflow.stages.quantize.ranges import sum_in_order

_log = logging.getLogger(__name__)

Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Computes the outputs of a model for a batch."""

# The error of a single layer is measured on only this many batches, because it varies little between batches.
_ALONE_BATCHES: Final = 16
# After every this many batches, a choice is compared with the limits.
_LOOK_BATCHES: Final = 32
# The comparison ends when the mean is this many standard errors away from the limits.
_CERTAINTY: Final = 4.0
# After bisection, up to this many of the layers that went back to float are tried again.
_RETRIES: Final = 8
# Outputs of the float model are kept up to this total size; further ones are computed again.
_KEPT_BYTES: Final = 1 << 26
# The maximum number of layers that a message names.
_NAMED: Final = 5

TOO_HARMFUL: Final = "costs too much accuracy"
"""The reason for layers that `max_accuracy_drop` or `max_error` does not allow to quantize."""
NOT_FASTER: Final = "not faster with integers on the target"
"""The reason for layers whose quantization would not make the library faster."""


class Limits(NamedTuple):
    """Limits on the loss of accuracy; None if the recipe has none.

    Attributes:
        accuracy_drop: The largest allowed loss of top-1 accuracy, in percentage points.
        error: The largest allowed relative root mean square error of an output.
    """

    accuracy_drop: float | None = None
    error: float | None = None

    def hold(self, cost: Cost) -> bool:
        """Return whether a cost satisfies the limits."""
        drop = self.accuracy_drop is None or (cost.drop or 0.0) <= self.accuracy_drop
        return drop and (self.error is None or cost.error <= self.error)

    def tighten(self, expected: Cost, actual: Cost) -> Limits:
        """Return limits tightened by how much a choice's actual cost exceeds the expected cost."""
        drop, error = self.accuracy_drop, self.error
        if drop is not None:
            drop -= max((actual.drop or 0.0) - (expected.drop or 0.0), 0.0)
        if error is not None and actual.error > expected.error:
            error *= expected.error / actual.error
        return Limits(drop, error)


class Cost(NamedTuple):
    """The cost of quantization.

    Attributes:
        error: The largest relative root mean square error of an output; infinite if an output is NaN.
        drop: The loss of top-1 accuracy, in percentage points; None without labels.
    """

    error: float
    drop: float | None = None

    def describe(self, limits: Limits) -> str:
        """Return the cost beside each limit, for messages."""
        parts = []
        if limits.accuracy_drop is not None and self.drop is not None:
            parts.append(
                f"a drop of {self.drop:.2f} points (max_accuracy_drop {limits.accuracy_drop:g})"
            )
        if limits.error is not None:
            parts.append(f"an error of {self.error:.2%} (max_error {limits.error:.2%})")
        return " and ".join(parts)


class Choice(NamedTuple):
    """The layers chosen for quantization, by index.

    Attributes:
        damage: The error of the outputs with only this layer quantized; infinite if an output is NaN.
        reasons: The reasons why layers stay float.
        cost: The cost of all chosen layers together.
        everything: The cost of all candidate layers.
        evaluations: The number of evaluated choices; each used only as many samples as its decision needed.
    """

    chosen: tuple[int, ...]
    damage: Mapping[int, float]
    reasons: Mapping[int, str]
    cost: Cost
    everything: Cost
    evaluations: int


class Comparison:
    """A quantized model's errors on the batches compared so far.

    Attributes:
        batches: The number of compared batches.
        squares: For each output and batch, the sums of squares of its errors and of its values.
        kept: The class scores of each batch, if there are labels.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.batches = 0
        self.squares: dict[str, list[tuple[float, float]]] = {}
        self.kept: list[Mapping[str, Array]] = []


class Evaluation:
    """Compares choices of layers with the float model on samples.

    Args:
        run_float: Computes the outputs of the float model.
        choose: Returns a function that computes the outputs with the layers of the given indices quantized.
        data: The samples, without labels if they have several sizes.
        output: The name of the output with class scores.
        zero_points: The zero points of quantized outputs, by name.
    """

    def __init__(
        self,
        run_float: Run,
        choose: Callable[[Collection[int]], Run],
        data: Samples,
        output: str,
        zero_points: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._run_float, self._choose = run_float, choose
        self._zero_points = zero_points
        self._data = data
        self._output = output
        self._exact: dict[int, Mapping[str, Array]] = {}
        self._kept_bytes = 0
        self._alone: dict[int, Cost] = {}
        self.count = 0
        """How many choices were evaluated."""
        self._right = self._judge(map(self._read_exact, range(len(data.batches))))
        self.accuracy = None if self._right is None else float(self._right.mean())
        """The accuracy of the float model; None without labels."""

    def measure(self, chosen: Collection[int], limits: Limits | None = None) -> Cost:
        """Return the cost of quantizing layers, by index; with limits, from no more samples than needed."""
        self.count += 1
        run = self._choose(chosen) if chosen else self._run_float
        return self.compare_more(Comparison(run), limits=limits)

    def measure_alone(self, index: int) -> Cost:
        """Return the error with only one layer quantized, from the first batches; accuracy needs all batches."""
        if index not in self._alone:
            comparison = Comparison(self._choose([index]))
            self._alone[index] = Cost(self.compare_more(comparison, _ALONE_BATCHES).error)
        return self._alone[index]

    def compare_more(
        self, comparison: Comparison, batches: int | None = None, limits: Limits | None = None
    ) -> Cost:
        """Continue a comparison up to a number of batches (all by default), and return its cost.

        With limits, it stops when the compared samples decide whether the limits are satisfied; the drop in accuracy
        is then that of the compared samples. Only all samples can show that the drop is within the limit.
        """
        count = len(self._data.batches)
        batches = count if batches is None else min(batches, count)
        while comparison.batches < batches:
            self._compare_batch(comparison)
            if limits is not None and self._is_clear(comparison, limits):
                break
        error = max(
            (_relate(*map(sum_in_order, own)) for own in _list_squares(comparison)), default=0.0
        )
        is_part = comparison.batches < count
        is_counted = self._data.count_samples(comparison.batches) is not None
        if self._right is None or (is_part and (limits is None or not is_counted)):
            return Cost(error)
        # one sample of 200 is exactly 0.5 points
        return Cost(error, round(100 * float(self._find_losses(comparison).mean()), 9))

    def _compare_batch(self, comparison: Comparison) -> None:
        index = comparison.batches
        exact, rounded = self._read_exact(index), comparison.run(self._data.batches[index])
        for name, array in exact.items():
            zero = self._zero_points.get(name, 0.0)
            if array.dtype.kind == "f" or name in self._zero_points:
                error = _sum_squares(np.subtract(rounded[name], array, dtype=np.float64))
                size = _sum_squares(array.astype(np.float64) - zero)
                comparison.squares.setdefault(name, []).append((error, size))
        if self._right is not None:
            comparison.kept.append({self._output: rounded[self._output]})
        comparison.batches += 1

    def _is_clear(self, comparison: Comparison, limits: Limits) -> bool:
        """Return whether the compared batches already decide if the limits are satisfied."""
        if comparison.batches % _LOOK_BATCHES:
            return False
        # only the remaining samples can change the mean
        left = 1 - comparison.batches / len(self._data.batches)
        sides = []
        if limits.error is not None:
            # a relative error is a ratio of means, so the sign of the mean of error² − allowed² · size² is tested
            allowed = limits.error * limits.error
            squares = _list_squares(comparison)
            sides = [_find_side(own[0] - allowed * own[1], left) for own in squares]
        if limits.accuracy_drop is None:
            return 1 in sides or (bool(sides) and all(side == -1 for side in sides))
        if self._data.count_samples(comparison.batches) is None:
            return 1 in sides
        losses = self._find_losses(comparison) - limits.accuracy_drop / 100
        return 1 in (*sides, _find_side(losses, left))

    def _find_losses(self, comparison: Comparison) -> Array:
        """Return for each sample 1 if it became wrong, −1 if it became right, 0 otherwise."""
        right = self._judge(comparison.kept)
        assert right is not None and self._right is not None, "there are labels"
        return self._right[: len(right)].astype(np.int64) - right

    def _read_exact(self, index: int) -> Mapping[str, Array]:
        if index in self._exact:
            return self._exact[index]
        outputs = self._run_float(self._data.batches[index])
        size = sum(array.nbytes for array in outputs.values())
        if self._kept_bytes + size <= _KEPT_BYTES:
            self._kept_bytes += size
            self._exact[index] = outputs
        return outputs

    def _judge(self, results: Iterable[Mapping[str, Array]]) -> Array | None:
        if self._data.labels is None:
            return None
        scores = [{self._output: outputs[self._output]} for outputs in results]
        joined = join_outputs(scores, self._data)
        labels = self._data.labels[: self._data.count_samples(len(scores))]
        return compare_labels(joined, self._output, labels)


def choose_layers(
    evaluation: Evaluation,
    names: Mapping[int, str],
    limits: Limits,
    gains: Mapping[int, float] = MappingProxyType({}),
) -> Choice:
    """Choose as many layers as the limits allow; StageError if they allow none.

    Layers return to float in descending order of damage per gain. Bisection finds the smallest number of float layers
    that satisfies the limits. Then some of these layers are tried again, one by one. `gains` holds the share of the
    library's time that each quantized layer saves; a layer that saves no time stays float.
    """
    damage = {index: evaluation.measure_alone(index).error for index in names}
    reasons = find_reasons(names, gains)
    useful = [index for index in names if index not in reasons]
    everything = evaluation.measure(useful, limits)
    _log.debug("all %s: %s", count_text(len(useful), "layer"), _describe(everything))
    # errors add up as squares, and times linearly
    weights = {i: damage[i] * damage[i] / (gains.get(i) or 1.0) for i in useful}
    order = sorted(useful, key=lambda index: (-weights[index], index))
    back, cost = _put_back(evaluation, order, everything, limits)
    chosen = [index for index in useful if index not in back]
    if back and not chosen:
        worst = ", ".join(f"{names[index]} ({damage[index]:.1%})" for index in order[:_NAMED])
        raise StageError(
            f"no layer can be computed with integers within the limits: all of them cost "
            f"{everything.describe(limits)}. The error of the outputs is largest with {worst}",
            fix="allow more, provide more and other calibration data, or leave `quantize` out",
        )
    reasons |= dict.fromkeys(back, TOO_HARMFUL)
    return Choice(
        chosen=tuple(chosen),
        damage=damage,
        reasons=reasons,
        cost=cost,
        everything=everything,
        evaluations=evaluation.count,
    )


def find_reasons(indices: Collection[int], gains: Mapping[int, float]) -> dict[int, str]:
    """Return `NOT_FASTER` for each layer, by index, whose quantization saves no time."""
    return {index: NOT_FASTER for index in indices if gains.get(index, 1.0) <= 0}


def _put_back(
    evaluation: Evaluation, order: Sequence[int], everything: Cost, limits: Limits
) -> tuple[list[int], Cost]:
    """Return the layers of `order` (worst first) that must stay float, and the cost of the others."""
    if limits.hold(everything):
        return [], everything
    # bisection: `few` float layers do not satisfy the limits, `enough` do
    few, enough, cost = 0, len(order), Cost(0.0)
    while enough - few > 1:
        middle = (few + enough) // 2
        tried = evaluation.measure(order[middle:], limits)
        _log.debug("%s in float: %s", count_text(middle, "layer"), _describe(tried))
        if limits.hold(tried):
            enough, cost = middle, tried
        else:
            few = middle
    back = list(order[:enough])
    # the last layer must stay float to satisfy the limits; the least harmful of the others may not have to
    for index in list(reversed(back[:-1]))[:_RETRIES]:
        tried = evaluation.measure(
            [other for other in order if other not in back or other == index], limits
        )
        if limits.hold(tried):
            back.remove(index)
            cost = tried
    return back, cost


def _list_squares(comparison: Comparison) -> list[Array]:
    """Return for each output an array of two rows: the summed squares of its errors and of its values."""
    return [np.array(own).T for own in comparison.squares.values()]


def _find_side(values: Array, left: float) -> int:
    """Return the sign of the mean; 0 if it is not significant, 1 if a value is not finite.

    `left` is the share of the samples that `values` does not contain yet.
    """
    total = sum_in_order(values)
    if not math.isfinite(total):
        return 1
    spread = _sum_squares(values - total / len(values)) / max(len(values) - 1, 1)
    if abs(total) <= _CERTAINTY * math.sqrt(spread * len(values) * left):
        return 0
    return 1 if total > 0 else -1


def _relate(error: float, size: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return math.sqrt(error / size) if size else (math.inf if error else 0.0)


def _sum_squares(values: Array) -> float:
    """Return the sum of squares, accumulated in index order."""
    return sum_in_order(np.square(values).reshape(-1))


def _describe(cost: Cost) -> str:
    drop = "" if cost.drop is None else f", {cost.drop:.2f} points of accuracy lost"
    return f"error of outputs {cost.error:.2%}{drop}"


# ---------------------------------------------------------------- estimated gains

# Speedups of int8 over float32. Those of ARM are from instruction counts of ResNet-18 and MobileNet v2: Neoverse V1
# (`_MATRICES`: int8 matrix multiply), Neoverse N1 (`_QUADS`: dot products of four) and Cortex-A72 (`_PAIRS`: of
# two). `_NARROW` and `_NARROW_DEPTHWISE` were measured with AVX2 (7-bit weights).
_MATRICES: Final = 6.0
_QUADS: Final = 3.6
_PAIRS: Final = 1.9
_NARROW: Final = 1.7
_DEPTHWISE: Final = 1.5
# Recurrent int8 weights with a float state: they are converted to float32 in registers.
_CONVERTED: Final = 0.8
_NARROW_DEPTHWISE: Final = 0.7
# Speedups of 3×3 float32 convolutions by Winograd's algorithm; int8 convolutions have no such kernels.
_WINOGRAD: Final = {1: 1.8, 2: 1.3}
"""By the stride."""
_WINOGRAD_KERNEL: Final = (3, 3)
_WINOGRAD_CHANNELS: Final = 16
# A core is assumed to multiply in this many SIMD pipelines, at this share of their peak.
_UTILIZATION: Final = 0.7
_PIPELINES: Final = 2
# The bytes per cycle that a core reads from memory if weights exceed its cache.
_BYTES_PER_CYCLE: Final = 4.0
_FLOAT_BYTES: Final = 4


def estimate_gains(
    layers: Sequence[Layer], flow: ir.DataFlow, cpu: CpuModel, states: Collection[Any] = ()
) -> list[float]:
    """Return the share of all layers' time that each layer saves in int8; negative if int8 is slower.

    `states` holds the variables of the recurrent layers whose state is int8.
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
    # dynamic dimensions are left out, because they are about the same in all layers
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
            # each result is computed from one in `stride` kernel positions along each axis
            products //= math.prod(map(int, call.attrs.strides))
        speedups = (_winograd_speedup(layer, weights, flow, cpu), _speedup(layer, cpu))
    cycles = products / (cpu.lanes * _PIPELINES * _UTILIZATION)
    exact, rounded = (
        # weights that do not stay in the cache are read from memory
        steps
        * max(cycles / speedup, read / _BYTES_PER_CYCLE if read > cpu.cached_weight_bytes else 0.0)
        for speedup, read in zip(speedups, (size * _FLOAT_BYTES, size), strict=True)
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
