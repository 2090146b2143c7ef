"""Schedule rules on random small shapes: the scheduled kernel computes what numpy computes."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tvm import te, tirx, topi
from tvm.s_tir import Schedule

from tests.support.kernels import LEVELS_HERE, host_level, level
from tests.unit.compiler.schedules.rule_checks import Array, check, choose, kernel
from tvmflow.compiler.code_generation import build_kernels
from tvmflow.compiler.contraction.machine import CpuModel, cpu_model_for
from tvmflow.compiler.contraction.winograd import Geometry
from tvmflow.compiler.schedules import blocks, rules
from tvmflow.compiler.tir_kernels import blocked, winograd

SLOW_EXAMPLES = settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
LEVELS = st.sampled_from(LEVELS_HERE)
EXTENTS = st.integers(1, 70)


def sliding_windows(images: Array, size: int) -> Array:
    """Return all windows (n, c, h, w, …, size, size) of images (n, c, h, w, …)."""
    rows = np.lib.stride_tricks.sliding_window_view(images, size, axis=2)
    result: Array = np.lib.stride_tricks.sliding_window_view(rows, size, axis=3)
    return result


@SLOW_EXAMPLES
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), LEVELS)
def test_elementwise_kernels_of_any_shape(shape: list[int], mcpu: str) -> None:
    x, y = te.placeholder(shape, name="x"), te.placeholder(shape[-1:], name="y")
    mod = kernel(x, y, topi.nn.relu(topi.add(topi.multiply(x, x), y)))
    check(mod, "elementwise", level(mcpu), lambda x, y: np.maximum(x * x + y, 0))


def test_scalars_that_a_kernel_computes_do_not_change_its_rule() -> None:
    """A scale that depends on the data, such as that of dynamic quantization, is computed where it is read."""
    x, w = te.placeholder((24, 64), name="x"), te.placeholder((64, 48), name="w")
    highest = te.placeholder((), name="highest")
    scale = topi.divide(topi.add(highest, 3.0), 255.0)
    product = topi.multiply(topi.matmul(x, w), topi.negative(scale))

    def reference(x: Array, w: Array, highest: Array) -> Array:
        result: Array = x @ w * -((highest + 3) / 255)
        return result

    check(kernel(x, w, highest, product), "register_tiles", host_level(), reference)


@pytest.mark.parametrize(
    ("functions", "stays"), [([topi.exp], 0), ([topi.asinh], 1), ([topi.exp, topi.sin], 1)]
)
def test_scalar_functions_that_stay_in_loops_are_computed_once(
    functions: list[Any], stays: int
) -> None:
    """LLVM moves a single function out of a loop, but no series of branches."""
    x, scale = te.placeholder((24, 64), name="x"), te.placeholder((), name="scale")
    factor = scale
    for function in functions:
        factor = function(factor)
    schedule = Schedule(kernel(x, scale, topi.multiply(x, factor)))
    blocks.analyze_blocks(schedule)
    assert len(blocks.list_intermediate_buffers(schedule)) == stays


def test_a_scalar_that_is_the_result_stays() -> None:
    x = te.placeholder((), name="x")
    mod = kernel(x, topi.multiply(topi.add(x, 1.0), 2.0))
    cpu = CpuModel.from_target(host_level())
    assert cpu is not None
    choice = rules.choose_schedule(mod, cpu)
    scheduled = mod if choice is None else choice.schedule.mod
    result = tvm.runtime.tensor(np.float32(0))
    build_kernels(scheduled, tvm.target.Target(host_level()))["main"](
        tvm.runtime.tensor(np.float32(3)), result
    )
    assert result.numpy() == 8


@pytest.mark.parametrize("shape", [[40001], [3, 40001], [1, 1, 32769], [5, 7, 1009]], ids=str)
def test_long_elementwise_kernels_that_no_vector_divides(shape: list[int]) -> None:
    """The loop over vectors runs in parallel where there are few rows."""
    x = te.placeholder(shape, name="x")
    mod = kernel(x, topi.nn.relu(topi.add(x, x)))
    check(mod, "elementwise", host_level(), lambda x: np.maximum(x + x, 0))
    assert "T.parallel" in choose(mod, host_level()).schedule.mod.script()


@pytest.mark.parametrize("shape", [(6, 37, 8), (6, 37, 1, 4), (2, 3, 31, 2)], ids=str)
def test_rows_of_parts_of_vectors_are_read_in_vectors(shape: tuple[int, ...]) -> None:
    """Two axes become one: the indices of a vector along three would be computed for each number."""
    x = te.placeholder(shape, name="x")
    mod = kernel(x, topi.nn.relu(x))
    check(mod, "elementwise", host_level(), lambda x: np.maximum(x, 0))
    target = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4"}
    schedule = choose(mod, target).schedule
    (block,) = blocks.analyze_simple_blocks(Schedule(mod))
    name = schedule.get_sblock(block.stmt.name_hint)
    lengths = [int(schedule.get(loop).extent) for loop in schedule.get_loops(name)]
    rows = int(np.prod([extent for extent in shape if extent > 1][:-2]))
    assert int(np.prod(lengths[:-2])) == rows
    assert lengths[-1] == 16


@pytest.mark.parametrize("columns", [3, 15, 16, 17, 49, 257])
def test_softmax_of_rows_that_no_vector_divides(columns: int) -> None:
    """What is left of a row belongs to its maximum and its sum, and nothing behind the row does."""
    x = te.placeholder((9, columns), name="x")

    def softmax(x: Array) -> Array:
        exponents = np.exp(x - x.max(-1, keepdims=True))
        result: Array = exponents / exponents.sum(-1, keepdims=True)
        return result

    check(kernel(x, topi.nn.softmax(x)), "row_reductions", host_level(), softmax)


def test_rows_are_those_of_the_blocks_that_are_read() -> None:
    """Softmax over the channels of an image whose channels are as many as its rows: axes of one length are not one axis."""
    x = te.placeholder((2, 7, 7, 5), name="x")

    def softmax(x: Array) -> Array:
        exponents = np.exp(x - x.max(1, keepdims=True))
        result: Array = exponents / exponents.sum(1, keepdims=True)
        return result

    check(kernel(x, topi.nn.softmax(x, axis=1)), "row_reductions", host_level(), softmax)


REDUCED = st.tuples(
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    st.sets(st.integers(0, 2), min_size=1, max_size=2),
    st.sampled_from(["mean", "max"]),
)


def check_reduction(case: tuple[list[int], set[int], str], mcpu: str) -> str:
    """Check a mean or a maximum over axes of a tensor but the last one, and return the name of its rule."""
    shape, chosen, kind = case
    axes = sorted({axis % (len(shape) - 1) for axis in chosen})
    x = te.placeholder(shape, name="x")
    count = float(np.prod([shape[axis] for axis in axes]))
    result = {
        "max": lambda: topi.max(x, axes),
        "mean": lambda: topi.divide(topi.sum(x, axes, keepdims=True), te.const(count)),
    }[kind]()
    mod = kernel(x, result)

    def reference(x: Array) -> Array:
        reduced: Array = x.max(tuple(axes)) if kind == "max" else x.mean(tuple(axes), keepdims=True)
        return reduced

    rule = choose(mod, level(mcpu)).rule
    check(mod, rule, level(mcpu), reference)
    return rule


@SLOW_EXAMPLES
@given(REDUCED, LEVELS)
def test_reductions_of_axes_but_the_last(case: tuple[list[int], set[int], str], mcpu: str) -> None:
    check_reduction(case, mcpu)


@pytest.mark.slow
@settings(SLOW_EXAMPLES, max_examples=150)
@given(REDUCED, LEVELS)
def test_many_reductions_of_axes_but_the_last(
    case: tuple[list[int], set[int], str], mcpu: str
) -> None:
    check_reduction(case, mcpu)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ([6, 11, 97], {1}),
        ([3, 40, 7, 7], {1}),
        ([5, 9, 13], {0}),
        ([4, 3, 5, 9], {1, 2}),
        ([2, 3, 5, 7, 11], {0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["mean", "max"])
def test_reductions_whose_rows_no_vector_divides(
    shape: list[int], axes: set[int], kind: str
) -> None:
    """Vectors go beyond a row where the next row follows it in memory; else the last one overlaps the one before."""
    assert check_reduction((shape, axes, kind), LEVELS_HERE[-1]) == "register_tiles"


@pytest.mark.parametrize("size", [9, 23, 50])
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_pooling_of_plain_images_that_no_vector_divides(size: int, kind: str) -> None:
    """The average counts the numbers that it adds up."""
    x = te.placeholder((2, 3, size, size + 1), name="x")
    pooled = topi.nn.pool2d(
        x, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), kind, count_include_pad=False, layout="NCHW"
    )

    def reference(x: Array) -> Array:
        outside = np.nan
        widths = ((0, 0), (0, 0), (1, 1), (1, 1))
        windows = sliding_windows(np.pad(x, widths, constant_values=outside), 3)
        pick = np.nanmax if kind == "max" else np.nanmean
        result: Array = pick(windows, axis=(-1, -2))
        return result

    check(kernel(x, pooled), "register_tiles", host_level(), reference)


@SLOW_EXAMPLES
@given(EXTENTS, EXTENTS, LEVELS)
def test_transpositions_of_any_shape(rows: int, columns: int, mcpu: str) -> None:
    """Results are stored as vectors, also where none divides a row."""
    x = te.placeholder((rows, columns), name="x")
    check(kernel(x, topi.transpose(x)), "elementwise", level(mcpu), np.transpose)


def test_an_interleaved_image_is_stored_along_its_rows() -> None:
    """Its phases lie far apart, but the pixels of a phase do not; lines of channels would displace each other."""
    x = te.placeholder((1, 4, 32, 32, 16), name="x")
    mod = kernel(x, blocked.unpack(blocked.interleave(x, [2, 2], [0, 0], [64, 64]), 16))
    schedule = choose(mod, level("x86-64-v3")).schedule
    *_, last = schedule.get_loops(schedule.get_sblock("unpack"))
    assert int(schedule.get(last).extent) == 64

    def reference(x: Array) -> Array:
        pixels = x.reshape(2, 2, 32, 32, 16).transpose(4, 2, 0, 3, 1)
        image: Array = pixels.reshape(1, 16, 64, 64)
        return image

    check(mod, "elementwise", level("x86-64-v3"), reference)


@pytest.mark.parametrize("channels", [3, 8, 31, 96, 131])
def test_pixels_at_computed_places(channels: int) -> None:
    """Their places are computed once for all channels, or for some of them."""
    image = te.placeholder((2, channels, 9, 7), name="image")
    place = te.placeholder((2, 5, 13), name="place")

    def pick(n: Any, c: Any, i: Any, j: Any) -> Any:
        row = tirx.Cast("int32", tirx.floor(place[n, i, j] * 4.0))
        return image[n, c, tirx.min(tirx.max(row, 0), 8), j % 7]

    def reference(image: Array, place: Array) -> Array:
        rows = np.clip(np.floor(place * 4).astype(int), 0, 8)
        columns = np.broadcast_to(np.arange(13) % 7, rows.shape)
        batch = np.arange(2)[:, None, None]
        result: Array = image[batch, :, rows, columns].transpose(0, 3, 1, 2)
        return result

    mod = kernel(image, place, te.compute((2, channels, 5, 13), pick))
    check(mod, "elementwise", host_level(), reference)


def check_permutation(shape: tuple[int, ...], order: tuple[int, ...], mcpu: str) -> None:
    """Check a transposition behind a sum, before a reshape."""
    x, y = te.placeholder(shape, name="x"), te.placeholder(shape[-1:], name="y")
    moved = topi.transpose(topi.add(x, y), order)
    flat = (int(moved.shape[0]), int(np.prod(shape)) // int(moved.shape[0]))
    mod = kernel(x, y, topi.nn.relu(topi.reshape(moved, flat)))

    def reference(x: Array, y: Array) -> Array:
        return np.maximum((x + y).transpose(order).reshape(flat), 0)

    check(mod, "elementwise", level(mcpu), reference)


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((2, 3, 14, 14, 16), (0, 1, 4, 2, 3)),
        ((1, 37, 5, 5), (0, 2, 3, 1)),
        ((3, 1, 17, 2), (3, 0, 1, 2)),
        ((7, 200, 16), (2, 0, 1)),
    ],
)
def test_permutations(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    """Blocked and plain images, and axes of length 1."""
    check_permutation(shape, order, LEVELS_HERE[-1])


@pytest.mark.slow
@settings(SLOW_EXAMPLES, max_examples=40)
@given(
    st.lists(st.integers(1, 33), min_size=2, max_size=5).flatmap(
        lambda shape: st.tuples(st.just(tuple(shape)), st.permutations(range(len(shape))))
    ),
    LEVELS,
)
def test_permutations_of_any_shape(case: tuple[tuple[int, ...], list[int]], mcpu: str) -> None:
    shape, order = case
    while np.prod(shape) > 1 << 20:
        shape = tuple(-(-extent // 2) for extent in shape)
    check_permutation(shape, tuple(order), mcpu)


@SLOW_EXAMPLES
@given(st.integers(2, 9), EXTENTS, st.sampled_from([8, 16, 24, 32, 48, 80]), LEVELS)
def test_matrix_products_of_any_shape(rows: int, depth: int, columns: int, mcpu: str) -> None:
    target = level(mcpu)
    lanes = choose_lanes(target)
    x = te.placeholder((rows, depth), name="x")
    w = te.placeholder((-(-columns // lanes), depth, lanes), name="w")

    def reference(x: Array, w: Array) -> Array:
        result: Array = np.einsum("rd,odl->rol", x, w).reshape(rows, -1)[:, :columns]
        return result

    check(kernel(x, w, blocked.dense(x, w, columns)), "register_tiles", target, reference)


def choose_lanes(target: dict[str, Any]) -> int:
    cpu = CpuModel.from_target(target)
    assert cpu is not None
    return cpu.lanes


@SLOW_EXAMPLES
@given(st.integers(1, 2), st.integers(1, 3), st.integers(4, 17), st.sampled_from([1, 2]), LEVELS)
def test_pooling_of_any_shape(images: int, blocks: int, size: int, stride: int, mcpu: str) -> None:
    """Padding is minus infinity for a maximum."""
    target = level(mcpu)
    lanes = choose_lanes(target)
    x = te.placeholder((images, blocks, size, size, lanes), name="x")
    pooled = topi.nn.pool2d(
        x, (3, 3), (stride, stride), (1, 1), (1, 1, 1, 1), "max", layout=f"NCHW{lanes}c"
    )

    def reference(x: Array) -> Array:
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
        windows = sliding_windows(padded, 3)
        result: Array = windows[:, :, ::stride, ::stride].max(axis=(-2, -1))
        return result

    check(kernel(x, pooled), "register_tiles", target, reference)


@SLOW_EXAMPLES
@given(st.lists(st.integers(1, 9), min_size=1, max_size=2), st.integers(2, 70), LEVELS)
def test_softmax_of_any_rows(outer: list[int], columns: int, mcpu: str) -> None:
    x = te.placeholder((*outer, columns), name="x")

    def reference(x: Array) -> Array:
        powers = np.exp(x - x.max(axis=-1, keepdims=True))
        result: Array = powers / powers.sum(axis=-1, keepdims=True)
        return result

    mod = kernel(x, topi.nn.softmax(x, len(outer)))
    check(mod, "row_reductions", level(mcpu), reference)


@SLOW_EXAMPLES
@given(
    st.lists(st.integers(1, 5), max_size=2),
    st.integers(2, 30),
    st.lists(st.integers(2, 37), min_size=1, max_size=3),
    LEVELS,
)
@example([], 100, [2003], "x86-64-v3")
@example([2], 19, [31, 33], "x86-64-v4")
@example([64], 97, [56], "x86-64-v2")
@example([], 3, [8209], "x86-64-v4")
def test_softmax_of_any_axis_but_the_last(
    outer: list[int], length: int, inner: list[int], mcpu: str
) -> None:
    """All steps of some columns are computed after each other, in vectors of columns."""
    x, axis = te.placeholder((*outer, length, *inner), name="x"), len(outer)

    def reference(x: Array) -> Array:
        powers = np.exp(x - x.max(axis=axis, keepdims=True))
        result: Array = powers / powers.sum(axis=axis, keepdims=True)
        return result

    # more columns than stay in the cache, which nothing divides, are not kept together
    rule = "generic_loops" if inner == [8209] else "row_reductions"
    mod, target = kernel(x, topi.nn.softmax(x, axis)), level(mcpu)
    check(mod, rule, target, reference)
    if rule == "row_reductions":
        assert "T.vectorized" in str(choose(mod, target).schedule.mod)


@pytest.mark.parametrize("shape", [(2, 21, 13, 11), (3, 64, 49), (40, 7)])
def test_norms_over_channels_are_computed_in_columns(shape: tuple[int, ...]) -> None:
    """What is computed between two sums of the same channels stays in the part of its columns."""
    x = te.placeholder(shape, name="x")
    axis = 1 if len(shape) > 2 else 0
    mean = topi.divide(topi.sum(x, axis), float(shape[axis]))
    centred = te.compute(
        shape, lambda *at: x(*at) - mean(*at[:axis], *at[axis + 1 :]), name="centred"
    )
    squares = topi.sum(topi.multiply(centred, centred), axis)
    scale = topi.rsqrt(topi.add(squares, 1.0))
    normed = te.compute(shape, lambda *at: centred(*at) * scale(*at[:axis], *at[axis + 1 :]))

    def reference(x: Array) -> Array:
        centred = x - x.mean(axis, keepdims=True)
        result: Array = centred / np.sqrt((centred**2).sum(axis, keepdims=True) + 1)
        return result

    check(kernel(x, normed), "row_reductions", host_level(), reference)


def test_steps_that_read_other_columns_are_not_kept_together() -> None:
    """A maximum of the column to the left is computed before all columns that read it."""
    x = te.placeholder((30, 40), name="x")
    largest = topi.max(x, 0)
    moved = te.compute((30, 40), lambda i, j: x[i, j] - largest[tirx.max(j - 1, 0)], name="moved")
    sums = topi.sum(moved, 0)
    result = te.compute((30, 40), lambda i, j: moved[i, j] * sums[j], name="result")

    def reference(x: Array) -> Array:
        moved = x - x.max(0)[np.maximum(np.arange(40) - 1, 0)]
        result: Array = moved * moved.sum(0)
        return result

    check(kernel(x, result), "generic_loops", host_level(), reference)


@SLOW_EXAMPLES
@given(st.integers(2, 9), st.integers(2, 70), LEVELS)
def test_sums_along_rows_of_any_length(rows: int, columns: int, mcpu: str) -> None:
    x = te.placeholder((rows, columns), name="x")
    check(kernel(x, topi.sum(x, 1)), "row_reductions", level(mcpu), lambda x: x.sum(axis=1))


@pytest.mark.parametrize("shape", [(2, 5, 13, 11), (3, 2, 3, 7, 5), (4, 4, 8, 32), (3, 3, 1, 1)])
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_squares_of_differences_are_added_up_along_images(
    shape: tuple[int, ...], mcpu: str
) -> None:
    """The lines of an odd image follow each other, in vectors; no difference is stored."""
    x = te.placeholder(shape, name="x")
    at = (0,) * (len(shape) - 2)
    apart = te.compute(shape, lambda *i: x(*i) - x(*i[:2], *at), name="apart")
    squares = topi.sum(topi.multiply(apart, apart), list(range(2, len(shape))))

    def reference(x: Array) -> Array:
        rows = x.reshape(*shape[:2], -1)
        apart = rows - rows[:, :, :1]
        result: Array = (apart**2).sum(-1)
        return result

    mod, target = kernel(x, squares), level(mcpu)
    check(mod, "row_reductions", target, reference)
    script = str(choose(mod, target).schedule.mod)
    assert "apart = " not in script, script
    if math.prod(shape[2:]) > 16:
        assert "T.vectorized" in script, script


def test_blocks_of_different_shapes_are_scheduled_one_by_one() -> None:
    """The columns' sums are not rows, and their reader has another shape."""
    x = te.placeholder((7, 9, 5), name="x")
    sums = topi.sum(x, [1, 2])
    mod = kernel(x, topi.add(topi.sum(sums, 0, keepdims=True), te.const(1.0)))
    check(
        mod,
        "generic_loops",
        host_level(),
        lambda x: x.sum(axis=(0, 1, 2), keepdims=False)[None] + 1,
    )


