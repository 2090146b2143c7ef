"""The register tiles that a reduction may have, and the analysis of loads behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te
from tvm.s_tir import Schedule

from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.schedules.blocks import (
    Block,
    analyze_blocks,
    depends_on,
    element_stride,
    list_loads,
)
from tvmflow.compiler.schedules.register_tiles import analyze_axes, generate_tiles
from tvmflow.compiler.tir_kernels import blocked
from tvmflow.compiler.tir_kernels.blocked import Groups, Window

FAST = settings(max_examples=25, deadline=None, derandomize=True)
CPUS = st.sampled_from(
    [
        CpuModel(16, 32, 1 << 20, 2, has_broadcast_loads=True),
        CpuModel(8, 16, 1 << 19, 8),
        CpuModel(4, 32, 1 << 18, 1),
    ]
)


def list_blocks(*tensors: Any) -> list[Block]:
    blocks = analyze_blocks(Schedule(te.create_prim_func(list(tensors))))
    assert blocks is not None
    return blocks


@FAST
@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.data())
def test_strides_are_those_of_numpy(shape: list[int], data: st.DataObject) -> None:
    """For a load whose axes are permuted and scaled."""
    order = data.draw(st.permutations(range(len(shape))))
    steps = [data.draw(st.integers(0, 3)) for _ in shape]
    extents = [(extent - 1) * step + 1 for extent, step in zip(shape, steps, strict=True)]
    source = te.placeholder([extents[axis] for axis in order], name="source")
    result = te.compute(
        shape, lambda *index: source(*(index[axis] * steps[axis] for axis in order)) * 2.0
    )
    (block,) = list_blocks(source, result)
    (load,) = list_loads(block)
    strides = np.empty([extents[axis] for axis in order], np.uint8).strides
    for axis, var in enumerate(block.spatial_axes):
        expected = strides[order.index(axis)] * steps[axis]
        assert element_stride(load, block, var) == expected
        assert depends_on(load, var) == bool(steps[axis])


def test_a_load_at_an_address_from_data_has_no_stride() -> None:
    index, table = te.placeholder((8,), "int32", "index"), te.placeholder((100,), name="table")
    (block,) = list_blocks(index, table, te.compute((8,), lambda i: table[index[i]] * 2.0))
    strides = [element_stride(load, block, block.spatial_axes[0]) for load in list_loads(block)]
    assert sorted(strides, key=str) == [1, None]


@FAST
@given(st.integers(1, 4), st.integers(1, 3), st.integers(4, 30), st.sampled_from([1, 3, 5]), CPUS)
def test_all_tiles_of_a_convolution_fit(
    out: int, inner: int, size: int, edge: int, cpu: CpuModel
) -> None:
    """Their sums fit the registers, and their windows half of the second-level cache; none comes twice."""
    lanes = cpu.lanes
    x = te.placeholder((1, inner, size + edge, size + edge, lanes), name="x")
    w = te.placeholder((out, inner, edge, edge, lanes, lanes), name="w")
    own = Window((1, 1), (edge // 2,) * 4, (1, 1))
    y = blocked.conv(x, w, own, Groups(inner * lanes, out * lanes, lanes, lanes, 1))
    blocks = list_blocks(x, w, y)
    pad = blocks[0] if len(blocks) == 2 else None
    axes = analyze_axes(blocks[-1], cpu)
    assert axes is not None
    assert axes.lanes == lanes and axes.data == 3 and axes.weight == (1 if out > 1 else None)
    tiles = list(generate_tiles(blocks[-1], pad, axes, cpu))
    assert tiles and len(set(tiles)) == len(tiles)
    height, width = (int(extent) for extent in y.shape[2:4])
    for tile in tiles:
        assert 1 <= tile.shape.vectors <= out and 1 <= tile.shape.rows <= width
        assert tile.shape.vectors * tile.shape.rows < cpu.registers
        assert 0 <= tile.window_rows <= height and (pad is not None or tile.window_rows == 0)
        window = (tile.window_rows + edge - 1) * (width + edge - 1) * lanes * inner * 4
        assert tile.window_rows == 0 or window <= cpu.l2_bytes
    first = tiles[0]
    assert first.shape.accumulators >= min(out * min(width, 8), 4)


@FAST
@given(st.sampled_from([199, 399, 799, 1599]))
def test_weights_beyond_the_first_cache_are_loaded_for_many_points(width: int) -> None:
    """A sequence whose length has no small factors has a test at its end rather than tiles of one point."""
    x, w = te.placeholder((1, 32, width + 2, 16)), te.placeholder((32, 32, 3, 16, 16))
    y = blocked.conv(x, w, Window((1,), (0, 0), (1,)), Groups(512, 512, 16, 16, 1))
    (block,) = list_blocks(x, w, y)
    cpu = CpuModel(16, 32, 1 << 20, 2, has_broadcast_loads=True)
    axes = analyze_axes(block, cpu)
    assert axes is not None
    assert next(generate_tiles(block, None, axes, cpu)).shape.rows > 3


@FAST
@given(st.integers(1, 50), CPUS)
def test_a_reduction_that_reads_across_vectors_has_no_tiles(rows: int, cpu: CpuModel) -> None:
    """The sum of each row of a matrix is one number: its last axis is the reduction's."""
    x = te.placeholder((rows, 33), name="x")
    k = te.reduce_axis((0, 33), "k")
    (block,) = list_blocks(x, te.compute((rows,), lambda i: te.sum(x[i, k], axis=[k])))
    assert block.is_reduction and block.reduction_extents == (33,)
    assert analyze_axes(block, cpu) is None


def test_vectors_stay_within_blocks_of_packed_weights() -> None:
    """A model with vectors of 256 bits on a CPU with 512: a vector of two blocks would be gathered number by number."""
    wide = CpuModel(16, 32, 1 << 20, 4, has_broadcast_loads=True)
    for block, lanes in ((16, 16), (8, 8), (4, 4)):
        x, w = te.placeholder((1, 128), name="x"), te.placeholder((512 // block, 128, block))
        product = list_blocks(x, w, blocked.dense(x, w, 512))[0]
        axes = analyze_axes(product, wide)
        assert axes is not None and axes.lanes == lanes
