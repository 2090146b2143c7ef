"""A linker of the user's own for a target: which program it is, whether it is there, how it is run.

A recipe names a compiler driver (`aarch64-linux-gnu-g++`) or a linker by the name that it has on
PATH. Its identity, in the key of `export`, is the digest of the program and what it says of its
version: another one under the same name links again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.errors import StageError
from tvmflow.stores.local import hash_file
from tvmflow.values import Json

FLAGS: Final = ("-shared", "-Wl,--build-id=none", "-s")
"""What a recipe's `flags` are when it says nothing: for compiler drivers such as gcc and clang."""

INSTALL: Final = "install it, or leave `toolchain` out: tvmflow links by itself"

_NO_VERSION: Final = "says no version"
_SECONDS: Final = 30.0
_LINKED: Final = "linked.so"


class Missing(LookupError):
    """There is no such program on PATH."""


class Found(NamedTuple):
    """A program: where it was found, and every place that was looked at before."""

    path: str
    looked_at: tuple[str, ...]


def find(linker: str) -> Found:
    """The program that a recipe means. Raises Missing."""
    path = shutil.which(linker)
    if path is None:
        raise Missing(linker)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep) if "/" not in linker else []
    places = [str(Path(folder, linker)) for folder in folders]
    before = places[: places.index(path)] if path in places else places
    return Found(path, (*before, path))


def version(path: str) -> str:
    """What a program answers to `--version`, its first line."""
    try:
        said = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return _NO_VERSION
    return (said.stdout.strip().splitlines() or [_NO_VERSION])[0]


def identity(linker: str, flags: Sequence[str], digest: str, version: str) -> dict[str, Json]:
    """What makes the output of a linker what it is: plain JSON, without the place where it was found."""
    return {"linker": linker, "flags": list(flags), "version": version, "sha256": digest}


def link(folder: Path, names: Sequence[str], toolchain: Mapping[str, Json]) -> str:
    """Link the files `names` of a folder there, with relative names; the name of the library. Raises StageError."""
    linker = str(toolchain["linker"])
    try:
        path = find(linker).path
    except Missing:
        raise StageError(f"there is no program {linker} on PATH", fix=INSTALL) from None
    if hash_file(path) != toolchain["sha256"]:
        raise StageError(f"{path} was changed while this run was planned", fix="run again")
    command = [path, *toolchain["flags"], "-o", _LINKED, *names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or f"it ended with {done.returncode}"
        raise StageError(
            f"{linker} cannot link: {said}",
            fix=f"look at the flags of its toolchain: {json.dumps(toolchain['flags'])}",
        )
    if not (folder / _LINKED).is_file():
        raise StageError(
            f"{linker} ended well and made no library",
            fix="its flags must let it write the file that `-o` names",
        )
    return _LINKED