@pytest.mark.slow
@SLOW_EXAMPLES
@given(
    tile=st.sampled_from([2, 4]),
    height=st.integers(3, 19),
    width=st.integers(3, 19),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    images=st.integers(1, 2),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    mcpu=LEVELS,
    added=st.integers(0, 3),
)
def test_winograd_convolutions_of_any_size(
    tile: int,
    height: int,
    width: int,
    blocks: tuple[int, int],
    images: int,
    padding: tuple[int, int, int, int],
    mcpu: str,
    added: int,
) -> None:
    """Tiles at the border, and columns of tiles that are added, reach beyond the image, where data are zeros; every schedule gives the same numbers."""
    target = level(mcpu)
    lanes, (inner, out) = choose_lanes(target), blocks
    top, left, bottom, right = padding
    shape = (images, 1, height + top + bottom - 2, width + left + right - 2)
    columns = -(-shape[3] // tile) + added
    geometry = Geometry(tile, shape, (0, top, left), tile_columns=columns)
    x = te.placeholder((images, inner, height, width, lanes), name="x")
    w = te.placeholder((tile + 2, tile + 2, out, 1, inner, lanes, lanes), name="w")
    mod = kernel(x, w, winograd.conv(x, w, geometry))
    transforms = [matrix.astype(np.float32) for matrix in winograd.TRANSFORMS[tile][:3]]

    def reference(x: Array, w: Array) -> Array:
        """Transform each window of the padded data, and multiply it with the transformed weights."""
        rows, columns = (-(-extent // tile) for extent in shape[2:])
        padded = np.zeros((images, inner, rows * tile + 2, columns * tile + 2, lanes), np.float32)
        inside = padded[:, :, top : top + height, left : left + width]
        inside[:] = x[:, :, : inside.shape[2], : inside.shape[3]]
        tiles = sliding_windows(padded, tile + 2)[:, :, ::tile, ::tile]
        data = np.einsum("ir,ncyxlrs,js->ncyxlij", transforms[0], tiles, transforms[0])
        product = np.einsum("ncyxlij,ijoclm->noyxmij", data, w[:, :, :, 0])
        image = np.einsum("pi,noyxmij,qj->noypxqm", transforms[2], product, transforms[2])
        image = image.reshape(images, out, rows * tile, columns * tile, lanes)
        result: Array = image[:, :, : shape[2], : shape[3]]
        return result

    check(mod, "winograd", target, reference)


@pytest.mark.parametrize("columns", [20, 257])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_rows_of_a_table_that_fill_no_vectors(columns: int, dtype: str) -> None:
    """TVM fails to move the last vector behind the loop where data are indices: mismatched types."""
    x = te.placeholder((7, columns), name="x")
    rows = te.placeholder((9,), dtype, name="rows")
    y = te.compute((9, columns), lambda i, j: x[rows[i].astype("int64"), j] + 1)
    choice = choose(kernel(x, rows, y), host_level())
    assert choice.rule == "elementwise"
    library = tvm.compile(choice.schedule.mod, tvm.target.Target(host_level()))
    table = np.arange(7 * columns, dtype=np.float32).reshape(7, columns)
    taken = np.array([6, 0, 3, 3, 1, 2, 5, 4, 6], dtype)
    result = tvm.runtime.tensor(np.zeros((9, columns), np.float32))
    library["main"](tvm.runtime.tensor(table), tvm.runtime.tensor(taken), result)
    np.testing.assert_array_equal(result.numpy(), table[taken] + 1)


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 2)])
def test_mirrored_rows_that_fill_no_vectors(before: int, after: int) -> None:
    """TVM fails to move the last vector behind the loop where a condition chooses the index: mismatched types."""
    rows, columns, first, last = (tirx.IntImm("int64", n) for n in (5, 30, before, after))
    zero = tirx.IntImm("int64", 0)
    x = te.placeholder((rows, columns), name="x")
    y = topi.nn.mirror_pad(x, [zero, first], [zero, last], "REFLECT")
    choice = choose(kernel(x, y), host_level())
    assert choice.rule == "elementwise"
    library = tvm.compile(choice.schedule.mod, tvm.target.Target(host_level()))
    data = np.arange(150, dtype=np.float32).reshape(5, 30)
    expected = np.pad(data, [(0, 0), (before, after)], "reflect")
    result = tvm.runtime.tensor(np.zeros_like(expected))
    library["main"](tvm.runtime.tensor(data), result)
    np.testing.assert_array_equal(result.numpy(), expected)


