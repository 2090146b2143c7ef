"""`tune`: search schedules for a model's workloads, with the ledger that all models share."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from tvmflow.core import packages
from tvmflow.core.errors import StageError
from tvmflow.core.formatting import count_text, duration_text, latency_text
from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.core.types import Json, RunTraits
from tvmflow.recipe import Recipe
from tvmflow.runtime.bundles import VM
from tvmflow.stages.base import (
    KnownFacts,
    Settings,
    StageContext,
    StageSettings,
    StageTraits,
    name_some,
    no_files,
    schedules_version,
)
from tvmflow.stages.runtime_choice import choose_runtime
from tvmflow.targets import devices
from tvmflow.targets.backends import backend_for
from tvmflow.targets.host import read_host
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.targets.threads import count_cpus, count_usable_cpus
from tvmflow.targets.tvm_target import with_threads
from tvmflow.tuning.budget import ROOFLINE_SHARE, BudgetRules, Task, TrialForecast, forecast_trials
from tvmflow.tuning.ledger import Ledger, WorkloadDescription, target_key
from tvmflow.tuning.ledger_folders import read_records
from tvmflow.tuning.tuning_job import (
    NOT_TUNED,
    BannedSchedule,
    TuneFacts,
    WorkloadFacts,
    search_name,
)

if TYPE_CHECKING:
    from tvmflow.core.fork_server import ChildFunction, ForkServer, Outcome
    from tvmflow.tuning.libraries import LibraryRequest


class TrialSettings(StageSettings):
    """The machine that measures trials; `remote` describes how to reach devices behind RPC.

    `threads` is the thread count of kernels; None for code without CPU threads. `by_driver` means that kernels are
    measured in C libraries, which launch them with the device's driver.
    """

    schedules: int
    target: dict[str, Json]
    threads: int | None = None
    device: dict[str, str]
    remote: dict[str, Json] | None = None
    by_driver: bool = False

    @property
    def measured_target(self) -> dict[str, Json]:
        """TVM's target with the thread count, under which the ledger keeps the trials."""
        return with_threads(self.target, self.threads)

    @property
    def measured_devices(self) -> tuple[str, ...]:
        """The device of this machine on which kernels are timed; none if devices are behind RPC."""
        return () if self.remote else (self.device["kind"],)

    def open_ledger(self, root: Path) -> Ledger:
        """Open the ledger of the measured target in the folder of all ledgers."""
        tvm_build = packages.identity("apache-tvm")
        return Ledger.open(root, self.measured_target, tvm_build, self.device)


class DeviceChildren(NamedTuple):
    """Children of a stage, each with exclusive use of a device; `log` is the file for their output."""

    device: Mapping[str, str]
    context: StageContext
    fork_server: ForkServer
    log: str

    def call(self, function: ChildFunction, payload: Json, timeout_s: float) -> Outcome:
        """Run a function in a child; StageError if the run was cancelled."""
        log = self.context.work / self.log
        with devices.exclusive(self.context.locks, self.device):
            outcome = self.fork_server.call(function, payload, timeout_s=timeout_s, log=log)
        if outcome.kind == "cancelled":
            raise StageError("measuring was cancelled", fix="run it again")
        return outcome


class LibrarySettings(TrialSettings):
    """The runtime of whole libraries that are compared."""

    runtime: str

    def library_request(self, workloads: str = "") -> LibraryRequest:
        """Return how libraries are built; `workloads` is the path of the saved modules."""
        from tvmflow.tuning.libraries import LibraryRequest

        return LibraryRequest(
            target=self.target,
            # if kernels run on a device, the threads are for the steps on the CPU
            threads=self.threads or count_usable_cpus(),
            runtime=self.runtime,
            rules_version=self.schedules,
            workloads=workloads,
        )


