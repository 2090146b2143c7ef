"""Files and folders below a folder, their sizes, and their change times."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder."""
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name)


def folders_below(folder: Path) -> Iterator[Path]:
    """Yield every folder below a folder."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            yield Path(parent, name)


def entries_of(folder: Path) -> list[Path]:
    """Return what a folder contains, sorted; nothing when it does not exist."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 when it does not exist."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def size_below(path: Path) -> int:
    """Return the size of a file, or of all files below a folder, in bytes."""
    return sum(map(size_of, files_below(path))) if path.is_dir() else size_of(path)


def changed_ns(path: Path) -> int:
    """Return the change time of a file (ns); 0 when it does not exist."""
    try:
        return path.lstat().st_ctime_ns
    except FileNotFoundError:
        return 0
