"""The protocol of a linker, and the call of zig's linkers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from tvmflow.core.errors import StageError
from tvmflow.targets import zig
from tvmflow.targets.platforms import Platform


class Linker(Protocol):
    """A module in this folder: linking for one object format."""

    @property
    def ARCHS(self) -> Collection[str]:
        """The architectures that it links for."""

    def link(self, folder: Path, names: Sequence[str], platform: Platform) -> str:
        """Link the objects `names` in a folder into a shared library there, and return its name.

        Raises:
            StageError: when the linker fails; the message holds its error.
        """


def run_zig(folder: Path, *arguments: str, action: str = "linking") -> None:
    """Run one of zig's tools in a folder.

    Raises:
        StageError: when it fails; the message holds its error.
    """
    done = zig.run(folder, *arguments)
    if done.returncode != 0:
        raise StageError(
            f"{action} failed: {done.stderr.strip() or done.returncode}",
            fix="run `tvmflow doctor`; it checks the linker by itself",
        )