class SearchSettings(Settings):
    """The budget and the options of searching and measuring; see `recipe.Tune`.

    `interim` marks a part of a longer search, after which the best result so far is delivered; the first part has 0
    minutes.
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
        """False if nothing is measured, and only trials in the ledger are used."""
        return self.minutes != 0

    @property
    def budget_rules(self) -> BudgetRules:
        """The limits of the budget."""
        return BudgetRules(**self.model_dump(include=set(BudgetRules._fields)))


class TuneSettings(TrialSettings):
    """The search; `unmeasurable_reason` says why the target cannot be measured, if it cannot."""

    tune: SearchSettings
    unmeasurable_reason: str = ""


class FinalistSettings(Settings):
    """The measuring options, and the minimum coverage by scheduled kernels; see `recipe.Tune`."""

    number: int
    min_repeat_ms: int
    flush_cache: bool
    trial_timeout_s: float
    min_coverage: float | None = None


class PickBestSettings(LibrarySettings):
    """The options for measuring finalists and the whole library."""

    tune: FinalistSettings


class NoTrials(Settings):
    """A budget of 0."""

    trials: Literal[0]


class NoSearchSettings(StageSettings):
    """The settings without a search: nothing else affects the result."""

    tune: NoTrials


NO_SEARCH: Final = NoSearchSettings(tune=NoTrials(trials=0))


def trial_settings(recipe: Recipe, target: ResolvedTarget) -> dict[str, Any]:
    """Return the fields of `TrialSettings`, except `by_driver`."""
    return {
        "schedules": schedules_version(recipe),
        "target": target.tvm,
        # kernels of a GPU have no CPU threads
        "threads": target.threads if backend_for(target.tvm).RUNS_ON_HOST_CPU else None,
        "device": target.device,
        "remote": target.remote or None,
    }


def is_measured_by_driver(recipe: Recipe, target: ResolvedTarget) -> bool:
    """Return whether kernels are launched with a device's driver here, without TVM's runtime."""
    has_executor = bool(backend_for(target.tvm).EXECUTOR)
    return has_executor and not target.remote and choose_runtime(recipe, target) != VM


def find_ledger_key(preimage: Mapping[str, Json]) -> str:
    """Return the name of the ledger's folder for a search's trials; empty if nothing was searched."""
    settings = preimage.get("settings", {})
    if "target" not in settings:
        return ""
    target = with_threads(settings["target"], settings.get("threads"))
    return target_key(target, preimage["tools"]["apache-tvm"], settings["device"])


# ---------------------------------------------------------------- the stage


NAME: Final = "tune"


def forecast(
    settings: TuneSettings | NoSearchSettings,
    inputs: Mapping[str, Path],
    ledger: Path,
    tvm_build: str,
) -> TrialForecast:
    """Return how much of a search the ledger has; this only reads."""
    if isinstance(settings, NoSearchSettings):
        return TrialForecast(0)
    if "extract_tasks/tasks.json" not in inputs:
        return TrialForecast(settings.tune.trials, settings.tune.minutes)
    tasks = load_tasks(inputs, settings.tune)
    folder = ledger / target_key(settings.measured_target, tvm_build, settings.device)
    records = {task.key: read_records(folder / f"{task.key}.jsonl").records for task in tasks}
    search = search_name(settings.tune.strategy, settings.tune.seed, settings.schedules)
    return forecast_trials(tasks, records, settings.tune.budget_rules, settings.schedules, search)


TRAITS: Final = StageTraits(
    version=5,
    scope="measured",
    needs={"extract_tasks": ("tasks.json", "workloads.json")},
    tools=("apache-tvm", "apache-tvm-ffi"),
    timeout_s=7 * 24 * 3600.0,
    compiles_kernels=True,
    forecast=forecast,
    run=RunTraits(measures=True, searches=True, uses_ledger=True),
)
deliveries = no_files

RECORDS: Final = "records.json"

# Above this relative change of one kernel's time, the machine's speed was not stable during the search.
_MAX_DRIFT: Final = 0.1
_FINISHED: Final = "; it had its share of this budget before"
_STOPPED_TEXTS: Final[Mapping[str, str]] = {
    "time": "stopped at tune.minutes; raise it and run again to continue",
    "exhausted": "stopped before the budget was spent: every search space was exhausted",
    "converged": "stopped before the budget was spent: nothing worth a trial is left to gain "
    "(with tune.patience it goes on)",
    "no search": "nothing was searched: these are the best schedules so far",
    "finished": "stopped before the budget was spent: the other kernels had their share in an earlier search; "
    "raise it and run again to continue",
}


def settings(recipe: Recipe, target: ResolvedTarget) -> TuneSettings | NoSearchSettings:
    """Return the recipe's search, and the machine to measure on."""
    if not recipe.tune.trials:
        return NO_SEARCH
    return TuneSettings(
        **trial_settings(recipe, target),
        tune=SearchSettings.model_validate(recipe.tune),
        unmeasurable_reason=target.unmeasurable_reason,
        by_driver=is_measured_by_driver(recipe, target),
    )


