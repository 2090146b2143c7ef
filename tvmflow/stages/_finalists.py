"""The finalists of a workload: measured again in turns, and the one that wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

from tvmflow.core.types import Json

if TYPE_CHECKING:
    from tvmflow.core.fork_server import ForkServer
    from tvmflow.stages.base import StageContext
    from tvmflow.stages.tune_settings import PickBestSettings
    from tvmflow.tuning.finalists import FinalistsRequest, FinalistTimes
    from tvmflow.tuning.ledger import WorkloadLedger

LOG: Final = "finalists.log"

_ROUNDS: Final = 9
# Two medians that are closer than this, or than the spread of the faster one's samples up to the
# second figure, do not tell which schedule is better.
_MIN_NOISE: Final = 0.02
_MAX_NOISE: Final = 0.10


class SizeTimes(TypedDict):
    """The times in µs of a kernel at one of several sizes, untuned and tuned."""

    at: str
    untuned_us: float
    tuned_us: float


class _OpenJudgement(TypedDict, total=False):
    """The part of a judgement that only a kernel with open sizes has.

    `sizes` has the times of the winner, `wrong` what is wrong with the values of finalists.
    """

    sizes: list[SizeTimes]
    wrong: list[str]


class Judgement(_OpenJudgement):
    """The outcome of measuring a workload's finalists again; times in µs.

    `rule` is the schedule rule of the untuned kernel, `winner` the id of a finalist that is faster
    than the untuned kernel, `error` why nothing could be measured. `overruled` says why such a
    finalist is not used all the same. `finalists` have their `id`, and in `samples_us` one time a round.
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
        id: Its id.
        ledger_s: Its median in seconds when it was found.
        samples: One time a round; the geometric mean of those at several sizes.
        sizes: For a kernel that is measured at several sizes, the samples at each.
    """

    id: str
    ledger_s: float
    samples: tuple[float, ...]
    sizes: tuple[tuple[float, ...], ...] = ()


def measure_workload(
    settings: PickBestSettings,
    context: StageContext,
    fork_server: ForkServer,
    mod: str,
    trials: Sequence[Mapping[str, Json]],
    ledger: WorkloadLedger,
) -> FinalistTimes:
    """Return the times of a workload untuned and with each finalist, measured once for a ledger."""
    from tvmflow.tuning.finalists import FinalistsRequest, read_or_measure
    from tvmflow.tuning.measure import Timing

    tune = settings.tune
    request = FinalistsRequest(
        mod=mod,
        traces=[trial["trace"] for trial in trials],
        target=settings.measured_target,
        rules_version=settings.schedules,
        # shorter samples than in the search, but more of them, and spread over time
        timing=Timing(tune.number, 1, max(10, tune.min_repeat_ms // 5), tune.flush_cache),
        by_driver=settings.by_driver,
        rounds=_ROUNDS,
    )
    return read_or_measure(
        request, ledger, lambda: _measure(request, settings, context, fork_server)
    )


def _measure(
    request: FinalistsRequest,
    settings: PickBestSettings,
    context: StageContext,
    fork_server: ForkServer,
) -> FinalistTimes:
    """Measure finalists on the device of the target."""
    from tvmflow.tuning.finalists import measure_finalists
    from tvmflow.tuning.rpc_device import DevicePool, RpcEndpoint, measure_finalists_remotely

    log = context.work / LOG
    timeout_s = settings.tune.trial_timeout_s * (len(request.traces) + 2)
    if settings.remote:
        pool = DevicePool(RpcEndpoint.from_settings(settings.remote), fork_server, log)
        return measure_finalists_remotely(request, pool, context.work, timeout_s)
    return measure_finalists(
        request,
        fork_server,
        device=settings.device,
        locks=context.locks,
        timeout_s=timeout_s,
        log=log,
    )


def measure_peak(
    settings: PickBestSettings, context: StageContext, fork_server: ForkServer
) -> float | None:
    """Return the peak of this machine's CPU in GFLOPS; None for other devices, and if not measurable."""
    from tvmflow.targets.backends import backend_for
    from tvmflow.tuning import roofline
    from tvmflow.tuning.tuning_job import call_alone

    if settings.remote or not backend_for(settings.target).RUNS_ON_HOST_CPU:
        return None
    outcome = call_alone(
        fork_server,
        roofline.measure_peak,
        {"target": settings.measured_target},
        device=settings.device,
        locks=context.locks,
        timeout_s=settings.tune.trial_timeout_s,
        log=context.work / LOG,
    )
    return float(outcome.value["gflops"]) if outcome.kind == "ok" else None


def judge_finalists(
    task: Mapping[str, Json], measured: FinalistTimes, trials: Sequence[Mapping[str, Json]]
) -> Judgement:
    """Return the winner among a workload's finalists, with all that they were judged by.

    Args:
        task: The workload as `extract_tasks` writes it.
        measured: Times in seconds.
        trials: The finalists as `tune` writes them.
    """
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
    """Return the finalist to keep; None when none is faster than the untuned kernel beyond the noise.

    Among those that the samples cannot tell apart it is the one that the ledger knows as
    fastest, so that measuring again does not change the choice. One that is slower at one of several
    sizes is not kept, however fast it is at the others.

    Args:
        finalists: The finalists with their samples, one a round.
        untuned: Seconds of the untuned kernel in the same rounds, or a single time.
        untuned_sizes: The same for each of several sizes.
    """
    from tvmflow.tuning.finalists import MIN_GAIN, pair_with_untuned

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
    """Return half the distance between the quartiles, relative to the median, within bounds."""
    ordered = sorted(samples)
    quarter = len(ordered) // 4
    spread = (ordered[-1 - quarter] - ordered[quarter]) / 2 / median(ordered)
    return min(max(spread, _MIN_NOISE), _MAX_NOISE)
