"""Kernels whose elements are computed in different ways: concatenations, padding, rotary embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi

from tests.support.kernels import LEVELS_HERE, host_level, level
from tests.unit.compiler.schedules.rule_checks import check, choose, kernel
from tvmflow.compiler.passes.vector_math import vectorize_math

Array = np.ndarray[Any, Any]
MANY = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
FEW = settings(MANY, max_examples=4)


def count_conditions(mod: tvm.IRModule) -> int:
    script: str = choose(mod, host_level()).schedule.mod.script()
    return script.count("T.if_then_else")


def sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


@st.composite
def concatenations(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    """Return shapes of tensors and the axis along which they are put together."""
    shape = draw(st.lists(st.integers(1, 13), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    lengths = draw(st.lists(st.integers(1, 40), min_size=2, max_size=5))
    return [[*shape[:axis], length, *shape[axis + 1 :]] for length in lengths], axis


def check_concatenation(case: tuple[list[list[int]], int], mcpu: str) -> None:
    """A function of the first tensor is computed before, and one of all of them, in another shape, after."""
    shapes, axis = case
    tensors = [te.placeholder(shape, name=f"x{i}") for i, shape in enumerate(shapes)]
    whole = topi.concatenate((topi.sigmoid(tensors[0]), *tensors[1:]), axis)
    extents = [int(n) for n in whole.shape]
    flat = [int(np.prod(extents[:-1])), extents[-1]]

    def reference(first: Array, *others: Array) -> Array:
        joined = np.concatenate((sigmoid(first), *others), axis).reshape(flat)
        result: Array = np.maximum(joined, 0)
        return result

    mod = kernel(*tensors, topi.nn.relu(topi.reshape(whole, flat)))
    check(mod, "elementwise", level(mcpu), reference)


@FEW
@given(concatenations())
def test_concatenations(case: tuple[list[list[int]], int]) -> None:
    check_concatenation(case, LEVELS_HERE[-1])


@pytest.mark.slow
@MANY
@given(concatenations(), st.sampled_from(LEVELS_HERE))
def test_concatenations_of_any_shape(case: tuple[list[list[int]], int], mcpu: str) -> None:
    check_concatenation(case, mcpu)


@pytest.mark.parametrize("lengths", [(33, 17), (3, 4, 5)])
def test_images_whose_pixels_no_vector_divides_are_copied_part_by_part(
    lengths: tuple[int, ...],
) -> None:
    """A vector would have pixels of two images, and its condition be computed for each of them."""
    images = [te.placeholder((2, length, 9, 7), name=f"x{length}") for length in lengths]
    mod = kernel(*images, topi.nn.relu(topi.concatenate(tuple(images), 1)))
    assert count_conditions(mod) == 0
    for mcpu in LEVELS_HERE:
        check(
            mod,
            "elementwise",
            level(mcpu),
            lambda *images: np.maximum(np.concatenate(images, 1), 0),
        )


PADDED = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4
)


def check_padding(axes: list[tuple[int, int, int]], mcpu: str) -> None:
    x = te.placeholder([extent for extent, _, _ in axes], name="x")
    before, after = ([axis[side] for axis in axes] for side in (1, 2))
    mod = kernel(x, topi.nn.pad(topi.exp(x), before, after, 3.0))
    widths = list(zip(before, after, strict=True))
    check(
        mod,
        "elementwise",
        level(mcpu),
        lambda x: np.pad(np.exp(x), widths, constant_values=3),
    )


@FEW
@given(PADDED)
def test_padding(axes: list[tuple[int, int, int]]) -> None:
    check_padding(axes, LEVELS_HERE[-1])


@pytest.mark.slow
@MANY
@given(PADDED, st.sampled_from(LEVELS_HERE))
def test_padding_of_any_width(axes: list[tuple[int, int, int]], mcpu: str) -> None:
    check_padding(axes, mcpu)


def rotary(rows: int, size: int) -> tvm.IRModule:
    """The rotary embedding of Su et al. 2021, arXiv:2104.09864, on halves of rows."""
    half = size // 2
    x, angle = te.placeholder((3, rows, size), name="x"), te.placeholder((rows, size), name="angle")
    turned = te.compute(
        (3, rows, size),
        lambda h, r, c: tirx.if_then_else(c < half, -x[h, r, c + half], x[h, r, c - half]),
    )
    return kernel(x, angle, topi.add(topi.multiply(x, angle), topi.multiply(turned, angle)))


@pytest.mark.parametrize(("rows", "size"), [(5, 32), (1, 6), (33, 64)])
def test_rotary_embeddings(rows: int, size: int) -> None:
    """Both halves are computed in vectors, without a condition."""
    mod, half = rotary(rows, size), size // 2

    def reference(x: Array, angle: Array) -> Array:
        turned = np.concatenate((-x[..., half:], x[..., :half]), -1)
        result: Array = x * angle + turned * angle
        return result

    check(mod, "elementwise", host_level(), reference)
    assert count_conditions(mod) == 0


def test_parts_are_computed_once() -> None:
    """A slow function of one part of a concatenation belongs to that part's piece."""
    x, y = te.placeholder((9, 81), name="x"), te.placeholder((9, 4), name="y")
    mod = kernel(x, y, topi.concatenate((topi.sigmoid(x), y), 1))
    script = choose(mod, host_level()).schedule.mod.script()
    assert script.count("T.sigmoid") == 1 and "sblock_alloc_buffer" not in script


