"""Further random inputs: of other magnitudes, and for branches that are not taken yet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Final, NamedTuple, cast

import numpy as np

from tvmflow.core.errors import BundleError, StageError
from tvmflow.core.types import Array, Feed, TensorSpec
from tvmflow.runtime.arrays import pack_rows
from tvmflow.runtime.samples import draw_integers, random_samples
from tvmflow.stages.verify.comparison import Tolerance, compare, compare_outputs, find_scaled_slice
from tvmflow.stages.verify.inputs import DEVIATIONS, ReferenceOutputs, is_finite
from tvmflow.stages.verify.libraries import Library, check_call
from tvmflow.stages.verify.verdict import (
    SMALLEST_NORMAL,
    DrawVerdict,
    Exercise,
    OutputComparison,
    ScaledSlice,
)
from tvmflow.stages.verify_settings import VerifySettings

Run = Callable[[Feed], dict[str, Array]]
Observe = Callable[[Feed], list[Exercise]]


class _Kind(NamedTuple):
    """A distribution of random inputs.

    Attributes:
        deviation: The standard deviation of floats without a range.
        sign: The sign of such floats, or None for both signs; inputs with a range use its upper or lower third.
        has_wide: Whether integers without a range are large and have both signs; otherwise they are 0 and 1.
    """

    text: str
    deviation: float = 1.0
    sign: int | None = None
    has_wide: bool = False


# Magnitudes of typical inputs: gradients of a sensor at rest, and pixels that were not scaled.
_MAGNITUDES: Final = tuple(_Kind(f"inputs of magnitude {n:g}", n) for n in (1e-3, 100.0))
_INTEGERS: Final = _Kind("integers of both signs", has_wide=True)
# Inputs that may reach further branches.
_FOR_BRANCHES: Final = (
    _Kind("low inputs", 1.0, -1),
    _Kind("high inputs", 1.0, 1),
    _Kind("inputs of magnitude 10", 10.0),
    _Kind("low inputs of magnitude 10", 10.0, -1),
    _Kind("high inputs of magnitude 10", 10.0, 1),
    _Kind("other inputs", 1.0),
    _Kind("inputs of magnitude 0.1", 0.1),
    _Kind("low inputs of magnitude 100", 100.0, -1),
    _Kind("high inputs of magnitude 100", 100.0, 1),
)
# The largest magnitude of integers without a range; 8-bit integers may have any value.
_LARGEST_INTEGER: Final = 1000
# The maximum number of batches of a recipe's samples whose branches are observed.
_MAX_OBSERVED: Final = 8
# Together, this many batches have enough values of each channel to detect a scaled one.
_REPEATS: Final = 64
# Repeats are drawn only for models whose tensors have at most this many elements, because they take about a second.
_MAX_REPEATED_ELEMENTS: Final = 2**20
# The tolerance for repeats. It is coarse, because in many batches some outputs are small by chance.
_REPEATS_TOLERANCE: Final = Tolerance(1e-2, SMALLEST_NORMAL, 1e-3, exact_integers=True)
# The maximum number of draws for outputs that are indices, and of consecutive draws without a new index.
_MORE_DRAWS: Final = 60
_VAIN_DRAWS: Final = 9
# The first seed of repeats; other draws have smaller seeds.
_FIRST_REPEAT: Final = 100
# Inputs are changed by this many roundings of their dtype. A draw whose outputs then change by more than the
# tolerance is useless.
_NUDGE: Final = 2.0


class Draw(NamedTuple):
    """An additional batch of random inputs, and the reference's outputs for it."""

    inputs: str
    feed: Feed
    outputs: dict[str, Array]


class MoreDraws(NamedTuple):
    """The additional random inputs, and what they reach.

    Attributes:
        names: The names of the compared outputs.
        left_out: A sentence for each useless draw.
        exercises: The share of elements in each branch over all inputs; None if the reference does not observe
            branches.
        repeats: Batches of the usual distribution, which together detect scaled channels.
        slices: The tolerance for scaled channels.
    """

    draws: tuple[Draw, ...] = ()
    names: tuple[str, ...] = ()
    tolerance: Tolerance = Tolerance(0.0, 0.0)
    left_out: tuple[str, ...] = ()
    exercises: tuple[Exercise, ...] | None = None
    repeats: tuple[Draw, ...] = ()
    slices: Tolerance = Tolerance(0.0, 0.0)


