"""The tools in the `ziglang` wheel: a compiler for C and C++, linkers, and an archiver."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

from tvmflow.core.disk_errors import find_disk_problem
from tvmflow.core.processes import module_command


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a tool in a folder, where its caches are too unless `environment` names others.

    Raises:
        StoreError: when it failed because the disk is full.
    """
    # zig would put its caches into the home folder, which may not exist
    caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(folder / "zig"))
    done = subprocess.run(
        module_command("ziglang", *arguments),
        cwd=folder,
        env={**os.environ, **caches, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        # before the caller removes the folder, with all that fills the disk
        places = [str(folder), *(path for name, path in environment.items() if name in caches)]
        if problem := find_disk_problem(places, done.stderr):
            raise problem
    return done


def library_folder() -> Path:
    """Return the folder of headers and sources in the wheel."""
    spec = find_spec("ziglang")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "lib"
