"""Places of the largest and smallest numbers of rows are those of numpy, found in vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.helper import make_node as node

from tests.support.kernels import LEVELS_HERE, host_level, kernels_of, level, outputs
from tests.support.onnx_models import load, model, value

Array = np.ndarray[Any, Any]


def find(
    data: Array, folder: Path, operator: str = "ArgMax", mcpu: str = LEVELS_HERE[-1], **more: int
) -> tuple[Array, list[str]]:
    """Return the places along the last axis, and the names of the kernels that find them."""
    shape = [*data.shape[:-1], *([1] if more.get("keepdims", 1) else [])]
    made = model(
        [node(operator, ["x"], ["y"], axis=-1, **more)],
        [value("x", list(data.shape), str(data.dtype))],
        [value("y", shape, "int64")],
    )
    loaded = load(made, folder)
    (places,) = outputs(loaded, {"x": data}, level(mcpu))
    return places, kernels_of(loaded.mod, host_level())


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
@pytest.mark.parametrize("length", [16, 17, 80, 131, 520])
def test_rows_of_any_length(length: int, mcpu: str, tmp_path: Path) -> None:
    """Of equal numbers the first is found, also where the last vector overlaps the one before it."""
    data = np.random.default_rng(length).integers(-4, 4, (70, length)).astype("float32")
    data[0, :] = 1
    data[1, -1], data[2, 0] = 9, 9
    places, kernels = find(data, tmp_path, mcpu=mcpu, keepdims=0)
    np.testing.assert_array_equal(places, data.argmax(-1))
    assert kernels == ["argmax"]


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_smallest_numbers_of_each_dtype(dtype: str, tmp_path: Path) -> None:
    """So many rows are divided between threads."""
    data = np.random.default_rng(0).integers(0, 120, (3, 400, 45)).astype(dtype)
    places, _ = find(data, tmp_path, "ArgMin")
    np.testing.assert_array_equal(places, data.argmin(-1)[..., None])


def test_infinities_nan_and_signed_zeros(tmp_path: Path) -> None:
    """A row of nothing but the lowest number has its first place; NaN is passed over."""
    data = np.full((5, 33), -np.inf, "float32")
    data[1] = np.nan
    data[2, [0, 20]] = np.nan, 3
    data[3] = -0.0
    data[3, 7:] = 0.0
    data[4, [5, 32]] = np.inf
    places, _ = find(data, tmp_path, keepdims=0)
    assert places.tolist() == [0, 0, 20, 0, 5]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 3)])
def test_a_maximum_of_places_and_zeros_has_its_own_shape(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Zeros of more dimensions make more of the places; only a maximum that changes nothing is dropped."""
    data = np.random.default_rng(1).normal(size=(3, 40)).astype("float32")
    zeros = np.zeros(shape, "int64")
    expected = np.maximum(data.argmax(-1), zeros)
    made = model(
        [node("ArgMax", ["x"], ["p"], axis=-1, keepdims=0), node("Max", ["p", "zeros"], ["y"])],
        [value("x", [3, 40])],
        [value("y", list(expected.shape), "int64")],
        {"zeros": zeros},
    )
    (places,) = outputs(load(made, tmp_path), {"x": data}, host_level())
    np.testing.assert_array_equal(places, expected)


def test_last_place_of_equals(tmp_path: Path) -> None:
    data = np.random.default_rng(2).integers(0, 3, (6, 50)).astype("float32")
    places, _ = find(data, tmp_path, select_last_index=1, keepdims=0)
    np.testing.assert_array_equal(places, 49 - data[:, ::-1].argmax(-1))
