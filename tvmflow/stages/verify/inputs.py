"""The inputs of `verify`: the recipe's samples or random inputs, and sizes of dynamic dimensions."""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
import tvm

from tvmflow.compiler import load_c_library, lower
from tvmflow.core.dimensions import (
    WrongSize,
    choose_tuning_size,
    derive_sizes,
    evaluate_shape,
    is_prime,
    list_tuning_sizes,
    sizes_text,
    specs_at,
)
from tvmflow.core.types import Array, Dimension, Feed, Json, Size, State, TensorSpec
from tvmflow.custom_operators.loading import calls_folder
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel
from tvmflow.frontends.inputs import array_of
from tvmflow.frontends.onnx.graph import node_name
from tvmflow.frontends.states import COMPUTED, store_states
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import NoSize, size_text, sizes_of, with_dimensions
from tvmflow.graph.ir import list_variables
from tvmflow.graph.operands import (
    find_input_bounds,
    has_computed_operands,
    name_checked_nodes,
)
from tvmflow.runtime import samples
from tvmflow.runtime.module import Module
from tvmflow.runtime.npz import read_npz
from tvmflow.runtime.samples import Samples
from tvmflow.stages.base import StageContext, describe_signature
from tvmflow.stages.images import DATA
from tvmflow.stages.verify import comparison, verdict_text
from tvmflow.stages.verify.comparison import Tolerance, find_undetected
from tvmflow.stages.verify.verdict import INPUTS
from tvmflow.stages.verify_settings import LOCAL, InputSettings, VerifySettings
from tvmflow.targets.tvm_target import make_target

# The largest magnitude of random divisors; both signs are drawn, so remainders have both signs, too.
_MAX_DIVISOR: Final = 9


class Operand(NamedTuple):
    """An input of indices into axes of these sizes, or of divisors if `sizes` is empty."""

    input: str
    sizes: tuple[Size, ...]


class ImportedModel(NamedTuple):
    """The model that a library was built from.

    Attributes:
        inputs: All inputs of the model, constant ones last.
        tensors: The intermediate tensors that a reference returns besides the outputs.
        bound: The values of constant inputs, by name.
        dimensions: The dynamic dimensions.
        quantized: The model with intermediate tensors as additional outputs, for the reference of a model that
            `quantize` made.
        operands: The inputs whose integers are indices or divisors.
        states: The states whose dtype in the library differs from the framework's.
    """

    files: Mapping[str, Path]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tensors: tuple[TensorSpec, ...]
    bound: Mapping[str, np.ndarray[Any, Any]]
    dimensions: tuple[Dimension, ...] = ()
    quantized: LoadedModel | None = None
    operands: tuple[Operand, ...] = ()
    states: tuple[State, ...] = ()

    @property
    def framework_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs in the dtypes that the framework takes; values of the library's inputs are exact in them."""
        stored = {state.input for state in self.states}
        return tuple(
            spec.stored_as(COMPUTED) if spec.name in stored else spec for spec in self.inputs
        )

    def load(self, kind: str, tensors: Sequence[str] = ()) -> LoadedModel:
        """Import the model again, with intermediate tensors as additional outputs."""
        loaded = FRONTENDS[kind].load(
            self.files, self.framework_inputs, tuple(tensors), self.bound, self.dimensions
        )
        loaded = store_states(loaded, self.states)
        main = loaded.mod.get_global_var("main")
        loaded.mod.update_func(main, with_dimensions(loaded.mod[main], self.dimensions))
        return loaded._replace(mod=name_checked_nodes(loaded.mod, loaded.nodes))


def read_imported_model(signature: Mapping[str, Json], files: Mapping[str, Path]) -> ImportedModel:
    """Return the imported model; its `files` are all files except samples."""
    inputs, bound, outputs, tensors = (
        tuple(map(TensorSpec.from_json, signature.get(kind, ())))
        for kind in ("inputs", "bound", "outputs", "tensors")
    )
    values = {
        spec.name: array_of(spec, entry["value"])
        for spec, entry in zip(bound, signature.get("bound", ()), strict=True)
    }
    own = {role: path for role, path in files.items() if role.partition("/")[0] != DATA}
    return ImportedModel(
        files=own,
        inputs=(*inputs, *bound),
        outputs=outputs,
        tensors=tensors,
        bound=values,
        dimensions=Dimension.list_of(signature),
        states=tuple(state for state in State.list_of(signature) if state.stored_as),
    )


