"""Tensor files: the batches of arrays that the emulation program reads and writes.

See emulation_main.c.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

Array = np.ndarray[Any, Any]
Batch = Sequence[Array]

_MAGIC: Final = b"TVMFLOW1"


def write_tensors(path: Path, batches: Sequence[Batch]) -> None:
    """Write batches of arrays; every batch has the same number of them."""
    with path.open("wb") as file:
        file.write(_MAGIC)
        file.write(struct.pack("<II", len(batches), len(batches[0]) if batches else 0))
        for batch in batches:
            for array in batch:
                _write_array(file, array)


def read_tensors(path: Path) -> list[list[Array]]:
    """Return the batches in a file.

    Raises:
        ValueError: when the file is damaged.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} is not a file of tensors")
        batch_count, tensor_count = struct.unpack("<II", _read_exactly(file, 8))
        batches = [[_read_array(file) for _ in range(tensor_count)] for _ in range(batch_count)]
        if file.read(1):
            raise ValueError(f"{path} continues after its last tensor")
    return batches


def _write_array(file: IO[bytes], array: Array) -> None:
    name = str(array.dtype).encode()
    little_endian = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    file.write(struct.pack("<I", len(name)) + name)
    file.write(struct.pack(f"<I{array.ndim}q", array.ndim, *array.shape))
    file.write(struct.pack("<Q", little_endian.nbytes))
    file.write(little_endian.tobytes())


def _read_array(file: IO[bytes]) -> Array:
    name = _read_exactly(file, struct.unpack("<I", _read_exactly(file, 4))[0]).decode()
    (dimensions,) = struct.unpack("<I", _read_exactly(file, 4))
    shape = struct.unpack(f"<{dimensions}q", _read_exactly(file, 8 * dimensions))
    data = _read_exactly(file, struct.unpack("<Q", _read_exactly(file, 8))[0])
    return np.frombuffer(data, np.dtype(name).newbyteorder("<")).reshape(shape).astype(name)


def _read_exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{file.name} ends too early")
    return data
