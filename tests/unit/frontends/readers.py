"""Readers of files that do what no reader should, for tests of the process that they run in."""

from __future__ import annotations

import os
from pathlib import Path

from tvmflow.core.errors import UsageError
from tvmflow.frontends.base import ModelFacts, ModelInput, NotAModel


def name_process(path: Path) -> ModelFacts:
    """Return facts of every kind, and the number of this process."""
    limits = {"n": (1, None)}
    inputs = (ModelInput("x", "int8", (1, "n"), limits=limits), ModelInput("y", is_required=False))
    return ModelFacts(inputs, (path.read_text(),), (str(os.getpid()),), "is new")


def refuse(path: Path) -> ModelFacts:
    """Say that the file is not a model."""
    raise NotAModel(f"{path.name} is none")


def fail(path: Path) -> ModelFacts:
    """Fail with an error of tvmflow."""
    raise UsageError(f"{path.name} is wrong", fix="write another")


def end(path: Path) -> ModelFacts:
    """End the process."""
    os._exit(3)


def allocate(path: Path) -> ModelFacts:
    """Take 2 GB."""
    return ModelFacts(weights=(str(len(bytearray(2 << 30))),))


def describe_at_length(path: Path) -> ModelFacts:
    """Return more than fits."""
    return ModelFacts(weights=("x" * (17 << 20),))


def loop(path: Path) -> ModelFacts:
    """Return never."""
    while True:
        path.exists()
