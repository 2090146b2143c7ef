"""`pick_best`: measure each workload's finalists again, interleaved, and keep the fastest.

Then the whole library is compared with the untuned one, and a slower one stays untuned. The
ledger keeps these times, so that the same finalists always have the same winner.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict, cast

from tvmflow.core import spans
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.codec import from_json, omits_empty
from tvmflow.core.errors import StageError, VerifyFailed
from tvmflow.core.formatting import count_text, duration_text, latency_text
from tvmflow.core.types import Json, RunTraits
from tvmflow.recipe import Recipe
from tvmflow.stages.base import (
    Files,
    KnownFacts,
    StageContext,
    StageTraits,
    name_some,
    no_lines,
    progress_event,
)
from tvmflow.stages.lower import LOWERED, LOWERED_ROLE
from tvmflow.stages.runtime_choice import choose_runtime
from tvmflow.stages.tune import (
    NO_SEARCH,
    DeviceChildren,
    FinalistSettings,
    NoSearchSettings,
    PickBestSettings,
    is_measured_by_driver,
    list_single,
    trial_settings,
)
from tvmflow.targets.backends import backend_for
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.tuning.roofline import MeasuredKernel, gflops, gflops_text, render_roofline
from tvmflow.tuning.tuning_job import TuneFacts

if TYPE_CHECKING:
    from tvmflow.core.fork_server import Outcome
    from tvmflow.tuning.ledger import Ledger, WorkloadLedger
    from tvmflow.tuning.libraries import LibraryTimes
    from tvmflow.tuning.measurer import FinalistsRequest, FinalistTimes

NAME: Final = "pick_best"
TRAITS: Final = StageTraits(
    version=9,
    scope="measured",
    needs={
        "lower": (LOWERED,),
        "extract_tasks": ("tasks.json", "workloads.json"),
        "tune": ("records.json",),
    },
    tools=("apache-tvm", "apache-tvm-ffi"),
    timeout_s=3600.0,
    compiles_kernels=True,
    run=RunTraits(measures=True, searches=True, uses_ledger=True),
)
explain = no_lines

CHOSEN: Final = "chosen.json"
ROOFLINE: Final = "roofline.svg"
FINALISTS: Final = "finalists.json"

LOG: Final = "finalists.log"

_ROUNDS: Final = 9
# Two schedules count as equally fast if their medians differ by less than the spread of the faster one's samples,
# limited to this range.
_MIN_NOISE: Final = 0.02
_MAX_NOISE: Final = 0.10
_SHOWN_KERNELS: Final = 5
_NAME_WIDTH: Final = 48


def settings(recipe: Recipe, target: ResolvedTarget) -> PickBestSettings | NoSearchSettings:
    """Return how to measure, and the machine to measure on."""
    if not recipe.tune.trials:
        return NO_SEARCH
    return PickBestSettings(
        **trial_settings(recipe, target),
        tune=FinalistSettings.model_validate(recipe.tune),
        runtime=choose_runtime(recipe, target),
        by_driver=is_measured_by_driver(recipe, target),
    )


def deliveries(recipe: Recipe, target: ResolvedTarget) -> Files:
    """Return the roofline chart, if the recipe tunes."""
    if not recipe.tune.trials:
        return ()
    return ((ROOFLINE, f"{target.part}-{ROOFLINE}" if target.part else ROOFLINE),)


class SizeTimes(TypedDict):
    """The times in µs of a kernel at one of several sizes, untuned and tuned."""

    at: str
    untuned_us: float
    tuned_us: float


class _DynamicJudgement(TypedDict, total=False):
    """A kernel with dynamic shapes: times of the winner, and problems with finalists' values (`wrong`)."""

    sizes: list[SizeTimes]
    wrong: list[str]


class Judgement(_DynamicJudgement):
    """The outcome of measuring a workload's finalists again; times are in µs.

    `rule` is the schedule rule of the untuned kernel. `winner` is the id of the finalist that is faster than the
    untuned kernel, or None. `overruled` says why a faster finalist is not used, and `error` why nothing could be
    measured. Each of `finalists` has an `id`, and in `samples_us` one time per round.
    """

    name: str
    weight: int
    flops: float
    rule: str
    untuned_us: float | None
    tuned_us: float | None
    error: str
    winner: str | None
    overruled: str
    finalists: list[dict[str, Json]]


