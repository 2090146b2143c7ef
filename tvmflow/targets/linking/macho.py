"""Mach-O: shared libraries for macOS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.targets.linking import macho_data
from tvmflow.targets.linking._base import Interface, run_zig
from tvmflow.targets.platforms import Platform

# Architecture -> zig's name of the target.
_TARGETS: Final[Mapping[str, str]] = {"x86_64": "x86_64-macos", "aarch64": "aarch64-macos"}
ARCHS: Final = tuple(_TARGETS)


def link(
    folder: Path, names: Sequence[str], platform: Platform, interface: Interface | None = None
) -> str:
    """Link a dylib; signed, as macOS requires. The arguments are those of `Linker.link`."""
    if interface:
        for name in names:
            macho_data.hide_symbols(folder / name, interface.functions)
    # a library of kernels takes the runtime's symbols from the program that loads it
    undefined = "-fno-allow-shlib-undefined" if interface else "-fallow-shlib-undefined"
    file = interface.file if interface else "linked.dylib"
    run_zig(
        folder,
        "build-lib",
        *("-dynamic", "-fstrip", "-O", "ReleaseSmall"),
        *("-target", f"{_TARGETS[platform.arch]}.13.0"),
        # zig would compile compiler-rt for half a minute; the system's own library has it too
        *("-fno-compiler-rt", undefined),
        *("-install_name", f"@rpath/{file}", "-femit-bin=linked.dylib"),
        *names,
    )
    return "linked.dylib"