class _Drawer:
    """Keeps the draws that can detect a wrong library."""

    def __init__(self, run: Run, names: Sequence[str], tolerance: Tolerance) -> None:
        self._run, self._names, self._tolerance = run, names, tolerance
        self.draws: list[Draw] = []
        self.left_out: list[str] = []

    def add(self, text: str, feed: Feed, *, is_needed: bool = True, nudges: bool = True) -> bool:
        """Add a draw if its outputs are stable under rounding of the inputs; return whether it was added.

        If it is not added and `is_needed`, the reason is recorded. Stability is tested only with `nudges`.
        """
        reason = ""
        try:
            outputs = self._run(feed)
            if not is_finite([outputs], self._names):
                reason = "the reference gives NaN or infinities"
            elif nudges:
                nudged = self._run({name: _nudge(array) for name, array in feed.items()})
                expected = {name: outputs[name] for name in self._names}
                compared = compare_outputs(nudged, expected, self._tolerance)
                if not all(output["passed"] for output in compared.values()):
                    reason = "roundings of the inputs change its outputs by more than the tolerance"
        except StageError as error:
            reason = f"the reference fails: {error.message}"
        if reason and is_needed:
            self.left_out.append(f"{text} are not compared: {reason}")
        if not reason:
            self.draws.append(Draw(text, feed, outputs))
        return not reason


def _nudge(array: Array) -> Array:
    """Return floats changed up or down by a few roundings; other dtypes are unchanged."""
    if array.dtype.kind != "f":
        return array
    signs = np.random.default_rng(0).choice((-1.0, 1.0), array.shape)
    nudged: Array = (array * (1 + signs * _NUDGE * np.finfo(array.dtype).eps)).astype(array.dtype)
    return nudged


