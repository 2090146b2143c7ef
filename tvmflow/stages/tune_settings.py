"""The settings of `tune` and `pick_best`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from tvmflow.core.types import Json
from tvmflow.recipe import Recipe
from tvmflow.runtime.bundles import VM
from tvmflow.stages.base import Settings, StageSettings
from tvmflow.stages.runtime_choice import choose_runtime
from tvmflow.targets.backends import backend_for
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.targets.tvm_target import with_threads
from tvmflow.tuning.budget import BudgetRules
from tvmflow.tuning.ledger import target_key


class TrialSettings(StageSettings):
    """The machine that measures trials; `remote` is how to reach its devices where they are behind RPC.

    `threads` are those that kernels run with; none for code that uses no threads of the CPU. `by_driver` tells that
    kernels are measured in C libraries, which launch them by the driver of their device.
    """

    schedules: int
    target: dict[str, Json]
    threads: int | None = None
    device: dict[str, str]
    remote: dict[str, Json] | None = None
    by_driver: bool = False

    @property
    def measured_target(self) -> dict[str, Json]:
        """TVM's target of the search, with the number of threads: the one that trials are kept for."""
        return with_threads(self.target, self.threads)

    @property
    def measured_devices(self) -> tuple[str, ...]:
        """The device whose kernels are timed, unless it is behind RPC."""
        return () if self.remote else (self.device["kind"],)


class SearchSettings(Settings):
    """The budget, how to search and how to measure; see `recipe.Tune`.

    `interim` is a part of a longer search, after which what it found so far is delivered; the first
    part has 0 minutes.
    """

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
    interim: bool = False

    @property
    def measures(self) -> bool:
        """False if it takes the best of the trials that the ledger has."""
        return self.minutes != 0

    @property
    def budget_rules(self) -> BudgetRules:
        """The limits of the budget."""
        return BudgetRules(
            trials=self.trials,
            trials_per_task=self.trials_per_task,
            patience=self.patience,
            min_gain=self.min_gain,
            minutes=self.minutes,
        )


class TuneSettings(TrialSettings):
    """The search; `unmeasurable_reason` says why nothing can be measured for the target."""

    tune: SearchSettings
    unmeasurable_reason: str = ""


class FinalistSettings(Settings):
    """Options of measuring, and the least share of time in kernels with a schedule; see `recipe.Tune`."""

    number: int
    min_repeat_ms: int
    flush_cache: bool
    trial_timeout_s: float
    min_coverage: float | None = None


class PickBestSettings(TrialSettings):
    """The measurement of finalists, and what executes the whole library."""

    tune: FinalistSettings
    runtime: str


class NoTrials(Settings):
    """A budget of 0."""

    trials: Literal[0]


class NoSearchSettings(StageSettings):
    """No search; nothing else matters then."""

    tune: NoTrials


NO_SEARCH: Final = NoSearchSettings(tune=NoTrials(trials=0))


def measured_threads(target: ResolvedTarget) -> int | None:
    """Return the number of threads that a target's kernels are measured with; None for a GPU."""
    return target.threads if backend_for(target.tvm).RUNS_ON_HOST_CPU else None


def is_measured_by_driver(recipe: Recipe, target: ResolvedTarget) -> bool:
    """Return whether kernels are launched by a driver on this machine, without TVM's runtime."""
    has_executor = bool(backend_for(target.tvm).EXECUTOR)
    return has_executor and not target.remote and choose_runtime(recipe, target) != VM


def find_ledger_key(preimage: Mapping[str, Json]) -> str:
    """Return the name of the ledger's folder for the trials of a search; empty where nothing was searched.

    Args:
        preimage: That of the key of `tune`.
    """
    settings = preimage.get("settings", {})
    if "target" not in settings:
        return ""
    target = with_threads(settings["target"], settings.get("threads"))
    return target_key(target, preimage["tools"]["apache-tvm"], settings["device"])
