"""Chooses the layers that are quantized: what each one costs, and what a recipe allows.

Everything is decided by outputs that are the same bits on every machine of an architecture, and by
sums in a fixed order, so the choice is the same wherever it is made.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import numpy as np

from tvmflow.core.errors import StageError
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Array
from tvmflow.runtime.samples import Samples, compare_labels, join_outputs
from tvmflow.stages.quantize.ranges import sum_in_order

_log = logging.getLogger(__name__)

Feed = Mapping[str, Array]

# The error of a single layer is measured on this many batches, because it is similar on most batches.
_ALONE_BATCHES: Final = 16
# A choice is compared with its limits after every this many batches.
_LOOK_BATCHES: Final = 32
# It is or is not when its mean is this many standard errors away from them.
_CERTAINTY: Final = 4.0
# This many layers are tried again after enough of them were put back.
_RETRIES: Final = 8
# The outputs of the float model are kept up to this size, and otherwise computed again.
_KEPT_BYTES: Final = 1 << 26
# How many layers a message names.
_NAMED: Final = 5

TOO_HARMFUL: Final = "costs too much accuracy"
"""Why a layer stays float that `max_accuracy_drop` or `max_error` does not allow."""
NOT_FASTER: Final = "not faster with integers on the target"
"""Why a layer stays float that would not make the library faster."""


class Switched(Protocol):
    """A model whose layers can each be computed in float or in int8."""

    def run(self, feed: Feed, chosen: Collection[int]) -> Mapping[str, Array]:
        """Return the outputs where some layers, by index, are quantized."""
        ...


class Limits(NamedTuple):
    """Limits on the loss of accuracy; None if the recipe has none.

    Attributes:
        accuracy_drop: Percentage points of top-1 accuracy.
        error: The largest root mean square of the error of an output, relative to that of the output.
    """

    accuracy_drop: float | None = None
    error: float | None = None

    def hold(self, cost: Cost) -> bool:
        """Return whether a cost satisfies the limits."""
        drop = self.accuracy_drop is None or (cost.drop or 0.0) <= self.accuracy_drop
        return drop and (self.error is None or cost.error <= self.error)

    def tighten(self, expected: Cost, actual: Cost) -> Limits:
        """Return tighter limits, which leave a margin for the unexpected cost of a choice."""
        drop, error = self.accuracy_drop, self.error
        if drop is not None:
            drop -= max((actual.drop or 0.0) - (expected.drop or 0.0), 0.0)
        if error is not None and actual.error > expected.error:
            error *= expected.error / actual.error
        return Limits(drop, error)


class Cost(NamedTuple):
    """The cost of quantization.

    Attributes:
        error: The largest root mean square of the error of an output, relative to that of the output; infinite
            if an output is NaN.
        drop: Percentage points of top-1 accuracy; None without labels.
    """

    error: float
    drop: float | None = None

    def describe(self, limits: Limits) -> str:
        """Return what is above its limit, for people."""
        parts = []
        if limits.accuracy_drop is not None and self.drop is not None:
            parts.append(
                f"a drop of {self.drop:.2f} points (max_accuracy_drop {limits.accuracy_drop:g})"
            )
        if limits.error is not None:
            parts.append(f"an error of {self.error:.2%} (max_error {limits.error:.2%})")
        return " and ".join(parts)


class Choice(NamedTuple):
    """The layers that are quantized.

    Attributes:
        chosen: Their positions.
        damage: The error of the outputs with only this layer quantized; infinite if an output is NaN.
        reasons: Why layers stay float, by index.
        cost: The cost of all chosen layers together.
        everything: The cost of all candidate layers.
        evaluations: The number of evaluated choices, each on as many samples as a decision needed.
    """

    chosen: tuple[int, ...]
    damage: Mapping[int, float]
    reasons: Mapping[int, str]
    cost: Cost
    everything: Cost
    evaluations: int


class Comparison:
    """An alternative model, and its errors on the batches so far.

    Attributes:
        batches: How many batches were compared.
        squares: Output name -> for each batch, the sums of squares of its errors and of its values.
        kept: The scores of classes of each batch, where there are labels.
    """

    def __init__(self, run: Callable[[Feed], Mapping[str, Array]]) -> None:
        self.run = run
        self.batches = 0
        self.squares: dict[str, list[tuple[float, float]]] = {}
        self.kept: list[Mapping[str, Array]] = []


class Evaluation:
    """Compares choices of layers with the float model on samples.

    Args:
        data: The samples; of several sizes they have no labels.
        output: The name of the output that has scores of classes.
        zero_points: The integer that stands for 0, by the names of outputs that are quantized.
    """

    def __init__(
        self,
        switched: Switched,
        data: Samples,
        output: str,
        zero_points: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._switched = switched
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
        """Return the cost of layers, by index, from only the samples that decide about the limits."""
        self.count += 1
        comparison = Comparison(lambda feed: self._switched.run(feed, chosen))
        return self.compare_more(comparison, limits=limits)

    def measure_alone(self, index: int) -> Cost:
        """Return the error with only one layer quantized, from the first batches; accuracy needs all batches."""
        if index not in self._alone:
            cost = self.compare(lambda feed: self._switched.run(feed, [index]), _ALONE_BATCHES)
            self._alone[index] = Cost(cost.error)
        return self._alone[index]

    def compare(
        self, run: Callable[[Feed], Mapping[str, Array]], batches: int | None = None
    ) -> Cost:
        """Return what another way to compute the outputs costs on the first batches, or all.

        There is no accuracy unless they are all.
        """
        return self.compare_more(Comparison(run), batches)

    def compare_more(
        self, comparison: Comparison, batches: int | None = None, limits: Limits | None = None
    ) -> Cost:
        """Return the cost of a comparison, which goes on with the batches that it lacks.

        It stops as soon as it is clear whether the limits are satisfied. The drop in accuracy is then that of the
        samples that were compared. Only all samples show that it is allowed.
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
        # one sample of 200 is 0.5 points and no more
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
        """Return whether further batches cannot change whether the limits are satisfied."""
        if comparison.batches % _LOOK_BATCHES:
            return False
        # only the remaining samples can change the mean
        left = 1 - comparison.batches / len(self._data.batches)
        sides = []
        if limits.error is not None:
            # where an error is relative to the size of outputs, a difference of both is a mean
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
        """Return 1 for each sample that became wrong, −1 for one that became right, 0 for others."""
        right = self._judge(comparison.kept)
        assert right is not None and self._right is not None, "there are labels"
        return self._right[: len(right)].astype(np.int64) - right

    def _read_exact(self, index: int) -> Mapping[str, Array]:
        if index in self._exact:
            return self._exact[index]
        outputs = self._switched.run(self._data.batches[index], ())
        size = sum(array.nbytes for array in outputs.values())
        if self._kept_bytes + size <= _KEPT_BYTES:
            self._kept_bytes += size
            self._exact[index] = outputs
        return outputs

    def _judge(self, results: Iterable[Mapping[str, Array]]) -> Array | None:
        """Return whether the first samples get the class of their label; None without labels."""
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
    """Return as many layers as the limits allow, and what each costs.

    Layers go back to float in the order of their damage. Bisection finds their number, because more quantized layers
    cost more. Then layers that went back are tried again, one by one. A layer that saves nothing, by its share of
    the library's time in `gains`, stays float.

    Raises:
        StageError: when the limits allow no layer.
    """
    damage = {index: evaluation.measure_alone(index).error for index in names}
    reasons = find_reasons(names, gains)
    useful = [index for index in names if index not in reasons]
    everything = evaluation.measure(useful, limits)
    _log.debug("all %s: %s", count_text(len(useful), "layer"), _describe(everything))
    order = sorted(useful, key=lambda index: (-_weigh(damage[index], gains.get(index)), index))
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
    """Return the layers that stay float because quantizing them saves no time, with the reason."""
    return {index: NOT_FASTER for index in indices if gains.get(index, 1.0) <= 0}