def find_operands(mod: tvm.IRModule) -> tuple[Operand, ...]:
    """Return the inputs of an imported model whose integers are indices or divisors."""
    operands: dict[Operand, None] = {}
    for var, bound in find_input_bounds(mod["main"]):
        if ir.dtype_of(var).startswith(("int", "uint")):
            with contextlib.suppress(NoSize):
                sizes = tuple(size_text(size) for size in bound.sizes or () if size is not None)
                if sizes or bound.sizes is None:
                    operands[Operand(str(var.name), sizes)] = None
    if has_computed_operands(mod):
        # the model may compute an index from any integer input, and could leave the range: 0 and 1 are safest
        known = {operand.input for operand in operands}
        for var in mod["main"].params[: int(mod["main"].attrs["num_input"])]:
            if ir.dtype_of(var).startswith(("int", "uint")) and str(var.name) not in known:
                operands[Operand(str(var.name), (2,))] = None
    return tuple(operands)


def limit_draws(
    settings: VerifySettings, operands: Sequence[Operand], sizes: Mapping[str, int]
) -> VerifySettings:
    """Return settings that keep random indices within their axes, and random divisors nonzero."""
    limits: dict[str, InputSettings] = {}
    for operand in operands:
        known = settings.inputs.get(operand.input, InputSettings())
        limit = limits.get(operand.input, known)
        update: dict[str, Any] = {}
        if not operand.sizes:
            update = {"nonzero": True, "range": limit.range or (-_MAX_DIVISOR, _MAX_DIVISOR)}
        elif not known.range:
            last = max(min(evaluate_shape(operand.sizes, sizes)) - 1, 0)
            update = {"range": (0, min(limit.range[1], last) if limit.range else last)}
        limit = limit.model_copy(update=update)
        limits[operand.input] = limit
    return settings.model_copy(update={"inputs": {**settings.inputs, **limits}})


# Standard deviations of random floats; the larger one is for networks with dominating biases.
DEVIATIONS: Final = (1.0, 10.0)
# The number of seeds to try at some sizes, because a random mask of few elements may select nothing.
_DRAWS_AT_A_SIZE: Final = 4


class ReferenceOutputs(NamedTuple):
    """Samples, and the reference's outputs for them.

    Attributes:
        outputs: Outputs and intermediate tensors by name, for each batch.
        undetected: How a wrong library could pass (see `comparison.find_undetected`), by output.
        random_inputs: The distribution of random inputs; empty for the usual one, and for samples.
        added: The number of samples added at the end for outputs that are indices.
    """

    samples: Samples
    outputs: list[dict[str, Array]]
    undetected: dict[str, str]
    random_inputs: str = ""
    added: int = 0


def load_samples(
    signature: Mapping[str, Json],
    settings: VerifySettings,
    path: Path | None,
    operands: Sequence[Operand] = (),
) -> Iterator[tuple[str, Samples]]:
    """Yield (distribution, samples): the recipe's samples, or seeded random inputs of the tuning sizes."""
    checks = settings.verify
    inputs = tuple(map(TensorSpec.from_json, signature["inputs"]))
    dimensions = read_dimensions(signature, settings)
    if path is not None:
        labels_for = "verify.min_accuracy" if checks.min_accuracy is not None else ""
        yield (
            "",
            samples.make_samples(
                inputs,
                read_npz(path, "verify.data"),
                source="verify.data",
                label=checks.label,
                labels_needed_by=labels_for,
                dimensions=dimensions,
            ),
        )
        return
    sizes = choose_tuning_sizes(dimensions)
    fixed = specs_at(inputs, sizes)
    limited = limit_draws(settings, operands, sizes)
    yield from _draw_samples(fixed, limited, batches=checks.samples, seed=checks.seed)


def _draw_samples(
    inputs: Sequence[TensorSpec], settings: VerifySettings, *, batches: int, seed: int
) -> Iterator[tuple[str, Samples]]:
    """Yield seeded random inputs; later ones are for cases in which earlier ones detect too little.

    Floats without a range have both signs; positive ones are for references that compute NaN from negative ones.
    For a quantized model, values from 0 to 1 come first, because calibration data often have this range.
    """
    ranges = settings.ranges

    def draw(deviation: float) -> Samples:
        return samples.random_samples(
            inputs,
            ranges,
            batches=batches,
            seed=seed,
            deviation=deviation,
            nonzero=settings.divisors,
        )

    deviations = [DEVIATIONS[0], 0.0, *DEVIATIONS[1:]]
    if settings.quantized:
        deviations.sort()
    if not any(spec.dtype.startswith("float") and spec.name not in ranges for spec in inputs):
        deviations = [0.0]
    for number, deviation in enumerate(deviations):
        text = (
            f"normally distributed with standard deviation {deviation:g}"
            if deviation
            else "uniform from 0 to 1"
        )
        yield text if number else "", draw(deviation)