def matmul(rows: int, columns: int) -> tvm.IRModule:
    x, w = te.placeholder((rows, 64), name="x"), te.placeholder((columns // 16, 64, 16), name="w")
    return kernel(x, w, blocked.dense(x, w, columns))


def test_small_kernels_stay_on_one_core() -> None:
    """Handing work to another core costs more than a small kernel takes."""
    cpu = CpuModel(lanes=16, registers=32, l2_bytes=1 << 20, cores=4)
    for mod, is_parallel in ((matmul(4, 32), False), (matmul(512, 256), True)):
        choice = rules.choose_schedule(mod, cpu)
        assert choice is not None
        assert ("T.parallel" in choice.schedule.mod.script()) is is_parallel
    alone = rules.choose_schedule(matmul(512, 256), cpu._replace(cores=1))
    assert alone is not None and "T.parallel" not in alone.schedule.mod.script()


def test_all_kernels_of_a_module_get_a_schedule_and_keep_their_attributes() -> None:
    """Kernels that have a schedule stay as they are, and so does the given module."""
    functions = {
        name: mod["main"].with_attr("global_symbol", name).with_attr("op_pattern", 4)
        for name, mod in {"product": matmul(8, 32), "done": matmul(8, 48)}.items()
    }
    functions["done"] = functions["done"].with_attr("tirx.is_scheduled", True)
    mod = tvm.IRModule({tvm.ir.GlobalVar(name): value for name, value in functions.items()})
    before = mod.script()
    scheduled, rule_names = rules.schedule_for_cpu(mod, CpuModel(16, 32, 1 << 20, 2))
    assert rule_names == {"product": "register_tiles"}
    assert mod.script() == before
    assert scheduled["done"].same_as(mod["done"])
    attributes = scheduled["product"].attrs
    assert attributes["tirx.is_scheduled"] and int(attributes["op_pattern"]) == 4
    assert str(attributes["global_symbol"]) == "product"


X86: Final = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            {**X86, "mcpu": "x86-64-v4", "num-cores": 8},
            CpuModel(16, 32, 1 << 20, 4, True, 1.25, has_pair_dots=True, has_fma=True),
        ),
        (
            {**X86, "mcpu": "x86-64-v3", "num-cores": 2},
            CpuModel(8, 16, 1 << 19, 4, has_pair_dots=True, has_fma=True),
        ),
        ({**X86, "mcpu": "x86-64-v2"}, CpuModel(4, 16, 1 << 18, 4)),
        (
            {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"},
            CpuModel(
                *(4, 32, 1 << 19, 4),
                dot_dtype="int8",
                has_quads=False,
                has_fma=True,
                multiplicand_lanes=4,
                issue_time=0.6,
                divides_slowly=True,
            ),
        ),
        ({"kind": "llvm", "mtriple": "armv7a-linux-gnueabihf", "mattr": ["-neon"]}, None),
        ({"kind": "c"}, None),
    ],
)
def test_the_cpu_model_follows_the_target(
    target: dict[str, Any], expected: CpuModel | None
) -> None:
    """Schedules are for four cores, whatever the number of threads; other targets have no rules."""
    assert CpuModel.from_target(target) == expected
    assert cpu_model_for(target, 0) is None
    assert cpu_model_for(target, 1) == expected


def test_rules_are_tried_in_their_order() -> None:
    """A kernel that several rules fit gets its schedule from the first."""
    assert list(rules.CPU_RULES) == [
        "winograd",
        "register_tiles",
        "elementwise",
        "row_reductions",
        "generic_loops",
    ]
    cpu = CpuModel(16, 32, 1 << 20, 2)
    fitting = [
        name for name, rule in rules.CPU_RULES.items() if next(rule(matmul(8, 32), cpu), None)
    ]
    assert fitting == ["register_tiles", "row_reductions", "generic_loops"]


@pytest.mark.parametrize("columns", [2, 4, 8, 16, 32])
def test_a_result_of_one_vector_has_no_loop_around_its_tile(columns: int) -> None:
    """Building such a kernel failed with an IndexError; the next rule schedules it."""
    x = te.placeholder((5, columns), name="x")
    lanes = choose_lanes(host_level())
    rule = "register_tiles" if columns > lanes else "row_reductions"
    check(kernel(x, topi.sum(x, 0)), rule, host_level(), lambda x: x.sum(axis=0))
