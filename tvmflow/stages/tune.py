"""`tune`: searches schedules for the workloads of a model, on the ledger that all models share."""

from __future__ import annotations

import fnmatch
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tvmflow import tools
from tvmflow.errors import StageError
from tvmflow.stages import _kernels
from tvmflow.stages._base import Event, StageContext

if TYPE_CHECKING:
    from tvmflow.tuning.ledger import Ledger
    from tvmflow.tuning.search import Emit, Result, Task, Tuned

VERSION: Final = 2
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {"extract_tasks": ("tasks.json", "workloads.json")}
READS: Final[tuple[str, ...]] = ()
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")
TIMEOUT_S: Final = 7 * 24 * 3600.0

RECORDS: Final = "records.json"


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """The budget, how to search and to measure, and the machine that is measured on."""
    tune = recipe.tune.model_dump(mode="json", exclude={"min_coverage", "min_speedup"})
    if not recipe.tune.trials:
        # without a search nothing else matters
        return {"tune": {"trials": 0}}
    return {
        "tune": tune,
        "schedules": _kernels.schedules(recipe),
        "target": target.tvm,
        "device": target.device,
        **({"why_not": target.why_not_tuned} if target.why_not_tuned else {}),
        **({"remote": target.remote} if target.remote else {}),
    }


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Measure what the budget asks for and the ledger lacks; write the best trials of each workload."""
    if not settings["tune"]["trials"]:
        (ctx.out / RECORDS).write_text("{}")
        return {"trials": 0, "measured": 0, "reused": 0, "failed": 0, "workloads": []}
    tasks = _tasks(ctx.inputs, settings["tune"])
    ledger, result = _search(settings, ctx, tasks)
    results = result.tuned
    _complain(results)
    best = {
        task.key: [
            {
                "id": trial.id,
                "trace": trial.trace,
                "seconds": trial.seconds,
                # who takes this result from elsewhere has no ledger that knows it
                "when": trial.when,
            }
            for trial in ledger.workload(task.key).valid()[: settings["tune"]["finalists"]]
        ]
        for task in tasks
    }
    (ctx.out / RECORDS).write_text(json.dumps(best, indent=1, sort_keys=True))
    return {
        "trials": settings["tune"]["trials"],
        "measured": sum(each.measured for each in results),
        "reused": sum(max(each.trials - each.measured, 0) for each in results),
        "known": sum(each.known for each in results),
        "failed": sum(each.failed for each in results),
        "exhausted": [each.name for each in results if each.exhausted],
        "untunable": [each.name for each in results if each.trials and each.best_s is None],
        "stopped": result.stopped,
        "seconds": round(sum(each.seconds for each in results), 3),
        "drift": round(result.drift, 4),
        "repairs": result.repairs,
        "workloads": [_fact(each) for each in results],
    }


def _tasks(inputs: Mapping[str, Path], tune: Mapping[str, Any]) -> list[Task]:
    """The workloads that a search applies to and that the recipe wants tuned."""
    from tvmflow.tuning.search import Task

    modules = json.loads(inputs["extract_tasks/workloads.json"].read_text())
    tunable = [
        each
        for each in json.loads(inputs["extract_tasks/tasks.json"].read_text())
        if each["tunable"]
    ]
    names = [each["names"] for each in tunable]
    wanted = selected(names, only=tune["only"], skip=tune["skip"])
    return [
        Task(each["key"], each["names"][0], each["weight"], each["flops"], modules[each["key"]])
        for each, chosen in zip(tunable, wanted, strict=True)
        if chosen
    ]


def selected(
    kernels: Sequence[Sequence[str]], *, only: Sequence[str], skip: Sequence[str]
) -> list[bool]:
    """Which kernels (each by all its names) the recipe wants tuned. Raises StageError for a word that names none."""
    unknown = [
        f"tune.{field}: '{word}'"
        for field, words in (("only", only), ("skip", skip))
        for word in words
        if not any(_is_meant(word, names) for names in kernels)
    ]
    if unknown:
        there = ", ".join(sorted(names[0] for names in kernels))
        raise StageError(
            f"{', '.join(unknown)} names no kernel of this model", fix=f"there are: {there}"
        )
    return [
        (not only or any(_is_meant(word, names) for word in only))
        and not any(_is_meant(word, names) for word in skip)
        for names in kernels
    ]


def _is_meant(word: str, names: Sequence[str]) -> bool:
    """Whether a word is the name of a kernel, a pattern of it, or an operator in it: conv2d in fused_conv2d1_relu."""
    operator = re.compile(rf"(^|_){re.escape(word)}\d*(_|$)")
    return any(fnmatch.fnmatchcase(name, word) or operator.search(name) for name in names)


def _search(
    settings: Mapping[str, Any], ctx: StageContext, tasks: list[Task]
) -> tuple[Ledger, Result]:
    from tvmflow.executors.nursery import Nursery
    from tvmflow.targets.host import read_host
    from tvmflow.tuning import bench, budget, measure, remote, search
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
    _describe(ledger, tasks)
    options = search.Options(
        rules=budget.Rules(
            tune["trials"], tune["trials_per_task"], tune["patience"], tune["min_gain"]
        ),
        seed=tune["seed"],
        strategy=tune["strategy"],
        cost_model=tune["cost_model"],
        timing=measure.Timing(
            tune["number"], tune["repeat"], tune["min_repeat_ms"], tune["flush_cache"]
        ),
        trial_timeout_s=tune["trial_timeout_s"],
    )
    site = bench.Site(
        target=target,
        device=device,
        schedules=settings["schedules"],
        locks=ctx.locks,
        tvm=build,
        host={"arch": host.arch, "model": host.model, "cores": host.cores},
        log=ctx.work / "trials.log",
    )
    # both before the search starts its threads: what the children need, and the server they fork from
    measure.load_compiler(target, runs="remote" not in settings)
    with Nursery.fork() as nursery, _Clock(ctx.work / "seconds", tune["minutes"]) as clock:
        options = options._replace(seconds=clock.left)
        where: bench.Bench | None = None
        if "remote" in settings:
            place = remote.Place.of(settings["remote"])
            trials = (site, options.timing, options.trial_timeout_s)
            where = remote.RemoteBench(*trials, nursery, place, ctx.work)
        emit = clock.ticking(ctx.emit)
        return ledger, search.tune(tasks, options, site, ledger, nursery, emit, where)


def _describe(ledger: Ledger, tasks: Sequence[Task]) -> None:
    """Note what the workloads are that the ledger knows only by their keys: for people, and for relatives."""
    import tvm

    from tvmflow.tuning.workloads import family_key

    for task in tasks:
        if not (ledger.description(task.key) and ledger.kernel(task.key)):
            mod = tvm.ir.load_json(task.mod)
            types = [each.ty for each in mod["main"].params]
            buffers = [
                f"{each.dtype}[{'×'.join(str(int(n)) for n in each.shape)}]" for each in types
            ]
            about = {
                "name": task.name,
                "flops": task.flops,
                "buffers": buffers,
                "family": family_key(mod),
            }
            ledger.describe(task.key, about, task.mod)


class _Clock:
    """How long this tuning has taken, counting what it took before it was killed."""

    def __init__(self, path: Path, minutes: float | None) -> None:
        self._path = path
        self._limit = None if minutes is None else minutes * 60
        self._before = float(path.read_text()) if path.exists() else 0.0
        self._started = time.monotonic()

    @property
    def left(self) -> float | None:
        """Seconds until the limit; None without one."""
        return None if self._limit is None else max(self._limit - self._before, 0.0)

    def ticking(self, emit: Emit) -> Emit:
        """The same, and it notes the time."""

        def tick(event: Event) -> None:
            self._note()
            emit(event)

        return tick

    def _note(self) -> None:
        aside = self._path.with_suffix(".part")
        aside.write_text(str(self._before + time.monotonic() - self._started))
        aside.replace(self._path)

    def __enter__(self) -> _Clock:
        return self

    def __exit__(self, *_: object) -> None:
        self._note()


def _complain(results: list[Tuned]) -> None:
    """Say which workloads have no schedule that works. Raises StageError when none at all has one."""
    asked = [each for each in results if each.trials]
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
        "trials": result.trials,
        "measured": result.measured,
        "failed": result.failed,
        "calls": result.calls,
        "untuned_us": None if result.untuned_s is None else round(result.untuned_s * 1e6, 3),
        "best_us": None if result.best_s is None else round(result.best_s * 1e6, 3),
        "spread": round(result.spread, 4),
        "seconds": round(result.seconds, 3),
        **({"first_failure": result.first_failure} if result.first_failure else {}),
    }