def draw_inputs(
    specs: Sequence[TensorSpec],
    sizes: Mapping[str, int],
    settings: VerifySettings,
    operands: Sequence[Operand],
) -> Iterator[Feed]:
    """Yield random inputs at some sizes, in the order to try them."""
    fixed, limited = specs_at(specs, sizes), limit_draws(settings, operands, sizes)
    for seed in range(settings.verify.seed, settings.verify.seed + _DRAWS_AT_A_SIZE):
        for _, data in _draw_samples(fixed, limited, batches=1, seed=seed):
            yield data.batches[0]


def run_reference_on(
    run: Callable[[Feed], dict[str, Array]],
    candidates: Iterator[tuple[str, Samples]],
    names: Sequence[str],
    tolerance: Tolerance,
) -> ReferenceOutputs:
    """Return the first candidate with finite outputs with which every wrong library is detected.

    If there is none, candidates with finite outputs are preferred, then those with the fewest undetected outputs.
    """
    best: ReferenceOutputs | None = None
    rank: tuple[bool, int] = (True, 0)
    for distribution, data in candidates:
        outputs = [run(feed) for feed in data.batches]
        undetected = find_undetected(outputs, names, tolerance)
        if not data.batches[0]:
            undetected = {name: what for name, what in undetected.items() if what != INPUTS}
        tried = (not is_finite(outputs, names), len(undetected))
        if best is None or tried < rank:
            best, rank = ReferenceOutputs(data, outputs, undetected, distribution), tried
        if rank == (False, 0):
            break
    assert best is not None
    return best


def is_finite(outputs: Sequence[Mapping[str, Array]], names: Sequence[str]) -> bool:
    """Return whether all values of these outputs are finite."""
    return all(
        np.isfinite(batch[name]).all() for batch in outputs for name in names if batch[name].size
    )


# ---------------------------------------------------------------- operator check
# If a library disagrees with the reference, each custom operator of the recipe is checked in isolation.


_log = logging.getLogger(__name__)


def list_operator_mismatches(
    settings: VerifySettings, context: StageContext, tolerance: Tolerance
) -> list[str]:
    """Return a sentence for each custom operator that disagrees with its reference.

    Each operator is compiled separately and called with the recorded tensors of the reference's calls.
    """
    sentences = []
    for path in sorted(calls_folder(context.work / "reference").glob("*.onnx")):
        with np.load(path.with_suffix(".npz")) as archive:
            arrays = dict(archive)
        try:
            name, outputs = _compute(path, arrays, settings, context)
        except Exception as error:
            _log.debug("%s cannot be run in isolation: %s", path.stem, error)
            continue
        comparisons = comparison.compare_outputs(
            outputs, {output: arrays[output] for output in outputs}, tolerance
        )
        sentences += [
            f"the operator {name} disagrees with its reference: {mismatch}"
            for mismatch in verdict_text.list_mismatches(comparisons, "its reference")
        ]
    return sentences


def _compute(
    path: Path, arrays: Mapping[str, Array], settings: VerifySettings, context: StageContext
) -> tuple[str, dict[str, Array]]:
    """Run a recorded custom operator call; return the operator with its node, and the outputs."""
    assert settings.run_on == LOCAL and settings.lowering and settings.schedules is not None
    [machine] = settings.machines.values()
    [node] = onnx.load(path).graph.node
    loaded = FRONTENDS["onnx"].load({**context.inputs, "model": path}, ())
    lowered = lower(loaded.mod, make_target(machine.tvm), settings.lowering)
    model = lowered.schedule_untuned(loaded.params, machine.tvm, settings.schedules)
    signature = describe_signature(loaded.inputs, loaded.outputs)
    module = Module(load_c_library(model, signature, machine.threads), signature, {})
    outputs = module.run({spec.name: arrays[spec.name] for spec in loaded.inputs})
    return f"{node.op_type} ({node.domain}) (node {node_name(node)})", outputs


# ---------------------------------------------------------------- sizes
# The sizes at which a library with dynamic shapes is verified, and the reference's outputs there.


Sizes = dict[str, int]
"""The size of each dimension by name."""

# Random sizes are added up to this many combinations; tuning sizes may exceed it.
_COMBINATIONS: Final = 8
_DRAWS: Final = 64
# Limits of a sweep over all dimensions: the number of sizes, and the elements of all tensors at all of these sizes.
_SWEPT: Final = 512
_SWEPT_ELEMENTS: Final = 2**26
_LARGEST_REMAINDERS: Final = 64
# The maximum number of elements of all tensors of a model together: 4 GB of float32 if all were in memory at once.
_MAX_ELEMENTS: Final = 2**30


