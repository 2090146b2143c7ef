"""Cumulative sums compute what ONNX Runtime computes, of any shape, with one kernel each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx.helper import make_node as node

from tests.support.kernels import host_level, kernels_of
from tests.support.onnx_models import agree, draw, model, value


def check(
    shape: tuple[int, ...],
    axis: int,
    folder: Path,
    *,
    dtype: str = "float32",
    exclusive: bool = False,
    reverse: bool = False,
) -> None:
    sums = node("CumSum", ["x", "axis"], ["y"], exclusive=int(exclusive), reverse=int(reverse))
    made = model(
        [sums],
        [value("x", list(shape), dtype)],
        [value("y", list(shape), dtype)],
        {"axis": np.array(axis, np.int64)},
    )
    loaded = agree(made, folder, {"x": (8 * draw(*shape)).astype(dtype)})
    assert sum("scan" in name for name in kernels_of(loaded.mod, host_level())) == 1


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [((3, 7), 1, "int64"), ((2, 5, 133), 1, "float32"), ((1, 40, 16, 64), -3, "float32")],
)
def test_sums_of_any_axis(shape: tuple[int, ...], axis: int, dtype: str, tmp_path: Path) -> None:
    """The other axes fill vectors, parts of them, or none; large ones are computed in parallel."""
    check(shape, axis, tmp_path, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_sums_of_random_shapes(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    rank = int(random.integers(1, 5))
    shape = tuple(int(n) for n in random.choice([1, 2, 3, 7, 16, 31, 64, 65], rank))
    check(
        shape,
        int(random.integers(-rank, rank)),
        tmp_path,
        dtype=str(random.choice(["float32", "int32", "int64"])),
        exclusive=bool(random.integers(2)),
        reverse=bool(random.integers(2)),
    )
