"""What a pipeline does beyond its stages: gates and a release, or a tuning budget to spread."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, Field, field_validator, model_validator

from tvmflow.mistakes import wrong
from tvmflow.recipe._closed import MAX_PATH, Closed
from tvmflow.yaml_positions import quoted

_RELEASE: Final = (
    r"^(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*))*((a|b|rc)(0|[1-9][0-9]*))?"
    r"(\.post(0|[1-9][0-9]*))?(\.dev(0|[1-9][0-9]*))?(\+[a-z0-9]+(\.[a-z0-9]+)*)?$"
)
"""Versions as Python's packages (PEP 440) write them when nothing has to be put right."""

LAST: Final = "last"
NONE: Final = "none"


def _check_version(value: str) -> str:
    """A version, or the mistake that it is none."""
    if not re.match(_RELEASE, value):
        raise wrong(f"must be a version such as 1.2.0 or 1.2.0rc1, not {quoted(value)}")
    return value


ReleaseVersion = Annotated[
    str,
    Field(max_length=100, json_schema_extra={"pattern": _RELEASE}),
    AfterValidator(_check_version),
]
"""The version of what is delivered, or of a release."""


class Gates(Closed):
    """What every recipe must reach on every target; one that does not keeps the release from being made."""

    min_accuracy: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        examples=[0.95],
        description="Least top-1 accuracy, of recipes that measure it.",
    )
    max_accuracy_drop: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        examples=[0.002],
        description="How much less accurate than in the last release, at most: 0.002 is 0.2 points.",
    )
    min_coverage: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        examples=[0.9],
        description="Least part of the model's time in kernels that were tuned, of targets that were.",
    )
    max_slowdown: float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        examples=[0.05],
        description="How much slower than the last release, at most: 0.05 is 5 %. Both are timed again, "
        "side by side, where they run here.",
    )
    max_growth: float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        examples=[0.1],
        description="How much larger than in the last release any file may be: 0.1 is 10 %.",
    )
    max_bytes: int | None = Field(
        default=None, ge=1, examples=[50000000], description="Most bytes of any file."
    )


class Release(Closed):
    """A folder with all files, their lock, checksums and a report, made when every gate is passed."""

    version: ReleaseVersion = Field(
        examples=["1.2.0"],
        description="Its version: digits and dots, in quotes. The folder is `<name>-<version>`.",
    )
    folder: str = Field(
        default="../releases",
        min_length=1,
        max_length=MAX_PATH,
        examples=["../releases"],
        description="Where releases are, from the pipeline's own folder.",
    )
    against: str = Field(
        default=LAST,
        max_length=100,
        examples=["1.1.0"],
        description="The release to compare with: a version, `last` for the one before this, or `none`.",
    )
    gates: Gates = Field(
        default=Gates(),
        examples=[{"max_slowdown": 0.05}],
        description="What must be reached.",
    )

    @field_validator("against")
    @classmethod
    def _check_against(cls, value: str) -> str:
        return value if value in (LAST, NONE) else _check_version(value)


class Retune(Closed):
    """Trials for all recipes and targets together, given in rounds to those that gain most by them."""

    trials: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        examples=[5000],
        description="Most trials to measure, beyond those that the ledger has.",
    )
    minutes: float | None = Field(
        default=None, gt=0.0, le=100_000.0, examples=[480], description="Most minutes to measure."
    )
    round: int = Field(
        default=64,
        ge=1,
        le=100_000,
        description="Trials that a recipe's target is given at a time.",
    )
    min_gain: float = Field(
        default=0.005,
        ge=0.0,
        le=1.0,
        description="A recipe's target whose last round made it faster by less than this is given no other, "
        "unless all are like that: then it ends.",
    )

    @model_validator(mode="after")
    def _check_budget(self) -> Retune:
        if self.trials is None and self.minutes is None:
            raise wrong("needs a budget: trials, minutes, or both")
        return self
