"""Untrusted `.npz` files of NumPy arrays, as `numpy.savez` writes them, and arrays on disk.

Reading allocates no more memory than the size of a file justifies. Larger arrays may stay in the file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import struct
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import EllipsisType
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from tvmflow.core.disk_errors import explain
from tvmflow.core.errors import EnvironmentProblem, StageError
from tvmflow.core.files import output_file
from tvmflow.core.formatting import quoted
from tvmflow.core.types import Array

if TYPE_CHECKING:
    import numpy as np

    AnyArray: TypeAlias = "Array | StoredArray"


class SharedFile:
    """A file that several arrays share; it is closed when none of them is left."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self._lock = threading.Lock()
        weakref.finalize(self, file.close)

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from an offset of the file; fewer at its end."""
        if not hasattr(os, "pread"):
            # Windows has no pread
            with self._lock:
                self.file.seek(offset)
                return self.file.read(size)
        pieces: list[bytes] = []
        # Linux reads at most 2 GiB at a time
        while size and (piece := os.pread(self.file.fileno(), size, offset)):
            pieces.append(piece)
            offset, size = offset + len(piece), size - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class StoredArray:
    """An array in a file, in C order."""

    def __init__(
        self, file: SharedFile, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.ndim, self.size = len(shape), math.prod(shape)
        self._file, self._offset = file, offset
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | EllipsisType) -> Array:
        """Return a range of rows, or all for `...`; EnvironmentProblem if the file has become shorter."""
        import numpy as np

        first, end, _ = (slice(None) if rows is ... else rows).indices(len(self))
        count = max(end - first, 0)
        content = self._file.read(self._offset + first * self._row_bytes, count * self._row_bytes)
        if len(content) < count * self._row_bytes:
            raise EnvironmentProblem(
                "a file of samples has become shorter while it was read",
                fix="run again, and leave the file alone until the run ends",
            )
        return np.frombuffer(content, self.dtype).reshape(count, *self.shape[1:])

    def min(self) -> Any:
        """Return the smallest element."""
        return min(piece.min() for piece in self._read_pieces())

    def max(self) -> Any:
        """Return the largest element."""
        return max(piece.max() for piece in self._read_pieces())

    def _read_pieces(self) -> Iterator[Array]:
        step = max(_PIECE // max(self._row_bytes, 1), 1)
        return (self[first : first + step] for first in range(0, len(self), step))


def store_rows(give: Callable[[Callable[[Array], None]], Any]) -> StoredArray:
    """Store the rows that `give` passes on in a temporary file; EnvironmentProblem without space for it."""
    import numpy as np

    unpacked = _open_temporary()
    kinds: list[tuple[tuple[int, ...], np.dtype[Any]]] = []

    def add(row: Array) -> None:
        _append(unpacked, row.tobytes())
        kinds.append((row.shape, row.dtype))

    try:
        give(add)
    except BaseException:
        unpacked.file.close()
        raise
    [(shape, dtype)] = set(kinds) or [((), np.dtype("uint8"))]
    return StoredArray(unpacked, 0, (len(kinds), *shape), dtype)


def _open_temporary() -> SharedFile:
    with _explain_unpacking():
        return SharedFile(tempfile.TemporaryFile())


def _append(file: SharedFile, content: bytes) -> None:
    with _explain_unpacking():
        file.file.write(content)
        file.file.flush()


@contextlib.contextmanager
def _explain_unpacking() -> Iterator[None]:
    """Raise EnvironmentProblem for a temporary file that cannot be opened or written."""
    try:
        yield
    except OSError as error:
        cause = error
        try:
            folder = tempfile.gettempdir()
        except OSError as missing:
            # this error names the folders that were tried
            cause, folder = missing, "a temporary file"
        raise explain(cause, folder) or EnvironmentProblem(
            f"samples cannot be unpacked in {folder}: {cause.strerror}",
            fix="free space, or let TMPDIR name a folder that has some",
        ) from error


# ---------------------------------------------------------------- npz files

# The maximum number of bytes of an unpacked npz file: `_MAX_NPZ`, plus its own size times `_MAX_NPZ_RATIO`.
_MAX_NPZ: Final = 1 << 30
_MAX_NPZ_RATIO: Final = 64
_MAX_ARRAYS: Final = 100_000
_NPY_HEAD: Final = 12
_MAX_NPY_HEADER: Final = 10_000
# Arrays with fewer bytes are always read into memory.
_MIN_STORED: Final = 1 << 12
_PIECE: Final = 1 << 20
# The header of a zip member, which ends with the lengths of the name and of the extra field.
_ZIP_HEAD: Final = struct.Struct("<26xHH")
# The `errno` of an OSError for a damaged file: for a negative offset, and for data that bz2 cannot unpack.
_DAMAGED: Final = (errno.EINVAL, None)


def read_npz(file: Path | IO[bytes], source: str) -> dict[str, Array]:
    """Return the arrays of an npz file by name; StageError if it is damaged or no npz file."""
    return _read_npz(file, source, _read_array)


def open_npz(path: Path, source: str) -> dict[str, AnyArray]:
    """Return the arrays of an npz file by name, large arrays as `StoredArray`.

    Large arrays stay in the file, or in a temporary file if compressed. Arrays in Fortran order are in memory.

    Raises:
        StageError: when it is damaged, or holds more than plain arrays.
        EnvironmentProblem: when there is no space to unpack it, or it cannot be read.
    """
    try:
        file = SharedFile(path.open("rb"))
    except OSError as error:
        raise _explain_reading(error, source) from error
    return _read_npz(file.file, source, _Storage(file).read)


def describe_npz(path: Path, source: str, read: Collection[str] = ()) -> dict[str, Array]:
    """Return the arrays of an npz file by name; those not in `read` are zeros that take no memory.

    Errors are those of `open_npz`.
    """
    import numpy as np

    def describe(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Array:
        if entry.filename.removesuffix(".npy") in read:
            return _read_array(archive, entry)
        header = _read_header(archive, entry)
        zeros: Array = np.broadcast_to(np.zeros((), header.dtype), header.shape)
        return zeros

    return _read_npz(path, source, describe)


def _read_npz(file: Path | IO[bytes], source: str, read: Callable[..., Any]) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(file) as archive:
            size = file.stat().st_size if isinstance(file, Path) else file.seek(0, os.SEEK_END)
            return _read_arrays(archive, _MAX_NPZ + _MAX_NPZ_RATIO * size, read)
    except EnvironmentProblem:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in _DAMAGED:
            raise _explain_reading(error, source) from error
        raise StageError(
            f"{source} is not an npz file of plain arrays: {error}",
            fix="write it with numpy.savez(path, <input name>=array, label=labels)",
        ) from error


def _explain_reading(error: OSError, source: str) -> EnvironmentProblem:
    return explain(error, source) or EnvironmentProblem(
        f"{source} cannot be read: {error.strerror}",
        fix="name a file that exists and that this user may read",
    )


def _read_arrays(archive: zipfile.ZipFile, limit: int, read: Callable[..., Any]) -> dict[str, Any]:
    """Return the arrays of an archive; ValueError for other entries or beyond the limit in bytes."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    if len(entries) > _MAX_ARRAYS:
        raise ValueError(f"it holds {len(entries):,} arrays, and the limit is {_MAX_ARRAYS:,}")
    total = sum(entry.file_size for entry in entries.values())
    if total > limit:
        raise ValueError(
            f"its arrays have {total:,} bytes when they are unpacked, and the limit for its size is {limit:,}"
        )
    return {name.removesuffix(".npy"): read(archive, e) for name, e in entries.items()}


