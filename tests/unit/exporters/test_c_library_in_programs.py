"""C libraries in programs that fork, handle signals, have small stacks, load and unload."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.c_library import link_parallel
from tests.support.exports import Exported
from tests.support.recipes import ROOT

SOURCE: Final = ROOT / "tests" / "support" / "c_programs" / "behaviour.c"
TIMEOUT_S: Final = 120


@pytest.fixture(scope="module")
def folder(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with loops that are divided among threads, and a program linked with it."""
    folder = tmp_path_factory.mktemp("programs")
    link_parallel(exported, folder)
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-I."]
    command = [sys.executable, "-m", "ziglang", "cc", *flags, str(SOURCE), "libdigits.a"]
    libraries = ["-lm", "-lpthread", "-ldl", "-o", "program"]
    subprocess.run([*command, *libraries], cwd=folder, check=True)
    return folder


CHECKS: Final = (
    "fork",
    "fork during calls",
    "small stack",
    "signals",
    "names",
    "limits",
    "exit",
    "unloading",
    pytest.param("lifetimes", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("check", CHECKS)
def test_a_program_that_does_more_than_call(folder: Path, check: str) -> None:
    """Nothing hangs, crashes or leaks, and outputs have the same bits as before; the checks are explained in the program."""
    command = [str(folder / "program"), check, str(folder / "libdigits.so")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env={}
    )
    assert (done.returncode, done.stderr) == (0, "")


FORK: Final = """
import os, sys
import numpy as np
from pathlib import Path
from tests.support.c_library import CLibrary

library = CLibrary(Path(sys.argv[1]), "digits", 3)
image = np.arange(64, dtype="float32").reshape(1, 1, 8, 8)
expected = library.run({"data": image})[0]
for call in range(50):
    child = os.fork()
    if child == 0:
        same = np.array_equal(library.run({"data": image})[0], expected)
        os._exit(0 if same and library.function("destroy")(library.context) == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(library.run({"data": image})[0], expected)
"""


def test_a_forked_python_computes(folder: Path) -> None:
    """As `multiprocessing` does on Linux."""
    command = [sys.executable, "-c", FORK, str(folder / "libdigits.so")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
