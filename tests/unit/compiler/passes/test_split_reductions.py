"""Reductions of a whole tensor to one number run over rows of vectors first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.helper import make_node as node

from tests.support.kernels import host_level, kernels_of, outputs
from tests.support.onnx_models import agree, draw, load, model, value

SHAPES = [
    (1, 64, 256),
    (1, 197, 97),
    (64, 56, 56),
    (1, 1, 50000),
    (300, 40),
    (4, 30000),
    (1, 1, 7919),
    (2, 3, 5, 7, 11),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin", "ReduceMean", "ReduceSum"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_results_agree_with_onnxruntime(
    operator: str, shape: tuple[int, ...], keepdims: int, tmp_path: Path
) -> None:
    """Sizes with and without a length for rows, one of them a prime."""
    made = model(
        [node("Relu", ["x"], ["r"]), node(operator, ["r"], ["y"], keepdims=keepdims)],
        [value("x", shape)],
        [value("y", None)],
    )
    agree(made, tmp_path, {"x": draw(*shape)})


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [((64, 56, 56), 2), ((1, 1, 100_000), 2), ((20, 7), 1), ((1, 1, 4096), 2)],
)
def test_only_large_tensors_are_split(shape: tuple[int, ...], kernels: int, tmp_path: Path) -> None:
    made = model([node("ReduceSum", ["x"], ["y"])], [value("x", shape)], [value("y", None)])
    loaded = agree(made, tmp_path, {"x": np.abs(draw(*shape))})
    names = kernels_of(loaded.mod, host_level())
    assert sum("sum" in name for name in names) == kernels, names


@pytest.mark.parametrize("axes", [[-1], [2]])
def test_one_row_is_not_split(axes: list[int], tmp_path: Path) -> None:
    """The rule for rows reduces it, in one kernel with what follows."""
    made = model(
        [node("ReduceSum", ["x", "a"], ["y"])],
        [value("x", (1, 1, 4096))],
        [value("y", None)],
        {"a": np.asarray(axes)},
    )
    loaded = agree(made, tmp_path, {"x": np.abs(draw(1, 1, 4096))})
    names = kernels_of(loaded.mod, host_level())
    assert sum("sum" in name for name in names) == 1, names


@pytest.mark.parametrize("operator", ["ReduceMean", "ReduceSum", "ReduceProd", "ReduceMax"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integers_are_exact(operator: str, dtype: type, tmp_path: Path) -> None:
    """The mean of rows would be rounded."""
    data: np.ndarray[Any, Any] = np.random.default_rng(0).integers(-3, 7, (3, 1000)).astype(dtype)
    made = model(
        [node(operator, ["x"], ["r"], keepdims=0), node("Add", ["r", "one"], ["y"])],
        [value("x", data.shape, data.dtype.name)],
        [value("y", None, data.dtype.name)],
        {"one": np.ones((), dtype)},
    )
    agree(made, tmp_path, {"x": data})


def test_products_of_rows_may_be_too_large(tmp_path: Path) -> None:
    data = np.full((2, 1024), 10 ** (-30 / 1024), np.float32)
    data[1] = 10 ** (50 / 1024)
    made = model(
        [node("ReduceProd", ["x"], ["y"], keepdims=0)], [value("x", data.shape)], [value("y", None)]
    )
    [actual] = outputs(load(made, tmp_path), {"x": data}, host_level())
    np.testing.assert_allclose(actual, 1e20, rtol=0.01)


def test_what_is_not_a_number_stays_so(tmp_path: Path) -> None:
    data = draw(64, 256)
    data[40, 100] = np.nan
    made = model(
        [node("ReduceMean", ["x"], ["y"], keepdims=0)], [value("x", data.shape)], [value("y", None)]
    )
    agree(made, tmp_path, {"x": data})


def test_sums_of_float16_are_rounded_once(tmp_path: Path) -> None:
    shape = (64, 512)
    made = model(
        [
            node("Cast", ["x"], ["h"], to=onnx.TensorProto.FLOAT16),
            node("ReduceMean", ["h"], ["m"]),
            node("Cast", ["m"], ["y"], to=onnx.TensorProto.FLOAT),
        ],
        [value("x", shape)],
        [value("y", None)],
    )
    loaded = load(made, tmp_path)
    # the mean is computed in float32, which may be split: means of rows are not rounded to float16
    assert sum("mean" in name for name in kernels_of(loaded.mod, host_level())) == 2
    data = np.random.default_rng(1).integers(0, 512, shape).astype(np.float32)
    once = data.mean(dtype=np.float64).astype(np.float16)
    assert once != data.mean(axis=1).astype(np.float16).mean(dtype=np.float64).astype(np.float16)
    [actual] = outputs(loaded, {"x": data}, host_level())
    assert actual.item() == once