def test_conditions_between_whole_vectors_stay() -> None:
    """Rows of 16 numbers are chosen as a whole: one loop nest."""
    x, y = te.placeholder((9, 16), name="x"), te.placeholder((7, 16), name="y")
    mod = kernel(x, y, topi.concatenate((x, y), 0))
    assert count_conditions(mod) == 1
    check(mod, "elementwise", host_level(), lambda x, y: np.concatenate((x, y), 0))


@pytest.mark.parametrize("channels", [3, 15, 31, 33, 97])
def test_channels_that_fill_no_vector(channels: int) -> None:
    """Whole blocks of channels are packed without a condition: only the last one has zeros."""
    x = te.placeholder((2, channels, 5, 7), name="x")
    blocks = -(-channels // 16)
    mod = kernel(
        x,
        te.compute(
            (2, blocks, 5, 7, 16),
            lambda n, o, i, j, c: tirx.if_then_else(
                o * 16 + c < channels, x[n, o * 16 + c, i, j], 0.0
            ),
        ),
    )

    def reference(x: Array) -> Array:
        padded = np.pad(x, ((0, 0), (0, 16 * blocks - channels), (0, 0), (0, 0)))
        packed: Array = padded.reshape(2, blocks, 16, 5, 7).transpose(0, 1, 3, 4, 2)
        return packed

    check(mod, "elementwise", host_level(), reference)
    assert count_conditions(mod) == 0


@pytest.mark.parametrize(
    ("columns", "times"), [(97, 2), (16, 3), (17, 1), (19, 12), (19, 13), (3, 5)]
)
def test_repeated_rows(columns: int, times: int) -> None:
    """No vector reaches beyond the end of a row to its beginning."""
    x = te.placeholder((4, columns), name="x")
    mod = kernel(x, topi.tile(x, (2, times)))
    check(mod, "elementwise", host_level(), lambda x: np.tile(x, (2, times)))


def test_many_parts_stay_together() -> None:
    """Each piece has a loop nest of its own: so many would be large code."""
    parts = [te.placeholder((3, 5), name=f"x{i}") for i in range(20)]
    mod = kernel(*parts, topi.concatenate(parts, 1))
    assert count_conditions(mod) > 0
    check(mod, "elementwise", host_level(), lambda *parts: np.concatenate(parts, 1))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_functions_of_parts_in_another_order(axis: int) -> None:
    """Each half is read by another piece, or by another branch of one: variables of vectorized functions differ."""
    x = te.placeholder((4, 6, 40), name="x")
    halves = topi.split(topi.sigmoid(x), 2, axis)
    mod = vectorize_math(kernel(x, topi.concatenate((halves[1], halves[0]), axis)))

    def reference(x: Array) -> Array:
        return np.concatenate(np.split(sigmoid(x), 2, axis)[::-1], axis)

    check(mod, "elementwise", host_level(), reference)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (0, 2), (3, 0)])
def test_functions_of_mirrored_images(before: int, after: int) -> None:
    """Conditions are in the index of the data."""
    x = te.placeholder((3, 6, 21), name="x")
    mirrored = topi.nn.mirror_pad(x, [0, 0, before], [0, 0, after])
    mod = vectorize_math(kernel(x, topi.multiply(mirrored, topi.sigmoid(mirrored))))

    def reference(x: Array) -> Array:
        widths = [(0, 0), (0, 0), (before, after)]
        padded = np.pad(x, widths, mode="symmetric")
        result: Array = padded * sigmoid(padded)
        return result

    check(mod, "elementwise", host_level(), reference)
