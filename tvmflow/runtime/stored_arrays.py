"""Arrays that stay in files: of their rows, only those that are asked for are in memory."""

from __future__ import annotations

import math
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import IO, TYPE_CHECKING, Any, Final

from tvmflow.core.disk_errors import explain
from tvmflow.core.errors import EnvironmentProblem

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_PIECE: Final = 1 << 20


class SharedFile:
    """A file that any number of arrays are in; it is closed when the last of them is gone.

    Args:
        file: The file, which belongs to this object from now on.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self._lock = threading.Lock()
        weakref.finalize(self, file.close)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes from a place of the file; fewer where it ends.

        Args:
            offset: The place.
            size: How many bytes.
        """
        if not hasattr(os, "pread"):
            # as on Windows
            with self._lock:
                self.file.seek(offset)
                return self.file.read(size)
        pieces: list[bytes] = []
        # Linux gives no more than 2 GiB at a time
        while size and (piece := os.pread(self.file.fileno(), size, offset)):
            pieces.append(piece)
            offset, size = offset + len(piece), size - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class StoredArray:
    """An array in a file, whose last axis is the innermost one.

    Args:
        file: The file.
        offset: The place of the first element.
        shape: The shape, of at least one axis.
        dtype: The dtype.
    """

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
        """Return neighboring rows, or all of them for `...`.

        Raises:
            EnvironmentProblem: when the file has become shorter.
        """
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
    """Return rows of one shape and dtype as an array in a temporary file.

    Args:
        give: A function that gives the rows to the function that it is called with.

    Raises:
        EnvironmentProblem: when there is no space for them.
    """
    import numpy as np

    unpacked = open_temporary()
    file = unpacked.file
    kinds: list[tuple[tuple[int, ...], np.dtype[Any]]] = []

    def add(row: Array) -> None:
        write_stored(file, row.tobytes())
        kinds.append((row.shape, row.dtype))

    try:
        give(add)
    except BaseException:
        file.close()
        raise
    [(shape, dtype)] = set(kinds) or [((), np.dtype("uint8"))]
    return StoredArray(unpacked, 0, (len(kinds), *shape), dtype)


def open_temporary() -> SharedFile:
    """Return a new temporary file, which has no name.

    Raises:
        EnvironmentProblem: when no folder takes one, or too many files are open.
    """
    try:
        return SharedFile(tempfile.TemporaryFile())
    except OSError as error:
        raise _explain_unpacking(error) from error


def write_stored(file: IO[bytes], content: bytes) -> None:
    """Append to a temporary file.

    Raises:
        EnvironmentProblem: when it cannot be written.
    """
    try:
        file.write(content)
        file.flush()
    except OSError as error:
        raise _explain_unpacking(error) from error


def _explain_unpacking(error: OSError) -> EnvironmentProblem:
    try:
        folder = tempfile.gettempdir()
    except OSError as missing:
        # it names the folders that were tried
        error, folder = missing, "a temporary file"
    return explain(error, folder) or EnvironmentProblem(
        f"samples cannot be unpacked in {folder}: {error.strerror}",
        fix="free space, or let TMPDIR name a folder that has some",
    )