class RandomDraws:
    """Runs a reference on additional random inputs; nothing is added to a recipe's samples or images.

    Attributes:
        results: The samples and the reference's outputs, including those that `reach_more` and `vary_indices` add.
    """

    def __init__(
        self,
        run: Run,
        results: ReferenceOutputs,
        settings: VerifySettings,
        with_row_scales: Collection[str] = (),
    ) -> None:
        self._run, self.results, self._settings = run, results, settings
        feed = results.samples.batches[0]
        self._inputs = [
            TensorSpec(name, a.shape, str(a.dtype), row_scales=name in with_row_scales)
            for name, a in feed.items()
        ]
        has_images = any(spec.image for spec in settings.inputs.values())
        self._is_random = not settings.verify.data and not has_images
        self._can_add = self._is_random and bool(feed)

    def draw_repeats(self, more: MoreDraws, elements: int, tolerance: Tolerance) -> MoreDraws:
        """Add repeats for a small model, whose channels have too few values in the samples."""
        if tolerance.slice_scale is None or not more.names or not self._can_add:
            return more
        if not 0 < elements <= _MAX_REPEATED_ELEMENTS:
            return more
        repeats = []
        for number in range(_REPEATS):
            feed = self._draw(_FIRST_REPEAT + number, _Kind(""))
            repeats.append(Draw("", feed, self._run(feed)))
        return more._replace(repeats=tuple(repeats), slices=tolerance)

    def draw_more(
        self, observe: Observe | None, names: Sequence[str], tolerance: Tolerance
    ) -> MoreDraws:
        """Run the reference on other magnitudes, and on inputs that reach new branches.

        `observe` returns the branches that a batch reaches; it is None if the reference cannot observe them. If
        there are no outputs to compare, no inputs are drawn.
        """
        feeds, settings = self.results.samples.batches, self._settings
        drawer = _Drawer(self._run, names, tolerance)
        can_draw = bool(names) and self._can_add
        # models take any magnitude, except where the recipe reduces the precision
        takes_magnitudes = can_draw and not settings.quantized and settings.precision == "model"
        drawn_inputs = [spec for spec in self._inputs if self._may_draw(spec)]
        if takes_magnitudes and drawn_inputs:
            signed = any((feed[spec.name] < 0).any() for feed in feeds for spec in drawn_inputs)
            for number, kind in enumerate(_MAGNITUDES):
                feed = self._draw(number + 1, kind._replace(sign=None if signed else 1))
                drawer.add(kind.text, feed, nudges=kind.deviation > 1)
        if takes_magnitudes and any(self._may_draw(spec, "iu") for spec in self._inputs):
            feed = self._draw(len(_MAGNITUDES) + len(_FOR_BRANCHES) + 1, _INTEGERS)
            drawer.add(_INTEGERS.text, feed, is_needed=False)
        observed: list[list[Exercise]] = []
        if observe is not None:
            # batches of one distribution reach the same branches
            own = feeds[: 1 if self._is_random else _MAX_OBSERVED]
            observed += [observe(feed) for feed in (*own, *(draw.feed for draw in drawer.draws))]
        if observe is not None and can_draw:
            for text, feed in self._draw_for_branches():
                missing = _list_missing(observed)
                if not missing:
                    break
                found = observe(feed)
                if missing - _list_missing([found]) and drawer.add(text, feed, is_needed=False):
                    observed.append(found)
        return MoreDraws(
            draws=tuple(drawer.draws),
            names=tuple(names),
            tolerance=tolerance,
            left_out=tuple(drawer.left_out),
            exercises=None if observe is None else tuple(_merge(observed)),
        )

    def reach_more(self, indices: Sequence[str], *, can_settle_ties: bool) -> None:
        """Draw more random inputs for outputs that are `indices`, and keep inputs that give new indices.

        Without `can_settle_ties`, no large inputs are drawn: their sigmoids are all 1, so a library whose sigmoids
        differ in the last bit would be rejected.
        """
        if not self._can_add:
            return
        outputs, settings = self.results.outputs, self._settings
        reached = {name: {int(n) for o in outputs for n in o[name].flat} for name in indices}
        added = list[Draw]()
        deviations = (0.0, *DEVIATIONS) if can_settle_ties else (0.0, DEVIATIONS[0])
        last = 0
        for number in range(_MORE_DRAWS):
            if number - last > _VAIN_DRAWS:
                break
            [feed] = random_samples(
                self._inputs,
                settings.ranges,
                batches=1,
                seed=settings.verify.seed + 1 + number,
                deviation=deviations[number % len(deviations)],
                nonzero=settings.divisors,
            ).batches
            computed = self._run(feed)
            new = {name: {int(n) for n in computed[name].flat} - reached[name] for name in indices}
            if any(new.values()) and is_finite([computed], list(computed)):
                added.append(Draw("", feed, computed))
                reached = {name: reached[name] | new[name] for name in indices}
                last = number
        self._add(added)

    def vary_indices(
        self, indices: Sequence[str], names: Sequence[str], tolerance: Tolerance
    ) -> None:
        """If an index is 0 for all samples, draw other inputs, and add the first ones that change it."""
        if not self._can_add:
            return
        outputs = self.results.outputs
        constant = {name for name in indices if not any(batch[name].any() for batch in outputs)}
        # rounding the inputs must not change an index: of two equal scores, the library may choose the other one
        drawer = _Drawer(self._run, [*dict.fromkeys((*indices, *names))], tolerance)
        for text, feed in self._draw_for_branches():
            if not constant:
                break
            computed = self._run(feed)
            varied = {name for name in constant if computed[name].any()}
            if varied and drawer.add(text, feed, is_needed=False):
                constant -= varied
        self._add(drawer.draws)

    def _add(self, draws: Sequence[Draw]) -> None:
        data, added = self.results.samples, len(draws)
        batches = [*data.batches, *(draw.feed for draw in draws)]
        self.results = self.results._replace(
            samples=data._replace(batches=batches, total=data.total + added),
            outputs=[*self.results.outputs, *(draw.outputs for draw in draws)],
            added=self.results.added + added,
        )

    def _may_draw(self, spec: TensorSpec, kinds: str = "f") -> bool:
        """Return whether an input has a dtype of these kinds (floats by default), and no range."""
        known = self._settings.inputs.get(spec.name)
        return np.dtype(spec.dtype).kind in kinds and not (known and known.range)

    def _draw_for_branches(self) -> Iterator[tuple[str, Feed]]:
        for number, kind in enumerate(_FOR_BRANCHES, len(_MAGNITUDES) + 1):
            yield kind.text, self._draw(number, kind)

    def _draw(self, number: int, kind: _Kind) -> Feed:
        """Return a batch of seeded random inputs; all repeats together contain all integers of a range."""
        settings = self._settings
        rng = np.random.default_rng([settings.verify.seed, number])

        def draw(spec: TensorSpec) -> Array:
            if spec.row_scales:
                return pack_rows(draw(spec.stored_as("float32")))
            if self._may_draw(spec):
                values = rng.normal(0.0, kind.deviation, spec.shape)
                return (values if kind.sign is None else kind.sign * np.abs(values)).astype(
                    spec.dtype
                )
            known = settings.inputs.get(spec.name)
            low, high = (known and known.range) or (0.0, 1.0)
            if kind.has_wide and self._may_draw(spec, "iu"):
                info = np.iinfo(spec.dtype)
                most = info.max if info.bits == 8 else _LARGEST_INTEGER
                low, high = max(info.min, -most - 1), most
            third = (high - low) / 3
            low, high = (
                high - third if kind.sign == 1 else low,
                low + third if kind.sign == -1 else high,
            )
            if np.dtype(spec.dtype).kind in "iub":
                # reach the end of the range, however short it is; low values include special token ids
                least = math.ceil(low)
                most = max(least, math.floor(min(high, low + 1) if kind.sign == -1 else high))
                if number >= _FIRST_REPEAT:
                    # go through a table's rows one after the other
                    first = (number - _FIRST_REPEAT) * math.prod(spec.shape)
                    counted = np.arange(first, first + math.prod(spec.shape))
                    values = rng.permutation(least + counted % (most - least + 1))
                    if spec.name in settings.divisors:
                        values[values == 0] = 1
                    return values.reshape(spec.shape).astype(spec.dtype)
                return draw_integers(rng, spec, least, most, nonzero=spec.name in settings.divisors)
            return rng.uniform(low, high, spec.shape).astype(spec.dtype)

        return {spec.name: draw(spec) for spec in self._inputs}


