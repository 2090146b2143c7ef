"""The IR of a model after each pass, as readable files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import tvm

from tvmflow.core.disk_errors import disk_errors

_TIMINGS: Final = "timings.txt"


class IRDump:
    """A folder with one numbered file for each pass, `03-blocked_layout.py`, and `timings.txt`."""

    def __init__(self, folder: Path) -> None:
        """Create the folder, or remove an earlier dump."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("[0-9][0-9]-*.py"), folder / _TIMINGS):
            old.unlink(missing_ok=True)
        self._folder = folder
        self._count = 0

    def write(self, name: str, mod: tvm.IRModule, seconds: float) -> None:
        """Write the module that a pass returned, and the seconds that the pass took.

        Raises: StoreError: when the disk is full or not writable.
        """
        stem = f"{self._count:02d}-{name}"
        with disk_errors(self._folder):
            (self._folder / f"{stem}.py").write_text(mod.script())
            with (self._folder / _TIMINGS).open("a") as timings:
                timings.write(f"{seconds * 1e3:10.2f} ms  {stem}\n")
        self._count += 1
