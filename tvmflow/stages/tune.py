"""`tune`: searches schedules for the workloads of a model, on the ledger that all models share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tvmflow import tools
from tvmflow.errors import StageError
from tvmflow.stages._base import StageContext

if TYPE_CHECKING:
    from tvmflow.tuning.ledger import Ledger
    from tvmflow.tuning.search import Task, Tuned

VERSION: Final = 1
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {"extract_tasks": ("tasks.json", "workloads.json")}
READS: Final[tuple[str, ...]] = ()
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")
TIMEOUT_S: Final = 7 * 24 * 3600.0

RECORDS: Final = "records.json"


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """The budget, how to search and to measure, and the machine that is measured on."""
    tune = recipe.tune.model_dump(mode="json")
    if not recipe.tune.trials:
        # without a search nothing else matters
        return {"tune": {"trials": 0}}
    return {
        "tune": tune,
        "target": target.tvm,
        "device": target.device,
        **({"why_not": target.why_not} if target.why_not else {}),
    }


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Measure what the budget asks for and the ledger lacks; write the best trials of each workload."""
    if not settings["tune"]["trials"]:
        (ctx.out / RECORDS).write_text("{}")
        return {"trials": 0, "measured": 0, "reused": 0, "failed": 0, "workloads": []}
    tasks = _tasks(ctx.inputs)
    ledger, results = _search(settings, ctx, tasks)
    _complain(results)
    best = {
        task.key: [
            {"id": trial.id, "trace": trial.trace, "seconds": trial.seconds}
            for trial in ledger.workload(task.key).valid()[: settings["tune"]["finalists"]]
        ]
        for task in tasks
    }
    (ctx.out / RECORDS).write_text(json.dumps(best, indent=1, sort_keys=True))
    return {
        "trials": settings["tune"]["trials"],
        "measured": sum(each.measured for each in results),
        "reused": sum(each.reused for each in results),
        "failed": sum(each.failed for each in results),
        "exhausted": [each.name for each in results if each.exhausted],
        "untunable": [each.name for each in results if each.asked and each.best_s is None],
        "workloads": [_fact(each) for each in results],
    }


def _tasks(inputs: Mapping[str, Path]) -> list[Task]:
    """The workloads that a search applies to."""
    from tvmflow.tuning.search import Task

    modules = json.loads(inputs["extract_tasks/workloads.json"].read_text())
    return [
        Task(each["key"], each["names"][0], each["weight"] * each["flops"], modules[each["key"]])
        for each in json.loads(inputs["extract_tasks/tasks.json"].read_text())
        if each["tunable"]
    ]


def _search(
    settings: Mapping[str, Any], ctx: StageContext, tasks: list[Task]
) -> tuple[Ledger, list[Tuned]]:
    from tvmflow.executors.nursery import Nursery
    from tvmflow.targets.host import read_host
    from tvmflow.tuning import measure, search
    from tvmflow.tuning.ledger import Ledger

    if why_not := settings.get("why_not"):
        raise StageError(
            f"nothing can be measured for this target on this machine: {why_not}",
            fix="set tune.trials to 0 for it, or tune on a machine that can run it",
        )
    tune, target, device = settings["tune"], settings["target"], settings["device"]
    host = read_host()
    build = tools.identity("apache-tvm")
    ledger = Ledger.open(ctx.ledger, target, build, device)
    options = search.Options(
        trials=tune["trials"],
        trials_per_task=tune["trials_per_task"],
        seed=tune["seed"],
        strategy=tune["strategy"],
        cost_model=tune["cost_model"],
        timing=measure.Timing(tune["number"], tune["repeat"], tune["min_repeat_ms"]),
        trial_timeout_s=tune["trial_timeout_s"],
    )
    site = search.Site(
        target=target,
        device=device,
        locks=ctx.locks,
        tvm=build,
        host={"arch": host.arch, "model": host.model, "cores": host.cores},
        log=ctx.work / "trials.log",
    )
    # both before the search starts its threads: what the children need, and the server they fork from
    measure.load_intrinsics(target)
    with Nursery.fork() as nursery:
        return ledger, search.tune(tasks, options, site, ledger, nursery, ctx.emit)


def _complain(results: list[Tuned]) -> None:
    """Say which workloads have no schedule that works. Raises StageError when none at all has one."""
    asked = [each for each in results if each.asked]
    broken = [each for each in asked if each.best_s is None and each.failed]
    if broken and len(broken) == len(asked):
        raise StageError(
            f"all {sum(each.failed for each in broken)} trials failed; the first: {broken[0].first_failure}",
            fix="look at trials.log in the stage's work folder; a longer tune.trial_timeout_s may help",
        )


def _fact(result: Tuned) -> dict[str, Any]:
    return {
        "key": result.key,
        "name": result.name,
        "trials": min(result.asked, result.reused + result.measured),
        "measured": result.measured,
        "failed": result.failed,
        "best_us": None if result.best_s is None else round(result.best_s * 1e6, 3),
        "seconds": round(result.seconds, 3),
        **({"first_failure": result.first_failure} if result.first_failure else {}),
    }
