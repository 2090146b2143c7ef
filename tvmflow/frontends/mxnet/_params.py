"""Reads MXNet's `.params` files: the binary formats that MXNet 0.8 to 1.9 wrote, without MXNet.

The layout is that of `NDArray::Save` and `NDArray::Load` in MXNet's `src/ndarray/ndarray.cc`.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tvmflow.errors import ImportFailed

_FILE_MAGIC: Final = 0x112


class _Format(NamedTuple):
    """How one version of MXNet wrote an array's head."""

    has_storage: bool = False
    rank_code: str = "I"
    dim_code: str = "q"
    no_value: int = 0
    """The rank that stands for no value at all."""


_FORMATS: Final[dict[int, _Format]] = {
    0xF993FAC8: _Format(),  # MXNet 0.9: 64-bit dimensions
    0xF993FAC9: _Format(has_storage=True),  # 0.12: sparse arrays
    # 1.5: NumPy's shapes, in which rank 0 is a scalar
    0xF993FACA: _Format(has_storage=True, rank_code="i", no_value=-1),
}
# name, and how many index arrays follow the values
_SPARSE: Final[dict[int, tuple[str, int]]] = {1: ("row-sparse", 1), 2: ("CSR", 2)}

# NumPy has no bfloat16; two bytes of anything else keep the place
_BFLOAT16: Final = np.dtype("V2")
_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("float32"),
    1: np.dtype("float64"),
    2: np.dtype("float16"),
    3: np.dtype("uint8"),
    4: np.dtype("int32"),
    5: np.dtype("int8"),
    6: np.dtype("int64"),
    7: np.dtype("bool"),
    8: np.dtype("int16"),
    9: np.dtype("uint16"),
    10: np.dtype("uint32"),
    11: np.dtype("uint64"),
    12: _BFLOAT16,
}
_MOST_ELEMENTS: Final = 1 << 56
# A rank beyond NumPy's limit means that what was read is not an array at all
_MAX_RANK: Final = 32

Array = np.ndarray[Any, Any]