# ---------------------------------------------------------------- branches


def _list_missing(observed: Iterable[Sequence[Exercise]]) -> set[tuple[str, str]]:
    """Return the (node, branch) pairs that no batch reaches."""
    return {
        (entry["node"], branch)
        for entry in _merge(observed)
        for branch, share in entry["branches"].items()
        if not share
    }


def _merge(observed: Iterable[Sequence[Exercise]]) -> list[Exercise]:
    """Return the shares of branches, averaged over all batches."""
    merged: list[Exercise] = []
    for first, *others in zip(*observed, strict=True):
        shares = [first["branches"], *(entry["branches"] for entry in others)]
        mean = {name: fmean(each[name] for each in shares) for name in first["branches"]}
        merged.append({"node": first["node"], "operator": first["operator"], "branches": mean})
    return merged


def list_unexercised(exercises: Iterable[Exercise]) -> list[str]:
    """Return a phrase for each branch that no input reaches, with the nodes of the operator."""
    entries = sorted(exercises, key=lambda entry: entry["operator"])
    phrases = []
    for operator, group in itertools.groupby(entries, key=lambda entry: entry["operator"]):
        nodes = list(group)
        branches = dict.fromkeys(branch for entry in nodes for branch in entry["branches"])
        for branch in branches:
            having = [entry for entry in nodes if branch in entry["branches"]]
            never = [entry["node"] for entry in having if not entry["branches"][branch]]
            if never:
                named = ", ".join(never[:_MAX_NAMED]) + (", …" if len(never) > _MAX_NAMED else "")
                phrases.append(f"{branch} of {len(never)} of {len(having)} {operator} ({named})")
    return phrases


_MAX_NAMED: Final = 3


# ---------------------------------------------------------------- comparison


def compare_draws(library: Library, more: MoreDraws) -> list[DrawVerdict]:
    """Compare a library with the reference on each draw separately: tolerances depend on the magnitude."""
    verdicts: list[DrawVerdict] = []
    for draw in more.draws:
        expected = {name: draw.outputs[name] for name in more.names}
        verdict, _ = check_call(library, draw.feed, expected, more.tolerance)
        verdicts.append(cast(DrawVerdict, {"inputs": draw.inputs, **verdict}))
    if more.repeats:
        verdicts.append(_compare_repeats(library, more))
    return verdicts


def _compare_repeats(library: Library, more: MoreDraws) -> DrawVerdict:
    """Find channels scaled over all repeats together, which rounding and thresholds do not explain."""
    text = f"{len(more.repeats)} more random inputs"
    try:
        outputs = library.run_all([draw.feed for draw in more.repeats])
    except (BundleError, StageError) as error:
        return {"inputs": text, "passed": False, "failure": error.message}
    scaled: dict[str, ScaledSlice] = {}
    compared: dict[str, OutputComparison] = {}
    # integer inputs are not rounded, so no output is just beside a threshold
    has_integers = all(array.dtype.kind in "iub" for array in more.repeats[0].feed.values())
    for name in more.names:
        actual, expected = (
            [batch[name] for batch in outputs],
            [d.outputs[name] for d in more.repeats],
        )
        if len({array.shape for array in (*actual, *expected)}) > 1:
            continue
        # stack batches on the last axis, so that the other axes keep their indices
        own, right = (np.stack(side, axis=-1).astype(np.float64) for side in (actual, expected))
        found = find_scaled_slice(own, right, more.slices)
        if found and found["axis"] < expected[0].ndim:
            scaled[name] = found
        if has_integers:
            compared[name] = compare(own, right, _REPEATS_TOLERANCE)
    is_passed = not scaled and all(output["passed"] for output in compared.values())
    return {"inputs": text, "passed": is_passed, "scaled": scaled, "outputs": compared}
