"""The protocol of a linker, and the call of zig's linkers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from tvmflow.core.errors import StageError
from tvmflow.targets import zig
from tvmflow.targets.platforms import Platform

IMPORT_LIBRARY: Final = "linked.lib"
"""The file, beside a linked DLL, that a linker of programs takes in its place."""


class Interface(NamedTuple):
    """The public part of a library that programs are linked with.

    Attributes:
        file: Its file name.
        functions: The only symbols that they may use.
        loads_libraries: Whether the library loads others while it runs.
    """

    file: str
    functions: Sequence[str]
    loads_libraries: bool = False


class Linker(Protocol):
    """A module in this folder: linking for one object format."""

    @property
    def ARCHS(self) -> Collection[str]:
        """The architectures that it links for."""

    def link(
        self,
        folder: Path,
        names: Sequence[str],
        platform: Platform,
        interface: Interface | None = None,
    ) -> str:
        """Link objects into a shared library that needs the system's C library alone.

        Args:
            folder: The folder of the objects, where the library is written.
            names: The file names of the objects.
            platform: The platform.
            interface: The interface of a plain C library; None for a library of kernels, whose symbols are all public.

        Returns:
            The name of the library.

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
