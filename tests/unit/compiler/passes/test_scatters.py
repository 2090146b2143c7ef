"""Scatters of rows compute what ONNX's definition does, of any shape and with indices that repeat, with one kernel each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx.helper import make_node as node
from onnx.reference import ReferenceEvaluator

from tests.support.kernels import host_level, kernels_of, outputs
from tests.support.onnx_models import draw, load, model, value

SIZES = (1, 2, 3, 7, 16, 31, 64)


def check(
    shape: tuple[int, ...],
    index_shape: tuple[int, ...],
    folder: Path,
    *,
    reduction: str = "add",
    dtype: str = "float32",
) -> None:
    """Compare a scatter with ONNX's reference: ONNX Runtime adds rows of one index in any order, some not at all."""
    random = np.random.default_rng(len(folder.name))
    depth = index_shape[-1]
    feed = {
        "x": (8 * draw(*shape)).astype(dtype),
        "updates": (8 * draw(*index_shape[:-1], *shape[depth:], seed=1)).astype(dtype),
        # from the end, too
        "indices": np.stack([random.integers(-n, n, index_shape[:-1]) for n in shape[:depth]], -1),
    }
    if reduction == "none":
        feed["indices"][...] = np.indices(index_shape[:-1]).reshape(index_shape) % shape[0]
    scatter = node("ScatterND", ["x", "indices", "updates"], ["y"], reduction=reduction)
    made = model(
        [scatter],
        [value(name, array.shape, str(array.dtype)) for name, array in feed.items()],
        [value("y", list(shape), dtype)],
        opset=18,
    )
    loaded = load(made, folder, feed)
    (expected,) = ReferenceEvaluator(made).run(None, feed)
    (result,) = outputs(loaded, feed)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
    assert sum("scatter" in name for name in kernels_of(loaded.mod, host_level())) == 1


@pytest.mark.parametrize(
    ("shape", "index_shape", "dtype"),
    [
        ((50, 128), (400, 1), "float32"),
        ((9, 5, 33), (4, 7, 2), "float32"),
        ((40,), (100, 1), "int64"),
        ((3, 4, 5), (2, 3), "int32"),
    ],
)
def test_sums_by_index(
    shape: tuple[int, ...], index_shape: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    """Many rows on several cores, rows that no vector divides, single numbers, and indices of all axes."""
    check(shape, index_shape, tmp_path, dtype=dtype)


@pytest.mark.parametrize("reduction", ["none", "mul", "min", "max"])
def test_reductions(reduction: str, tmp_path: Path) -> None:
    check((20, 17), (16, 1), tmp_path, reduction=reduction)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_scatters(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    rank = int(random.integers(1, 5))
    shape = tuple(int(n) for n in random.choice(SIZES, rank))
    depth = int(random.integers(1, rank + 1))
    outer = (int(n) for n in random.choice(SIZES, int(random.integers(1, 3))))
    check(
        shape,
        (*outer, depth),
        tmp_path,
        reduction=str(random.choice(["add", "mul", "min", "max"])),
        dtype=str(random.choice(["float32", "int32", "int64"])),
    )
