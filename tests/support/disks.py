"""Small disks of their own for tests that fill them: mounted where this process may mount, skipped elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_DETACH: Final = 2
_REMOUNT: Final = 32
READ_ONLY: Final = 1
NOEXEC: Final = 8


@contextlib.contextmanager
def small_disk(folder: Path, size: int, *, files: int = 0, flags: int = 0) -> Iterator[Path]:
    """Mount a tmpfs of `size` bytes at a folder while the block runs.

    Args:
        folder: Where; it is created.
        size: How many bytes it takes, in pages of 4096.
        files: How many files and folders it takes; 0 for any number.
        flags: Of `mount`: `READ_ONLY`, `NOEXEC`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={size}" + (f",nr_inodes={files}" if files else "")
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options.encode()):
        pytest.skip(f"this process may not mount a disk: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        libc.umount2(os.fsencode(folder), _DETACH)


def fill(folder: Path) -> None:
    """Use up the last byte of the disk of a folder."""
    with (
        contextlib.suppress(OSError),
        (folder / ".filling").open("ab", buffering=0) as stream,
    ):
        while True:
            stream.write(bytes(4096))


def protect(folder: Path) -> None:
    """Let nobody write to a small disk any more."""
    if ctypes.CDLL(None).mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _REMOUNT | READ_ONLY, b""):
        raise OSError(f"{folder} cannot be mounted again")


def grow(folder: Path, size: int = 256 << 20, files: int = 100_000) -> None:
    """Give a small disk more bytes and files, by default as many as anybody needs."""
    options = f"size={size},nr_inodes={files}".encode()
    if ctypes.CDLL(None).mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _REMOUNT, options):
        raise OSError(f"{folder} cannot be mounted again")
