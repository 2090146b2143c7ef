"""The sizes at which a library with dimensions is verified, and what it computes at each of them."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.core.dimensions import (
    WrongSize,
    choose_representative,
    derive_sizes,
    evaluate_shape,
    is_prime,
    list_sizes_to_tune_at,
    sizes_text,
)
from tvmflow.core.types import Array, Dimension, Json, Size, TensorSpec
from tvmflow.stages.verify_settings import VerifySettings

if TYPE_CHECKING:
    import tvm


Sizes = dict[str, int]
"""The size of each dimension by name."""

# Random ones fill up to so many combinations; sizes to tune at may be more.
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
        coverage: Of a sweep: which of the sizes of each dimension these are.
    """

    combinations: tuple[Sizes, ...] = ()
    left_out: tuple[str, ...] = ()
    coverage: tuple[str, ...] = ()


class SizeOutputs(NamedTuple):
    """The inputs and outputs of a call of the reference at some sizes.

    Attributes:
        sizes: The size of each dimension.
        feed: The inputs of the library.
        outputs: The outputs, and inner tensors, by name.
    """

    sizes: Sizes
    feed: dict[str, Array]
    outputs: dict[str, Array]


def read_dimensions(
    signature: Mapping[str, Json], settings: VerifySettings
) -> tuple[Dimension, ...]:
    """Return the dimensions of a library with the sizes to tune at; none for one of fixed sizes."""
    return settings.add_sizes_to_tune_at(Dimension.list_of(signature))


def choose_representatives(dimensions: Sequence[Dimension]) -> Sizes:
    """Return the sizes at which all is verified that is verified at one size, and latency is measured."""
    return {dimension.name: choose_representative(dimension) for dimension in dimensions}


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

    These are the least and the largest ones, all to tune at, those that no tile divides, and random ones;
    in place of the largest, where it is too large, smaller ones, and each dimension's largest by itself.

    `count_elements` returns the number of elements of all tensors of the model.
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
    for sizes in list_sizes_to_tune_at(dimensions):
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
        furthest = max(dimensions, key=lambda d: sizes[d.name] / d.min)
        if sizes[furthest.name] == furthest.min:
            break
        half = sizes[furthest.name] // 2 // furthest.multiple_of * furthest.multiple_of
        sizes[furthest.name] = max(half, furthest.min)
    return sizes


def _list_primes(dimensions: Sequence[Dimension]) -> Iterator[Sizes]:
    """Give combinations of different sizes that no tile divides: near the middle, and near the end."""
    for find_start in (lambda d: math.isqrt(d.min * d.max), lambda d: d.max - d.multiple_of):
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
    low, high = math.log(dimension.min), math.log(dimension.max + 1)
    size = int(math.exp(rng.uniform(low, high))) // dimension.multiple_of * dimension.multiple_of
    return min(max(size, dimension.min), dimension.max)


def make_element_count(mod: tvm.IRModule) -> Callable[[Sizes], int]:
    """Return a function that counts the elements of all tensors of an imported model for some sizes.

    Sizes that are known only when the model runs do not count.
    """
    from tvmflow.compiler.ir import list_variables
    from tvmflow.compiler.open_sizes import NoSize, size_text, sizes_of

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
