"""The inputs that `verify` uses: samples of the recipe, or random inputs that reach the outputs."""

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
from tvmflow.core.types import Array, Dimension, Feed, Json, Size, TensorSpec
from tvmflow.custom_operators.loading import calls_folder
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel
from tvmflow.frontends.inputs import array_of
from tvmflow.frontends.onnx.graph import node_name
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

# Random divisors of both signs reach remainders of both.
_MOST_DIVISOR: Final = 9


class Operand(NamedTuple):
    """An input whose integers are indices into axes of some sizes, or divisors if there are no sizes."""

    input: str
    sizes: tuple[Size, ...]


class ImportedModel(NamedTuple):
    """The model that a library was built from.

    Attributes:
        inputs: All its inputs, constant ones last.
        tensors: The inner tensors that a reference returns, too.
        bound: The constants, by input.
        dimensions: The dimensions whose sizes each call chooses.
        quantized: The reference's model with inner tensors, if `quantize` made the model.
        operands: The inputs whose integers are indices or divisors.
    """

    files: Mapping[str, Path]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tensors: tuple[TensorSpec, ...]
    bound: Mapping[str, np.ndarray[Any, Any]]
    dimensions: tuple[Dimension, ...] = ()
    quantized: LoadedModel | None = None
    operands: tuple[Operand, ...] = ()

    def load(self, kind: str, tensors: Sequence[str] = ()) -> LoadedModel:
        """Import it again, with inner tensors as further outputs."""
        loaded = FRONTENDS[kind].load(
            self.files, self.inputs, tuple(tensors), self.bound, self.dimensions
        )
        main = loaded.mod.get_global_var("main")
        loaded.mod.update_func(main, with_dimensions(loaded.mod[main], self.dimensions))
        return loaded._replace(mod=name_checked_nodes(loaded.mod, loaded.nodes))


def read_imported_model(signature: Mapping[str, Json], files: Mapping[str, Path]) -> ImportedModel:
    """Return the imported model; samples are not files of it."""
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
        # of any integer, it may be made an index out of range: 0 and 1 are safest
        known = {operand.input for operand in operands}
        for var in mod["main"].params[: int(mod["main"].attrs["num_input"])]:
            if ir.dtype_of(var).startswith(("int", "uint")) and str(var.name) not in known:
                operands[Operand(str(var.name), (2,))] = None
    return tuple(operands)


def limit_draws(
    settings: VerifySettings, operands: Sequence[Operand], sizes: Mapping[str, int]
) -> VerifySettings:
    """Return settings with random indices within their axes, and without 0 among random divisors."""
    limits: dict[str, InputSettings] = {}
    for operand in operands:
        known = settings.inputs.get(operand.input, InputSettings())
        limit = limits.get(operand.input, known)
        update: dict[str, Any] = {}
        if not operand.sizes:
            update = {"nonzero": True, "range": limit.range or (-_MOST_DIVISOR, _MOST_DIVISOR)}
        elif not known.range:
            last = max(min(evaluate_shape(operand.sizes, sizes)) - 1, 0)
            update = {"range": (0, min(limit.range[1], last) if limit.range else last)}
        limit = limit.model_copy(update=update)
        limits[operand.input] = limit
    return settings.model_copy(update={"inputs": {**settings.inputs, **limits}})


# Both sides of zero, and networks whose biases outweigh that.
DEVIATIONS: Final = (1.0, 10.0)
# A mask of few elements may leave nothing.
_DRAWS_AT_A_SIZE: Final = 4


class ReferenceOutputs(NamedTuple):
    """Samples, and the reference's outputs.

    Attributes:
        outputs: Outputs and inner tensors by name, for each batch.
        undetected: The outputs whose check a wrong library could pass, and how.
        random_inputs: The distribution of random inputs; empty for the usual one, and for other inputs.
        added: The number of last samples that were added for outputs that are indices.
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
    """Yield the recipe's samples, or seeded random inputs of the tuning sizes, with distributions."""
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
    """Yield seeded random inputs, each for the case that earlier ones detect too little.

    Floats without a range have both signs, unless the reference gives no values for negative ones. For a quantized
    model, values from 0 to 1 come first, because calibration data are likely such.
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
    """Yield random inputs at some sizes, in the order in which they are tried."""
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
    """Run the reference on the first samples that leave no wrong library undetected, with finite outputs.

    Without such samples, it prefers finite outputs, then the fewest outputs whose check a wrong library could pass.
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
    """Return whether all values of these outputs are finite; integers always are."""
    return all(
        np.isfinite(batch[name]).all() for batch in outputs for name in names if batch[name].size
    )


# ---------------------------------------------------------------- operator check
# Each operator of a recipe by itself, where a library disagrees with the reference: which one is wrong.


_log = logging.getLogger(__name__)


def list_operator_mismatches(
    settings: VerifySettings, context: StageContext, tolerance: Tolerance
) -> list[str]:
    """Return a sentence for each operator of the recipe whose code disagrees with its reference.

    Each is compiled by itself and called with the tensors of the reference's calls, which the stage has recorded.
    """
    sentences = []
    for path in sorted(calls_folder(context.work / "reference").glob("*.onnx")):
        with np.load(path.with_suffix(".npz")) as archive:
            arrays = dict(archive)
        try:
            name, outputs = _compute(path, arrays, settings, context)
        except Exception as error:
            _log.debug("%s cannot be run by itself: %s", path.stem, error)
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
# Sizes at which a library with dynamic shapes is verified, and its outputs there.


