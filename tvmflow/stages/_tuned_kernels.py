"""The kernels that `tune` is for, and how many of their trials the ledger has already. Imports no TVM."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tvmflow.core.errors import StageError
from tvmflow.stages._tune_settings import NoSearchSettings, SearchSettings, TuneSettings
from tvmflow.tuning.forecast import TrialForecast, forecast_trials
from tvmflow.tuning.ledger import target_key
from tvmflow.tuning.ledger_folders import read_records
from tvmflow.tuning.tuning_job import Task, search_name


def load_tasks(inputs: Mapping[str, Path], tune: SearchSettings) -> list[Task]:
    """Return the workloads that can be tuned and that the recipe selects.

    Raises:
        StageError: when the recipe names a kernel that the model does not have.
    """
    modules = json.loads(inputs["extract_tasks/workloads.json"].read_text())
    tasks = json.loads(inputs["extract_tasks/tasks.json"].read_text())
    tunable = [task for task in tasks if task["tunable"]]
    selected = select_kernels([task["names"] for task in tunable], only=tune.only, skip=tune.skip)
    return [
        Task(task["key"], task["names"][0], task["weight"], task["flops"], modules[task["key"]])
        for task, is_selected in zip(tunable, selected, strict=True)
        if is_selected
    ]


def select_kernels(
    kernels: Sequence[Sequence[str]], *, only: Sequence[str], skip: Sequence[str]
) -> list[bool]:
    """Return for each kernel whether the recipe has it tuned.

    Args:
        kernels: All names of each kernel.
        only: Names, patterns or operators of the kernels to tune; all where it is empty.
        skip: The same of kernels not to tune.

    Raises:
        StageError: when one of these selects no kernel.
    """
    unknown = [
        f"tune.{field}: '{pattern}'"
        for field, patterns in (("only", only), ("skip", skip))
        for pattern in patterns
        if not any(_is_selected_by(pattern, names) for names in kernels)
    ]
    if unknown:
        known = ", ".join(sorted(names[0] for names in kernels))
        verb = "names" if len(unknown) == 1 else "name"
        raise StageError(
            f"{', '.join(unknown)} {verb} no kernel of this model", fix=f"its kernels are: {known}"
        )
    return [
        (not only or any(_is_selected_by(pattern, names) for pattern in only))
        and not any(_is_selected_by(pattern, names) for pattern in skip)
        for names in kernels
    ]


def _is_selected_by(pattern: str, names: Sequence[str]) -> bool:
    """Return whether this is a kernel's name, a pattern of it, or an operator in it: conv2d in fused_conv2d1_relu."""
    operator = re.compile(rf"(^|_){re.escape(pattern)}\d*(_|$)")
    return any(fnmatch.fnmatchcase(name, pattern) or operator.search(name) for name in names)


def forecast(
    settings: TuneSettings | NoSearchSettings,
    inputs: Mapping[str, Path],
    ledger: Path,
    tvm_build: str,
) -> TrialForecast:
    """Return what a search will find in the ledger, reading only.

    Args:
        settings: Those of the stage.
        inputs: Its input files, as far as they are known.
        ledger: The folder of the trial ledger.
        tvm_build: The identity of the installed TVM.

    Raises:
        StageError: when the recipe names a kernel that the model does not have.
    """
    if isinstance(settings, NoSearchSettings):
        return TrialForecast(0)
    if "extract_tasks/tasks.json" not in inputs:
        return TrialForecast(settings.tune.trials, settings.tune.minutes)
    tasks = load_tasks(inputs, settings.tune)
    folder = ledger / target_key(settings.measured_target, tvm_build, settings.device)
    records = {task.key: read_records(folder / f"{task.key}.jsonl").records for task in tasks}
    search = search_name(settings.tune.strategy, settings.tune.seed)
    return forecast_trials(tasks, records, settings.tune.budget_rules, settings.schedules, search)
