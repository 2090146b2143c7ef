"""A GPU for machines that have none: CUDA's driver and runtime on the CPU, and a compiler that makes kernels for it.

TVM's own CUDA runtime runs on it, and finds a GPU of the architecture that `STAND_IN_GPU` says (90: sm_90).
It shows that kernels compute the right thing, and that what calls them copies and waits where
it must; it says nothing of speed. See driver.cpp.
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
    # programs ask for the runtime's functions of this version
    versions = folder / "versions"
    versions.write_text(f"{runtime.name} {{ global: *; }};\n")
    options = ["-xc++", "-std=c++17", "-O1", "-fno-exceptions", "-fno-rtti"]
    _link([*options, str(_HERE / "driver.cpp"), f"-Wl,--version-script={versions}"], runtime)
    # all is in the runtime: this one is there to be found by its name
    empty = folder / "empty.c"
    empty.write_text("int stand_in;\n")
    _link([str(empty), "-Wl,--no-as-needed", f"-L{folder}", f"-l:{runtime.name}"], driver)


def _link(words: list[str], output: Path) -> None:
    command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-fno-sanitize=undefined"]
    command += [*words, "-o", str(output), f"-Wl,-soname,{output.name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def environment(folder: Path, arch: int = 90) -> Mapping[str, str]:
    """What a process gets that is to find the GPU whose driver is in `folder`, and to compile for it."""
    paths = [str(_HERE / "hook"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "STAND_IN_GPU": str(arch),
    }
