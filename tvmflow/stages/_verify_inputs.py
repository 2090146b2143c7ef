"""The inputs that `verify` runs a library on: samples of the recipe, or random inputs that reach the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.types import Json, TensorSpec
from tvmflow.runtime import samples
from tvmflow.runtime.samples import Samples
from tvmflow.stages._tolerances import Tolerance
from tvmflow.stages._undetected import INPUTS, find_undetected
from tvmflow.stages._verify_settings import VerifySettings

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Feed = dict[str, Array]

# Networks whose biases outweigh numbers from 0 to 1, and those that have no negative ones, need others.
_DEVIATIONS: Final = (1.0, 10.0)
# The draws for outputs that are indices, in all and one after the other that reach nothing new.
_MORE_DRAWS: Final = 60
_VAIN_DRAWS: Final = 9


class ReferenceOutputs(NamedTuple):
    """Samples, and what the reference computes of them.

    Attributes:
        samples: The samples.
        outputs: Outputs and inner tensors by name, for each batch.
        undetected: The outputs of which a wrong library would pass, with what it could do.
        random_inputs: The distribution of random inputs; empty for the usual one, and for other inputs.
        added: How many samples, the last ones, were added for outputs that are indices.
    """

    samples: Samples
    outputs: list[dict[str, Array]]
    undetected: dict[str, str]
    random_inputs: str = ""
    added: int = 0


def load_samples(
    signature: Mapping[str, Json], settings: VerifySettings, path: Path | None
) -> Iterator[tuple[str, Samples]]:
    """Give what the library may be run on, with the distribution where that is not the usual one.

    That is the file that the recipe names, or seeded random inputs: uniform, and then normally
    distributed with growing deviations where an input of floats has no range.
    """
    checks = settings.verify
    inputs = tuple(map(TensorSpec.from_json, signature["inputs"]))
    if path is not None:
        labels_for = "verify.min_accuracy" if checks.min_accuracy is not None else ""
        yield (
            "",
            samples.load_samples(
                inputs, path, source="verify.data", label=checks.label, labels_needed_by=labels_for
            ),
        )
        return
    ranges = {name: spec.range for name, spec in settings.inputs.items() if spec.range}
    usual = samples.random_samples(inputs, ranges, batches=checks.samples, seed=checks.seed)
    yield "", usual
    if any(spec.dtype.startswith("float") and spec.name not in ranges for spec in inputs):
        for deviation in _DEVIATIONS:
            yield (
                f"normally distributed with standard deviation {deviation:g}",
                samples.random_samples(
                    inputs, ranges, batches=checks.samples, seed=checks.seed, deviation=deviation
                ),
            )


def run_reference_on(
    run: Callable[[Feed], dict[str, Array]],
    candidates: Iterator[tuple[str, Samples]],
    names: Sequence[str],
    tolerance: Tolerance,
) -> ReferenceOutputs:
    """Run the reference on the first samples that leave no wrong library undetected.

    Where there are none, these are the samples for which the fewest outputs do.

    Args:
        run: Runs the reference on one batch.
        candidates: Samples with their distribution.
        names: The outputs.
        tolerance: How closely outputs must agree.
    """
    best: ReferenceOutputs | None = None
    for distribution, data in candidates:
        outputs = [run(feed) for feed in data.batches]
        undetected = find_undetected(outputs, names, tolerance)
        if not data.batches[0]:
            undetected = {name: what for name, what in undetected.items() if what != INPUTS}
        tried = ReferenceOutputs(data, outputs, undetected, distribution)
        if best is None or (len(undetected) < len(best.undetected) and _is_finite(outputs, names)):
            best = tried
        if not best.undetected:
            break
    assert best is not None
    return best


def reach_more(
    run: Callable[[Feed], dict[str, Array]],
    results: ReferenceOutputs,
    indices: Sequence[str],
    settings: VerifySettings,
) -> ReferenceOutputs:
    """Draw more random inputs for outputs that are indices, and add those that reach other elements than before.

    Args:
        run: Runs the reference on one batch.
        results: What it computed before; samples of the recipe, and images, stay as they are.
        indices: The names of these outputs.
        settings: Those of `verify`.
    """
    data = results.samples
    is_random = not settings.verify.data and not any(s.image for s in settings.inputs.values())
    if not is_random or not data.batches[0]:
        return results
    batches, outputs = list(data.batches), list(results.outputs)
    reached = {name: {int(n) for batch in outputs for n in batch[name].flat} for name in indices}
    inputs = [TensorSpec(name, a.shape, str(a.dtype)) for name, a in batches[0].items()]
    ranges = {name: spec.range for name, spec in settings.inputs.items() if spec.range}
    deviations = (0.0, *_DEVIATIONS)
    last = 0
    for number in range(_MORE_DRAWS):
        if number - last > _VAIN_DRAWS:
            break
        [feed] = samples.random_samples(
            inputs,
            ranges,
            batches=1,
            seed=settings.verify.seed + 1 + number,
            deviation=deviations[number % len(deviations)],
        ).batches
        computed = run(feed)
        new = {name: {int(n) for n in computed[name].flat} - reached[name] for name in indices}
        if any(new.values()) and _is_finite([computed], list(computed)):
            batches.append(feed)
            outputs.append(computed)
            reached = {name: reached[name] | new[name] for name in indices}
            last = number
    added = len(batches) - len(data.batches)
    more = data._replace(batches=batches, total=data.total + added)
    return results._replace(samples=more, outputs=outputs, added=added)


def _is_finite(outputs: Sequence[Mapping[str, Array]], names: Sequence[str]) -> bool:
    """Return whether no number overflows; integers cannot."""
    import numpy as np

    return all(
        np.isfinite(batch[name]).all() for batch in outputs for name in names if batch[name].size
    )
