"""The kernels of a delivered library: where the schedule of each came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tvmflow.core.types import Json
from tvmflow.provenance.lineage import FinishedStage, Lineage
from tvmflow.stages import build, extract_tasks, pick_best, tune
from tvmflow.stages._tune_settings import find_ledger_key
from tvmflow.store.blobs import DamagedBlob
from tvmflow.tuning.trials import trial_id


def list_kernels(lineage: Lineage) -> list[dict[str, Json]]:
    """Return the entry of each kernel in the library, as a statement has it.

    Returns:
        `name` and `schedule` (`tuned` or a rule) of each kernel; `part`, for a model in parts;
        `workload`, its key, for a tuned model; `record`, the trial behind a tuned kernel, of
        which a locked run knows nothing but its id.

    Raises:
        DamagedBlob: A result or the lock's choice is not what it should be.
    """
    return [
        kernel
        for built in lineage.find_stages("build")
        for kernel in _kernels_of_build(lineage, built)
    ]


def _kernels_of_build(lineage: Lineage, built: FinishedStage) -> Iterator[dict[str, Json]]:
    rules: Mapping[str, str] = lineage.read(built, build.KERNELS) or {}
    target = built.spec.target
    stages = {stage.spec.stage: stage for stage in lineage.stages if stage.spec.target == target}
    workloads = _workloads_by_kernel(lineage, stages)
    locked = _locked_choice(built)
    for name, rule in sorted(rules.items()):
        kernel: dict[str, Json] = {"name": name, "schedule": rule}
        if target != lineage.target:
            kernel["part"] = target
        workload = workloads.get(name, "")
        if workload:
            kernel["workload"] = workload
        if workload and rule == build.TUNED and "pick_best" in stages:
            kernel["record"] = _find_winner(lineage, stages, workload)
        elif rule == build.TUNED and workload in locked:
            kernel["record"] = {"trial": trial_id(locked[workload])}
        yield kernel


def _workloads_by_kernel(lineage: Lineage, stages: Mapping[str, FinishedStage]) -> dict[str, str]:
    """Return the workload's key for each kernel; empty when the model was not tuned."""
    if "extract_tasks" not in stages:
        return {}
    tasks = lineage.read(stages["extract_tasks"], extract_tasks.TASKS)
    return {name: task["key"] for task in tasks for name in task["names"]}


def _locked_choice(built: FinishedStage) -> Mapping[str, Json]:
    """Return the traces by workload that came from a lock file; empty for a run with a search.

    Raises:
        DamagedBlob: The file has changed since the build.
    """
    role = f"pick_best/{pick_best.CHOSEN}"
    for file in built.spec.files:
        if file.role == role:
            content = Path(file.path).read_bytes()
            expected = built.preimage["inputs"][role]
            if hashlib.sha256(content).hexdigest() != expected:
                raise DamagedBlob(expected, file.path)
            choice: Mapping[str, Json] = json.loads(content)
            return choice
    return {}


def _find_winner(lineage: Lineage, stages: Mapping[str, FinishedStage], workload: str) -> Json:
    """Return the trial that won: as the ledger has it, and as `pick_best` measured it again (seconds)."""
    tuned = stages["tune"]
    judged = lineage.read(stages["pick_best"], pick_best.FINALISTS)[workload]
    finalists = lineage.read(tuned, tune.RECORDS)[workload]
    winner = next(trial for trial in finalists if trial["id"] == judged["winner"])
    return {
        "trial": winner["id"],
        "target": find_ledger_key(tuned.preimage),
        "seconds": winner["seconds"],
        "when": winner["when"],
        "again_seconds": judged["tuned_us"] / 1e6,
        "untuned_seconds": judged["untuned_us"] / 1e6,
    }
