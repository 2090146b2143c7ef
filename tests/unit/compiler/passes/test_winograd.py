"""Winograd convolutions compute what direct ones do, and are used only where they are profitable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx

from tests.support import kernels
from tests.support.dynamic_networks import Array, Input, make_network, make_weights
from tests.support.kernels import (
    FAST,
    LEVELS_HERE,
    PLAIN,
    host_level,
    kernels_of,
    level,
)
from tests.support.tuning import conv, model, relu
from tests.unit.compiler.networks import biased, convolution, residual
from tvmflow.compiler import lowering
from tvmflow.compiler.c_program import load_c_library
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction import winograd
from tvmflow.compiler.contraction.machine import CpuModel, cpu_model_for
from tvmflow.compiler.contraction.winograd import Convolution, Geometry
from tvmflow.compiler.options import SCHEDULES_VERSION
from tvmflow.compiler.schedules import winograd as schedules
from tvmflow.compiler.schedules.rules import schedule_for_cpu
from tvmflow.compiler.tir_kernels import winograd as emitter
from tvmflow.core.choices import tile_size
from tvmflow.core.types import Dimension, TensorSpec
from tvmflow.graph.dynamic_shapes import with_tuning_sizes
from tvmflow.targets.tvm_target import make_target

# The tolerance for each tile, relative to the largest number.
ERRORS = {2: 1e-5, winograd.RECTANGLE: 2e-5, 4: 5e-5}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Winograd convolutions for small shapes too, where they are not profitable."""
    monkeypatch.setattr(Convolution, "rank_tiles", lambda _, tiles, *costs: tiles[::-1])


@pytest.fixture(params=ERRORS)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Use Winograd convolutions with each tile, those that are not for this machine too."""
    monkeypatch.setattr(Convolution, "rank_tiles", lambda *_: [request.param])
    return int(request.param)


@pytest.fixture(params=["at once", "separate"])
def transforms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transform tiles along both axes at once, and along one after the other, as on ARM."""
    pad_columns = winograd.pad_columns

    def pad(geometry: Geometry, *sizes: Any) -> Geometry:
        return pad_columns(geometry, *sizes)._replace(is_separate=request.param == "separate")

    monkeypatch.setattr(winograd, "pad_columns", pad)


def check(mod: Any, tile: int, target: dict[str, Any]) -> None:
    """Check that a model computes what TVM's own kernels do."""
    shape = [int(n) for n in mod["main"].params[0].ty.shape]
    data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    options = replace(FAST, winograd=2 if tile == min(ERRORS) else 4)
    actual = kernels.run(mod, target, options, data)
    for fast, plain in zip(actual, kernels.run(mod, target, PLAIN, data), strict=True):
        largest = float(np.abs(plain).max())
        np.testing.assert_allclose(fast / largest, plain / largest, rtol=0, atol=ERRORS[tile])


@pytest.mark.usefixtures("transforms")
@pytest.mark.parametrize(
    ("shape", "out", "padding"),
    [
        # Whole tiles, partial tiles in both directions, one row of tiles, channels that fill no vector, two images.
        ((1, 16, 8, 8), 32, 1),
        ((2, 20, 13, 7), 24, [0, 1, 2, 1]),
        ((1, 17, 3, 30), 16, 0),
    ],
)
def test_winograd_convolutions_compute_what_direct_ones_do(
    tile: int, shape: tuple[int, ...], out: int, padding: Any
) -> None:
    """Padding and size are arbitrary; a bias, a residual and activations follow."""
    channels = shape[1]
    layers = [
        residual(convolution(channels, (3, 3), padding=1)),
        convolution(out, (3, 3), padding=padding),
        biased,
        relu,
        conv(5, 1),
    ]
    mod = model(*layers, shape=shape)
    names = kernels_of(mod, host_level(), FAST)
    assert any("winograd" in name for name in names)
    check(mod, tile, host_level())


