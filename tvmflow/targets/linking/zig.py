"""Runs the tools in the `ziglang` wheel; if one fails, StageError has its message."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.disk_errors import find_disk_problem
from tvmflow.core.errors import StageError
from tvmflow.targets.platforms import zig_target

IMPORT_LIBRARY: Final = "linked.lib"
"""The import library beside a linked DLL; programs link with it instead of the DLL."""


class Interface(NamedTuple):
    """A shared library's exported functions; whether it may load other libraries while it runs."""

    file: str
    functions: Sequence[str]
    loads_libraries: bool = False


def call_zig(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a tool in a folder, which also holds its caches; StoreError if the disk is full."""
    # By default, zig puts its caches into the home folder, which may not exist.
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(folder / "zig"))
    done = subprocess.run(
        [str(library_folder().parent / "zig"), *arguments],
        cwd=folder,
        env={**os.environ, **caches, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        # Check the disk before the caller removes the folder, and with it the files that fill the disk.
        places = [str(folder), *(path for name, path in environment.items() if name in caches)]
        if problem := find_disk_problem(places, done.stderr):
            raise problem
    return done


def run_zig(folder: Path, *arguments: str, action: str = "linking") -> None:
    """Run a tool in a folder; StageError with its message if it fails."""
    done = call_zig(folder, *arguments)
    if done.returncode != 0:
        raise StageError(
            f"{action} failed: {done.stderr.strip() or done.returncode}",
            fix="run `tvmflow doctor`; it checks the linker separately",
        )


def library_folder() -> Path:
    """Return the folder of headers and sources in the wheel."""
    spec = find_spec("ziglang")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "lib"


# ---------------------------------------------------------------- checks of generated C and C++

# File suffix -> the compiler, and the oldest standard that programs may use.
_LANGUAGES: Final = {".c": ("cc", "-std=c11"), ".cpp": ("c++", "-std=c++17")}
# To save time, generate no machine code, and skip headers that libc++ includes only for older programs.
_CHECK: Final = (
    *("-c", "-emit-llvm", "-O0", "-g0", "-fno-sanitize=undefined"),
    "-D_LIBCPP_REMOVE_TRANSITIVE_INCLUDES",
)


def find_program_errors(
    programs: Mapping[str, str], includes: Sequence[Path], triple: str
) -> list[str]:
    """Return the compiler's messages for each program that does not compile without warnings."""
    folders = [f"-I{folder.resolve()}" for folder in includes]

    def check(name: str) -> str:
        compiler, standard = _LANGUAGES[Path(name).suffix]
        options = [standard, *_CHECK, "-Wall", "-Wextra", "-Werror", *folders]
        # Each program has its own cache folder, because zig locks it.
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / name).write_text(programs[name], encoding="utf-8")
            command = (compiler, "-target", zig_target(triple), *options, name, "-o", "unused.bc")
            done = call_zig(folder, *command)
        return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"

    with ThreadPoolExecutor(len(programs)) as pool:
        return [error for error in pool.map(check, programs) if error]


def find_c_error(source: Path, includes: Sequence[Path]) -> str:
    """Return the first C compiler error in a file, as `LINE: message`; empty if it compiles."""
    options = ["-c", "-O0", "-w", *(f"-I{folder}" for folder in includes)]
    # With -fsyntax-only, zig's cc searches for an object file and fails.
    with tempfile.TemporaryDirectory() as scratch:
        done = call_zig(Path(scratch), "cc", *options, str(source.resolve()), "-o", "unused.o")
    if done.returncode == 0:
        return ""
    errors = re.findall(r"^.*?:(\d+):\d+: (?:fatal )?error: (.*)$", done.stderr, re.MULTILINE)
    return f"{errors[0][0]}: {errors[0][1]}" if errors else done.stderr.strip()