class Finalist(NamedTuple):
    """A trial measured again.

    Attributes:
        ledger_s: The median seconds of the trial in the ledger.
        samples: The seconds in each round; for several sizes, the geometric means.
        sizes: For a kernel that is measured at several sizes, the samples at each size.
    """

    id: str
    ledger_s: float
    samples: tuple[float, ...]
    sizes: tuple[tuple[float, ...], ...] = ()


def choice_text(chosen: Mapping[str, Json]) -> str:
    """Return a choice (workload -> trace) as canonical JSON text."""
    return json.dumps(chosen, indent=1, sort_keys=True)


class LibraryFacts(TypedDict, total=False):
    """The comparison of the tuned library with the untuned one; empty if they were not compared.

    Attributes:
        overruled: The reason why kernels stay untuned -> the kernels that are faster only in isolation.
        pairs: How many pairs of times were measured.
    """

    overruled: dict[str, list[str]]
    error: str
    tuned_us: float
    untuned_us: float
    pairs: int
    speedup: float
    low: float
    high: float


@omits_empty("size_speedups", "wrong")
class PickBestFacts(NamedTuple):
    """The outcome of tuning; times are µs per inference.

    Attributes:
        tuned: How many workloads have a schedule from the search.
        tunable: How many can be tuned.
        untried: How many tunable workloads have no successful trial.
        coverage: The share of the untuned time in kernels with a schedule, from the search or a rule.
        peak_gflops: The peak of the machine in GFLOPS; None if unknown.
        threads: The number of threads that kernels ran with; None if nothing was measured.
        library: The outcome for the whole library.
        size_speedups: For each tuned kernel with dynamic shapes, the speedup at each tuning size.
        wrong: For kernels with dynamic shapes, how banned schedules compute wrong values.
    """

    tuned: int
    tunable: int
    untried: int
    coverage: float
    untuned_us: float
    tuned_us: float
    speedup: float
    kernels: tuple[MeasuredKernel, ...]
    errors: Mapping[str, str]
    peak_gflops: float | None = None
    threads: int | None = None
    library: LibraryFacts = LibraryFacts()
    size_speedups: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    wrong: Mapping[str, tuple[str, ...]] = MappingProxyType({})


def run(settings: PickBestSettings | NoSearchSettings, context: StageContext) -> PickBestFacts:
    """Write the winner's trace for every workload that tuning makes faster, and all times."""
    records = json.loads(context.inputs["tune/records.json"].read_text())
    tasks = [task for task in _read_json(context.inputs, "tasks.json") if task["tunable"]]
    judgements: dict[str, Judgement] = {}
    peak: float | None = None
    library: LibraryTimes | None = None
    if records and isinstance(settings, PickBestSettings):
        judgements, peak, library = _measure(settings, context, tasks, records)
    _check_any_measured(judgements)
    drop_slower(judgements, library)
    chosen = _choose_traces(judgements, records)
    (context.out / CHOSEN).write_text(choice_text(chosen))
    (context.out / FINALISTS).write_text(json.dumps(judgements, indent=1, sort_keys=True))
    facts = _make_facts(len(tasks), judgements, peak, make_facts(judgements, library))
    (context.out / ROOFLINE).write_text(render_roofline(facts.kernels, peak))
    if not isinstance(settings, PickBestSettings):
        return facts
    _check_coverage(facts.coverage, settings.tune.min_coverage)
    return facts._replace(threads=settings.threads)


def _read_json(inputs: Mapping[str, Path], name: str) -> Any:
    return json.loads(inputs[f"extract_tasks/{name}"].read_text())


def _choose_traces(
    judgements: Mapping[str, Judgement], records: Mapping[str, list[dict[str, Json]]]
) -> dict[str, Json]:
    return {
        key: next(trial["trace"] for trial in records[key] if trial["id"] == judgement["winner"])
        for key, judgement in judgements.items()
        if judgement["winner"] is not None
    }


