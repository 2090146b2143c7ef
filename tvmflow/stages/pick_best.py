"""`pick_best`: measures each workload's finalists again, in turns, and keeps the one that wins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from tvmflow.errors import StageError, VerifyFailed
from tvmflow.stages import _kernels
from tvmflow.stages._base import StageContext
from tvmflow.targets.gpu import CUDA

if TYPE_CHECKING:
    from tvmflow.executors.nursery import Nursery

VERSION: Final = 2
SCOPE: Final[Literal["model", "target"]] = "target"
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "extract_tasks": ("tasks.json", "workloads.json"),
    "tune": ("records.json",),
}
READS: Final[tuple[str, ...]] = ()
TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")
TIMEOUT_S: Final = 3600.0

CHOSEN: Final = "chosen.json"
ROOFLINE: Final = "roofline.svg"
FINALISTS: Final = "finalists.json"

_ROUNDS: Final = 9
# Two medians that are closer than this, or than the spread of the faster one's samples up to the
# second figure, say nothing about which schedule is better.
_LEAST_NOISE: Final = 0.02
_MOST_NOISE: Final = 0.10


class Finalist(NamedTuple):
    """A trial measured again: `ledger_s` is its median when it was found, `samples` one a round."""

    id: str
    ledger_s: float
    samples: tuple[float, ...]


def settings(recipe: Any, target: Any) -> dict[str, Any]:
    """How to measure, and the machine that is measured on."""
    tune = recipe.tune.model_dump(mode="json")
    if not recipe.tune.trials:
        return {"tune": {"trials": 0}}
    names = ["number", "min_repeat_ms", "flush_cache", "trial_timeout_s"]
    if tune["min_coverage"] is not None:
        names.append("min_coverage")
    return {
        "tune": {name: tune[name] for name in names},
        "schedules": _kernels.schedules(recipe),
        "target": target.tvm,
        "device": target.device,
        **({"remote": target.remote} if target.remote else {}),
    }


def choice_text(chosen: Mapping[str, Any]) -> str:
    """The one spelling of a choice: workload -> trace."""
    return json.dumps(chosen, indent=1, sort_keys=True)


def run(settings: Mapping[str, Any], ctx: StageContext) -> dict[str, Any]:
    """Write the winner's trace for every workload that tuning makes faster, and all the timings apart."""
    from tvmflow.executors.nursery import Nursery
    from tvmflow.tuning import measure, roofline

    records = json.loads(ctx.inputs["tune/records.json"].read_text())
    tasks = [each for each in _read(ctx.inputs, "tasks.json") if each["tunable"]]
    chosen: dict[str, Any] = {}
    report: dict[str, Any] = {}
    peak: float | None = None
    if records:
        modules = _read(ctx.inputs, "workloads.json")
        measure.load_compiler(settings["target"], runs="remote" not in settings)
        with Nursery.fork() as nursery:
            peak = _peak(settings, ctx, nursery)
            for done, task in enumerate(tasks, 1):
                key = task["key"]
                trials = records.get(key, [])
                measured = _measure(settings, ctx, nursery, modules[key], trials)
                winner, report[key] = _judge(task, measured, trials)
                if winner is not None:
                    chosen[key] = next(each["trace"] for each in trials if each["id"] == winner)
                ctx.emit(
                    {
                        "event": "progress",
                        "unit": "workload",
                        "done": done,
                        "total": len(tasks),
                        "workload": task["names"][0],
                        "best_us": report[key]["tuned_us"],
                        "failed": sum(1 for each in report.values() if each["error"]),
                    }
                )
    errors = [each["error"] for each in report.values() if each["error"]]
    if errors and len(errors) == len(report):
        raise StageError(
            f"no workload could be measured again; the first: {errors[0]}",
            fix="look at finalists.log in the stage's work folder; a longer tune.trial_timeout_s may help",
        )
    (ctx.out / CHOSEN).write_text(choice_text(chosen))
    (ctx.out / FINALISTS).write_text(json.dumps(report, indent=1, sort_keys=True))
    facts = {**_facts(tasks, report), "peak_gflops": peak}
    (ctx.out / ROOFLINE).write_text(roofline.picture(facts["kernels"], peak))
    wanted = settings["tune"].get("min_coverage")
    if wanted is not None and facts["coverage"] < wanted:
        raise VerifyFailed(
            f"kernels with a schedule cover {facts['coverage']:.0%} of the untuned time, "
            f"below tune.min_coverage {wanted:g}",
            fix="raise tune.trials; what was measured is kept",
        )
    return facts


def _read(inputs: Mapping[str, Path], name: str) -> Any:
    return json.loads(inputs[f"extract_tasks/{name}"].read_text())