@pytest.mark.usefixtures("always", "transforms")
@pytest.mark.parametrize(
    ("shape", "out", "kernel", "options"),
    [
        ((1, 16, 4, 8, 8), 32, (3, 3, 3), {"padding": 1}),
        ((2, 20, 5, 7, 6), 17, (1, 3, 3), {"padding": [0, 1, 0, 1, 1, 1]}),
        ((2, 16, 7, 5, 9), 24, (3, 3, 3), {"padding": [2, 0, 1, 1, 0, 1], "strides": (2, 1, 1)}),
        ((1, 16, 9, 6, 6), 16, (2, 3, 3), {"padding": 1, "dilation": (3, 1, 1)}),
    ],
)
def test_volumes_are_transformed_slice_by_slice(
    shape: tuple[int, ...], out: int, kernel: tuple[int, ...], options: dict[str, Any]
) -> None:
    """The depth may have any kernel, stride, dilation and padding."""
    mod = model(convolution(out, kernel, **options), relu, shape=shape)
    assert any("winograd_conv3d" in name for name in kernels_of(mod, host_level(), FAST))
    check(mod, 2, host_level())


@pytest.mark.usefixtures("transforms")
@pytest.mark.parametrize(
    ("shape", "out", "groups"),
    [((1, 32, 8, 8), 64, 2), ((2, 96, 13, 7), 48, 3), ((1, 32, 4, 7, 6), 32, 2)],
)
def test_groups_of_whole_blocks_are_multiplied_apart(
    tile: int, shape: tuple[int, ...], out: int, groups: int
) -> None:
    """A bias and an activation follow; groups may have more or fewer channels of results than of data."""
    kernel = (3,) * (len(shape) - 2)
    layer = convolution(out, kernel, padding=1, groups=groups)
    mod = model(layer, biased, relu, shape=shape)
    assert any("winograd" in name for name in kernels_of(mod, host_level(), FAST))
    check(mod, tile, host_level())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("inner", "out"), [(40, 32), (32, 40)])
def test_groups_that_share_a_block_are_direct(inner: int, out: int) -> None:
    mod = model(convolution(out, (3, 3), padding=1, groups=2), relu, shape=(1, inner, 8, 8))
    assert not any("winograd" in name for name in kernels_of(mod, level("x86-64-v4"), FAST))


@pytest.mark.usefixtures("always")
def test_groups_of_a_dynamic_image_are_direct() -> None:
    """The loops over its tiles know no groups."""
    network = make_network(
        OPEN,
        {"x": Input((1, 32, "h", "w"))},
        make_weights(a=[32, 16, 3, 3]),
        lambda emit, x, a: emit(relax.op.nn.conv2d(x, a, padding=1, groups=2)),
    )
    assert not any("winograd" in name for name in network.list_kernels(host_level()))