def _measure(
    settings: PickBestSettings,
    context: StageContext,
    tasks: Sequence[Mapping[str, Json]],
    records: Mapping[str, list[dict[str, Json]]],
) -> tuple[dict[str, Judgement], float | None, LibraryTimes | None]:
    """Return the judgement of each workload by key, the peak in GFLOPS, and the library's times."""
    from tvmflow.core.fork_server import ForkServer
    from tvmflow.tuning import measure

    ledger = settings.open_ledger(context.ledger)
    modules = _read_json(context.inputs, "workloads.json")
    judgements: dict[str, Judgement] = {}
    measure.load_compiler(
        settings.target, runs=settings.remote is None, by_driver=settings.by_driver
    )
    with ForkServer.fork() as fork_server:
        children = DeviceChildren(settings.device, context, fork_server, LOG)
        peak = measure_peak(settings, children)
        for done, task in enumerate(tasks, 1):
            key, trials = task["key"], records.get(task["key"], [])
            with spans.span(f"finalists of {task['names'][0]}", trials=len(trials)):
                measured = measure_workload(
                    settings, children, modules[key], trials, ledger.workload(key)
                )
            judgements[key] = judge_finalists(task, measured, trials)
            bans = ledger.workload(key).bans if task.get("sizes") or settings.by_driver else {}
            if wrong := [bans[trial["id"]].reason for trial in trials if trial["id"] in bans]:
                judgements[key]["wrong"] = wrong
            context.emit(
                progress_event(
                    *("workload", done, len(tasks), task["names"][0]),
                    best_us=judgements[key]["tuned_us"],
                    failed=sum(1 for judgement in judgements.values() if judgement["error"]),
                )
            )
        drop_negligible(judgements)
        chosen = _choose_traces(judgements, records)
        library = compare_libraries(settings, children, tasks, chosen, ledger)
    return judgements, peak, library


def _check_any_measured(judgements: Mapping[str, Judgement]) -> None:
    errors = [judgement["error"] for judgement in judgements.values() if judgement["error"]]
    if errors and len(errors) == len(judgements):
        raise StageError(
            f"no workload could be measured again; the first error: {errors[0]}",
            fix="look at finalists.log in the stage's work folder; a longer tune.trial_timeout_s may help",
        )


def _check_coverage(coverage: float, min_coverage: float | None) -> None:
    if min_coverage is not None and coverage < min_coverage:
        raise VerifyFailed(
            f"kernels with a schedule cover {coverage:.0%} of the untuned time, "
            f"below tune.min_coverage {min_coverage:g}",
            fix="raise tune.trials; what was measured is kept",
        )


def _make_facts(
    tunable: int, judgements: Mapping[str, Judgement], peak: float | None, library: LibraryFacts
) -> PickBestFacts:
    untuned_us = tuned_us = covered_us = 0.0
    kernels: list[MeasuredKernel] = []
    for judgement in judgements.values():
        calls, before_us = judgement["weight"], judgement["untuned_us"]
        after_us = judgement["tuned_us"]
        if before_us is None:
            continue
        untuned_us += calls * before_us
        tuned_us += calls * (before_us if after_us is None else after_us)
        if after_us is not None or judgement["rule"] != "none":
            covered_us += calls * before_us
        kernels.append(
            MeasuredKernel(
                name=judgement["name"],
                calls=calls,
                untuned_us=round(before_us, 3),
                tuned_us=None if after_us is None else round(after_us, 3),
                flops=judgement["flops"],
            )
        )
    return PickBestFacts(
        tuned=sum(1 for kernel in kernels if kernel.tuned_us is not None),
        tunable=tunable,
        untried=sum(1 for j in judgements.values() if not j["finalists"] and not j["error"]),
        coverage=round(covered_us / untuned_us, 4) if untuned_us else 0.0,
        untuned_us=round(untuned_us, 3),
        tuned_us=round(tuned_us, 3),
        speedup=round(untuned_us / tuned_us, 3) if tuned_us else 1.0,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.calls * kernel.untuned_us)),
        errors={j["name"]: j["error"] for j in judgements.values() if j["error"]},
        peak_gflops=peak,
        library=library,
        size_speedups={
            judgement["name"]: {
                row["at"]: round(row["untuned_us"] / row["tuned_us"], 3) for row in rows
            }
            for judgement in judgements.values()
            if judgement["winner"] and (rows := judgement.get("sizes"))
        },
        wrong={j["name"]: tuple(j["wrong"]) for j in judgements.values() if j.get("wrong")},
    )


