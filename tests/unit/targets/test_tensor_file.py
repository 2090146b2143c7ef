"""Tensor files: arrays survive a round trip, and a damaged file is an error."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from tvmflow.recipe._model_fields import DTYPES
from tvmflow.targets.emulation import read_tensors, write_tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3), (1, 1, 8, 8)])
def test_arrays_survive_a_round_trip(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """Every dtype that a recipe may name, also without dimensions and without elements."""
    rng = np.random.default_rng(0)
    batches = [[(rng.random(shape) * 100).astype(dtype), np.arange(3)] for _ in range(2)]
    write_tensors(tmp_path / "t", batches)
    batch_arrays = read_tensors(tmp_path / "t")
    assert len(batch_arrays) == 2
    for actual, expected in zip(batch_arrays, batches, strict=True):
        for a, b in zip(actual, expected, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_array_equal(a, b)


def test_an_array_of_any_layout_is_written_row_by_row(tmp_path: Path) -> None:
    """Transposed, and with the bytes of its numbers the other way round."""
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    write_tensors(tmp_path / "t", [[array]])
    ((batch_arrays,),) = read_tensors(tmp_path / "t")
    np.testing.assert_array_equal(batch_arrays, array)


def test_no_batches_are_no_batches(tmp_path: Path) -> None:
    """An empty file of tensors is one."""
    write_tensors(tmp_path / "t", [])
    assert read_tensors(tmp_path / "t") == []


def test_the_format_is_that_of_the_emulation_program(tmp_path: Path) -> None:
    """Byte for byte as emulation_main.c describes it."""
    write_tensors(tmp_path / "t", [[np.array([[1, 2]], np.int16)]])
    assert (tmp_path / "t").read_bytes() == (
        b"TVMFLOW1"
        + struct.pack("<II", 1, 1)
        + struct.pack("<I", 5) + b"int16"
        + struct.pack("<IqqQ", 2, 1, 2, 4)
        + struct.pack("<hh", 1, 2)
    )  # fmt: skip


def test_a_truncated_or_too_long_file_is_an_error(tmp_path: Path) -> None:
    """Wherever it ends."""
    path = tmp_path / "t"
    write_tensors(path, [[np.arange(4, dtype="float32")]])
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"ends too early|is not a file of tensors"):
            read_tensors(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match="continues after its last tensor"):
        read_tensors(path)