Sizes = dict[str, int]
"""The size of each dimension by name."""

# Random ones fill up to this many combinations; sizes to tune at may be more.
_COMBINATIONS: Final = 8
_DRAWS: Final = 64
# Sizes beside these combinations, over all dimensions, and the elements of all tensors at all of them.
_SWEPT: Final = 512
_SWEPT_ELEMENTS: Final = 2**26
_LARGEST_REMAINDERS: Final = 64
# All tensors of a model together: 4 GB of float32, if all were in memory at once.
_MAX_ELEMENTS: Final = 2**30


class ChosenSizes(NamedTuple):
    """Combinations of sizes.

    Attributes:
        combinations: The combinations, in the order in which a library runs them.
        left_out: A sentence for each combination that is too large to be verified.
        coverage: The covered sizes of each dimension, for a sweep.
    """

    combinations: tuple[Sizes, ...] = ()
    left_out: tuple[str, ...] = ()
    coverage: tuple[str, ...] = ()


class SizeOutputs(NamedTuple):
    """The inputs of the reference at some sizes, and its outputs and inner tensors by name."""

    sizes: Sizes
    feed: dict[str, Array]
    outputs: dict[str, Array]


def read_dimensions(
    signature: Mapping[str, Json], settings: VerifySettings
) -> tuple[Dimension, ...]:
    """Return the dimensions of a library with the sizes to tune at; none for one of fixed sizes."""
    return settings.add_tuning_sizes(Dimension.list_of(signature))


def choose_tuning_sizes(dimensions: Sequence[Dimension]) -> Sizes:
    """Return the sizes at which all is verified that is verified at one size, and latency is measured."""
    return {dimension.name: choose_tuning_size(dimension) for dimension in dimensions}


def find_sizes(
    signature: Mapping[str, Json], dimensions: Sequence[Dimension], feed: Mapping[str, Array]
) -> Sizes:
    """Return the sizes of the dimensions in some inputs."""
    inputs = map(TensorSpec.from_json, signature["inputs"])
    sizes = {spec.name: spec.sizes or spec.shape for spec in inputs}
    return derive_sizes(dimensions, sizes, {name: array.shape for name, array in feed.items()})


def choose_sizes(
    dimensions: Sequence[Dimension], count_elements: Callable[[Sizes], int], seed: int
) -> ChosenSizes:
    """Return the sizes at which a library is verified.

    These are the minimum and maximum, all tuning sizes, sizes that no tile divides, and random ones. If the largest
    sizes together are too large, smaller ones and each dimension's largest by itself replace them. `count_elements`
    returns the number of elements of all tensors of the model.
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
    # one combination is verified in any case
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
    """Return sizes at which only outputs are compared, one dimension after the other.

    They reach each tail of a library's tiles: every size, or all remainders of some.
    The other dimensions have their least size, or the one after it.
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
    """Return the sizes of a dimension: consecutive ones, then those near powers of two, then the rest."""
    low, high = (-(-dimension.min // dimension.multiple_of), dimension.max // dimension.multiple_of)
    powers = (2**n + offset for n in range(high.bit_length() + 1) for offset in (-1, 0, 1))
    factors = [
        *range(low, low + _LARGEST_REMAINDERS),
        *powers,
        *range(high, high - _LARGEST_REMAINDERS, -1),
        # those between them, far apart first
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
    """Return the largest sizes, with the one furthest from its minimum halved until all is affordable."""
    sizes = {dimension.name: dimension.max for dimension in dimensions}
    while count_elements(sizes) > _MAX_ELEMENTS:
        furthest = max(dimensions, key=lambda d: sizes[d.name] / d.least_nonempty)
        if sizes[furthest.name] <= furthest.least_nonempty:
            break
        half = sizes[furthest.name] // 2 // furthest.multiple_of * furthest.multiple_of
        sizes[furthest.name] = max(half, furthest.least_nonempty)
    return sizes


def _list_primes(dimensions: Sequence[Dimension]) -> Iterator[Sizes]:
    """Yield combinations of different sizes that no tile divides: near the middle, and near the end."""
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
    """Return a prime (times `multiple_of`) up to a size and not used yet; the closest size where none is."""
    step = dimension.multiple_of
    for factor in range(max(start, dimension.min) // step, dimension.min // step - 1, -1):
        if is_prime(factor) and factor * step not in used:
            return factor * step
    return max(start // step * step, dimension.min)


def _draw(dimension: Dimension, rng: random.Random) -> int:
    """Return a random size; small ones are as likely as large ones."""
    low, high = math.log(dimension.least_nonempty), math.log(dimension.max + 1)
    size = int(math.exp(rng.uniform(low, high))) // dimension.multiple_of * dimension.multiple_of
    return min(max(size, dimension.min), dimension.max)


def make_element_count(mod: tvm.IRModule) -> Callable[[Sizes], int]:
    """Return a function that counts a model's elements, without tensors of data-dependent shape."""
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
