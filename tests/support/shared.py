"""Folders of files that tests read: of all workers of a test run, or of one module."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest


def shared_folder(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """Return a folder that `make` fills once for all workers, and that nobody changes afterwards.

    The first worker that needs it makes it, and the others wait.
    """
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = root / name, root / f"{name}.done"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def folder_made_by(factory: pytest.TempPathFactory, module: str) -> Path:
    """Return a new folder that `python -m MODULE FOLDER` fills, for modules that import PyTorch."""
    folder = factory.mktemp(module.rpartition(".")[2])
    subprocess.run([sys.executable, "-m", module, str(folder)], check=True)
    return folder


MODELS: Final = os.environ.get("TVMFLOW_TEST_MODELS", "")


needs_models = pytest.mark.skipif(
    not MODELS, reason="TVMFLOW_TEST_MODELS names no folder of models"
)
