"""A small model, built, tuned, locked, signed and exported once: what the suites of delivered files mutate."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Final

from tests.support.mutations import mutate_bytes
from tests.support.project import Project

RECIPE: Final = "tiny.yaml"
LOCK: Final = "tiny.lock.yaml"
DELIVERED: Final = Path("dist/tiny/host")
BUNDLE: Final = DELIVERED / "tiny.tvmflow"
PACK: Final = "trials.jsonl"
KEY: Final = "release.key"


def prepare(folder: Path) -> None:
    """Run the commands in processes of their own, which may start threads."""
    project = Project(folder)
    project.write_recipe(trials=2)
    project.environment["TVMFLOW_SIGNING_KEY"] = str(folder / KEY)
    for words in (
        ("keygen", KEY),
        ("lock", RECIPE, "--lock", LOCK),
        ("records", "export", PACK),
    ):
        done = project.tvmflow(*words)
        assert done.code == 0, done.out + done.err
    os.environ["TVMFLOW_STORE"] = str(folder / "cache")


def copy_and_mutate(draw: random.Random, source: Path, target: Path) -> bool:
    """Copy a file or folder, and change one of its files; return whether its bytes differ afterwards."""
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    files = [target] if target.is_file() else sorted(p for p in target.rglob("*") if p.is_file())
    path = draw.choice(files)
    before = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(mutate_bytes(draw, before))
    return path.read_bytes() != before
