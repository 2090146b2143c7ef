"""The lock as a file: its fields, reading it with places for mistakes, and where it is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field, model_validator

from tvmflow.errors import RecipeError, UsageError
from tvmflow.mistakes import check, wrong
from tvmflow.recipe import Closed, Version
from tvmflow.tuning.ledger import trial_id
from tvmflow.yaml_positions import read_yaml

SUFFIX: Final = ".lock.yaml"

SEARCHING: Final = frozenset({"tune", "pick_best"})
"""Stages that a locked run does without: what they found is in the lock."""

MEASURING: Final = frozenset({"verify"})
"""Stages that a locked run repeats, and whose results are times: nothing is held against them."""

_OR_NAME: Final = ", or name another with --lock FILE"

FOR_CHECKS: Final = frozenset({"runner"})
"""Stages that make what others are only checked with: nothing is held to their bytes."""

# ResNet-50 for one target takes 300 kB
_TIMES_A_RECIPE: Final = 64

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LockedStage(Closed):
    """What a stage depended on, and what it gave: file -> sha256."""

    version: int
    settings: dict[str, Any] = Field(default={})
    inputs: dict[str, _Digest] = Field(default={})
    outputs: dict[str, _Digest] = Field(default={})


class LockedKernel(Closed):
    """A kernel of the model, and the trial whose schedule it has; without one it is scheduled by rule.

    Times are those of `pick_best`, in µs. `trace` is canonical JSON.
    """

    names: list[str]
    calls: int
    untuned_us: float | None = None
    tuned_us: float | None = None
    trial: str = ""
    trace: str = ""

    @model_validator(mode="after")
    def _check_trace(self) -> LockedKernel:
        if bool(self.trial) != bool(self.trace):
            raise wrong("trial and trace stand together or not at all")
        if self.trace:
            try:
                found = trial_id(json.loads(self.trace))
            except ValueError:
                raise wrong("is not JSON", "trace") from None
            if found != self.trial:
                raise wrong("is not the trace of this trial", "trace")
        return self


class LockedTarget(Closed):
    """A machine that was built for, its kernels by workload, and what was measured when it was locked."""

    tvm: dict[str, Any]
    cores: int
    features: list[str] = Field(default=[])
    toolchain: dict[str, Any] | None = None
    measured: dict[str, Any] = Field(default={})
    kernels: dict[str, LockedKernel] = Field(default={})

    @property
    def choice(self) -> dict[str, Any]:
        """Workload -> the trace that was chosen for it."""
        return {
            key: json.loads(kernel.trace) for key, kernel in self.kernels.items() if kernel.trace
        }


class LockedRecipe(Closed):
    """A recipe, or a variant of one, by the name that its stages have."""

    recipe: str
    version: str
    inputs: dict[str, str] = Field(default={})
    outputs: dict[str, str] = Field(default={})
    operators: dict[str, int] = Field(default={})
    stages: dict[str, LockedStage]
    targets: dict[str, LockedTarget]


class LockFile(Closed):
    """A lock as it is written."""

    lock: Version = Field(description="Version of this language: 1.")
    machine: str
    tools: dict[str, str]
    recipes: dict[str, LockedRecipe]


class Lock(NamedTuple):
    """A lock that was read. `where` gives `file:line:column` of a path of fields in it."""

    path: Path
    file: LockFile
    where: Any

    @property
    def recipes(self) -> Mapping[str, LockedRecipe]:
        return self.file.recipes

    def target(self, recipes: Iterable[str], target: str) -> LockedTarget | None:
        """What a target was, for the first of these recipes that has it."""
        locked = (
            self.recipes[name].targets.get(target) for name in recipes if name in self.recipes
        )
        return next((found for found in locked if found is not None), None)


def read_lock(path: Path) -> Lock:
    """The lock in a file. Raises RecipeError, with places, for what is none, and UsageError where there is no file."""
    if not path.exists():
        raise UsageError(f"there is no lock {path}", fix=f"write it with `tvmflow lock`{_OR_NAME}")
    document = read_yaml(path, times=_TIMES_A_RECIPE)
    if isinstance(document.value, dict) and "lock" not in document.value:
        raise RecipeError(
            f"{path}:1:1: this is no lock", fix=f"give one that `tvmflow lock` wrote{_OR_NAME}"
        )
    found, problems = check(document, LockFile)
    if found is None:
        raise document.error(problems, fix="make it again with `tvmflow lock`")
    return Lock(path, found, document.where)


def lock_path(recipes: Sequence[str]) -> Path:
    """Where the lock of what a command line names is: beside the one file, with `.lock.yaml` for its ending.

    Raises UsageError for several files.
    """
    if len(recipes) != 1:
        raise UsageError(
            "several recipes have no lock of their own", fix="name it with --lock FILE"
        )
    path = Path(recipes[0])
    return path.with_name(path.stem + SUFFIX)