# ---------------------------------------------------------------- finalists


def measure_workload(
    settings: PickBestSettings,
    children: DeviceChildren,
    mod: str,
    trials: Sequence[Mapping[str, Json]],
    ledger: WorkloadLedger,
) -> FinalistTimes:
    """Return a workload's times, untuned and with each finalist, from the ledger or a measurement."""
    from tvmflow.tuning.measure import Timing
    from tvmflow.tuning.measurer import FinalistsRequest, read_or_measure

    tune = settings.tune
    request = FinalistsRequest(
        mod=mod,
        traces=[trial["trace"] for trial in trials],
        target=settings.measured_target,
        rules_version=settings.schedules,
        # samples are shorter than in the search, but there are more, spread over time
        timing=Timing(tune.number, 1, max(10, tune.min_repeat_ms // 5), tune.flush_cache),
        by_driver=settings.by_driver,
        rounds=_ROUNDS,
    )
    return read_or_measure(request, ledger, lambda: _measure_finalists(request, settings, children))


def _measure_finalists(
    request: FinalistsRequest, settings: PickBestSettings, children: DeviceChildren
) -> FinalistTimes:
    from tvmflow.tuning.measurer import FinalistTimes, time_finalists
    from tvmflow.tuning.rpc_device import DevicePool, RpcEndpoint, measure_finalists_remotely

    timeout_s = settings.tune.trial_timeout_s * (len(request.traces) + 2)
    if settings.remote:
        work, endpoint = children.context.work, RpcEndpoint.from_settings(settings.remote)
        pool = DevicePool(endpoint, children.fork_server, work / LOG)
        return measure_finalists_remotely(request, pool, work, timeout_s)
    outcome = children.call(time_finalists, request.to_json(), timeout_s)
    if outcome.kind != "ok":
        return FinalistTimes(error=outcome.message)
    return from_json(FinalistTimes, outcome.value)


def measure_peak(settings: PickBestSettings, children: DeviceChildren) -> float | None:
    """Return the peak of this machine's CPU in GFLOPS; None for other devices, or if it is unknown."""
    from tvmflow.tuning import roofline

    if settings.remote or not backend_for(settings.target).RUNS_ON_HOST_CPU:
        return None
    payload = {"target": settings.measured_target}
    outcome = children.call(roofline.measure_peak, payload, settings.tune.trial_timeout_s)
    return float(outcome.value["gflops"]) if outcome.kind == "ok" else None


def judge_finalists(
    task: Mapping[str, Json], measured: FinalistTimes, trials: Sequence[Mapping[str, Json]]
) -> Judgement:
    """Return the winner among a workload's finalists, and the times that it was chosen by."""
    untuned_sizes, *sizes = measured.sizes or ((),) * (1 + len(measured.samples))
    finalists = [
        Finalist(trial["id"], trial["seconds"], samples, rows)
        for trial, samples, rows in zip(trials, measured.samples, sizes, strict=False)
        if samples
    ]
    untuned_s = median(measured.untuned) if measured.untuned else None
    winner = None
    if measured.untuned:
        winner = choose_finalist(finalists, measured.untuned, untuned_sizes)
    judgement: Judgement = {
        "name": task["names"][0],
        "weight": task["weight"],
        "flops": task["flops"],
        "rule": measured.rule,
        "untuned_us": None if untuned_s is None else untuned_s * 1e6,
        "tuned_us": median(winner.samples) * 1e6 if winner else None,
        "error": measured.error,
        "winner": winner.id if winner else None,
        "overruled": "",
        "finalists": [
            {"id": finalist.id, "samples_us": [seconds * 1e6 for seconds in finalist.samples]}
            for finalist in finalists
        ],
    }
    if winner and winner.sizes:
        judgement["sizes"] = [
            {"at": at, "untuned_us": median(untuned) * 1e6, "tuned_us": median(tuned) * 1e6}
            for at, untuned, tuned in zip(task["sizes"], untuned_sizes, winner.sizes, strict=False)
        ]
    return judgement


def choose_finalist(
    finalists: Sequence[Finalist],
    untuned: Sequence[float],
    untuned_sizes: Sequence[Sequence[float]] = (),
) -> Finalist | None:
    """Return the finalist to keep; None if none is faster than the untuned kernel beyond the noise.

    Of finalists without a significant difference, the one that is fastest in the ledger is kept, so that measuring
    again does not change the choice. A finalist that is slower at one of several sizes is never kept. `untuned`
    holds the untuned kernel's seconds in the same rounds, or a single time; `untuned_sizes` holds them at each size.
    """
    from tvmflow.tuning.measurer import MIN_GAIN, pair_with_untuned

    finalists = [
        finalist
        for finalist in finalists
        if not any(
            pair_with_untuned(row, other).ratio > 1 + MIN_GAIN
            for row, other in zip(finalist.sizes, untuned_sizes, strict=True)
        )
    ]
    if not finalists:
        return None
    fastest = min(finalists, key=lambda finalist: (median(finalist.samples), finalist.id))
    limit = median(fastest.samples) * (1 + _relative_noise(fastest.samples))
    equals = [finalist for finalist in finalists if median(finalist.samples) <= limit]
    winner = min(equals, key=lambda finalist: (finalist.ledger_s, finalist.id))
    times = pair_with_untuned(winner.samples, untuned)
    is_gain = times.ratio < 1 - MIN_GAIN and times.limits[1] < 1
    return winner if is_gain else None


def _relative_noise(samples: Sequence[float]) -> float:
    """Return half the interquartile range relative to the median, limited to a range."""
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    spread = (ordered[-1 - quarter] - ordered[quarter]) / 2 / median(ordered)
    return min(max(spread, _MIN_NOISE), _MAX_NOISE)


# ---------------------------------------------------------------- the summary


def describe(facts: PickBestFacts, inputs: KnownFacts) -> list[str]:
    """Return lines with the gain of tuning and the slowest kernels."""
    if not facts.untuned_us:
        return []
    tuned = inputs.get(TuneFacts)
    threads = f" (with {count_text(facts.threads, 'thread')})" if facts.threads else ""
    untried = max(facts.untried - (len(list_single(tuned)) if tuned else 0), 0)
    lines = [
        f"{_kept_text(facts, untried)}; {facts.coverage:.0%} of the time is in kernels with a schedule{threads}",
        *describe_libraries(facts.library, tuned.measured + tuned.reused if tuned else 0),
        *describe_roofline(facts, tuned),
    ]
    if facts.kernels:
        peak = facts.peak_gflops
        machine = f" (peak of this machine: {peak:.0f} GFLOPS)" if peak else ""
        seconds = {workload.name: workload.seconds for workload in tuned.workloads} if tuned else {}
        table = _kernel_table(facts.kernels[:_SHOWN_KERNELS], peak, seconds)
        lines.append(
            "tuned and untuned kernels, measured interleaved; total time per inference, "
            f"slowest first{machine}\n{table}"
        )
    lines += [
        f"{name} at each size: "
        + ", ".join(f"{speedup:.3g}× ({at})" for at, speedup in speedups.items())
        for name, speedups in facts.size_speedups.items()
    ]
    lines += [
        f"BANNED: a schedule of {name}: {reason}"
        for name, reasons in facts.wrong.items()
        for reason in reasons
    ]
    lines += _describe_untried(untried, len(tuned.untunable) if tuned else 0)
    return lines + [f"not measured again: {name}: {error}" for name, error in facts.errors.items()]


def _kept_text(facts: PickBestFacts, untried: int) -> str:
    kept = f"accepted tuned schedules for {facts.tuned} of {count_text(facts.tunable, 'workload')}"
    is_vain = not facts.tuned and not facts.library.get("overruled")
    # if trials failed or are missing, the lines below say so
    return f"{kept}: those of the rules are the fastest" if is_vain and not untried else kept


def _describe_untried(untried: int, untunable: int) -> list[str]:
    broken = min(untunable, untried)
    counts = {"no trial that worked": broken, "no trial": untried - broken}
    return [
        f"{count_text(count, 'workload')} {'has' if count == 1 else 'have'} {text}: not tuned"
        for text, count in counts.items()
        if count
    ]


def _kernel_table(
    kernels: Sequence[MeasuredKernel], peak: float | None, tuning_seconds: Mapping[str, float]
) -> str:
    lines = [
        f"    {'':<{_NAME_WIDTH}} {'calls':>5} {'untuned':>9} {'tuned':>9} {'speedup':>7} "
        f"{'GFLOPS':>11} {'saved/minute':>15}"
    ]
    for kernel in kernels:
        name, calls, untuned_us = kernel.name, kernel.calls, kernel.untuned_us
        tuned_us = kernel.call_us
        speedup = f"{untuned_us / tuned_us:.3g}×" if kernel.tuned_us else "–"
        short = name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 3]}..."
        saved_s = calls * (untuned_us - tuned_us) / 1e6
        lines.append(
            f"    {short:<{_NAME_WIDTH}} {calls:>5} {latency_text(calls * untuned_us / 1e6):>9} "
            f"{latency_text(calls * tuned_us / 1e6):>9} {speedup:>7} "
            f"{_gflops_text(kernel, peak):>11} "
            f"{_saved_per_minute(saved_s, tuning_seconds.get(name, 0.0)):>15}"
        )
    return "\n".join(lines)