@pytest.fixture
def strided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow strides of 2 on the CPU of this machine, too."""
    monkeypatch.setattr(CpuModel, "winograd_strides", (1, 2))


@pytest.mark.usefixtures("strided")
@pytest.mark.parametrize(
    ("shape", "out", "kernel", "options"),
    [
        # Whole tiles, partial ones of odd and even data, one row and one column of results, three images, volumes.
        ((1, 16, 16, 16), 32, (3, 3), {"padding": 1}),
        ((3, 20, 15, 9), 24, (3, 3), {"padding": [0, 1, 2, 1]}),
        ((1, 17, 3, 30), 16, (3, 3), {}),
        ((1, 16, 22, 4), 16, (3, 3), {"padding": [1, 0, 0, 0]}),
        ((2, 16, 5, 9, 6), 17, (3, 3, 3), {"padding": 1}),
    ],
)
def test_strides_of_2(
    tile: int,
    shape: tuple[int, ...],
    out: int,
    kernel: tuple[int, ...],
    options: dict[str, Any],
) -> None:
    """Data at even places are a convolution of two taps, those at odd places are multiplied as they are."""
    mod = model(convolution(out, kernel, strides=2, **options), biased, relu, shape=shape)
    assert any("winograd" in name for name in kernels_of(mod, host_level(), FAST))
    check(mod, tile, host_level())


@pytest.mark.parametrize(
    ("channels", "size", "options", "is_winograd"),
    [
        ((64, 128), 56, {"padding": 1}, True),
        ((128, 256), 28, {"padding": 1}, True),
        ((256, 512), 14, {"padding": 1}, True),
        # Larger weights for a few pixels.
        ((512, 512), 6, {"padding": 1}, False),
        # Transforms cost more than the product saves.
        ((8, 8), 56, {"padding": 1}, False),
        ((64, 128), 56, {"padding": 1, "dilation": 2}, False),
        ((64, 128), 56, {"padding": 1, "strides": (2, 1)}, False),
        ((64, 128), 56, {"padding": 1, "strides": 3}, False),
    ],
)
def test_strides_of_2_have_transforms_on_64_bit_arm(
    channels: tuple[int, int], size: int, options: dict[str, Any], is_winograd: bool
) -> None:
    """With few registers, direct convolutions are faster."""
    inner, out = channels
    layer = convolution(out, (3, 3), **{"strides": 2, **options})
    mod = model(layer, relu, shape=(1, inner, size, size))
    arm = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1"}
    for target, expected in ((arm, is_winograd), (level("x86-64-v4"), False)):
        lowered = lowering.lower(mod, make_target(target), FAST).mod
        _, rules = schedule_for_cpu(lowered, cpu_model_for(target, SCHEDULES_VERSION))
        assert any(rule == "winograd" for rule in rules.values()) == expected


@pytest.mark.usefixtures("always", "strided")
def test_strides_of_2_over_a_dynamic_image_are_direct() -> None:
    """Its tiles are numbered by loops that know no strides."""
    network = make_network(
        OPEN,
        {"x": Input(DYNAMIC_IMAGE)},
        make_weights(a=[16, 16, 3, 3]),
        lambda emit, x, a: emit(relax.op.nn.conv2d(x, a, strides=2, padding=1)),
    )
    assert not any("winograd" in name for name in network.list_kernels(host_level()))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_every_level_schedules_winograd_convolutions(mcpu: str) -> None:
    """One kernel transforms, multiplies, transforms back and computes the epilogue."""
    mod, target = model(conv(32), biased, relu, shape=(1, 32, 16, 16)), level(mcpu)
    lowered = lowering.lower(mod, make_target(target), FAST).mod
    _, rules = schedule_for_cpu(lowered, cpu_model_for(target, 1))
    assert {name: rule for name, rule in rules.items() if "winograd" in name} == {
        "fused_winograd_conv2d_NCHWc_add_relu": "winograd"
    }
    check(mod, 2, target)


def largest_unrolled(function: Any) -> int:
    """Return the number of times that the body of the loops that are unrolled is repeated."""

    def visit(statement: Any) -> int:
        if isinstance(statement, tirx.For):
            is_unrolled = statement.kind == tirx.ForKind.UNROLLED
            return visit(statement.body) * (int(statement.extent) if is_unrolled else 1)
        parts = getattr(statement, "seq", None) or [
            getattr(statement, name)
            for name in ("block", "body", "init")
            if getattr(statement, name, None) is not None
        ]
        return max(map(visit, parts), default=1)

    return visit(function.body)


@pytest.mark.parametrize("columns", [31, 97, 101, 193])
@pytest.mark.parametrize("mcpu", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("channels", [16, 64, 192])
def test_prime_numbers_of_tiles_are_padded(columns: int, mcpu: str, channels: int) -> None:
    """No register tile divides them: a scalar one would read all weights for each tile, and one of all would be code without end."""
    cpu = cpu_model_for({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu}, 1)
    assert cpu is not None
    geometry = Geometry(2, (1, 1, 6, 2 * columns - 1), (0, 1, 1))
    blocks = channels // cpu.lanes
    padded = winograd.pad_columns(geometry, blocks, channels, cpu)
    assert columns <= padded.tiles[1] <= columns + 7
    x = te.placeholder((1, blocks, 6, 2 * columns - 1, cpu.lanes), name="x")
    w = te.placeholder((4, 4, blocks, 1, blocks, cpu.lanes, cpu.lanes), name="w")
    function = te.create_prim_func([x, w, emitter.conv(x, w, padded)])
    kernel = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    (schedule, *_) = schedules.generate(kernel, cpu)
    assert largest_unrolled(schedule.mod["main"]) <= 256
    own = schedules._find_blocks(tvm.s_tir.Schedule(kernel))
    assert own is not None
    assert winograd.list_splits(own.tiled_product, cpu)[0].tile.rows > 1


@pytest.mark.parametrize("columns", [7, 14, 20, 28, 56, 112])
def test_columns_that_register_tiles_divide_stay(columns: int) -> None:
    cpu = cpu_model_for({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4"}, 1)
    assert cpu is not None
    geometry = Geometry(2, (1, 1, 6, 2 * columns), (0, 1, 1))
    for blocks in (1, 2, 4, 6, 16):
        assert winograd.pad_columns(geometry, blocks, 16 * blocks, cpu) == geometry


def test_a_prime_number_of_columns(tile: int) -> None:
    """Columns that are added are computed, but not stored."""
    columns = 37 * tile_size(tile)[1] - 1
    check(model(conv(32), biased, relu, shape=(1, 32, 3, columns)), tile, host_level())


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "options", "is_winograd"),
    [
        ((128, 128), 28, 3, {"padding": 1}, True),
        # Larger weights for a few pixels.
        ((512, 512), 7, 3, {"padding": 1}, False),
        # Few channels: the transforms cost more than the product saves.
        ((8, 8), 56, 3, {"padding": 1}, False),
        ((16, 64), 56, 3, {"padding": 1}, True),
        ((128, 128), 28, 3, {"padding": 1, "strides": 2}, False),
        ((128, 128), 28, 3, {"padding": 2, "dilation": 2}, False),
        ((128, 128), 28, 3, {"padding": 1, "groups": 2}, True),
        ((128, 128), 28, 3, {"padding": 1, "groups": 16}, False),
        ((128, 128), 28, 5, {"padding": 2}, False),
    ],
)
def test_winograd_is_used_where_it_is_profitable(
    channels: tuple[int, int], size: int, kernel: int, options: dict[str, Any], is_winograd: bool
) -> None:
    """A recipe can turn it off."""
    inner, out = channels
    mod = model(convolution(out, (kernel, kernel), **options), shape=(1, inner, size, size))
    target = level("x86-64-v3")
    used = [
        any("winograd" in name for name in kernels_of(mod, target, options))
        for options in (FAST, replace(FAST, winograd=0))
    ]
    assert used == [is_winograd, False]


def choose_tile(
    convolution: Convolution, tiles: tuple[int, ...] = (2, 4), *, has_few: bool = False
) -> int:
    return convolution.rank_tiles(tiles, winograd.costs_by_rule(has_few))[0]


@pytest.mark.parametrize(
    ("channels", "size", "tile"), [(64, 56, 4), (128, 28, 4), (512, 7, 2), (4, 6, 0)]
)
def test_each_layer_has_the_tile_that_is_estimated_to_be_fastest(
    channels: int, size: int, tile: int
) -> None:
    """Few pixels do not pay for the larger weights of a tile of 4, and few of few channels for no transforms."""
    geometry = Geometry(2, (1, 1, size, size), (0, 1, 1))
    convolution = Convolution(geometry, channels, channels, lanes=4)
    assert choose_tile(convolution) == tile
    assert choose_tile(convolution, (2,)) == min(tile, 2)


@pytest.mark.parametrize(
    ("channels", "size", "step", "tile"),
    [(512, 7, 1, 42), (256, 14, 1, 4), (64, 56, 1, 4), (512, 3, 1, 0), (384, 7, 2, 4)],
)
def test_tiles_of_4_by_2_where_a_core_reads_fast(
    channels: int, size: int, step: int, tile: int
) -> None:
    """With 7 pixels along an axis they waste the fewest products of those whose weights are read in time."""
    geometry = Geometry(2, (1, 1, size, size), (0, 1, 1), step=step)
    costs = winograd.costs_by_rule(False, takes_lanes=True)
    convolution = Convolution(geometry, channels, channels, lanes=4)
    assert convolution.rank_tiles(winograd.list_tiles(True), costs)[0] == tile
    assert winograd.RECTANGLE not in winograd.list_tiles(False)


def test_the_estimate_knows_strides() -> None:
    """Weights for data at odd places are read once; 14 rows fill whole tiles of 2 alone."""
    geometries = [Geometry(2, (1, 1, size, size), (0, 1, 1), step=2) for size in (28, 14, 7)]
    chosen = [choose_tile(Convolution(geometry, 256, 128, lanes=4)) for geometry in geometries]
    assert chosen == [4, 2, 0]


def test_the_estimate_knows_groups() -> None:
    """Each group multiplies its own data; all data are transformed."""
    geometry = Geometry(2, (1, 1, 28, 28), (0, 1, 1))
    whole = Convolution(geometry, 128, 128, lanes=16).count_work(4)
    halves = Convolution(geometry, 128, 64, lanes=16, groups=2).count_work(4)
    assert halves.transforms == whole.transforms
    assert (2 * halves.products, 2 * halves.weights) == (whole.products, whole.weights)


def test_transforms_that_registers_do_not_hold_are_not_worth_it_for_few_channels() -> None:
    geometry = Geometry(2, (1, 1, 56, 56), (0, 1, 1))
    convolution = Convolution(geometry, 8, 8, lanes=8)
    assert [choose_tile(convolution, has_few=has_few) for has_few in (False, True)] == [4, 0]


@pytest.mark.parametrize(("inner", "tile"), [(8, 0), (16, 4)])
def test_a_direct_convolution_does_not_multiply_the_empty_lanes_of_a_single_block(
    inner: int, tile: int
) -> None:
    geometry = Geometry(2, (1, 1, 112, 112), (0, 1, 1))
    convolution = Convolution(geometry, 16, inner, lanes=16)
    assert choose_tile(convolution) == tile
    assert convolution.count_work(0).products == 9 * inner * 112 * 112
    # with several terms an instruction, blocks are whole
    assert convolution._replace(terms=2).count_work(0).products == 9 * 16 * 112 * 112


def test_a_recipe_limits_the_tiles() -> None:
    """Without a limit, all may be chosen; where results are rounded, large ones on 64-bit ARM alone."""

    def tiles(mtriple: str, mcpu: str, **options: Any) -> tuple[int, ...]:
        target = {"kind": "llvm", "mtriple": mtriple, "mcpu": mcpu}
        cpu = cpu_model_for(target, SCHEDULES_VERSION)
        return LoweringContext(make_target(target), cpu, replace(FAST, **options)).winograd_tiles

    assert tiles("aarch64-linux-gnu", "cortex-a72") == (2, 42, 4)
    assert tiles("aarch64-linux-gnu", "cortex-a72", winograd=2) == (2,)
    assert tiles("x86_64-linux-gnu", "x86-64-v3") == (2, 4)
    assert tiles("x86_64-linux-gnu", "x86-64-v3", winograd=2) == (2,)
    for arm, mcpu, expected in ((True, "cortex-a72", (2, 42, 4)), (False, "x86-64-v3", (2,))):
        mtriple = "aarch64-linux-gnu" if arm else "x86_64-linux-gnu"
        assert tiles(mtriple, mcpu, precision="mixed") == expected
    assert tiles("x86_64-linux-gnu", "x86-64-v3", precision="mixed", winograd=4) == (2, 4)
    assert tiles("x86_64-linux-gnu", "x86-64-v3", winograd=0) == ()


OPEN = tuple(Dimension(name, 1, limit) for name, limit in (("batch", 3), ("h", 128), ("w", 128)))
DYNAMIC_IMAGE = ("batch", 16, "h", "w")


def two_layers(emit: Any, x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Weights that stay in a cache, and some that do not; a bias, a residual and activations.

    Images have half of the height and width of the data.
    """
    x = emit(relax.op.nn.conv2d(x, d, strides=2))
    y = emit(relax.op.nn.relu(emit(relax.op.nn.conv2d(x, a, padding=1))))
    z = emit(relax.op.nn.conv2d(y, b, padding=[0, 1, 2, 1]))
    return emit(relax.op.sigmoid(emit(relax.op.add(emit(relax.op.add(z, c)), y))))


