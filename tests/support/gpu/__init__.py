"""A stand-in GPU for machines without one: CUDA's driver and runtime on the CPU, and a compiler for its kernels.

TVM's own CUDA runtime runs on it, and finds a GPU of the architecture in `STAND_IN_GPU` (90: sm_90).
It shows that kernels compute correct results, and that their callers copy and synchronize where they
must; it gives no information about speed. See driver.cpp.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_ROOT: Final = _HERE.parents[2]


def make_driver(folder: Path) -> None:
    """Put the libraries of the driver and of CUDA's runtime into a folder."""
    runtime, driver = folder / "libcudart.so.13", folder / "libcuda.so.1"
    # programs require this version of the runtime's functions
    versions = folder / "versions"
    versions.write_text(f"{runtime.name} {{ global: *; }};\n")
    options = ["-xc++", "-std=c++17", "-O1", "-fno-exceptions", "-fno-rtti"]
    _link([*options, str(_HERE / "driver.cpp"), f"-Wl,--version-script={versions}"], runtime)
    # all functions are in the runtime: this library only has to exist under its name
    empty = folder / "empty.c"
    empty.write_text("int stand_in;\n")
    _link([str(empty), "-Wl,--no-as-needed", f"-L{folder}", f"-l:{runtime.name}"], driver)


def _link(arguments: list[str], output: Path) -> None:
    command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-fno-sanitize=undefined"]
    command += [*arguments, "-o", str(output), f"-Wl,-soname,{output.name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def environment(folder: Path, arch: int = 90) -> Mapping[str, str]:
    """Return the environment of a process that uses the GPU whose driver is in `folder`, and compiles for it."""
    paths = [str(_HERE / "hook"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "STAND_IN_GPU": str(arch),
    }
