"""WebAssembly: modules of functions, without threads, for WASI and for JavaScript."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tvmflow.targets.linking._base import Interface, run_zig
from tvmflow.targets.platforms import Platform

ARCHS: Final = ("wasm32",)

# How a program in another language gets memory for tensors in the module.
_MEMORY: Final = ("malloc", "free")


def link(
    folder: Path, names: Sequence[str], platform: Platform, interface: Interface | None = None
) -> str:
    """Link a module that exports its memory and functions (WASI calls it a reactor). The arguments are those of `Linker.link`.

    zig compiles WASI's C library for it, which takes some ten seconds.
    """
    del platform
    functions = (*interface.functions, *_MEMORY) if interface else ()
    exports = [f"-Wl,--export={function}" for function in functions]
    run_zig(
        folder,
        *("cc", "-target", "wasm32-wasi", "-mexec-model=reactor", "-Wl,--strip-all"),
        *(*names, "-lm", *exports, "-o", "linked.wasm"),
    )
    return "linked.wasm"