def run(settings: TuneSettings | NoSearchSettings, context: StageContext) -> TuneFacts:
    """Measure the trials of the budget that the ledger lacks; write each workload's best trials."""
    if isinstance(settings, NoSearchSettings):
        (context.out / RECORDS).write_text("{}")
        return NOT_TUNED._replace(usable_cpus=count_usable_cpus(), cpus=count_cpus())
    tasks = load_tasks(context.inputs, settings.tune)
    ledger, facts = search(settings, context, tasks)
    if settings.tune.measures:
        _check_any_trial_worked(facts.workloads)
    ledgers = {task.key: ledger.workload(task.key) for task in tasks}
    best = {
        task.key: [
            {
                "id": trial.id,
                "trace": trial.trace,
                "seconds": trial.seconds,
                # a store that fetches this result may lack the trial in its ledger
                "when": trial.when,
            }
            for trial in ledgers[task.key].valid()[: settings.tune.finalists]
        ]
        for task in tasks
    }
    if not settings.tune.measures and not any(best.values()):
        # without trials, `pick_best` has nothing to measure
        best = {}
    (context.out / RECORDS).write_text(json.dumps(best, indent=1, sort_keys=True))
    banned = (
        BannedSchedule(task.name, ban.trial, ban.reason, ban.when)
        for task in tasks
        for ban in ledgers[task.key].bans.values()
    )
    return facts._replace(
        threads=settings.threads,
        usable_cpus=count_usable_cpus(),
        cpus=count_cpus(),
        gain=_make_gain(facts.workloads),
        banned=tuple(banned),
    )


def search(
    settings: TuneSettings, context: StageContext, tasks: Sequence[Task]
) -> tuple[Ledger, TuneFacts]:
    """Search schedules for the tasks, and return the ledger with all trials."""
    from tvmflow.core.fork_server import ForkServer
    from tvmflow.tuning import measure, measurer, roofline, rpc_device
    from tvmflow.tuning.search import Tuning
    from tvmflow.tuning.tuning_job import SearchOptions, WorkClock

    if settings.unmeasurable_reason:
        raise StageError(
            f"nothing can be measured for this target on this machine: {settings.unmeasurable_reason}",
            fix="set tune.trials to 0 for it, or tune on a machine that can run it",
        )
    tune, host, ledger = settings.tune, read_host(), settings.open_ledger(context.ledger)
    _describe_workloads(ledger, tasks)
    measure_context = measurer.MeasureContext(
        target=settings.measured_target,
        device=settings.device,
        rules_version=settings.schedules,
        locks=context.locks,
        tvm=packages.identity("apache-tvm"),
        host={
            "arch": host.arch,
            "model": host.model,
            "cores": host.cores,
            **({"threads": settings.threads} if settings.threads else {}),
        },
        log=context.work / "trials.log",
        clock=WorkClock(),
        timing=measure.Timing(tune.number, tune.repeat, tune.min_repeat_ms, tune.flush_cache),
        timeout_s=tune.trial_timeout_s,
        by_driver=settings.by_driver,
    )
    options = SearchOptions(
        rules=tune.budget_rules,
        seed=tune.seed,
        strategy=tune.strategy,
        cost_model=tune.cost_model,
    )
    # load modules for the children and start the fork server before the search starts threads
    measure.load_compiler(
        settings.target, runs=settings.remote is None, by_driver=settings.by_driver
    )
    with ForkServer.fork() as fork_server:
        remote: measurer.Measurer | None = None
        if settings.remote:
            remote = rpc_device.RemoteMeasurer(
                measure_context,
                fork_server,
                rpc_device.RpcEndpoint.from_settings(settings.remote),
                context.work,
            )

        def measure_roofline() -> roofline.Roofline | None:
            # rooflines of GPUs and remote devices are not measured
            if settings.remote or not backend_for(settings.target).RUNS_ON_HOST_CPU:
                return None
            with contextlib.ExitStack() as stack:
                with measure_context.clock.waiting():
                    stack.enter_context(devices.exclusive(context.locks, settings.device))
                outcome = fork_server.call(
                    roofline.measure_roofline,
                    {
                        "target": settings.measured_target,
                        "rules_version": measure_context.rules_version,
                    },
                    timeout_s=tune.trial_timeout_s,
                    log=measure_context.log,
                )
            if outcome.kind != "ok" or outcome.value["gflops"] is None:
                return None
            bandwidths = tuple((size, speed) for size, speed in outcome.value["bandwidths"])
            return roofline.Roofline(outcome.value["gflops"], bandwidths)

        tuning = Tuning(
            *(tasks, options, measure_context, ledger, fork_server, context.emit, remote),
            measure_roofline=measure_roofline,
        )
        with measure_context.clock.ticking():
            return ledger, tuning.run()