def _gflops_text(kernel: MeasuredKernel, peak: float | None) -> str:
    value = gflops(kernel)
    return "–" if value is None or value < 1 else gflops_text(value, peak)


def _saved_per_minute(saved_s: float, tuning_s: float) -> str:
    """Return the time saved per inference for each minute of tuning in this run, as text."""
    if not tuning_s or saved_s <= 0:
        return "–"
    return latency_text(saved_s / (tuning_s / 60))


# ---------------------------------------------------------------- library choice
# The choice for the whole library: tuned kernels that are slower inside the library stay untuned, and all kernels do
# if the tuned library is not faster.


SLOWER_IN_LIBRARY: Final = "slower in the library"
LIBRARY_SLOWER: Final = "the library is not faster"
NEGLIGIBLE: Final = "its gain is negligible"
"""The reasons why a kernel stays untuned, although it is faster tuned in isolation."""

# If tuned kernels together save a smaller share of a call, the placement of code and data in memory decides which
# library is faster, and this changes with every build.
_MIN_LIBRARY_GAIN: Final = 0.01


def drop_negligible(judgements: Mapping[str, Judgement]) -> None:
    """Leave all kernels untuned if the winners together save less than 1 % of all kernels' time."""
    winners = [judgement for judgement in judgements.values() if judgement["winner"]]
    untuned_us = sum(j["weight"] * (j["untuned_us"] or 0.0) for j in judgements.values())
    saved_us = sum(
        j["weight"] * ((j["untuned_us"] or 0.0) - (j["tuned_us"] or 0.0)) for j in winners
    )
    if saved_us < _MIN_LIBRARY_GAIN * untuned_us:
        for judgement in winners:
            _overrule(judgement, NEGLIGIBLE)


