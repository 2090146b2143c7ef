"""Samples: arrays, images or random inputs in whole batches, and the joined outputs of all batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from tvmflow.core.dimensions import WrongSize, derive_sizes
from tvmflow.core.errors import StageError
from tvmflow.core.formatting import count_text, quoted
from tvmflow.core.types import Array, Dimension, Feed, TensorSpec
from tvmflow.runtime.arrays import pack_rows
from tvmflow.runtime.images import Preprocessing
from tvmflow.runtime.npz import StoredArray

if TYPE_CHECKING:
    import numpy as np

    AnyArray = Array | StoredArray


_FIX = (
    "provide one array for each input, with its name, samples along the first axis; where that is something else "
    "in the model, along an axis before it"
)


class Samples(NamedTuple):
    """Whole batches of inputs, which may be made on demand, with a label for each sample or None.

    `total` samples are real; the rest of the last batch is padding. `batch_size` is 0 for a batch that cannot be
    divided into samples. If `is_stacked`, each batch is one sample, along an additional first axis of the arrays.
    """

    batches: Sequence[Feed]
    total: int
    labels: Array | None
    batch_size: int
    is_stacked: bool = False

    def count_samples(self, batches: int) -> int | None:
        """Return how many samples the first `batches` have; None if batches cannot be divided."""
        if batches >= len(self.batches):
            return self.total
        size = 1 if self.is_stacked else self.batch_size
        return batches * size if size else None


def random_samples(
    inputs: Sequence[TensorSpec],
    ranges: Mapping[str, tuple[float, float]],
    *,
    batches: int,
    seed: int,
    deviation: float = 0.0,
    nonzero: Collection[str] = (),
) -> Samples:
    """Return seeded random inputs, uniform in each input's range (ends included), by default from 0 to 1.

    With a `deviation`, float inputs without a range are normally distributed; `nonzero` inputs have 1 in place of 0.
    """
    import numpy as np

    rng = np.random.default_rng(seed)

    def draw(spec: TensorSpec) -> Array:
        if spec.row_scales:
            return pack_rows(draw(spec.stored_as("float32")))
        low, high = ranges.get(spec.name, (0, 1))
        if np.dtype(spec.dtype).kind in "iub":
            return draw_integers(rng, spec, low, high, nonzero=spec.name in nonzero)
        if deviation and spec.name not in ranges:
            return rng.normal(0.0, deviation, spec.shape).astype(spec.dtype)
        return rng.uniform(low, high, spec.shape).astype(spec.dtype)

    feeds = [{spec.name: draw(spec) for spec in inputs} for _ in range(batches)]
    return Samples(feeds, batches, None, 0)


def draw_integers(
    rng: np.random.Generator, spec: TensorSpec, low: float, high: float, *, nonzero: bool
) -> Array:
    """Return random integers from a range, limited to what the dtype can represent."""
    import numpy as np

    if (kind := np.dtype(spec.dtype).kind) in "iu":
        limits = np.iinfo(spec.dtype)
        low = max(low, 1 if nonzero and kind == "u" else limits.min)
        high = max(low, min(high, limits.max))
    values: Array = rng.integers(int(low), int(high), spec.shape, endpoint=True)
    return np.where(nonzero & (values == 0), 1, values).astype(spec.dtype)


def constant_samples(inputs: Sequence[TensorSpec], value: float) -> Samples:
    """Return one batch in which every element is `value`."""
    import numpy as np

    feed = {spec.name: np.full(spec.shape, value, spec.dtype) for spec in inputs}
    return Samples([feed], 1, None, 0)


class _Batches(Sequence["Feed"]):
    """Batches that are made on access; slicing makes none."""

    def __init__(self, make: Callable[[int], Feed], indices: range) -> None:
        self._make = make
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Feed: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Feed]: ...
    def __getitem__(self, index: int | slice) -> Feed | Sequence[Feed]:
        if isinstance(index, slice):
            return _Batches(self._make, self._indices[index])
        return self._make(self._indices[index])


def image_samples(
    preprocessing: Preprocessing, images: Sequence[Array] | StoredArray, labels: Array | None = None
) -> Samples:
    """Return images for a model whose only input takes them, divided into batches."""
    size = preprocessing.input.shape[0]

    def make(start: int) -> Feed:
        some: Any = images[start : start + size]
        return {preprocessing.input.name: preprocessing.tensor(some)}

    return Samples(_Batches(make, range(0, len(images), size)), len(images), labels, size)


def make_samples(
    inputs: Sequence[TensorSpec],
    arrays: Mapping[str, AnyArray],
    *,
    source: str,
    label: str = "label",
    labels_needed_by: str = "",
    dimensions: Sequence[Dimension] = (),
) -> Samples:
    """Divide arrays by name into batches; the last sample is repeated to fill the last batch.

    With dynamic shapes, batches have the shapes of the arrays, and the last batch is smaller if the dimension allows it.
    Arrays of different sizes are named `NUMBER/INPUT`: the arrays of one number are a batch.

    If an array has one axis more than its input, its first axis is the samples. An example is a state whose own first
    axis is layers. Arrays without that axis are then the same for all samples. Labels are in the array named `label`.
    Messages call the file `source`, and name the setting that needs labels.

    Raises:
        StageError: when the arrays do not fit; the message names each problem.
    """
    labels = _read_labels(inputs, arrays, label, source)
    if dimensions:
        samples = _make_dynamic_samples(inputs, arrays, dimensions, label, source)
    elif _count_stacked(inputs, arrays):
        samples = _make_stacked_samples(inputs, arrays, (), source)
    else:
        samples = _make_fixed_samples(inputs, arrays, source)
    problem = ""
    if labels is None and labels_needed_by:
        problem = f"{labels_needed_by} is set and there is no array '{label}' with labels"
    elif labels is not None and len(labels) != samples.total:
        problem = f"it has {samples.total} samples and {len(labels)} labels"
    if problem:
        raise StageError(
            f"{source} does not fit the model: {problem}",
            fix=f"provide an array '{label}' with an entry for each sample",
        )
    return samples._replace(labels=labels)


def _make_fixed_samples(
    inputs: Sequence[TensorSpec], arrays: Mapping[str, AnyArray], source: str
) -> Samples:
    matching = {spec.name: arrays[spec.name] for spec in inputs if spec.name in arrays}
    shapes = {name: array.shape for name, array in matching.items()}
    # arrays with exactly the model's shapes are one batch, even if their first axes are not samples
    is_one_batch = all(shapes.get(spec.name) == spec.shape for spec in inputs)
    problems = [*filter(None, (_mismatch_reason(spec, arrays) for spec in inputs))]
    if not is_one_batch:
        if len({spec.shape[:1] for spec in inputs}) > 1 or not inputs[0].shape:
            problems.append("the model's inputs do not all have samples along their first axis")
        if len({shape[0] for shape in shapes.values() if shape}) > 1:
            problems.append("its arrays do not have the same number of samples")
    _check_problems(problems, source)
    if is_one_batch:
        return _make_batch(inputs, matching, source)
    count, batch_size = len(matching[inputs[0].name]), inputs[0].shape[0]
    batches = _divide(inputs, matching, count, batch_size, source)
    return Samples(batches, count, None, batch_size)


def _make_batch(
    inputs: Sequence[TensorSpec], arrays: Mapping[str, AnyArray], source: str
) -> Samples:
    """Return arrays as one batch, which cannot be divided into samples."""

    def make(_: int) -> Feed:
        return {spec.name: _convert(arrays[spec.name][...], spec, source) for spec in inputs}

    count = next((len(arrays[spec.name]) for spec in inputs if arrays[spec.name].ndim), 1)
    return Samples(_Batches(make, range(1)), count, None, 0)


def _check_problems(problems: Sequence[str], source: str, fix: str = _FIX) -> None:
    if problems:
        raise StageError(f"{source} does not fit the model: " + "; ".join(problems), fix=fix)


def _read_labels(
    inputs: Sequence[TensorSpec], arrays: Mapping[str, AnyArray], label: str, source: str
) -> Array | None:
    """Return the labels, one value each; None if there is no such array, or it is an input."""
    array = arrays.get(label)
    if array is None or any(spec.name == label for spec in inputs):
        return None
    if not array.ndim or array.size != len(array) or array.dtype.kind not in "biuf":
        raise StageError(
            f"{source}: the array '{label}' has shape {array.shape} and dtype {array.dtype}, "
            "and labels are one number for each sample",
            fix=f"write the index of each sample's class into '{label}', or give it another name if it has no labels",
        )
    return array[...]


def _group_numbered(arrays: Mapping[str, AnyArray], label: str) -> dict[str, dict[str, AnyArray]]:
    """Group arrays named `NUMBER/INPUT` by number; if none is numbered, the key is empty."""
    groups: dict[str, dict[str, AnyArray]] = {}
    for name, array in arrays.items():
        number, separator, own = name.partition("/")
        if separator and number.isdecimal():
            groups.setdefault(number, {})[own] = array
    if not groups:
        return {"": {name: array for name, array in arrays.items() if name != label}}
    return dict(sorted(groups.items(), key=lambda entry: int(entry[0])))


def _make_dynamic_samples(
    inputs: Sequence[TensorSpec],
    arrays: Mapping[str, AnyArray],
    dimensions: Sequence[Dimension],
    label: str,
    source: str,
) -> Samples:
    groups = [
        _make_group(inputs, group, dimensions, f"{source}, batch {name}" if name else source)
        for name, group in _group_numbered(arrays, label).items()
    ]
    if len(groups) == 1:
        return groups[0]
    if len({group.is_stacked for group in groups}) > 1:
        raise StageError(
            f"{source}: some of its numbered arrays have an axis of samples before those of the model, and others "
            "have not",
            fix="give all of them one, or none",
        )
    # all samples of a group have one size
    indices = [(group, index) for group in groups for index in range(len(group.batches))]

    def make(number: int) -> Feed:
        group, index = indices[number]
        return group.batches[index]

    return Samples(
        batches=_Batches(make, range(len(indices))),
        total=sum(group.total for group in groups),
        labels=None,
        batch_size=0,
        is_stacked=groups[0].is_stacked,
    )


def _make_group(
    inputs: Sequence[TensorSpec],
    arrays: Mapping[str, AnyArray],
    dimensions: Sequence[Dimension],
    source: str,
) -> Samples:
    """Return arrays of one size as one batch if the model takes that, else divided into batches."""
    if _count_stacked(inputs, arrays):
        return _make_stacked_samples(inputs, arrays, dimensions, source)
    problems = [*filter(None, (_mismatch_reason(spec, arrays, is_dynamic=True) for spec in inputs))]
    if not problems:
        shapes = {spec.name: arrays[spec.name].shape for spec in inputs}
        problem = _find_size_problem(inputs, dimensions, shapes)
        if not problem:
            return _make_batch(inputs, arrays, source)
        # the arrays do not fit as they are: divide them if they have more samples than a batch may have
        batch_size = _find_batch_size(inputs, arrays, dimensions)
        if batch_size:
            count = len(arrays[inputs[0].name])
            rest = count % batch_size
            [name, *_] = inputs[0].sizes or inputs[0].shape
            batch = next((dimension for dimension in dimensions if dimension.name == name), None)
            is_smaller = rest > 0 and batch is not None and not batch.find_problem(rest)
            batches = _divide(inputs, arrays, count, batch_size, source, fills_last=not is_smaller)
            # the batches in between have the shapes of the first one
            found = [
                {name: array.shape for name, array in batches[index].items()} for index in (0, -1)
            ]
            texts = [_find_size_problem(inputs, dimensions, shapes) for shapes in found]
            problem = texts[0] or texts[1]
            if not problem:
                return Samples(batches, count, None, batch_size)
        problems = [problem]
    fix = (
        "provide one array for each input, with its name and sizes in the ranges of `dimensions`; "
    )
    fix += "arrays of several sizes are named 0/INPUT, 1/INPUT, …"
    raise StageError(f"{source} does not fit the model: " + "; ".join(problems), fix=fix)


def _find_size_problem(
    inputs: Sequence[TensorSpec],
    dimensions: Sequence[Dimension],
    shapes: Mapping[str, tuple[int, ...]],
) -> str:
    """Return why inputs cannot have these shapes in one call; empty if they can."""
    try:
        derive_sizes(dimensions, {spec.name: spec.sizes or spec.shape for spec in inputs}, shapes)
    except WrongSize as error:
        return str(error)
    return ""


def _count_stacked(inputs: Sequence[TensorSpec], arrays: Mapping[str, AnyArray]) -> int:
    """Return how many samples there are along an additional first axis; 0 if no array has one."""
    found = (arrays[spec.name] for spec in inputs if _is_stacked(spec, arrays.get(spec.name)))
    return max((len(array) for array in found), default=0)


def _is_stacked(spec: TensorSpec, array: AnyArray | None) -> bool:
    return array is not None and array.ndim == len(spec.shape) + 1


def _make_stacked_samples(
    inputs: Sequence[TensorSpec],
    arrays: Mapping[str, AnyArray],
    dimensions: Sequence[Dimension],
    source: str,
) -> Samples:
    """Return a batch for each sample along an additional first axis."""
    import numpy as np

    problems = [*filter(None, (_mismatch_reason(spec, arrays, is_dynamic=True) for spec in inputs))]
    found = {spec.name: arrays[spec.name] for spec in inputs if spec.name in arrays}
    stacked = {spec.name for spec in inputs if _is_stacked(spec, found.get(spec.name))}
    shapes = {name: array.shape[name in stacked :] for name, array in found.items()}
    for spec in inputs if not dimensions else ():
        if spec.name in found and shapes[spec.name] != spec.shape:
            problems.append(
                f"'{spec.name}' has shape {found[spec.name].shape}, the model takes {spec.shape}"
            )
    if dimensions and not problems:
        problems += filter(None, [_find_size_problem(inputs, dimensions, shapes)])
    if len({len(found[name]) for name in stacked}) > 1:
        problems.append("its arrays do not have the same number of samples")
    _check_problems(problems, source)

    def take(spec: TensorSpec, index: int) -> Array:
        array = found[spec.name]
        own = array[index : index + 1] if spec.name in stacked else array[...]
        return np.reshape(own, shapes[spec.name]).astype(spec.dtype)

    def make(index: int) -> Feed:
        return {spec.name: take(spec, index) for spec in inputs}

    count = _count_stacked(inputs, arrays)
    return Samples(_Batches(make, range(count)), count, None, 0, is_stacked=True)


def _find_batch_size(
    inputs: Sequence[TensorSpec], arrays: Mapping[str, AnyArray], dimensions: Sequence[Dimension]
) -> int:
    """Return the maximum batch size, by the first axis of all inputs; 0 if that is not the samples."""
    firsts = {(spec.sizes or spec.shape)[:1] for spec in inputs}
    counts = {arrays[spec.name].shape[:1] for spec in inputs}
    if len(firsts) != 1 or len(counts) != 1 or () in firsts or counts & {(), (0,)}:
        return 0
    [[size]] = firsts
    largest = {dimension.name: dimension.max for dimension in dimensions}
    return size if isinstance(size, int) else largest.get(size, 0)


def _mismatch_reason(
    spec: TensorSpec, arrays: Mapping[str, AnyArray], *, is_dynamic: bool = False
) -> str:
    """Return why an input's array does not fit, dynamic sizes aside; empty if it fits."""
    array = arrays.get(spec.name)
    if array is None:
        return f"there is no array '{spec.name}' (there are {sorted(arrays)})"
    is_shaped = array.shape[1:] == spec.shape[1:] and array.ndim == len(spec.shape) and array.size
    if not is_dynamic and not is_shaped:
        return f"'{spec.name}' has shape {array.shape}, the model takes {spec.shape}"
    problem = _conversion_problem(array, spec.dtype) if array.size else None
    if problem is not None:
        return f"'{spec.name}' is {array.dtype}, the model takes {spec.dtype}{problem}"
    return ""


