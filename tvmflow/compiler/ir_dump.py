"""The dump of a lowering: TVMScript after each pass, and the time that each pass took."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import tvm

from tvmflow.core.disk_errors import disk_errors

TIMINGS: Final = "timings.txt"


class IRDump:
    """A folder with one numbered file for each pass, `03-blocked_layout.py`, and `timings.txt`."""

    def __init__(self, folder: Path) -> None:
        """Create the folder, or remove what an earlier dump left in it."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("[0-9][0-9]-*.py"), folder / TIMINGS):
            old.unlink(missing_ok=True)
        self._folder = folder
        self._count = 0

    def write(self, name: str, mod: tvm.IRModule, seconds: float) -> None:
        """Write the module after a pass.

        Args:
            name: The name of the pass.
            mod: The module that it returned.
            seconds: The time that it took.

        Raises:
            StoreError: when the disk is full or not writable.
        """
        stem = f"{self._count:02d}-{name}"
        with disk_errors(self._folder):
            (self._folder / f"{stem}.py").write_text(mod.script())
            with (self._folder / TIMINGS).open("a") as timings:
                timings.write(f"{seconds * 1e3:10.2f} ms  {stem}\n")
        self._count += 1
