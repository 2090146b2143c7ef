"""Damage to files: what bad disks, careless people and other programs leave in the place of a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

Fault = Callable[[Path, bytes], None]


def _rewrite(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


def _empty(path: Path, other: bytes) -> None:
    _rewrite(path, b"")


def _truncate(path: Path, other: bytes) -> None:
    content = path.read_bytes()
    _rewrite(path, content[: len(content) * 2 // 3])


def _flip(path: Path, other: bytes) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[len(content) // 2] ^= 1
    _rewrite(path, bytes(content))


def _swap(path: Path, other: bytes) -> None:
    _rewrite(path, other)


def _make_folder(path: Path, other: bytes) -> None:
    _remove(path, other)
    path.mkdir()
    (path / "inside").write_text("somebody's")


def _make_dangling_link(path: Path, other: bytes) -> None:
    _remove(path, other)
    path.symlink_to("nowhere/at/all")


def _make_circular_link(path: Path, other: bytes) -> None:
    _remove(path, other)
    path.symlink_to(path.name)


def _make_pipe(path: Path, other: bytes) -> None:
    _remove(path, other)
    os.mkfifo(path)


def _remove(path: Path, other: bytes) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


FAULTS: Final[Mapping[str, Fault]] = {
    "emptied": _empty,
    "truncated": _truncate,
    "flipped": _flip,
    "swapped": _swap,
    "a folder": _make_folder,
    "a link to nothing": _make_dangling_link,
    "a link to itself": _make_circular_link,
    "a pipe": _make_pipe,
    "missing": _remove,
}
"""What happens to a file; each gets its path and the content of another one."""

CONTENT: Final = frozenset({"emptied", "truncated", "flipped", "swapped"})
"""The faults after which it still is a regular file."""
