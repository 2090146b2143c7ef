"""Mach-O: shared libraries for macOS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.targets.linking._base import run_zig
from tvmflow.targets.platforms import Platform

# Architecture -> zig's name of the target.
_TARGETS: Final[Mapping[str, str]] = {"x86_64": "x86_64-macos", "aarch64": "aarch64-macos"}
ARCHS: Final = tuple(_TARGETS)


def link(folder: Path, names: Sequence[str], platform: Platform) -> str:
    """Link a dylib that takes the runtime's symbols from the program that loads it; signed, as macOS requires."""
    run_zig(
        folder,
        "build-lib",
        *("-dynamic", "-fstrip", "-O", "ReleaseSmall"),
        *("-target", f"{_TARGETS[platform.arch]}.13.0"),
        # zig would compile compiler-rt for half a minute; the system's own library has it too
        *("-fno-compiler-rt", "-fallow-shlib-undefined"),
        *("-install_name", "@rpath/linked.dylib", "-femit-bin=linked.dylib"),
        *names,
    )
    return "linked.dylib"