def compute_two_layers(x: Array, a: Array, b: Array, c: Array, d: Array) -> Array:
    """Return what `two_layers` computes."""

    def convolve(images: Array, weights: Array, *pads: tuple[int, int]) -> Array:
        padded = np.pad(images, ((0, 0), (0, 0), *pads))
        size = weights.shape[2:]
        windows = np.lib.stride_tricks.sliding_window_view(padded, size, (2, 3))  # type: ignore[call-overload]
        sums: Array = np.einsum("nihwyz,oiyz->nohw", windows, weights, optimize=True)
        return sums

    x = convolve(x[:, :, ::2, ::2], d, (0, 0), (0, 0))
    y = np.maximum(convolve(x, a, (1, 1), (1, 1)), 0)
    result: Array = 1 / (1 + np.exp(-(convolve(y, b, (0, 2), (1, 1)) + c + y)))
    return result


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("tile", "mcpu"),
    [(2, LEVELS_HERE[-1]), pytest.param(4, LEVELS_HERE[0], marks=pytest.mark.slow)],
)
def test_any_number_of_tiles(tile: Literal[2, 4], mcpu: str) -> None:
    """One library, with the same bits for one thread and for two, at sizes in any order."""
    shapes = {"a": [48, 16, 3, 3], "b": [48, 48, 3, 3], "c": [1, 48, 1, 1], "d": [16, 16, 1, 1]}
    network = make_network(OPEN, {"x": Input(DYNAMIC_IMAGE)}, make_weights(**shapes), two_layers)
    halves = ("batch", 48, "(h + 1) // 2", "(w + 1) // 2")
    signature = {
        "inputs": [TensorSpec("x", (3, 16, 128, 128), "float32", sizes=DYNAMIC_IMAGE).to_json()],
        "outputs": [TensorSpec("y", (3, 48, 64, 64), "float32", sizes=halves).to_json()],
        "dimensions": [entry.to_json() for entry in OPEN],
    }
    scheduled = lowering.lower(
        network.mod, make_target(level(mcpu)), replace(FAST, winograd=tile)
    ).schedule_untuned(network.weights, level(mcpu), SCHEDULES_VERSION)
    libraries = [load_c_library(scheduled, signature, threads) for threads in (1, 2)]
    edges = [(1, 1, 1), (1, 1, 74), (3, 4, 1), (1, 6, 9), (2, 7, 8), (1, 9, 16), (1, 13, 14)]
    for sizes in [*edges, (1, 100, 66), (2, 62, 73), (1, 17, 26), (3, 128, 3)]:
        feed = network.draw(dict(zip(("batch", "h", "w"), sizes, strict=True)))
        expected = compute_two_layers(feed["x"], *network.weights.values())
        [one], [two] = (library.main(feed["x"]) for library in libraries)
        np.testing.assert_array_equal(one, two, err_msg=str(sizes))
        largest = float(np.abs(expected).max())
        np.testing.assert_allclose(
            one / largest, expected / largest, rtol=0, atol=ERRORS[tile], err_msg=str(sizes)
        )


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("mcpu", LEVELS_HERE)
def test_every_level_divides_a_dynamic_number_of_tiles(mcpu: str) -> None:
    """The epilogue belongs to the kernel of each; volumes have direct ones."""
    images = make_network(
        OPEN,
        {"x": Input(DYNAMIC_IMAGE)},
        make_weights(a=[48, 16, 3, 3], b=[48, 48, 3, 3], c=[1, 48, 1, 1], d=[16, 16, 1, 1]),
        two_layers,
    )
    target = level(mcpu)
    _, rules = schedule_for_cpu(
        with_tuning_sizes(images.lower(target).mod), cpu_model_for(target, 1)
    )
    own = [name for name in rules if "winograd" in name]
    assert len(own) == 2
    assert all(rules[name] == "winograd" and name.startswith("fused") for name in own)
    volumes = make_network(
        OPEN,
        {"x": Input(("batch", 16, 4, "h", "w"))},
        make_weights(a=[16, 16, 3, 3, 3]),
        lambda emit, x, a: emit(relax.op.nn.conv3d(x, a, padding=1)),
    )
    assert not any("winograd" in name for name in volumes.list_kernels(target))