def _overrule(judgement: Judgement, reason: str) -> None:
    judgement["overruled"] = reason
    judgement["winner"] = judgement["tuned_us"] = None


def compare_libraries(
    settings: PickBestSettings,
    children: DeviceChildren,
    tasks: Sequence[Mapping[str, Json]],
    chosen: Mapping[str, Json],
    ledger: Ledger,
) -> LibraryTimes | None:
    """Compare the tuned library with the untuned one; None if they cannot be timed here."""
    from tvmflow.tuning import libraries

    is_in_process = backend_for(settings.target).RUNS_ON_HOST_CPU or settings.by_driver
    if not chosen or settings.remote or not is_in_process:
        return None
    inputs = children.context.inputs
    request = settings.library_request(str(inputs["extract_tasks/workloads.json"]))
    lowered = inputs[LOWERED_ROLE]
    kernels = {task["key"]: dict.fromkeys(task["names"], 1.0) for task in tasks}

    def measure(keys: Collection[str]) -> Outcome:
        tuned = (lowered, {key: chosen[key] for key in keys})
        members = {key: (kernels[key], kernels[key]) for key in keys}
        payload = request.make_payload(tuned, lowered, members, libraries.TUNED)
        return children.call(libraries.measure_libraries, payload, libraries.TIMEOUT_S)

    # the records are those of all models with the same kernels and calls
    records = ledger.workload(digest_of({"library": {t["key"]: t["weight"] for t in tasks}}))
    digest = digest_of([chosen, settings.schedules, settings.runtime, libraries.TUNED.rounds])
    return libraries.read_or_compare(records, digest, sorted(chosen), measure)


