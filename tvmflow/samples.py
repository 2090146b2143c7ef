"""Inputs for a model in whole batches: read from an npz file, or drawn at random; and its outputs over all of them.

Every wheel has this module too.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmflow.errors import EnvironmentProblem, StageError
from tvmflow.values import TensorSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Feed = dict[str, Array]


class Samples(NamedTuple):
    """Whole batches of inputs; `real` of their samples are real, the rest of the last batch is padding.

    `labels` has an entry for each sample, where there are labels. `per_batch` is how many
    a batch has; 0 where batches are whole, each counting as one sample if it was drawn.
    """

    batches: list[Feed]
    real: int
    labels: Array | None
    per_batch: int


def drawn(
    inputs: Sequence[TensorSpec],
    ranges: Mapping[str, tuple[float, float]],
    *,
    batches: int,
    seed: int,
) -> Samples:
    """Seeded inputs, uniform in each input's range (0 to 1 where there is none); integers include both ends."""
    import numpy as np

    rng = np.random.default_rng(seed)
    made: list[Feed] = []
    for _ in range(batches):
        feed: Feed = {}
        for spec in inputs:
            dtype = np.dtype(spec.dtype)
            low, high = ranges.get(spec.name, (0, 1))
            values = (
                rng.integers(int(low), int(high), spec.shape, endpoint=True)
                if dtype.kind in "iub"
                else rng.uniform(low, high, spec.shape)
            )
            feed[spec.name] = values.astype(dtype)
        made.append(feed)
    return Samples(made, batches, None, 0)


def filled(inputs: Sequence[TensorSpec], value: float) -> Samples:
    """One batch whose every number is `value`."""
    import numpy as np

    feed = {spec.name: np.full(spec.shape, value, spec.dtype) for spec in inputs}
    return Samples([feed], 1, None, 0)


def recorded(
    inputs: Sequence[TensorSpec],
    path: Path,
    *,
    what: str,
    label: str = "label",
    needs_labels: str = "",
) -> Samples:
    """The arrays of an npz, cut into batches; the last is filled up with its own last sample.

    `what` is what the file is called in errors, `needs_labels` what asks for the array `label`.
    Raises StageError that names everything that does not fit.
    """
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:
        raise StageError(
            f"{what} is not an npz file of plain arrays: {error}",
            fix="write it with numpy.savez(path, <input name>=array, label=labels)",
        ) from error
    problems = []
    for spec in inputs:
        array = arrays.get(spec.name)
        if array is None:
            problems.append(f"there is no array '{spec.name}' (there are {sorted(arrays)})")
        elif array.shape[1:] != spec.shape[1:] or array.ndim != len(spec.shape) or not array.size:
            problems.append(f"'{spec.name}' has shape {array.shape}, the model takes {spec.shape}")
        elif not np.can_cast(array.dtype, spec.dtype, "same_kind"):
            problems.append(f"'{spec.name}' is {array.dtype}, the model takes {spec.dtype}")
    there = {spec.name: arrays[spec.name] for spec in inputs if spec.name in arrays}
    whole = [there[spec.name].shape == spec.shape for spec in inputs if spec.name in there]
    is_one = len(whole) == len(inputs) and all(whole)
    if not is_one and (len({spec.shape[:1] for spec in inputs}) > 1 or not inputs[0].shape):
        problems.append("the model's inputs do not all have samples along their first axis")
    labels = arrays.get(label)
    if needs_labels and labels is None:
        problems.append(f"{needs_labels} is set and there is no array '{label}' with labels")
    counts = {len(array) for array in there.values() if array.ndim} if not is_one else set()
    if labels is not None and (counts or inputs[0].shape):
        counts |= {len(labels)} | ({inputs[0].shape[0]} if is_one else set())
    if len(counts) > 1:
        problems.append("its arrays do not have the same number of samples")
    if problems:
        raise StageError(
            f"{what} does not fit the model: " + "; ".join(problems),
            fix="one array per input, named like it, samples first",
        )
    if is_one:
        # inputs as they are, whatever their first axes mean
        feed = {spec.name: there[spec.name].astype(spec.dtype) for spec in inputs}
        count = inputs[0].shape[0] if inputs and inputs[0].shape else 1
        return Samples([feed], count, labels, 0)
    count, size = counts.pop(), inputs[0].shape[0]
    batches: list[Feed] = []
    for start in range(0, count, size):
        index = np.minimum(np.arange(start, start + size), count - 1)
        batches.append({spec.name: there[spec.name][index].astype(spec.dtype) for spec in inputs})
    return Samples(batches, count, labels, size)


def outputs_of(run: Callable[[Feed], Mapping[str, Array]], samples: Samples) -> dict[str, Array]:
    """`joined` of what `run` gives for each batch."""
    return joined([run(feed) for feed in samples.batches], samples)


def joined(results: Sequence[Mapping[str, Array]], samples: Samples) -> dict[str, Array]:
    """Every output over all batches, one after the other along the first axis; those of padding are cut off."""
    import numpy as np

    found = {}
    for name in results[0]:
        parts = [np.atleast_1d(result[name]) for result in results]
        whole = np.concatenate(parts) if len(parts) > 1 else parts[0]
        has_samples = samples.per_batch and all(len(part) == samples.per_batch for part in parts)
        found[name] = whole[: samples.real] if has_samples else whole
    return found


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write an npz, all or nothing. Raises EnvironmentProblem."""
    import numpy as np

    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # not through `numpy.savez`, for which no array may be called `file`
        with zipfile.ZipFile(aside, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    np.save(stream, array, allow_pickle=False)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise EnvironmentProblem(
            f"{path} cannot be written: {error.strerror}",
            fix="name a file in a folder that exists and has room",
        ) from error
