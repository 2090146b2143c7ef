"""Arrays in the files that a runner reads and writes (see runner/tensors.h): batches of inputs there, of outputs back."""

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
    """Write batches of arrays; each batch has the same number of them."""
    with path.open("wb") as file:
        file.write(_MAGIC)
        file.write(struct.pack("<II", len(batches), len(batches[0]) if batches else 0))
        for batch in batches:
            for array in batch:
                _put(file, array)


def read_tensors(path: Path) -> list[list[Array]]:
    """The batches in a file. Raises ValueError for one that is not whole."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} is not a file of tensors")
        batches, tensors = struct.unpack("<II", _exactly(file, 8))
        found = [[_take(file) for _ in range(tensors)] for _ in range(batches)]
        if file.read(1):
            raise ValueError(f"{path} goes on after its last tensor")
    return found


def _put(file: IO[bytes], array: Array) -> None:
    name = str(array.dtype).encode()
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    file.write(struct.pack("<I", len(name)) + name)
    file.write(struct.pack(f"<I{array.ndim}q", array.ndim, *array.shape))
    file.write(struct.pack("<Q", little.nbytes))
    file.write(little.tobytes())


def _take(file: IO[bytes]) -> Array:
    name = _exactly(file, struct.unpack("<I", _exactly(file, 4))[0]).decode()
    (dimensions,) = struct.unpack("<I", _exactly(file, 4))
    shape = struct.unpack(f"<{dimensions}q", _exactly(file, 8 * dimensions))
    data = _exactly(file, struct.unpack("<Q", _exactly(file, 8))[0])
    return np.frombuffer(data, np.dtype(name).newbyteorder("<")).reshape(shape).astype(name)


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError(f"{file.name} ends too early")
    return data
