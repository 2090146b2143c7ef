"""The settings of `tune` and `pick_best`."""

from __future__ import annotations

from typing import Final, Literal

from tvmflow.core.types import Json
from tvmflow.stages._base import Settings, StageSettings


class TrialSettings(StageSettings):
    """The machine that trials are measured on; `remote` is how its devices are reached where they are behind RPC."""

    schedules: int
    target: dict[str, Json]
    device: dict[str, str]
    remote: dict[str, Json] | None = None

    @property
    def measured_devices(self) -> tuple[str, ...]:
        """The device whose kernels are timed, unless it is behind RPC."""
        return () if self.remote else (self.device["kind"],)


class SearchSettings(Settings):
    """The budget, how to search and how to measure; see `recipe.Tune`."""

    trials: int
    minutes: float | None
    trials_per_task: int | None
    patience: int | None
    min_gain: float
    only: tuple[str, ...]
    skip: tuple[str, ...]
    seed: int
    strategy: str
    cost_model: str
    number: int
    repeat: int
    min_repeat_ms: int
    trial_timeout_s: float
    flush_cache: bool
    finalists: int


class TuneSettings(TrialSettings):
    """The search; `unmeasurable_reason` says why nothing can be measured for the target."""

    tune: SearchSettings
    unmeasurable_reason: str = ""


class FinalistSettings(Settings):
    """The options of measuring, and the least share of the time in kernels with a schedule; see `recipe.Tune`."""

    number: int
    min_repeat_ms: int
    flush_cache: bool
    trial_timeout_s: float
    min_coverage: float | None = None


class PickBestSettings(TrialSettings):
    """The measurement of finalists."""

    tune: FinalistSettings


class NoTrials(Settings):
    """A budget of 0."""

    trials: Literal[0]


class NoSearchSettings(StageSettings):
    """No search; nothing else matters then."""

    tune: NoTrials


NO_SEARCH: Final = NoSearchSettings(tune=NoTrials(trials=0))