class _Reader:
    """Takes values off the front of a file's bytes, and names the file when there are too few."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = memoryview(path.read_bytes())
        self._at = 0

    def take(self, size: int, what: str) -> memoryview:
        if size > len(self._data) - self._at:
            raise self.broken(
                f"it ends within {what}: {size} bytes are due at byte {self._at}, "
                f"{len(self._data) - self._at} are left"
            )
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, code: str, what: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))
        return int(value)

    def numbers(self, code: str, count: int, what: str) -> tuple[int, ...]:
        code = f"<{count}{code}"
        return struct.unpack(code, self.take(struct.calcsize(code), what))

    def broken(self, why: str) -> ImportFailed:
        return ImportFailed(
            f"{self.path.name} is damaged: {why}",
            fix="copy or export the checkpoint again, and compare the file's size with the original's",
        )

    def foreign(self, why: str) -> ImportFailed:
        return ImportFailed(
            f"{self.path.name} is not a .params file of MXNet 0.8 to 1.9: {why}",
            fix="name the checkpoint by its prefix and epoch: PREFIX-symbol.json and PREFIX-0000.params",
        )

    def at_end(self) -> bool:
        return self._at == len(self._data)


def read_params(path: Path) -> dict[str, Array]:
    """The arrays of a checkpoint by name, without the `arg:` and `aux:` that some files prefix.

    Raises ImportFailed for a file that is truncated, of another kind, or holds sparse arrays.
    """
    reader = _Reader(path)
    head = bytes(reader.take(min(8, path.stat().st_size), "its first number"))
    if head[:4] == b"PK\x03\x04":
        raise reader.foreign("it is a NumPy archive, as MXNet 2 writes them")
    if head != struct.pack("<Q", _FILE_MAGIC):
        raise reader.foreign(f"it starts with {head.hex() or 'nothing'}")
    reader.take(8, "the header")

    count = reader.number("Q", "the number of arrays")
    arrays = []
    for index in range(count):
        arrays.append(_read_array(reader, f"array {index + 1} of {count}"))
    names_count = reader.number("Q", "the number of names")
    if names_count == 0 and count > 0:
        raise reader.foreign(f"its {count} arrays have no names")
    if names_count != count:
        raise reader.broken(f"it has {count} arrays and {names_count} names")
    names = []
    for index in range(count):
        size = reader.number("Q", f"the length of name {index + 1}")
        try:
            names.append(bytes(reader.take(size, f"name {index + 1}")).decode())
        except UnicodeDecodeError:
            raise reader.broken(f"name {index + 1} is not text") from None
    if not reader.at_end():
        raise reader.broken("bytes follow the last name")

    params: dict[str, Array] = {}
    for name, array in zip(names, arrays, strict=True):
        plain = name.removeprefix("arg:").removeprefix("aux:")
        if plain in params:
            raise reader.broken(f"it has two arrays named {plain!r}")
        if isinstance(array, str):
            raise ImportFailed(
                f"{path.name}: {plain!r} cannot be imported: {array}",
                fix="store the array densely (`array.tostype('default')`) as float32 and save the checkpoint again",
            )
        params[plain] = array
    return params


def _read_array(reader: _Reader, what: str) -> Array | str:
    """One array, or why it cannot be used; that is said later, when its name is known."""
    magic = reader.number("I", what)
    # before 64-bit dimensions there was no magic number: the first number is the rank
    form = _FORMATS.get(magic, _Format(dim_code="I"))
    storage = reader.number("i", what) if form.has_storage else 0
    if storage in _SPARSE:
        return _skip_sparse(reader, what, storage, form)
    if storage != 0:
        raise reader.broken(f"{what} has the unknown storage type {storage}")
    shape = _shape(reader, what, form, rank=None if magic in _FORMATS else magic)
    if shape is None:
        return "it was saved without a value"
    reader.take(8, f"the device of {what}")
    dtype = _dtype(reader, what)
    data = reader.take(math.prod(shape) * dtype.itemsize, f"the data of {what}")
    if dtype == _BFLOAT16:
        return "its type is bfloat16"
    # a copy, so that the array is aligned, writable, and does not keep the whole file in memory
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape).astype(dtype)


def _dtype(reader: _Reader, what: str) -> np.dtype[Any]:
    flag = reader.number("i", f"the type of {what}")
    if flag not in _DTYPES:
        raise reader.broken(f"{what} has the unknown type {flag}")
    return _DTYPES[flag]


def _shape(
    reader: _Reader, what: str, form: _Format, rank: int | None = None
) -> tuple[int, ...] | None:
    """The shape, or None for an array that never got one."""
    if rank is None:
        rank = reader.number(form.rank_code, f"the rank of {what}")
    if rank == form.no_value:
        return None
    if not 0 <= rank <= _MAX_RANK:
        raise reader.broken(f"{what} cannot have {rank} dimensions")
    dims = reader.numbers(form.dim_code, rank, f"the shape of {what}")
    # NumPy counts the elements of an empty array as if none of its dimensions were 0
    if any(dim < 0 for dim in dims) or math.prod(dim or 1 for dim in dims) > _MOST_ELEMENTS:
        raise reader.broken(f"{what} has the shape {dims}")
    return dims


def _skip_sparse(reader: _Reader, what: str, storage: int, form: _Format) -> str:
    """Step over a sparse array, so that the names that follow can be read and the culprit named."""
    name, index_arrays = _SPARSE[storage]
    stored = _shape(reader, what, form) or ()
    if _shape(reader, what, form) is not None:
        reader.take(8, f"the device of {what}")
        sizes = [_dtype(reader, what).itemsize * math.prod(stored)]
        for _ in range(index_arrays):
            width = _dtype(reader, what).itemsize
            sizes.append(width * math.prod(_shape(reader, what, form) or ()))
        # the values, then the index arrays
        for size in sizes:
            reader.take(size, what)
    return f"its storage is {name}"