class ChosenSizes(NamedTuple):
    """The sizes at which a library is verified.

    Attributes:
        combinations: The combinations, in the order in which a library runs them.
        left_out: A sentence for each combination that is too large to verify.
        coverage: A text about the covered sizes of each dimension, for a sweep.
    """

    combinations: tuple[Sizes, ...] = ()
    left_out: tuple[str, ...] = ()
    coverage: tuple[str, ...] = ()


class SizeOutputs(NamedTuple):
    """The reference's inputs at some sizes, and its outputs and intermediate tensors by name."""

    sizes: Sizes
    feed: dict[str, Array]
    outputs: dict[str, Array]


def read_dimensions(
    signature: Mapping[str, Json], settings: VerifySettings
) -> tuple[Dimension, ...]:
    """Return the dynamic dimensions of a library with their tuning sizes; none for fixed shapes."""
    return settings.add_tuning_sizes(Dimension.list_of(signature))


def choose_tuning_sizes(dimensions: Sequence[Dimension]) -> Sizes:
    """Return the tuning size of each dimension: latency and single-size checks use these sizes."""
    return {dimension.name: choose_tuning_size(dimension) for dimension in dimensions}


def find_sizes(
    signature: Mapping[str, Json], dimensions: Sequence[Dimension], feed: Mapping[str, Array]
) -> Sizes:
    """Return the sizes of the dynamic dimensions in given inputs."""
    inputs = map(TensorSpec.from_json, signature["inputs"])
    sizes = {spec.name: spec.sizes or spec.shape for spec in inputs}
    return derive_sizes(dimensions, sizes, {name: array.shape for name, array in feed.items()})


def choose_sizes(
    dimensions: Sequence[Dimension], count_elements: Callable[[Sizes], int], seed: int
) -> ChosenSizes:
    """Return the sizes at which a library is verified.

    These are the minimum and maximum, all tuning sizes, sizes that are not a multiple of a tile, and random ones. If
    all maxima together are too large, smaller sizes replace them, and each dimension has its maximum once.
    `count_elements` returns how many elements all tensors of the model have together.
    """
    chosen: list[Sizes] = []
    left_out = []

    def add(sizes: Sizes) -> bool:
        is_affordable = count_elements(sizes) <= _MAX_ELEMENTS
        if is_affordable and sizes not in chosen:
            chosen.append(sizes)
        return is_affordable

    least = {dimension.name: dimension.min for dimension in dimensions}
    largest = {dimension.name: dimension.max for dimension in dimensions}
    # the minimum is verified even if it is too large
    chosen.append(least)
    if not add(largest):
        smaller = _shrink(dimensions, count_elements)
        left_out.append(_describe_left_out(largest, count_elements, smaller))
        add(smaller)
        for name, size in largest.items():
            add({**least, name: size})
    for sizes in list_tuning_sizes(dimensions):
        if not add(sizes):
            left_out.append(_describe_left_out(sizes, count_elements))
    for sizes in _list_primes(dimensions):
        add(sizes)
    rng = random.Random(seed)
    for _ in range(_DRAWS):
        if len(chosen) >= _COMBINATIONS:
            break
        add({dimension.name: _draw(dimension, rng) for dimension in dimensions})
    return ChosenSizes(tuple(chosen), tuple(left_out))


def sweep_sizes(
    dimensions: Sequence[Dimension], count_elements: Callable[[Sizes], int]
) -> ChosenSizes:
    """Return the sizes of a sweep, in which only outputs are compared; one dimension varies at a time.

    They reach all tails of a library's tiles: they are all sizes, or sizes with all remainders. Meanwhile, other
    dimensions have their smallest size or the next one.
    """
    swept: list[Sizes] = []
    coverage = []
    for dimension in dimensions:
        elements = 0
        chosen: list[int] = []
        for size in _order_sizes(dimension):
            others = {
                other.name: min(other.min + other.multiple_of * (len(chosen) % 2), other.max)
                for other in dimensions
            }
            sizes = {**others, dimension.name: size}
            elements += count_elements(sizes)
            is_affordable = elements <= _SWEPT_ELEMENTS // len(dimensions)
            if not is_affordable or len(chosen) >= _SWEPT // len(dimensions):
                break
            chosen.append(size)
            swept.append(sizes)
        coverage.append(_describe_coverage(dimension, chosen))
    return ChosenSizes(tuple(swept), coverage=tuple(coverage))


