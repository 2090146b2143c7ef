"""The samples of `quantize` are read a batch at a time, whatever they are stored as."""

from __future__ import annotations

import errno
import os
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tvmflow.core.errors import EnvironmentProblem, StageError
from tvmflow.core.types import Dimension, Json, TensorSpec
from tvmflow.runtime.npz import open_npz, read_npz
from tvmflow.runtime.samples import Samples, make_samples
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


@pytest.mark.parametrize("save", [save_plain, save_packed])
@pytest.mark.parametrize("has_pread", [True, False])
def test_numbered_arrays_are_not_held_and_share_a_file(
    save: Callable[..., None], has_pread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read when its batch is asked for, and no array has an open file of its own."""
    if not has_pread:
        monkeypatch.delattr(os, "pread")
    arrays = {f"{n}/x": np.full((n + 1, 7_000), n, np.float32) for n in range(60)}
    save(tmp_path / "data.npz", **arrays)
    dimension = Dimension("n", 1, 60)
    spec = TensorSpec("x", (60, 7_000), "float32", sizes=("n", 7_000))
    before = len([*Path("/proc/self/fd").iterdir()])
    tracemalloc.start()
    try:
        opened = open_npz(tmp_path / "data.npz", "quantize.data")
        data = make_samples((spec,), opened, source="quantize.data", dimensions=(dimension,))
        assert len([*Path("/proc/self/fd").iterdir()]) <= before + 2
        for place in (*range(60), 3):
            assert np.array_equal(data.batches[place]["x"], arrays[f"{place}/x"])
        assert tracemalloc.get_traced_memory()[1] < sum(a.nbytes for a in arrays.values()) // 4
    finally:
        tracemalloc.stop()
    assert (data.total, len(data.batches)) == (60 * 61 // 2, 60)
    del data, opened
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_the_parts_of_a_long_read_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system may give fewer bytes than were asked for, as Linux does beyond 2 GiB."""
    array = np.arange(40_000, dtype=np.float32).reshape(40, 1000)
    np.savez(tmp_path / "data.npz", x=array)
    opened = open_npz(tmp_path / "data.npz", "quantize.data")
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, place: read(file, min(size, 999), place))
    assert np.array_equal(opened["x"][...], array)
    assert np.array_equal(opened["x"][3:5], array[3:5])


@pytest.mark.parametrize(
    ("number", "text", "expected"),
    [
        (errno.ENOENT, "No usable temporary directory found in ['/a']", "No usable temporary"),
        (errno.EMFILE, "Too many open files", "Too many open files"),
        (errno.ENOSPC, "No space left on device", "no space left"),
    ],
)
def test_what_the_system_lacks_is_no_damage_of_the_file(
    number: int, text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a temporary file, the environment is named, and not the format of the data."""

    def refuse() -> None:
        raise OSError(number, text)

    save_packed(tmp_path / "data.npz", **make_arrays())
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(EnvironmentProblem, match=expected) as caught:
        load({"calibration": tmp_path / "data.npz"})
    assert "npz" not in caught.value.message


def write_member(path: Path, shape: tuple[int, ...], size: int, promised: int, method: int) -> None:
    """Write an npz file whose first array has fewer bytes than its list of contents promises."""
    head = str({"descr": "<f4", "fortran_order": False, "shape": shape}).ljust(117) + "\n"
    content = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode()
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x.npy", content.ljust(size, b"\1"))
        archive.writestr("y.npy", content.ljust(promised, b"\2"))
        archive.infolist()[0].file_size = promised


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("read", [open_npz, read_npz])
def test_an_array_that_ends_early_is_refused(
    method: int, read: Callable[..., Any], tmp_path: Path
) -> None:
    """The list of contents promises more than there is: what follows in the file is not the array's."""
    write_member(tmp_path / "data.npz", (40, 1024), 1_000, 164_000, method)
    with pytest.raises(StageError, match="is not an npz file of plain arrays"):
        read(tmp_path / "data.npz", "quantize.data")


@pytest.mark.parametrize("shape", [(-200, -200), (-1, 9), (3, -1, -1)])
@pytest.mark.parametrize("read", [open_npz, read_npz])
def test_negative_sizes_are_refused(
    shape: tuple[int, ...], read: Callable[..., Any], tmp_path: Path
) -> None:
    """Their product may be positive."""
    write_member(tmp_path / "data.npz", shape, 170_000, 170_000, zipfile.ZIP_STORED)
    with pytest.raises(StageError, match="has a negative size"):
        read(tmp_path / "data.npz", "quantize.data")