def _describe_workloads(ledger: Ledger, tasks: Sequence[Task]) -> None:
    import tvm

    from tvmflow.tuning.workloads import shapes_text

    for task in tasks:
        if not ledger.description(task.key).name or ledger.kernel(task.key) != task.mod:
            buffers = shapes_text(tvm.ir.load_json(task.mod))
            description = WorkloadDescription(task.name, task.flops, buffers)
            ledger.describe(task.key, description, task.mod)


def _describe_threads(facts: TuneFacts) -> list[str]:
    if not facts.threads:
        return []
    line = f"measured with {count_text(facts.threads, 'thread')}"
    if facts.usable_cpus < facts.cpus:
        line += (
            f"; the run might use {facts.usable_cpus} of this machine's {facts.cpus} CPUs "
            "(the target's `threads` sets another number)"
        )
    if not facts.starting_points:
        return [line]
    count = count_text(facts.starting_points, "schedule")
    return [line, f"{count} measured first: the best on {'; '.join(facts.near_targets)}"]


def _check_any_trial_worked(results: Sequence[WorkloadFacts]) -> None:
    tried = [result for result in results if result.trials]
    broken = [result for result in tried if result.best_us is None and result.failed]
    if broken and len(broken) == len(tried):
        failed = sum(result.failed for result in broken)
        raise StageError(
            f"all {count_text(failed, 'trial')} failed; the first: {broken[0].first_failure}",
            fix="look at trials.log in the stage's work folder; a longer tune.trial_timeout_s may help",
        )


def _make_gain(workloads: Sequence[WorkloadFacts]) -> dict[str, float]:
    """Return the `found` and the `possible` speedup; empty if a time is unknown."""
    untuned_us = tuned_us = least_us = 0.0
    for w in workloads:
        if not w.untuned_us or not w.roofline_us:
            return {}
        best_us = min(w.untuned_us, w.best_us or w.untuned_us)
        untuned_us += w.calls * w.untuned_us
        tuned_us += w.calls * best_us
        least_us += w.calls * min(best_us, w.roofline_us)
    if not workloads:
        return {}
    return {"found": round(untuned_us / tuned_us, 4), "possible": round(untuned_us / least_us, 4)}


def describe(facts: TuneFacts, inputs: KnownFacts) -> list[str]:
    """Return lines with the trials of a search, why it ended, and unusual events."""
    if not facts.trials:
        return ["not tuned (tune.trials is 0)"]
    done = facts.measured + facts.reused
    has_limit = facts.stopped not in ("time", "no search") and facts.trials < UNLIMITED_TRIALS
    budget = f"of {facts.trials} " if has_limit else ""
    took = f" in {duration_text(facts.seconds)}" if facts.measured else ""
    failed = f", {facts.failed} failed" if facts.failed else ""
    counts = f"{facts.measured} measured{took}, {facts.reused} from the ledger{failed}"
    trials = "trial" if not budget and done == 1 else "trials"
    lines = [f"{done} {budget}{trials} ({counts})"]
    lines += _describe_threads(facts)
    if facts.stopped in _STOPPED_TEXTS:
        lines.append(_STOPPED_TEXTS[facts.stopped])
    lines += _describe_dynamic_shapes(facts.workloads)
    if single := list_single(facts):
        lines.append(f"the rules have a single schedule for {name_some(single)}")
    lines += _describe_roofline(facts.workloads)
    if facts.drift > _MAX_DRIFT:
        lines.append(
            f"the machine's speed changed during the search: one kernel's time by {facts.drift:.0%}"
        )
    lines += [f"note: {text}" for text in facts.repairs]
    for ban in facts.banned:
        lines.append(
            f"BANNED on {ban.when[:10]}: the schedule {ban.trial[:12]} of {ban.name}: {ban.reason}"
        )
    if exhausted := [name for name in facts.exhausted if name not in single]:
        lines.append(f"search space exhausted: {name_some(exhausted)}")
    if facts.untunable:
        lines.append(f"no candidate worked: {name_some(facts.untunable)}")
    return lines


def describe_end(facts: TuneFacts, kept: int | None) -> str:
    """Return the result of a search, or why it ended before its budget; else an empty string.

    The library has `kept` tuned kernels; None if unknown.
    """
    if not facts.measured:
        return ""
    share = ""
    if facts.gain:
        reached = facts.gain["found"] / facts.gain["possible"]
        share = f", and kernels reach {reached:.0%} of the roofline"
    took = duration_text(facts.seconds)
    if kept == 0:
        tried = facts.measured + facts.reused
        return f"no schedule is faster than the untuned ones: {tried} tried in {took}{share}"
    reason = "" if facts.stopped == "time" else _STOPPED_TEXTS.get(facts.stopped, "")
    return reason and f"the search {reason}; it took {took}{share}"