def _order_sizes(dimension: Dimension) -> list[int]:
    """Order the sizes of a dimension: first consecutive ones, then near powers of two, then the rest."""
    low, high = (-(-dimension.min // dimension.multiple_of), dimension.max // dimension.multiple_of)
    powers = (2**n + offset for n in range(high.bit_length() + 1) for offset in (-1, 0, 1))
    factors = [
        *range(low, low + _LARGEST_REMAINDERS),
        *powers,
        *range(high, high - _LARGEST_REMAINDERS, -1),
        # sizes in between, first with large steps
        *range(low, high + 1, max(1, (high - low) // _SWEPT)),
        *(range(low, high + 1) if high - low < _SWEPT else ()),
    ]
    known = dict.fromkeys(factor for factor in factors if low <= factor <= high)
    return [factor * dimension.multiple_of for factor in known]


def _describe_coverage(dimension: Dimension, chosen: Sequence[int]) -> str:
    step = dimension.multiple_of
    count = dimension.max // step - -(-dimension.min // step) + 1
    if len(chosen) == count:
        return f"all {count} sizes of '{dimension.name}'"
    divisor = _LARGEST_REMAINDERS
    while len({size // step % divisor for size in chosen}) < divisor:
        divisor //= 2
    tails = f", with all tails of tiles of up to {divisor * step}" if divisor > 1 else ""
    return f"{len(chosen)} of {count} sizes of '{dimension.name}'{tails}"


def _describe_left_out(
    sizes: Sizes, count_elements: Callable[[Sizes], int], instead: Sizes | None = None
) -> str:
    text = (
        f"{sizes_text(sizes)} is not verified: the tensors of the model have {count_elements(sizes):,} elements "
        f"there, more than {_MAX_ELEMENTS:,}"
    )
    return f"{text}; {sizes_text(instead)} is, instead" if instead else text


def _shrink(dimensions: Sequence[Dimension], count_elements: Callable[[Sizes], int]) -> Sizes:
    """Halve the dimension with the largest ratio to its minimum, until all sizes are affordable."""
    sizes = {dimension.name: dimension.max for dimension in dimensions}
    while count_elements(sizes) > _MAX_ELEMENTS:
        furthest = max(dimensions, key=lambda d: sizes[d.name] / d.least_nonempty)
        if sizes[furthest.name] <= furthest.least_nonempty:
            break
        half = sizes[furthest.name] // 2 // furthest.multiple_of * furthest.multiple_of
        sizes[furthest.name] = max(half, furthest.least_nonempty)
    return sizes


def _list_primes(dimensions: Sequence[Dimension]) -> Iterator[Sizes]:
    """Yield two combinations of distinct primes (no multiples of a tile), near the middle and the maximum."""
    for find_start in (
        lambda d: math.isqrt(d.least_nonempty * d.max),
        lambda d: d.max - d.multiple_of,
    ):
        used: set[int] = set()
        sizes = {}
        for dimension in dimensions:
            size = _find_prime(dimension, find_start(dimension), used)
            used.add(size)
            sizes[dimension.name] = size
        yield sizes


def _find_prime(dimension: Dimension, start: int, used: set[int]) -> int:
    """Return the largest unused prime (times `multiple_of`) up to `start`, or the size next to it."""
    step = dimension.multiple_of
    for factor in range(max(start, dimension.min) // step, dimension.min // step - 1, -1):
        if is_prime(factor) and factor * step not in used:
            return factor * step
    return max(start // step * step, dimension.min)


def _draw(dimension: Dimension, rng: random.Random) -> int:
    """Return a random size; each order of magnitude is equally likely."""
    low, high = math.log(dimension.least_nonempty), math.log(dimension.max + 1)
    size = int(math.exp(rng.uniform(low, high))) // dimension.multiple_of * dimension.multiple_of
    return min(max(size, dimension.min), dimension.max)


def make_element_count(mod: tvm.IRModule) -> Callable[[Sizes], int]:
    """Return a function that counts the elements of all tensors, except those of data-dependent shape."""
    shapes: list[list[Size]] = []
    for variable in dict.fromkeys(list_variables(mod["main"])):
        sizes = sizes_of(variable)
        if sizes is not None:
            with contextlib.suppress(NoSize):
                shapes.append([size_text(size) for size in sizes])

    def count(sizes: Sizes) -> int:
        elements = 0
        for shape in shapes:
            with contextlib.suppress(WrongSize):
                elements += math.prod(evaluate_shape(shape, sizes))
        return elements

    return count