def _conversion_problem(array: AnyArray, dtype: str) -> str | None:
    """Return why an array cannot be taken as another dtype, as the end of a sentence; None if it can.

    Floats may be converted to any float dtype, and integers to integer dtypes that can hold them. Integers are not
    converted to floats: pixels from 0 to 255 would reach a model that was trained on values from 0 to 1.
    """
    import numpy as np

    target = np.dtype(dtype)
    if array.dtype == target:
        return None
    kinds = array.dtype.kind, target.kind
    if not (kinds == ("f", "f") or set(kinds) <= set("iu")):
        is_pixels = kinds[0] in "iub" and kinds[1] == "f"
        return (
            f": convert it, scaled as in training (`array.astype('{dtype}')`)" if is_pixels else ""
        )
    if kinds[1] != "f":
        limits = np.iinfo(target)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            return f", which holds {limits.min} to {limits.max}"
    return None


def _convert(array: Array, spec: TensorSpec, source: str) -> Array:
    """Return an array with the dtype of an input; StageError if a value overflows it."""
    import numpy as np

    try:
        with np.errstate(over="raise"):
            return array.astype(spec.dtype)
    except FloatingPointError:
        raise StageError(
            f"{source}: '{spec.name}' is {array.dtype} and has values beyond the range of {spec.dtype}, "
            "which the model takes",
            fix="scale the samples like the training data, or leave them out",
        ) from None


