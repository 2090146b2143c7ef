"""The samples of `quantize` are read a batch at a time, whatever they are stored as."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tvmflow.core.errors import StageError
from tvmflow.core.types import Json, TensorSpec
from tvmflow.runtime.samples import Samples
from tvmflow.stages.quantize.data import DataSource, check_finite, limit_samples

Array = np.ndarray[Any, Any]

_SIDE, _COUNT = 64, 200
_ONE: int = 3 * _SIDE * _SIDE * 4
"""The bytes of a sample."""


def make_arrays() -> dict[str, Array]:
    """Return samples of 10 MB, each of another number, with labels."""
    numbers = np.arange(_COUNT, dtype=np.float32)
    return {
        "x": np.broadcast_to(numbers[:, None, None, None], (_COUNT, 3, _SIDE, _SIDE)),
        "label": numbers.astype(np.int64),
    }


def load(files: dict[str, Path], images: dict[str, Json] | None = None, batch: int = 1) -> Samples:
    """Return the calibration data of a model with one input."""
    spec = TensorSpec("x", (batch, 3, _SIDE, _SIDE), "float32")
    source = DataSource("calibration", "quantize.data", (spec,), (), images or {}, "label", ())
    loaded = source.load(files)
    assert loaded is not None
    return loaded


def save_packed(path: Path, **arrays: Array) -> None:
    """Save arrays compressed."""
    np.savez_compressed(path, **arrays)


def save_plain(path: Path, **arrays: Array) -> None:
    """Save arrays as they are."""
    np.savez(path, **arrays)


def count_held(files: dict[str, Path], images: dict[str, Json] | None = None) -> int:
    """Return the most bytes that are held at a time while samples are loaded, checked and read twice."""
    tracemalloc.start()
    try:
        data = load(files, images)
        batches = limit_samples(data, _COUNT)
        check_finite(batches, "quantize.data")
        for feed in [*range(len(batches)), *range(len(batches))]:
            assert batches[feed]["x"].shape == (1, 3, _SIDE, _SIDE)
        assert len(batches) == _COUNT
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("save", [save_plain, save_packed])
def test_an_npz_file_is_not_held(save: Callable[..., None], tmp_path: Path) -> None:
    """Of 10 MB a few samples are in memory at a time, also where the file is compressed."""
    save(tmp_path / "data.npz", **make_arrays())
    assert count_held({"calibration": tmp_path / "data.npz"}) < 4 << 20


def test_images_are_decoded_one_by_one(tmp_path: Path) -> None:
    """Neither their pixels nor the tensors that are made of them are held."""
    pixels = np.zeros((_SIDE, _SIDE, 3), np.uint8)
    for number in range(_COUNT):
        Image.fromarray(pixels + np.uint8(number)).save(tmp_path / f"{number:03}.png")
    files = {f"calibration/{path.name}": path for path in sorted(tmp_path.iterdir())}
    images: dict[str, Json] = {"x": {"resize": [_SIDE, _SIDE], "scale": 1.0}}
    # decoders are loaded
    load(files, images)
    assert count_held(files, images) < _COUNT * _ONE // 8
    data = load(files, images)
    assert [float(data.batches[place]["x"][0, 0, 0, 0]) for place in (3, 0, 199)] == [3, 0, 199]


@pytest.mark.parametrize("save", [save_plain, save_packed])
def test_stored_samples_are_those_of_the_arrays(save: Callable[..., None], tmp_path: Path) -> None:
    """Batches are filled up with the last sample, and slices of them are those of a list."""
    arrays = make_arrays()
    save(tmp_path / "data.npz", **arrays)
    data = load({"calibration": tmp_path / "data.npz"}, batch=3)
    assert data.labels is not None and np.array_equal(data.labels, arrays["label"])
    assert (data.total, len(data.batches)) == (_COUNT, 67)
    for place in (0, 40, 66):
        first = 3 * place
        expected = [min(first + sample, _COUNT - 1) for sample in range(3)]
        assert np.array_equal(data.batches[place]["x"], arrays["x"][expected])
    some = data.batches[60:][2:4]
    assert [feed["x"][0, 0, 0, 0] for feed in some] == [186, 189]


@pytest.mark.parametrize("transposed", [False, True])
def test_the_layout_of_a_file_does_not_matter(transposed: bool, tmp_path: Path) -> None:
    """Float64 becomes float32, and an array of Fortran's order is read as any other."""
    array = np.random.default_rng(0).normal(size=(8, 3, _SIDE, _SIDE))
    np.savez(tmp_path / "data.npz", x=np.asfortranarray(array) if transposed else array)
    data = load({"calibration": tmp_path / "data.npz"})
    for place, own in enumerate(array.astype(np.float32)):
        assert np.array_equal(data.batches[place]["x"][0], own)


def test_a_damaged_sample_is_found_before_anything_is_computed(tmp_path: Path) -> None:
    """A changed byte does not fit the checksum of the file."""
    path = tmp_path / "data.npz"
    np.savez(path, **make_arrays())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(StageError, match=r"quantize\.data is not an npz file of plain arrays"):
        load({"calibration": path})