def list_single(facts: TuneFacts) -> list[str]:
    """Return the workloads for which the rules have a single schedule."""
    return [w.name for w in facts.workloads if w.name in facts.exhausted and not w.trials]


def _describe_dynamic_shapes(workloads: Sequence[WorkloadFacts]) -> list[str]:
    dynamic = [workload for workload in workloads if workload.sizes]
    if not dynamic:
        return []
    count = count_text(len(dynamic), "workload")
    verb = "has" if len(dynamic) == 1 else "have"
    return [
        f"{count} {verb} dynamic shapes: each schedule is measured at {'; '.join(dynamic[0].sizes)}"
    ]


def _describe_roofline(workloads: Sequence[WorkloadFacts]) -> list[str]:
    lines = _describe_possible_gain(workloads)
    done = sum(workload.at_roofline for workload in workloads)
    if not done:
        return lines
    verb = "reaches" if done == 1 else "reach"
    share = f"{ROOFLINE_SHARE:.0%} of the roofline and {'is' if done == 1 else 'are'}"
    count = f"{done} of {count_text(len(workloads), 'workload')}"
    return [*lines, f"{count} {verb} {share} not tuned further"]


def _describe_possible_gain(workloads: Sequence[WorkloadFacts]) -> list[str]:
    gains_s = {True: 0.0, False: 0.0}
    total_s = 0.0
    for workload in workloads:
        if not workload.untuned_us or workload.roofline_us is None:
            return []
        untuned_s = workload.calls * workload.untuned_us / 1e6
        least_s = workload.calls * workload.roofline_us / 1e6
        total_s += untuned_s
        gains_s[workload.trials > 0] += max(untuned_s - least_s, 0.0)
    tried = sum(workload.trials > 0 for workload in workloads)
    if not total_s:
        return []
    line = (
        f"{tried} of {count_text(len(workloads), 'workload')} could gain at most "
        f"{latency_text(gains_s[True])} of {latency_text(total_s)}"
    )
    if tried < len(workloads):
        line += f"; those without a trial {latency_text(gains_s[False])} together"
    return [line]


def explain(facts: TuneFacts) -> list[str]:
    """Return each workload's trials, time and share of its roofline, the longest time first."""
    lines = []
    for workload in sorted(facts.workloads, key=lambda w: -w.calls * (w.untuned_us or 0.0)):
        times = [us for us in (workload.untuned_us, workload.best_us) if us]
        if times and workload.roofline_us:
            share = min(workload.roofline_us / min(times), 1.0)
            lines.append(
                f"  {workload.name}: {count_text(workload.trials, 'trial')}, "
                f"{latency_text(min(times) / 1e6)} per call, {share:.0%} of its roofline"
                f"{_FINISHED if workload.finished else ''}"
            )
    return ["workloads against the roofline of this machine", *lines] if lines else []


# ---------------------------------------------------------------- tuned kernels
# The kernels to tune.


def load_tasks(inputs: Mapping[str, Path], tune: SearchSettings) -> list[Task]:
    """Return the workloads that can be tuned and that the recipe selects."""
    modules = json.loads(inputs["extract_tasks/workloads.json"].read_text())
    tasks = json.loads(inputs["extract_tasks/tasks.json"].read_text())
    tunable = [task for task in tasks if task["tunable"]]
    selected = select_kernels([task["names"] for task in tunable], only=tune.only, skip=tune.skip)
    return [
        Task(
            key=task["key"],
            name=task["names"][0],
            calls=task["weight"],
            flops=task["flops"],
            mod=modules[task["key"]],
            sizes=tuple(task.get("sizes", ())),
        )
        for task, is_selected in zip(tunable, selected, strict=True)
        if is_selected
    ]


def select_kernels(
    kernels: Sequence[Sequence[str]], *, only: Sequence[str], skip: Sequence[str]
) -> list[bool]:
    """Return for each kernel, given by all its names, whether the recipe selects it for tuning.

    Raises:
        StageError: if an entry of `only` or `skip` (name, pattern or operator) selects no kernel.
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
    """Return whether a pattern matches a kernel's name, or names an operator in it (conv2d)."""
    operator = re.compile(rf"(^|_){re.escape(pattern)}\d*(_|$)")
    return any(fnmatch.fnmatchcase(name, pattern) or operator.search(name) for name in names)