def _divide(
    inputs: Sequence[TensorSpec],
    arrays: Mapping[str, AnyArray],
    count: int,
    batch_size: int,
    source: str,
    *,
    fills_last: bool = True,
) -> Sequence[Feed]:
    """Return batches; if `fills_last`, the last sample is repeated to fill the last batch."""
    import numpy as np

    def take(spec: TensorSpec, start: int) -> Array:
        rows = arrays[spec.name][start : min(start + batch_size, count)]
        missing = batch_size - len(rows) if fills_last else 0
        if missing:
            rows = np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])
        return _convert(rows, spec, source)

    def make(start: int) -> Feed:
        return {spec.name: take(spec, start) for spec in inputs}

    return _Batches(make, range(0, count, batch_size))


def run_samples(run: Callable[[Feed], Mapping[str, Array]], samples: Samples) -> dict[str, Array]:
    """Run a model on each batch and return every output over all samples."""
    return join_outputs([run(feed) for feed in samples.batches], samples)


def join_outputs(results: Sequence[Mapping[str, Array]], samples: Samples) -> dict[str, Array]:
    """Return every output of all batches, joined along the first axis, without padding.

    For stacked samples, each output gets an additional first axis of samples.

    Raises:
        StageError: when sizes of an output differ between batches, besides the number of samples.
    """
    import numpy as np

    outputs = {}
    for name in results[0]:
        batches = [np.atleast_1d(result[name]) for result in results]
        if samples.is_stacked:
            batches = [np.expand_dims(result[name], 0) for result in results]
        shapes = {batch.shape[1:] for batch in batches}
        if len(shapes) > 1:
            raise StageError(
                f"output '{name}' has samples of several sizes, which do not fit in one array: "
                f"{', '.join(map(str, sorted(shapes)))}",
                fix="give inputs of one size at a time",
            )
        joined = np.concatenate(batches) if len(batches) > 1 else batches[0]
        has_samples = {len(batch) for batch in batches} == {samples.batch_size}
        outputs[name] = joined[: samples.total] if has_samples else joined
    return outputs


def top1_accuracy(outputs: Mapping[str, Array], output: str, labels: Array) -> float:
    """Return the share of samples whose largest score is the label's (see `compare_labels`)."""
    return float(compare_labels(outputs, output, labels).mean())


def compare_labels(outputs: Mapping[str, Array], output: str, labels: Array) -> Array:
    """Return for each sample whether its largest score is the label's; StageError if there are no scores."""
    values = outputs[output]
    if not values.size or not len(labels) or values.size % len(labels):
        raise StageError(
            f"accuracy needs scores for each sample in the first output, and {quoted(output)} has shape "
            f"{values.shape} for {count_text(len(labels), 'label')}",
            fix="leave the labels out of the samples, or export the model with its scores as the first output",
        )
    scores = values.reshape(len(labels), -1)
    right: Array = scores.argmax(axis=1) == labels.reshape(-1)
    return right