def _measure(
    settings: Mapping[str, Any],
    ctx: StageContext,
    nursery: Nursery,
    mod: str,
    trials: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Times of the untuned kernel and of each finalist, or `{"error": sentence}`."""
    from tvmflow.targets import devices
    from tvmflow.tuning import remote
    from tvmflow.tuning.measure import Timing

    tune = settings["tune"]
    # shorter samples than in the search, but more of them, and spread over time
    timing = Timing(tune["number"], 1, max(10, tune["min_repeat_ms"] // 5), tune["flush_cache"])
    payload = {
        "mod": mod,
        "traces": [each["trace"] for each in trials],
        "target": settings["target"],
        "schedules": settings["schedules"],
        "timing": timing._asdict(),
        "rounds": _ROUNDS,
    }
    build_s = tune["trial_timeout_s"] * (len(trials) + 2)
    if "remote" in settings:
        place = remote.Place.of(settings["remote"])
        farm = remote.Farm(place, nursery, ctx.work / "finalists.log")
        return dict(remote.measure_finalists(farm, payload, ctx.work, build_s))
    with devices.exclusive(ctx.locks, settings["device"]):
        outcome = nursery.call(
            "tvmflow.tuning.measure:measure_finalists",
            payload,
            timeout_s=build_s,
            log=ctx.work / "finalists.log",
            emit=lambda _: None,
        )
    if outcome.kind == "cancelled":
        raise StageError("measuring was cancelled", fix="run it again")
    return dict(outcome.value) if outcome.kind == "ok" else {"error": outcome.message}


def _peak(settings: Mapping[str, Any], ctx: StageContext, nursery: Nursery) -> float | None:
    """What this machine can do at most, in GFLOPS; None where kernels run elsewhere, on a GPU, or it cannot be said."""
    from tvmflow.targets import devices

    if "remote" in settings or settings["target"]["kind"] == CUDA:
        return None
    with devices.exclusive(ctx.locks, settings["device"]):
        outcome = nursery.call(
            "tvmflow.tuning.roofline:measure_peak",
            {"target": settings["target"]},
            timeout_s=settings["tune"]["trial_timeout_s"],
            log=ctx.work / "finalists.log",
            emit=lambda _: None,
        )
    return outcome.value["gflops"] if outcome.kind == "ok" else None


def _judge(
    task: Mapping[str, Any], measured: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]
) -> tuple[str | None, dict[str, Any]]:
    """The winner's id (None when nothing beats the untuned kernel), and what the report keeps."""
    from tvmflow.tuning.ledger import median

    error = measured.get("error", "")
    samples = measured.get("secs", [])
    finalists = [
        Finalist(trial["id"], trial["seconds"], tuple(secs))
        for trial, secs in zip(trials, samples, strict=False)
        if secs
    ]
    untuned = median(measured["untuned"]) if "untuned" in measured else None
    winner = choose(finalists, untuned) if untuned is not None else None
    return (
        winner.id if winner else None,
        {
            "name": task["names"][0],
            "weight": task["weight"],
            "flops": task["flops"],
            "road": measured.get("road", "none"),
            "untuned_us": None if untuned is None else untuned * 1e6,
            "tuned_us": median(winner.samples) * 1e6 if winner else None,
            "error": error,
            "winner": winner.id if winner else None,
            "finalists": [
                {"id": each.id, "samples_us": [seconds * 1e6 for seconds in each.samples]}
                for each in finalists
            ],
        },
    )


def choose(finalists: Sequence[Finalist], untuned_s: float) -> Finalist | None:
    """The finalist to keep; None when none is faster than the untuned kernel beyond the noise.

    Among those that the samples cannot tell apart it is the one that the ledger knows as
    fastest, so that measuring again does not change the choice.
    """
    from tvmflow.tuning.ledger import median

    if not finalists:
        return None
    fastest = min(finalists, key=lambda each: (median(each.samples), each.id))
    limit = median(fastest.samples) * (1 + _noise(fastest.samples))
    alike = [each for each in finalists if median(each.samples) <= limit]
    winner = min(alike, key=lambda each: (each.ledger_s, each.id))
    return winner if median(winner.samples) < untuned_s * (1 - _LEAST_NOISE) else None


def _noise(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, relative to the median, within sensible bounds."""
    from tvmflow.tuning.ledger import median

    ordered = sorted(samples)
    quarter = len(ordered) // 4
    spread = (ordered[-1 - quarter] - ordered[quarter]) / 2 / median(ordered)
    return min(max(spread, _LEAST_NOISE), _MOST_NOISE)


def _facts(tasks: Sequence[Any], report: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How many workloads are tuned, what that bought, and how much of the time has a schedule at all.

    A kernel is covered by a schedule that tuning found, or by that of its road.
    """
    timed = [each for each in report.values() if each["untuned_us"] is not None]
    covered = [each for each in timed if each["tuned_us"] is not None or each["road"] != "none"]
    won = [each for each in timed if each["tuned_us"] is not None]

    def total(entries: Sequence[Mapping[str, Any]], name: str) -> float:
        return float(sum(each["weight"] * each[name] for each in entries))

    untuned = total(timed, "untuned_us")
    tuned = untuned - total(won, "untuned_us") + total(won, "tuned_us")
    return {
        "tuned": len(won),
        "tunable": len(tasks),
        "untried": sum(
            1 for each in report.values() if not each["finalists"] and not each["error"]
        ),
        "coverage": round(total(covered, "untuned_us") / untuned, 4) if untuned else 0.0,
        "untuned_us": round(untuned, 3),
        "tuned_us": round(tuned, 3),
        "speedup": round(untuned / tuned, 3) if tuned else 1.0,
        "kernels": [
            {
                "name": each["name"],
                "calls": each["weight"],
                "flops": each["flops"],
                "untuned_us": round(each["untuned_us"], 3),
                "tuned_us": None if each["tuned_us"] is None else round(each["tuned_us"], 3),
            }
            for each in sorted(timed, key=lambda each: -each["weight"] * each["untuned_us"])
        ],
        "errors": {each["name"]: each["error"] for each in report.values() if each["error"]},
    }
