"""Builds the emulation program: a model with its C library in one static executable, which an emulator runs.

The kernels and constants are the object files of the delivered library. Its C code is compiled once
more, together with `emulation_main.c`, for the C library that the executable holds: musl, by the compiler
in `ziglang`. Compiling that C library takes nearly all of the time, and depends on the architecture alone.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.core.errors import StageError
from tvmflow.targets import c_library, zig
from tvmflow.targets.c_library import DescribedModel
from tvmflow.targets.linking import compile_c, link_program

_log = logging.getLogger(__name__)

_MAIN: Final = Path(__file__).parent / "emulation_main.c"
SOURCES: Final = (*c_library.SOURCES, _MAIN)
"""All that the program is compiled from, besides the model's own C code."""

_LINKER: Final = "ld.lld"


def build_libc(zig_target: str, folder: Path, scratch: Path) -> None:
    """Compile the C library of an architecture, and what else a static executable begins and ends with.

    Args:
        zig_target: An `EmulatedArch.zig_target`.
        folder: Gets the files: an object, `crt1.o`, and archives; the same bytes on every machine.
        scratch: A folder for temporary files. What zig caches there is reused by a later attempt.

    Raises:
        StageError: when it cannot be compiled; the message holds the compiler's error.
    """
    _log.debug("compiling the C library for %s in %s", zig_target, scratch)
    # a folder for the cache that the user has chosen is kept for other versions of this stage, too
    names = [f"ZIG_{scope}_CACHE_DIR" for scope in ("GLOBAL", "LOCAL")]
    caches = {name: os.environ.get(name, "zig") for name in names}
    (scratch / "empty.c").write_text("int main(void) { return 0; }\n")
    command = ("cc", "-target", zig_target, "-static", "-s", "-O2", "empty.c", "-o", "empty")
    done = zig.run(scratch, *command, ZIG_VERBOSE_LINK="1", **caches)
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"{_LINKER} ")]
    if done.returncode != 0 or not lines:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise StageError(
            f"the C library for {zig_target} cannot be compiled: {(errors or [str(done.returncode)])[0]}",
            fix="check that ziglang has the version that tvmflow requires (`tvmflow doctor`)",
        )
    # the last command links the program: its inputs besides the program's own are what zig has compiled
    for word in lines[-1].split():
        if word.endswith((".a", "crt1.o")):
            shutil.copyfile(scratch / word, folder / Path(word).name)


def build_program(
    model: DescribedModel,
    compiled: Mapping[str, Path],
    libc: Mapping[str, Path],
    output: Path,
) -> None:
    """Compile the emulation program of a model.

    Args:
        model: The model; its triple is an `EmulatedArch.zig_target`.
        compiled: What `compiler.c_library` wrote, by file name.
        libc: What `build_libc` wrote, by file name.
        output: The program.

    Raises:
        StageError: when compiler or linker fails; the message holds its error.
    """
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        code = compile_main(model, compiled, Path(scratch))
        objects = {name: path for name, path in compiled.items() if name.endswith(".o")}
        link_program({**objects, **libc, code.name: code}, output, model.triple)


def compile_main(model: DescribedModel, compiled: Mapping[str, Path], folder: Path) -> Path:
    """Compile all C code of the emulation program in a folder, and return the object file.

    Raises:
        StageError: when the compiler fails; the message holds its error.
    """
    c_library.write_sources(model, compiled[c_library.PROGRAM], folder)
    shutil.copyfile(_MAIN, folder / _MAIN.name)
    # one file, because the program uses the names that the model's C code defines
    includes = [f'#include "{name}"\n' for name in (c_library.SOURCE, _MAIN.name)]
    (folder / "whole.c").write_text("".join(includes))
    compile_c(folder, "whole.c", "whole.o", model.triple)
    return folder / "whole.o"
