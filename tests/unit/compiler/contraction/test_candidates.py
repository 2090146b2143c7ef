"""The register tiles of contractions: what is padded, and the one estimate that ranks them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest
import tvm
from tvm import te
from tvm.s_tir import Schedule

import tvmflow
from tvmflow.compiler.contraction import candidates
from tvmflow.compiler.contraction.candidates import Contraction, RegisterTile, multiply_add
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.schedules.blocks import analyze_blocks
from tvmflow.compiler.schedules.register_tiles import analyze_axes, generate_tiles
from tvmflow.compiler.tir_kernels import blocked

AVX512: Final = CpuModel(16, 32, 1 << 20, 4, has_broadcast_loads=True)
AVX2: Final = CpuModel(8, 16, 1 << 19, 4, has_fma=True)
NEON: Final = CpuModel(4, 32, 1 << 19, 4, multiplicand_lanes=4, has_fma=True)
CPUS: Final = (AVX512, AVX2, CpuModel(8, 16, 1 << 19, 4), CpuModel(4, 32, 1 << 19, 4), NEON)


def pad_product(rows: int, columns: int, depth: int, cpu: CpuModel) -> tuple[int, int]:
    """Return the padded rows and columns of a product."""
    problem = Contraction(rows, -(-columns // cpu.lanes), depth, multiply_add(cpu))
    padded, vectors = candidates.pad_product(problem, cpu)
    return padded, vectors * cpu.lanes


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16, 28, 64, 128])
def test_whole_tiles_are_not_padded(rows: int) -> None:
    assert pad_product(rows, 1024, 512, AVX512) == (rows, 1024)
    problem = Contraction(rows, 8, 1152, is_product=False)
    assert candidates.pad_rows(problem, AVX512) == rows


@pytest.mark.parametrize("cpu", CPUS)
def test_few_rows_are_added(cpu: CpuModel) -> None:
    for rows in range(1, 400):
        problem = Contraction(rows, 11, 99, multiply_add(cpu), is_product=False)
        padded = pad_product(rows, 1024, 512, cpu)[0], candidates.pad_rows(problem, cpu)
        assert all(rows <= number <= min(rows * 5 // 4, rows + 7) for number in padded)


@pytest.mark.parametrize("rows", [74, 193, 302, 7])
def test_rows_are_not_padded_where_a_smaller_tile_computes_the_last_ones(rows: int) -> None:
    assert pad_product(rows, 1024, 512, AVX512) == (rows, 1024)


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [(256, 512, 512), (512, 256, 256), (128, 256, 256), (361, 728, 728), (16, 512, 2048)],
)
def test_products_are_padded_for_the_tile_that_they_are_scheduled_with(
    rows: int, depth: int, columns: int
) -> None:
    padded, width = pad_product(rows, columns, depth, AVX2)
    data = te.placeholder((rows, depth), name="data")
    packed = te.placeholder((width // AVX2.lanes, depth, AVX2.lanes), name="weights")
    result = blocked.dense(data, packed, columns, padded)
    mod = tvm.IRModule({"main": te.create_prim_func([data, packed, result])})
    *_, block = [each for each in analyze_blocks(Schedule(mod)) or () if each.is_reduction]
    axes = analyze_axes(block, AVX2)
    assert axes is not None
    tile = next(generate_tiles(block, None, axes, AVX2))
    assert padded == rows or padded % tile.shape.rows == 0
    assert width == columns or width // AVX2.lanes % tile.shape.vectors == 0


@pytest.mark.parametrize("cpu", CPUS)
def test_tiles_of_attention_spill_nothing(cpu: CpuModel) -> None:
    """A tile of 3 rows and 4 vectors, which needs 17 registers of AVX2, took twice as long as one of 4 and 3."""
    for rows, keys in ((49, 49), (128, 128), (197, 197), (512, 512)):
        vectors = (-(-keys // cpu.lanes), -(-64 // cpu.lanes))
        block = candidates.choose_row_block(rows, vectors, 28, 28, cpu)
        assert all(block.rows % tile.rows == 0 for tile in block.tiles)
        if cpu is not NEON:
            assert all(candidates.holds_operands(tile, cpu) for tile in block.tiles)


@pytest.mark.parametrize("cpu", CPUS)
def test_tiles_of_packed_columns_stay_within_them(cpu: CpuModel) -> None:
    """The tail tile ends where the columns do: a wider one than all columns would begin before them."""
    for rows in (1, 7, 35, 97):
        for columns in range(cpu.lanes, 5 * cpu.lanes + 1):
            tile = candidates.choose_packing_tile(rows, columns, cpu)
            assert tile.vectors * cpu.lanes <= columns


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("sizes", [(1, 20, 64), (49, 48, 384), (361, 91, 728), (1024, 1, 9)])
def test_candidates_are_ranked_by_their_speed(sizes: tuple[int, int, int], cpu: CpuModel) -> None:
    problem = Contraction(*sizes, multiply_add(cpu))
    ranked = candidates.rank_tiles(problem, cpu)
    speeds = [speed for speed, _ in ranked]
    assert speeds == sorted(speeds, reverse=True) and 0 < speeds[0] <= 1
    assert len({tile for _, tile in ranked}) == len(ranked)
    assert all(tile.accumulators < cpu.registers for _, tile in ranked)
    assert speeds[0] == candidates.estimate_speed(problem, ranked[0][1], cpu)


def test_a_tail_costs_what_it_computes_in_vain() -> None:
    """One row more than whole tiles is slower than as many rows as tiles have, or than one row less."""
    tile = RegisterTile(4, 3)
    speeds = [
        candidates.estimate_speed(Contraction(rows, 30, 512), tile, AVX2) for rows in (36, 37, 40)
    ]
    assert speeds[1] < min(speeds[0], speeds[2])


def test_contractions_have_one_chooser_of_tiles() -> None:
    """Tiles are chosen, and their speed is estimated, in `contraction` alone."""
    folder = Path(tvmflow.__file__).parent / "compiler"
    choosers = [
        f"{path.relative_to(folder)}: {function.name}"
        for path in sorted(folder.rglob("*.py"))
        if path.parent.name != "contraction"
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        and re.match(
            r"_?(choose_tile|estimate_(speed|time|cost|shapes|utilization))", function.name
        )
        and {"cpu", "device", "vectors"} & {argument.arg for argument in function.args.args}
    ]
    assert choosers == []
