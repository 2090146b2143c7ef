"""Edits of files that only the change time shows."""

from __future__ import annotations

import os
from pathlib import Path


def write_with_old_times(path: Path, content: bytes) -> None:
    """Write to a file, and restore its modification time; its change time is another one when this returns."""
    before = path.stat()
    # The clock of a file system may stand still for some milliseconds.
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