def drop_slower(judgements: Mapping[str, Judgement], times: LibraryTimes | None) -> None:
    """Leave the kernels untuned that are slower in the library; all if the library is not faster."""
    for key, judgement in judgements.items():
        if times is None or judgement["winner"] is None:
            continue
        if key in times.slower:
            _overrule(judgement, SLOWER_IN_LIBRARY)
        elif not times.keeps_tuned:
            _overrule(judgement, LIBRARY_SLOWER)


def make_facts(judgements: Mapping[str, Judgement], times: LibraryTimes | None) -> LibraryFacts:
    """Return the facts about the whole library."""
    overruled: dict[str, list[str]] = {}
    for judgement in judgements.values():
        if judgement["overruled"]:
            overruled.setdefault(judgement["overruled"], []).append(judgement["name"])
    if times is None:
        return {"overruled": overruled} if overruled else {}
    facts: LibraryFacts = {"overruled": overruled, "error": times.error}
    if times.tuned:
        facts |= cast(LibraryFacts, times.describe_speedup())
        facts["tuned_us"] = round(median(times.tuned) * 1e6, 3)
        facts["untuned_us"] = round(median(times.untuned) * 1e6, 3)
    return facts


def describe_libraries(facts: LibraryFacts, tried: int) -> list[str]:
    """Return lines about kernels that stay untuned because of the whole library."""
    if error := facts.get("error"):
        return [f"the tuned library was not compared with the untuned one: {error}"]
    overruled = facts.get("overruled", {})
    lines = []
    if names := overruled.get(SLOWER_IN_LIBRARY):
        verb = "is" if len(names) == 1 else "are"
        lines.append(
            f"{count_text(len(names), 'kernel')} {verb} faster tuned in isolation, but slower in the library, "
            f"so left untuned: {name_some(names)}"
        )
    if names := overruled.get(NEGLIGIBLE):
        verb = "gains" if len(names) == 1 else "gain together"
        lines.append(
            f"{count_text(len(names), 'kernel')} {verb} less than {_MIN_LIBRARY_GAIN:.0%} of a call, "
            f"so left untuned: {name_some(names)}"
        )
    if facts.keys() >= {"speedup", "low", "high", "pairs"} and overruled.get(LIBRARY_SLOWER):
        # only for an untuned library: if it is tuned, `verify` measures the speedup as delivered
        after = f"after {count_text(tried, 'tried schedule')}, " if tried else ""
        lines.append(
            f"{after}the untuned library is the fastest: tuned kernels give it a speedup of "
            f"{facts['speedup']:.3g} ({facts['low']:.3g} to {facts['high']:.3g}, interleaved, "
            f"{count_text(facts['pairs'], 'pair')}), so all kernels stay untuned"
        )
    return lines


def describe_roofline(facts: PickBestFacts, tuned: TuneFacts | None) -> list[str]:
    """Return a line with the speedup that the roofline would allow, and the time spent on tuning."""
    if tuned is None or not tuned.measured:
        return []
    least_us = {w.name: w.roofline_us for w in tuned.workloads if w.roofline_us}
    if not least_us.keys() >= {kernel.name for kernel in facts.kernels}:
        return []
    possible_us = sum(
        kernel.calls * min(kernel.tuned_us or kernel.untuned_us, least_us[kernel.name])
        for kernel in facts.kernels
    )
    if not possible_us:
        return []
    return [
        f"{duration_text(tuned.seconds)} of tuning; by the roofline of this machine, "
        f"at most a speedup of {facts.untuned_us / possible_us:.3g} over untuned is possible"
    ]
