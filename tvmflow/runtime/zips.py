"""Zips from strangers: what is checked of one before anything in it is read."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
from collections.abc import Collection
from pathlib import PurePosixPath, PureWindowsPath
from typing import IO, Final

from tvmflow.core.documents import Unreadable, quote

# The end of a zip without a comment: signature, 8 bytes, size and position of its index, length of the comment.
_ZIP_END: Final = struct.Struct("<4s8sIIH")
_ZIP_END_MAGIC: Final = b"PK\5\6"
_ENCRYPTED: Final = 0x1
_MAX_INDEX_BYTES: Final = 16 << 20
_MAX_ENTRIES: Final = 10_000

ZIP_ERRORS: Final = (
    zipfile.BadZipFile,
    struct.error,
    OSError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    # an encrypted entry, or a compression that Python does not know
    RuntimeError,
    ArithmeticError,
)
"""The errors of readers of zips that are damaged, or made to do harm."""


def check_zip_end(stream: IO[bytes]) -> None:
    """Check that a stream ends with the index of a zip, and that this is not large.

    Python would read an index of any size, and look for it in the middle of a damaged file.

    Raises:
        Unreadable: It does not.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(size - _ZIP_END.size, 0))
    end = stream.read(_ZIP_END.size)
    stream.seek(0)
    if len(end) < _ZIP_END.size or not end.startswith(_ZIP_END_MAGIC):
        raise Unreadable("it is damaged (its end is missing)")
    _, _, index_bytes, _, _ = _ZIP_END.unpack(end)
    if index_bytes > _MAX_INDEX_BYTES:
        raise Unreadable("it is damaged (its index is too large)")


def check_entries(entries: Collection[zipfile.ZipInfo], max_bytes: int) -> set[str]:
    """Return the names of the entries of a zip.

    Args:
        entries: The entries.
        max_bytes: How much they may hold together.

    Raises:
        Unreadable: There is an entry that no delivered file has.
    """
    if not entries or len(entries) > _MAX_ENTRIES:
        raise Unreadable(f"it has {len(entries)} entries")
    names: set[str] = set()
    for entry in entries:
        check_name(entry.filename, names)
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if entry.is_dir() or kind not in (0, stat.S_IFREG):
            raise Unreadable(f"its entry {quote(entry.filename)} is not a file")
        if entry.flag_bits & _ENCRYPTED:
            raise Unreadable(f"its entry {quote(entry.filename)} is encrypted")
        names.add(entry.filename)
    if sum(entry.file_size for entry in entries) > max_bytes:
        raise Unreadable(f"its entries are larger than {max_bytes} bytes")
    return names


def check_name(name: str, names: Collection[str]) -> None:
    """Check the name of an entry in an archive; `names` are those before it.

    Raises:
        Unreadable: It points outside of the archive, or is there twice.
    """
    path = PurePosixPath(name)
    is_outside = path.is_absolute() or ".." in path.parts or PureWindowsPath(name).drive
    if is_outside or "\\" in name:
        raise Unreadable(f"it has an entry that points outside of it: {quote(name)}")
    if name in names:
        raise Unreadable(f"it has two entries {quote(name)}")