class _Header(NamedTuple):
    """The header of an npy file: shape, dtype, order, and the offset of the elements."""

    offset: int
    shape: tuple[int, ...]
    is_transposed: bool
    dtype: np.dtype[Any]


def _read_header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> _Header:
    """Return the header of an array; ValueError if it claims more elements than the archive has."""
    import numpy as np

    # NumPy has no type stubs for this module
    layout: Any = np.lib.format
    read_header = {(1, 0): layout.read_array_header_1_0, (2, 0): layout.read_array_header_2_0}
    with archive.open(entry) as stream:
        start = stream.read(_NPY_HEAD + _MAX_NPY_HEADER)
    version = (start[6], start[7]) if start.startswith(b"\x93NUMPY") else (0, 0)
    length = start[8:10] if version == (1, 0) else start[8:_NPY_HEAD]
    if version not in read_header or int.from_bytes(length, "little") > _MAX_NPY_HEADER:
        raise ValueError(f"{quoted(entry.filename)} is not an array, or has fields")
    header = io.BytesIO(start)
    layout.read_magic(header)
    shape, is_transposed, dtype = read_header[version](header)
    if dtype.hasobject:
        raise ValueError(f"{quoted(entry.filename)} holds Python objects, not numbers of one dtype")
    if min(shape, default=0) < 0:
        raise ValueError(f"{quoted(entry.filename)} has a negative size: {shape}")
    if math.prod(shape) * dtype.itemsize > entry.file_size:
        raise _ends_early(entry)
    return _Header(header.tell(), shape, is_transposed, dtype)


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Array:
    """Return an array, after checking that the archive has as many bytes as its header claims."""
    import numpy as np

    layout: Any = np.lib.format
    _read_header(archive, entry)
    with archive.open(entry) as stream:
        array: Array = layout.read_array(stream, allow_pickle=False)
    return array


def _ends_early(entry: zipfile.ZipInfo) -> ValueError:
    return ValueError(f"{quoted(entry.filename)} ends before its last element")


class _Storage:
    """The files that hold an archive's large arrays: the archive, or one temporary file."""

    def __init__(self, file: SharedFile) -> None:
        self._file = file

    @cached_property
    def _unpacked(self) -> SharedFile:
        return _open_temporary()

    def read(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> AnyArray:
        """Return an array; a large one stays in a file."""
        header = _read_header(archive, entry)
        size = math.prod(header.shape) * header.dtype.itemsize
        is_small = size < _MIN_STORED or not header.shape
        if is_small or header.is_transposed:
            return _read_array(archive, entry)
        is_packed = entry.compress_type != zipfile.ZIP_STORED
        if is_packed:
            file = self._unpacked
            begin = file.file.seek(0, os.SEEK_END)
        else:
            file = self._file
            name, extra = _ZIP_HEAD.unpack(file.read(entry.header_offset, _ZIP_HEAD.size))
            begin = entry.header_offset + _ZIP_HEAD.size + name + extra
        count = 0
        with archive.open(entry) as stream:
            # zipfile verifies the checksum at the end of the member
            while piece := stream.read(_PIECE):
                count += len(piece)
                if is_packed:
                    _append(file, piece)
        is_whole = is_packed or entry.compress_size == entry.file_size
        if not is_whole or count < header.offset + size:
            raise _ends_early(entry)
        return StoredArray(file, begin + header.offset, header.shape, header.dtype)


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays to an npz file atomically; EnvironmentProblem when the file cannot be written."""
    import numpy as np

    try:
        # not by `numpy.savez`, which rejects an array with the name `file`
        with output_file(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    np.save(stream, array, allow_pickle=False)
    except OSError as error:
        raise explain(error, path) or EnvironmentProblem(
            f"{path} cannot be written: {error.strerror}",
            fix="name a file in a folder that exists and has free space",
        ) from error