def _put_back(
    evaluation: Evaluation, order: Sequence[int], everything: Cost, limits: Limits
) -> tuple[list[int], Cost]:
    """Return the layers that must stay float, and the cost with all others quantized.

    Layers in `order` are sorted by their error, largest first.
    """
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
    # the last layer was necessary to satisfy the limits; of the others, those with the least error may not be
    for index in list(reversed(back[:-1]))[:_RETRIES]:
        tried = evaluation.measure(
            [other for other in order if other not in back or other == index], limits
        )
        if limits.hold(tried):
            back.remove(index)
            cost = tried
    return back, cost


def _weigh(damage: float, gain: float | None) -> float:
    """Return the order in which layers go back to float: errors add up as squares, and times linearly."""
    return damage * damage / gain if gain else damage * damage


def _list_squares(comparison: Comparison) -> list[Array]:
    """Return the sums of squares of each output: a row of its errors, and one of itself."""
    return [np.array(own).T for own in comparison.squares.values()]


def _find_side(values: Array, left: float) -> int:
    """Return the sign of the mean of some samples; 0 if it is not significant.

    Args:
        values: The samples.
        left: The share of the population that is not among the samples.
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
    """Return the sum of squares, added in order."""
    return sum_in_order(np.square(values).reshape(-1))


def _describe(cost: Cost) -> str:
    drop = "" if cost.drop is None else f", {cost.drop:.2f} points of accuracy lost"
    return f"error of outputs {cost.error:.2%}{drop}"
