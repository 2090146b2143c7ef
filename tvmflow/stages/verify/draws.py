"""Further random inputs: other magnitudes, and inputs that reach branches not yet taken."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.errors import BundleError, StageError
from tvmflow.core.types import TensorSpec
from tvmflow.runtime.samples import draw_integers
from tvmflow.stages.verify.comparison import compare, find_scaled_slice
from tvmflow.stages.verify.inputs import ReferenceOutputs, is_finite
from tvmflow.stages.verify.tolerances import Tolerance
from tvmflow.stages.verify.verdict import DrawVerdict, Exercise, ScaledSlice
from tvmflow.stages.verify_settings import VerifySettings

if TYPE_CHECKING:
    import numpy as np

    from tvmflow.stages.verify.libraries import Library

    Array = np.ndarray[Any, Any]
    Feed = dict[str, Array]
    Run = Callable[[Feed], dict[str, Array]]
    Observe = Callable[[Feed], list[Exercise]]

# What a trained model sees: gradients of a sensor at rest, pixels that were not scaled.
_MAGNITUDES: Final = (1e-3, 100.0)
# The batches of a recipe's samples of which branches are observed.
_MAX_OBSERVED: Final = 8
# So many further batches have enough values of each class to tell a scaled one.
_REPEATS: Final = 64
# The elements of all tensors of a model, up to which these batches take about a second.
_MAX_REPEATED_ELEMENTS: Final = 2**20
# The numbers of their random inputs: others are below.
_FIRST_REPEAT: Final = 100
# Inputs are changed by so many roundings of their dtype: outputs that change more tell nothing.
_NUDGE: Final = 2.0


class Draw(NamedTuple):
    """A batch of random inputs beside the usual ones, and what the reference computes of it.

    Attributes:
        inputs: What inputs it has.
        feed: The inputs.
        outputs: The outputs by name.
    """

    inputs: str
    feed: Feed
    outputs: dict[str, Array]


class MoreDraws(NamedTuple):
    """Results of the further random inputs.

    Attributes:
        draws: The batches.
        names: The outputs that are compared.
        tolerance: How closely these must agree.
        left_out: A sentence for each that tells nothing, and why.
        exercises: The branches that all inputs reach; None where the reference cannot tell.
        repeats: Batches of the usual distribution, in whose outputs channels are looked for that are scaled.
        slices: How far these may be scaled.
    """

    draws: tuple[Draw, ...] = ()
    names: tuple[str, ...] = ()
    tolerance: Tolerance = Tolerance(0.0, 0.0)
    left_out: tuple[str, ...] = ()
    exercises: tuple[Exercise, ...] | None = None
    repeats: tuple[Draw, ...] = ()
    slices: Tolerance = Tolerance(0.0, 0.0)


def draw_repeats(
    run: Run,
    more: MoreDraws,
    results: ReferenceOutputs,
    elements: int,
    settings: VerifySettings,
    tolerance: Tolerance,
) -> MoreDraws:
    """Add batches for a small model, whose classes have too few values in few samples.

    Args:
        run: Runs the reference on one batch.
        more: The other draws.
        results: What the reference computed of the usual inputs.
        elements: The elements of all tensors of the model.
        settings: Those of `verify`.
        tolerance: How closely outputs must agree.
    """
    feeds = results.samples.batches
    if tolerance.slice_scale is None or not more.names or not _is_random(settings) or not feeds[0]:
        return more
    if not 0 < elements <= _MAX_REPEATED_ELEMENTS:
        return more
    inputs = [TensorSpec(name, a.shape, str(a.dtype)) for name, a in feeds[0].items()]
    repeats = []
    for number in range(_REPEATS):
        feed = _draw(inputs, settings, _FIRST_REPEAT + number, 1.0, None)
        repeats.append(Draw("", feed, run(feed)))
    return more._replace(repeats=tuple(repeats), slices=tolerance)


def draw_more(
    run: Run,
    observe: Observe | None,
    results: ReferenceOutputs,
    names: Sequence[str],
    settings: VerifySettings,
    tolerance: Tolerance,
) -> MoreDraws:
    """Run the reference on further magnitudes, and on inputs for branches that none before them reach.

    Samples of the recipe, and images, stay as they are.

    Args:
        run: Runs the reference on one batch.
        observe: Returns which branches a batch reaches; None where the reference cannot tell.
        results: What it computed of the usual inputs.
        names: The outputs that are compared; none where no more inputs may be drawn.
        settings: Those of `verify`.
        tolerance: How closely outputs must agree.
    """
    feeds = results.samples.batches
    is_random = _is_random(settings)
    drawer = _Drawer(run, names, tolerance)
    can_draw = is_random and bool(names) and bool(feeds[0])
    inputs = [TensorSpec(name, a.shape, str(a.dtype)) for name, a in feeds[0].items()]
    open_inputs = [spec for spec in inputs if _is_open(spec, settings)]
    if can_draw and open_inputs and _takes_magnitudes(settings):
        signed = any((feed[spec.name] < 0).any() for feed in feeds for spec in open_inputs)
        for number, magnitude in enumerate(_MAGNITUDES):
            feed = _draw(inputs, settings, number + 1, magnitude, None if signed else 1)
            drawer.add(f"inputs of magnitude {magnitude:g}", feed, nudges=magnitude > 1)
    observed: list[list[Exercise]] = []
    if observe is not None:
        # batches of one distribution reach the same branches
        own = feeds[: 1 if is_random else _MAX_OBSERVED]
        observed += [observe(feed) for feed in (*own, *(draw.feed for draw in drawer.draws))]
    if observe is not None and can_draw:
        for text, feed in _draw_for_branches(inputs, settings):
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


def vary_indices(
    run: Run,
    results: ReferenceOutputs,
    indices: Sequence[str],
    names: Sequence[str],
    settings: VerifySettings,
    tolerance: Tolerance,
) -> ReferenceOutputs:
    """Draw other inputs where an index is 0 for all samples, and add the first that change it.

    A library that never computes the index would pass otherwise.

    Args:
        run: Runs the reference on one batch.
        results: What it computed before; samples of the recipe, and images, stay as they are.
        indices: The outputs that are indices.
        names: All outputs that are compared.
        settings: Those of `verify`.
        tolerance: How closely outputs must agree.
    """
    data = results.samples
    if not _is_random(settings) or not data.batches[0]:
        return results
    constant = {name for name in indices if not any(batch[name].any() for batch in results.outputs)}
    # roundings of the inputs must not change an index: the library may choose the other of two equal scores
    drawer = _Drawer(run, [*dict.fromkeys((*indices, *names))], tolerance)
    inputs = [TensorSpec(name, a.shape, str(a.dtype)) for name, a in data.batches[0].items()]
    for text, feed in _draw_for_branches(inputs, settings):
        if not constant:
            break
        outputs = run(feed)
        varied = {name for name in constant if outputs[name].any()}
        if varied and drawer.add(text, feed, is_needed=False):
            constant -= varied
    added = len(drawer.draws)
    batches = [*data.batches, *(draw.feed for draw in drawer.draws)]
    return results._replace(
        samples=data._replace(batches=batches, total=data.total + added),
        outputs=[*results.outputs, *(draw.outputs for draw in drawer.draws)],
        added=results.added + added,
    )


def _is_random(settings: VerifySettings) -> bool:
    return not settings.verify.data and not any(s.image for s in settings.inputs.values())


def _takes_magnitudes(settings: VerifySettings) -> bool:
    """Return whether a model is made for any magnitude: not where the recipe limits what it can compute."""
    return not settings.quantized and settings.precision == "model"


def _is_open(spec: TensorSpec, settings: VerifySettings) -> bool:
    """Return whether an input has floats of any range."""
    known = settings.inputs.get(spec.name)
    return spec.dtype.startswith("float") and not (known and known.range)


class _Drawer:
    """Keeps the draws that can tell a wrong library.

    Args:
        run: Runs the reference on one batch.
        names: The outputs that are compared.
        tolerance: How closely outputs must agree.
    """

    def __init__(self, run: Run, names: Sequence[str], tolerance: Tolerance) -> None:
        self._run, self._names, self._tolerance = run, names, tolerance
        self.draws: list[Draw] = []
        self.left_out: list[str] = []

    def add(self, text: str, feed: Feed, *, is_needed: bool = True, nudges: bool = True) -> bool:
        """Add a draw whose outputs are numbers that roundings of the inputs do not change.

        Args:
            text: What inputs it has.
            feed: The inputs.
            is_needed: Whether to say why it is not added.
            nudges: Whether to try roundings of the inputs.

        Returns:
            Whether it was added.
        """
        reason = ""
        try:
            outputs = self._run(feed)
            if not is_finite([outputs], self._names):
                reason = "the reference gives NaN or infinities"
            elif nudges:
                nudged = self._run({name: _nudge(array) for name, array in feed.items()})
                if not all(
                    compare(nudged[name], outputs[name], self._tolerance)["passed"]
                    for name in self._names
                ):
                    reason = "roundings of the inputs change its outputs by more than the tolerance"
        except StageError as error:
            reason = f"the reference fails: {error.message}"
        if reason and is_needed:
            self.left_out.append(f"{text} are not compared: {reason}")
        if not reason:
            self.draws.append(Draw(text, feed, outputs))
        return not reason


def _nudge(array: Array) -> Array:
    """Return floats that are a few roundings further up or down."""
    import numpy as np

    if array.dtype.kind != "f":
        return array
    signs = np.random.default_rng(0).choice((-1.0, 1.0), array.shape)
    nudged: Array = (array * (1 + signs * _NUDGE * np.finfo(array.dtype).eps)).astype(array.dtype)
    return nudged


def _draw(
    inputs: Sequence[TensorSpec],
    settings: VerifySettings,
    number: int,
    deviation: float,
    sign: int | None,
) -> Feed:
    """Return a batch of seeded random inputs.

    Args:
        inputs: The inputs.
        settings: Those of `verify`.
        number: Another number gives other inputs.
        deviation: The standard deviation of floats without a range.
        sign: The sign of these; None for both. Of others, the upper or lower third of their range.
    """
    import numpy as np

    rng = np.random.default_rng([settings.verify.seed, number])

    def draw(spec: TensorSpec) -> Array:
        if _is_open(spec, settings):
            values = rng.normal(0.0, deviation, spec.shape)
            return (values if sign is None else sign * np.abs(values)).astype(spec.dtype)
        known = settings.inputs.get(spec.name)
        low, high = (known and known.range) or (0.0, 1.0)
        third = (high - low) / 3
        low, high = (high - third if sign == 1 else low, low + third if sign == -1 else high)
        if np.dtype(spec.dtype).kind in "iub":
            # the end of a range is reached, however short it is, and special ids are among the least ones
            least = math.ceil(low)
            most = max(least, math.floor(min(high, low + 1) if sign == -1 else high))
            return draw_integers(rng, spec, least, most, nonzero=spec.name in settings.divisors)
        return rng.uniform(low, high, spec.shape).astype(spec.dtype)

    return {spec.name: draw(spec) for spec in inputs}


def _draw_for_branches(
    inputs: Sequence[TensorSpec], settings: VerifySettings
) -> Iterator[tuple[str, Feed]]:
    """Give inputs that may reach what others do not."""
    kinds: tuple[tuple[str, float, int | None], ...] = (
        ("low inputs", 1.0, -1),
        ("high inputs", 1.0, 1),
        ("inputs of magnitude 10", 10.0, None),
        ("low inputs of magnitude 10", 10.0, -1),
        ("high inputs of magnitude 10", 10.0, 1),
        ("other inputs", 1.0, None),
        ("inputs of magnitude 0.1", 0.1, None),
        ("low inputs of magnitude 100", 100.0, -1),
        ("high inputs of magnitude 100", 100.0, 1),
    )
    for number, (text, deviation, sign) in enumerate(kinds):
        yield text, _draw(inputs, settings, len(_MAGNITUDES) + 1 + number, deviation, sign)


# ---------------------------------------------------------------- branches


def _list_missing(observed: Iterable[Sequence[Exercise]]) -> set[tuple[str, str]]:
    """Return node and branch of what no batch reaches."""
    return {
        (entry["node"], branch)
        for entry in _merge(observed)
        for branch, share in entry["branches"].items()
        if not share
    }


def _merge(observed: Iterable[Sequence[Exercise]]) -> list[Exercise]:
    """Return the mean shares over all batches."""
    merged: list[Exercise] = []
    for first, *others in zip(*observed, strict=True):
        shares = [first["branches"], *(entry["branches"] for entry in others)]
        mean = {name: fmean(each[name] for each in shares) for name in first["branches"]}
        merged.append({"node": first["node"], "operator": first["operator"], "branches": mean})
    return merged


def list_unexercised(exercises: Iterable[Exercise]) -> list[str]:
    """Return a phrase for each branch of an operator that no input reaches, with the nodes."""
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
    """Run a library on draws, each compared with the reference by itself: tolerances follow the magnitude."""
    verdicts: list[DrawVerdict] = []
    for draw in more.draws:
        try:
            [outputs] = library.run_all([draw.feed])
        except (BundleError, StageError) as error:
            verdicts.append({"inputs": draw.inputs, "passed": False, "failure": error.message})
            continue
        compared = {
            name: compare(outputs[name], draw.outputs[name], more.tolerance) for name in more.names
        }
        is_passed = all(output["passed"] for output in compared.values())
        verdicts.append({"inputs": draw.inputs, "passed": is_passed, "outputs": compared})
    if more.repeats:
        verdicts.append(_compare_repeats(library, more))
    return verdicts


def _compare_repeats(library: Library, more: MoreDraws) -> DrawVerdict:
    """Look for scaled channels in all batches together: rounding and steps of the model are no factor."""
    import numpy as np

    text = f"{len(more.repeats)} more random inputs"
    try:
        outputs = library.run_all([draw.feed for draw in more.repeats])
    except (BundleError, StageError) as error:
        return {"inputs": text, "passed": False, "failure": error.message}
    scaled: dict[str, ScaledSlice] = {}
    for name in more.names:
        actual, expected = (
            [batch[name] for batch in outputs],
            [d.outputs[name] for d in more.repeats],
        )
        if len({array.shape for array in (*actual, *expected)}) > 1:
            continue
        # the last axis is that of the batches, so that the others keep their numbers
        own, right = (np.stack(side, axis=-1).astype(np.float64) for side in (actual, expected))
        found = find_scaled_slice(own, right, more.slices)
        if found and found["axis"] < expected[0].ndim:
            scaled[name] = found
    return {"inputs": text, "passed": not scaled, "scaled": scaled}
