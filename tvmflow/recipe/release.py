"""What a pipeline does beyond its stages: a release with gates, or a tuning budget for recipes."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from tvmflow.core.formatting import quoted
from tvmflow.core.schema import MAX_PATH_LENGTH, ClosedModel, field_error, to_tuple

_VERSION_PATTERN: Final = (
    r"^(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*))*((a|b|rc)(0|[1-9][0-9]*))?"
    r"(\.post(0|[1-9][0-9]*))?(\.dev(0|[1-9][0-9]*))?(\+[a-z0-9]+(\.[a-z0-9]+)*)?$"
)
"""Versions of Python packages in their normalized form (PEP 440)."""

LAST_RELEASE: Final = "last"
NO_RELEASE: Final = "none"


def _check_version(value: str) -> str:
    if not re.match(_VERSION_PATTERN, value):
        raise field_error(f"must be a version such as 1.2.0 or 1.2.0rc1, not {quoted(value)}")
    return value


ReleaseVersion = Annotated[
    str,
    Field(max_length=100, json_schema_extra={"pattern": _VERSION_PATTERN}),
    AfterValidator(_check_version),
]
"""The version of deliveries, or of a release."""


class Gates(ClosedModel):
    """Limits that every recipe must meet on every target; otherwise no release is made."""

    min_accuracy: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        examples=[0.95],
        description="Minimum top-1 accuracy, for recipes that measure it.",
    )
    max_accuracy_drop: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        examples=[0.002],
        description="Maximum loss of accuracy since the last release; 0.002 is 0.2 percentage points.",
    )
    min_coverage: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        examples=[0.9],
        description="Minimum share of the model's time in tuned kernels, for targets that are tuned.",
    )
    max_slowdown: float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        examples=[0.05],
        description="Maximum slowdown since the last release; 0.05 is 5 %. Both are measured again, alternating, "
        "if they run on this machine.",
    )
    max_growth: float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        examples=[0.1],
        description="Maximum growth of any file since the last release; 0.1 is 10 %.",
    )
    max_bytes: int | None = Field(
        default=None, ge=1, examples=[50000000], description="Maximum size of any file, in bytes."
    )


class Release(ClosedModel):
    """A folder with all files, their lock file, checksums and a report, made when every gate is passed."""

    version: ReleaseVersion = Field(
        examples=["1.2.0"],
        description="Version of the release: digits and dots, in quotes. Its folder is `<name>-<version>`.",
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_PATH_LENGTH,
        examples=["../releases"],
        description="Folder of all releases, from the folder of the pipeline. Default: `releases` in the root of the "
        "project: see [cli.md](cli.md).",
    )
    against: str = Field(
        default=LAST_RELEASE,
        max_length=100,
        examples=["1.1.0"],
        description="Release to compare with: a version, `last` (the previous release) or `none`.",
    )
    drop: Annotated[tuple[str, ...], BeforeValidator(to_tuple)] = Field(
        default=(),
        examples=[["digits/edge"]],
        description="What this release drops on purpose: `RECIPE`, `RECIPE/TARGET`, `RECIPE/TARGET/OUTPUT`, or "
        "`RECIPE/TARGET/verify`. If anything else of the last release is missing, the release fails.",
    )
    gates: Gates = Field(
        default=Gates(), examples=[{"max_slowdown": 0.05}], description="Limits that must be met."
    )

    @field_validator("against")
    @classmethod
    def _check_against(cls, value: str) -> str:
        return value if value in (LAST_RELEASE, NO_RELEASE) else _check_version(value)


class Retune(ClosedModel):
    """A tuning budget for all recipes and targets together, spent in rounds on those that gain most."""

    trials: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        examples=[5000],
        description="Maximum number of trials, in addition to those in the ledger.",
    )
    minutes: float | None = Field(
        default=None,
        gt=0.0,
        le=100_000.0,
        examples=[480],
        description="Maximum minutes of measuring.",
    )
    round: int = Field(
        default=64,
        ge=1,
        le=100_000,
        description="Trials that one target of a recipe gets in a round.",
    )
    min_gain: float = Field(
        default=0.005,
        ge=0.0,
        le=1.0,
        description="Smallest relative gain of a round: a target of a recipe that gains less gets no further round. "
        "Tuning ends when none gains more.",
    )

    @model_validator(mode="after")
    def _check_budget(self) -> Retune:
        if self.trials is None and self.minutes is None:
            raise field_error("needs a budget: trials, minutes, or both")
        return self
