"""Links object files into libraries with what is in the `ziglang` wheel: no compiler needed.

The linker runs in a folder of its own with relative names, without build id and symbols, so
that the same objects give the same bytes anywhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.errors import StageError
from tvmflow.targets.platforms import platform_of

# glibc's names of the two libraries that compiled kernels call into (memcpy, expf, …).
_LIBC: Final[tuple[str, ...]] = ("libc.so.6", "libm.so.6")

# LLVM triple's first part -> the linker's name of the object format.
_EMULATION: Final[Mapping[str, str]] = {
    "x86_64": "elf_x86_64",
    "aarch64": "aarch64linux",
    "riscv64": "elf64lriscv",
}
# C library or system -> how its static libraries are laid out, where not as GNU's.
_ARCHIVE_LAYOUTS: Final[Mapping[str, str]] = {"msvc": "coff", "macos": "darwin"}


def link_shared(objects: Sequence[Path], output: Path, triple: str) -> None:
    """Link `objects` into the shared library `output` for `triple`. Raises StageError."""
    emulation = _EMULATION.get(triple.partition("-")[0])
    if emulation is None or "linux" not in triple:
        raise StageError(
            f"no linker is set up for {triple}",
            fix=f"use a Linux target for {', '.join(sorted(_EMULATION))}",
        )
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        folder = Path(scratch)
        names = [path.name for path in sorted(objects, key=lambda path: path.name)]
        for path in objects:
            (folder / path.name).symlink_to(path.resolve())
        stubs = [_stub(folder, library, emulation) for library in _LIBC]
        _lld(folder, emulation, "linked.so", ["--strip-all", *names, "--no-as-needed", *stubs])
        shutil.move(folder / "linked.so", output)


def archive_static(objects: Sequence[Path], output: Path, triple: str) -> None:
    """Put `objects` into the static library `output` for `triple`, with an index of their symbols. Raises StageError."""
    platform = platform_of(triple)
    layout = _ARCHIVE_LAYOUTS.get(platform.libc) or _ARCHIVE_LAYOUTS.get(platform.system, "gnu")
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        folder = Path(scratch)
        names = [path.name for path in sorted(objects, key=lambda path: path.name)]
        for path in objects:
            (folder / path.name).symlink_to(path.resolve())
        # D: no times and owners, c: without a word that it is new
        command = [sys.executable, "-m", "ziglang", "ar", f"--format={layout}", "Dcr", "made"]
        done = subprocess.run(
            [*command, *names], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise StageError(
                f"making a static library failed: {done.stderr.strip() or done.returncode}",
                fix="run `tvmflow doctor`; it tries the linker by itself",
            )
        shutil.move(folder / "made", output)


def complaint_about(source: Path, includes: Sequence[Path]) -> str:
    """What a C compiler says first against a file, as `LINE: what`; empty when it is correct C."""
    command = [sys.executable, "-m", "ziglang", "cc", "-c", "-O0", "-w"]
    command += [f"-I{folder}" for folder in includes]
    # zig's cc cannot do -fsyntax-only: it looks for an object file
    with tempfile.TemporaryDirectory() as scratch:
        command += [str(source), "-o", str(Path(scratch, "unused.o"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    errors = re.findall(r"^.*?:(\d+):\d+: (?:fatal )?error: (.*)$", done.stderr, re.MULTILINE)
    return f"{errors[0][0]}: {errors[0][1]}" if errors else done.stderr.strip()


def _stub(folder: Path, library: str, emulation: str) -> str:
    """An empty library of that name: enough for the loader to be told to bring the real one."""
    (folder / "empty").touch()
    name = f"stub-{library}"
    _lld(folder, emulation, name, ["-soname", library, "--format=binary", "empty"])
    return name


def _lld(folder: Path, emulation: str, output: str, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ziglang", "ld.lld", "-m", emulation]
    command += ["-shared", "--build-id=none", "--hash-style=gnu", "-o", output, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StageError(
            f"linking failed: {done.stderr.strip() or done.returncode}",
            fix="run `tvmflow doctor`; it tries the linker by itself",
        )
