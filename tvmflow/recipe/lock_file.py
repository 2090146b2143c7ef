"""Lock files: fields, reader and default paths."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from pydantic import Field, model_validator

from tvmflow.core.choices import find_problem_of_choices
from tvmflow.core.documents import Unreadable, read_json
from tvmflow.core.errors import RecipeError, UsageError
from tvmflow.core.file_kinds import LOCK, check_kind
from tvmflow.core.schema import ClosedModel, FormatVersion, field_error
from tvmflow.core.types import Json
from tvmflow.recipe.yaml_files import read_yaml, validate
from tvmflow.tuning import traces
from tvmflow.tuning.roofline import MeasuredKernel
from tvmflow.tuning.trials import trial_id

SUFFIX: Final = ".lock.yaml"

_OR_NAME: Final = ", or name another lock file with --lock FILE"
_WRITE_AGAIN: Final = "write it again with `tvmflow lock`"

# The lock file of ResNet-50 for one target takes 300 kB, and a recipe may take 1 MiB.
_SIZE_FACTOR: Final = 64

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LockedStage(ClosedModel):
    """The dependencies of a stage, and the sha256 of each output file."""

    version: int
    settings: dict[str, Json] = Field(default={})
    inputs: dict[str, _Digest] = Field(default={})
    outputs: dict[str, _Digest] = Field(default={})


class LockedKernel(ClosedModel):
    """A kernel of the model, and the trial of its schedule; without a trial, a rule schedules it.

    Times are measured by `pick_best`, in µs; `flops` is the number for one call. `trace` is canonical JSON.
    """

    names: list[str]
    calls: int
    untuned_us: float | None = None
    tuned_us: float | None = None
    flops: float | None = None
    trial: str = ""
    trace: str = ""

    @model_validator(mode="after")
    def _check_trace(self) -> LockedKernel:
        if bool(self.trial) != bool(self.trace):
            raise field_error("needs both trial and trace, or neither")
        if self.trace:
            try:
                trace = read_json(self.trace.encode())
                trial = trial_id(trace)
            except (Unreadable, ValueError):
                raise field_error("is not JSON", "trace") from None
            if trial != self.trial:
                raise field_error("is not the trace of this trial", "trace")
            if not traces.has_form(trace):
                raise field_error("is not a trace", "trace")
            if problem := traces.find_problem(trace):
                raise field_error(f"is refused: {problem}", "trace")
        return self


class Measurements(ClosedModel):
    """The measurements of a target when the lock file was written. Informational, not enforced.

    `coverage` is the share of the time in tuned kernels; `bytes` holds the sizes of the delivered files. `compared_us`
    holds the latency of each compared runtime, by name and version.
    """

    accuracy: float | None = None
    max_abs_error: float | None = None
    latency_us: float | None = None
    compared_us: dict[str, float] = Field(default={})
    coverage: float | None = None
    bytes: dict[str, int] = Field(default={})


class LockedTarget(ClosedModel):
    """A target, its kernels by workload, and the measurements when the lock file was written.

    `peak_gflops` is the peak of the machine that chose the schedules. `choices` holds the operators for which a
    measured alternative replaces the rule's choice.
    """

    tvm: dict[str, Json]
    cores: int
    features: list[str] = Field(default=[])
    toolchain: dict[str, Json] | None = None
    measured: Measurements = Field(default=Measurements())
    peak_gflops: float | None = None
    kernels: dict[str, LockedKernel] = Field(default={})
    choices: dict[str, dict[str, int]] = Field(default={})

    @model_validator(mode="after")
    def _check_choices(self) -> LockedTarget:
        if problem := find_problem_of_choices(self.choices):
            raise field_error(f"is refused: {problem}", "choices")
        return self

    @property
    def measured_kernels(self) -> list[MeasuredKernel]:
        """Return the kernels that were measured."""
        return [
            MeasuredKernel(
                name=kernel.names[0],
                calls=kernel.calls,
                untuned_us=kernel.untuned_us,
                tuned_us=kernel.tuned_us,
                flops=kernel.flops,
            )
            for kernel in self.kernels.values()
            if kernel.untuned_us is not None and kernel.names
        ]

    @property
    def choice(self) -> dict[str, Json]:
        """Return workload -> trace of its chosen schedule."""
        return {
            key: json.loads(kernel.trace) for key, kernel in self.kernels.items() if kernel.trace
        }


class LockedRecipe(ClosedModel):
    """A recipe or a variant, under the name in its stages."""

    recipe: str
    version: str
    inputs: dict[str, str] = Field(default={})
    outputs: dict[str, str] = Field(default={})
    operators: dict[str, int] = Field(default={})
    stages: dict[str, LockedStage]
    targets: dict[str, LockedTarget]


class LockFile(ClosedModel):
    """The content of a lock file."""

    lock: FormatVersion
    """Version of the format: 1."""
    machine: str
    tools: dict[str, str]
    recipes: dict[str, LockedRecipe]


class Lock(NamedTuple):
    """A lock file that was read; `where` returns `file:line:column` of a field."""

    path: Path
    file: LockFile
    where: Callable[..., str]

    @property
    def recipes(self) -> Mapping[str, LockedRecipe]:
        """Return the locked recipes by name."""
        return self.file.recipes

    def target(self, recipes: Iterable[str], target: str) -> LockedTarget | None:
        """Return the locked target from the first of `recipes` that has it, or None."""
        locked = (
            self.recipes[name].targets.get(target) for name in recipes if name in self.recipes
        )
        return next((entry for entry in locked if entry is not None), None)


def read_lock(path: Path) -> Lock:
    """Read a lock file; UsageError if it is missing, RecipeError if it is invalid."""
    if not os.path.lexists(path):
        raise UsageError(
            f"there is no lock file {path}", fix=f"write it with `tvmflow lock`{_OR_NAME}"
        )
    check_kind(path, LOCK)
    document = read_yaml(path, size_factor=_SIZE_FACTOR, fix=_WRITE_AGAIN)
    if isinstance(document.value, dict) and "lock" not in document.value:
        raise RecipeError(
            f"{path}:1:1: this is not a lock file", fix=f"write one with `tvmflow lock`{_OR_NAME}"
        )
    file, problems = validate(document, LockFile)
    if file is None:
        raise document.error(problems, fix=_WRITE_AGAIN)
    return Lock(path, file, document.where)


def lock_path(recipes: Sequence[str]) -> Path:
    """Return the default lock file beside a recipe or pipeline; UsageError for several recipes."""
    if len(recipes) != 1:
        raise UsageError(
            "several recipes have no default lock file", fix="name one with --lock FILE"
        )
    path = Path(recipes[0])
    return path.with_name(path.stem + SUFFIX)
