"""Rows of products and columns of convolutions are padded to whole tiles where that saves time."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest
import tvm
from onnx.helper import make_node as node
from tvm import te
from tvm.s_tir import Schedule

from tests.support.onnx_models import agree, draw, model, value
from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.schedules.blocks import analyze_blocks
from tvmflow.compiler.schedules.register_tiles import analyze_axes, generate_tiles
from tvmflow.compiler.tir_kernels import blocked, tiles

AVX512: Final = CpuModel(16, 32, 1 << 20, 4, has_broadcast_loads=True)
AVX2: Final = CpuModel(8, 16, 1 << 19, 4, has_fma=True)
CPUS: Final = (AVX512, CpuModel(8, 16, 1 << 19, 4), CpuModel(4, 32, 1 << 19, 4))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16, 28, 64, 128])
def test_whole_tiles_are_not_padded(rows: int) -> None:
    assert tiles.pad_product(rows, 1024, 512, AVX512) == (rows, 1024)
    assert tiles.pad_rows(rows, 8, 1152, AVX512) == rows


@pytest.mark.parametrize("cpu", CPUS)
def test_few_rows_are_added(cpu: CpuModel) -> None:
    for rows in range(1, 400):
        padded = tiles.pad_product(rows, 1024, 512, cpu)[0], tiles.pad_rows(rows, 11, 99, cpu)
        assert all(rows <= number <= min(rows * 5 // 4, rows + 7) for number in padded)


@pytest.mark.parametrize(("rows", "padded"), [(74, 75), (193, 195), (302, 304), (7, 7)])
def test_rows_of_deep_products_are_padded_to_many_points(rows: int, padded: int) -> None:
    """Two points and eight vectors divide 74 rows, but would read all weights from the second-level cache 37 times."""
    assert tiles.pad_product(rows, 1024, 512, AVX512)[0] == padded


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(256, 512, 512), (512, 256, 256), (128, 256, 256), (361, 728, 728), (16, 512, 2048)],
)
def test_products_are_padded_for_the_tile_that_they_are_scheduled_with(
    rows: int, depth: int, columns: int
) -> None:
    padded, width = tiles.pad_product(rows, columns, depth, AVX2)
    data = te.placeholder((rows, depth), name="data")
    packed = te.placeholder((width // AVX2.lanes, depth, AVX2.lanes), name="weights")
    result = blocked.dense(data, packed, columns, padded)
    mod = tvm.IRModule({"main": te.create_prim_func([data, packed, result])})
    *_, block = [each for each in analyze_blocks(Schedule(mod)) or () if each.is_reduction]
    axes = analyze_axes(block, AVX2)
    assert axes is not None
    tile = next(generate_tiles(block, None, axes, AVX2))
    assert padded == rows or padded % tile.points == 0
    assert width == columns or width // AVX2.lanes % tile.vectors == 0


def check_columns(columns: int, stride: int, pad: int, folder: Path, *, transposed: bool) -> None:
    taps, channels = 3, 32
    size = (columns - 1) * stride + taps - 2 * pad
    weights = {"w": draw(channels, 32, taps), "b": draw(32, seed=1)}
    kind, source, result = (
        ("ConvTranspose", columns, size) if transposed else ("Conv", size, columns)
    )
    nodes = [
        node("Relu", ["x"], ["r"]),
        node(kind, ["r", "w", "b"], ["c"], strides=[stride], pads=[pad, pad]),
        node("Relu", ["c"], ["y"]),
    ]
    inputs, outputs = value("x", [2, channels, source]), value("y", [2, 32, result])
    feed = {"x": draw(2, channels, source)}
    agree(model(nodes, [inputs], [outputs], weights), folder, feed)


@pytest.mark.parametrize(
    ("columns", "stride", "pad", "transposed"), [(199, 2, 0, False), (37, 1, 1, True)]
)
def test_columns_of_convolutions(
    columns: int, stride: int, pad: int, transposed: bool, tmp_path: Path
) -> None:
    check_columns(columns, stride, pad, tmp_path, transposed=transposed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_columns_of_random_convolutions(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    columns = int(random.choice([5, 7, 11, 23, 29, 37, 41, 58, 61, 73, 74, 82, 101, 122, 193]))
    transposed = bool(random.integers(2))
    check_columns(
        columns,
        int(random.integers(1, 4)),
        int(random.integers(2)),
        tmp_path,
        transposed=transposed,
    )


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 9, 37, 41, 58, 61, 73, 74, 82, 101, 122, 193])
def test_rows_of_products(rows: int, tmp_path: Path) -> None:
    made = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", [rows, 96])],
        [value("y", [rows, 50])],
        {"w": draw(96, 50)},
    )
    agree(made, tmp_path, {"x": draw(rows, 96)})
