"""Toolchains: the linker that a recipe names for a target, its identity, and its call.

A recipe names a compiler driver (`aarch64-linux-gnu-g++`) or a linker on PATH. The key of `export` contains its
identity with the program's digest, so that replacing the program causes another link.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.disk_errors import find_disk_problem
from tvmflow.core.errors import StageError
from tvmflow.core.files import hash_file
from tvmflow.core.types import Json

DEFAULT_FLAGS: Final = ("-shared", "-Wl,--build-id=none", "-s")
"""The default flags, which suit compiler drivers such as gcc and clang."""

INSTALL: Final = "install it, or leave `toolchain` out: tvmflow has a linker of its own"

_NO_VERSION: Final = "says no version"
_VERSION_TIMEOUT_S: Final = 30.0
_LINKED: Final = "linked.so"

ToolchainIdentity = Mapping[str, Json]
"""Everything that determines a linker's output: `linker`, `flags`, `version`, `sha256`. In settings and keys."""


class ProgramNotFound(LookupError):
    """There is no such program on PATH."""


class Program(NamedTuple):
    """A program: its path, and all paths that were tried before it was found."""

    path: str
    searched: tuple[str, ...]


def find_program(linker: str) -> Program:
    """Return the program that a recipe names; ProgramNotFound if it is not on PATH."""
    path = shutil.which(linker)
    if path is None:
        raise ProgramNotFound(linker)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep) if "/" not in linker else []
    candidates = [str(Path(folder, linker)) for folder in folders]
    before = candidates[: candidates.index(path)] if path in candidates else candidates
    return Program(path, (*before, path))


def read_version(path: str) -> str:
    """Return the first line of a program's answer to `--version`."""
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_VERSION_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return _NO_VERSION
    return (done.stdout.strip().splitlines() or [_NO_VERSION])[0]


def identify(linker: str, flags: Sequence[str], digest: str, version: str) -> dict[str, Json]:
    """Return the identity of a linker as plain JSON, which excludes its path."""
    return {"linker": linker, "flags": list(flags), "version": version, "sha256": digest}


def link(folder: Path, names: Sequence[str], identity: ToolchainIdentity) -> str:
    """Link files in a folder; return the library's name. StageError if the linker fails."""
    linker = str(identity["linker"])
    try:
        path = find_program(linker).path
    except ProgramNotFound:
        raise StageError(f"there is no program {linker} on PATH", fix=INSTALL) from None
    if hash_file(path) != identity["sha256"]:
        raise StageError(f"{path} was changed while this run was planned", fix="run again")
    command = [path, *identity["flags"], "-o", _LINKED, *names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if problem := find_disk_problem([folder], done.stderr):
            raise problem
        reason = done.stderr.strip() or f"it ended with exit code {done.returncode}"
        raise StageError(
            f"{linker} cannot link: {reason}",
            fix=f"check the flags of its toolchain: {json.dumps(identity['flags'])}",
        )
    if not (folder / _LINKED).is_file():
        raise StageError(
            f"{linker} ended without an error and without a library",
            fix="its flags must let it write the file that `-o` names",
        )
    return _LINKED
