"""The umask of this process, changed while a block runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def umask(mask: int) -> Iterator[int]:
    """Create files with this umask while the block runs, and give the mode that they get."""
    before = os.umask(mask)
    try:
        yield 0o666 & ~mask
    finally:
        os.umask(before)


def modes_below(folder: Path) -> set[int]:
    """Return the permissions of all files below a folder, without repetition."""
    return {path.stat().st_mode & 0o7777 for path in folder.rglob("*") if path.is_file()}
