"""Measure schedules on this machine in child processes: several are built at a time, one runs.

Finalists (a workload's best trials) are timed again, interleaved with each other and the untuned kernel.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core import spans
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.statistics import PairedTimes, geometric_means, interleave
from tvmflow.core.types import Array, Json
from tvmflow.targets import devices
from tvmflow.targets.backends import backend_for
from tvmflow.targets.tvm_target import split_threads
from tvmflow.tuning import measure
from tvmflow.tuning.ledger import WorkloadLedger
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.trials import Ban, Failure, FinalistsRecord, Trial, timestamp, trial_id
from tvmflow.tuning.tuning_job import (
    PhaseReporter,
    PhaseSpans,
    WorkClock,
    read_failure,
    report_failure,
)
from tvmflow.tuning.workloads import list_compared_sizes

if TYPE_CHECKING:
    import tvm

_TRIALS_BETWEEN_DRIFT_CHECKS: Final = 64
# The maximum number of builders: each one is a process with TVM loaded.
_MAX_BUILDERS: Final = 8
_log = logging.getLogger(__name__)


class MeasureContext(NamedTuple):
    """How trials are measured, on which machine, and its description in their records.

    Attributes:
        rules_version: The version of the schedule rules for untuned kernels.
        device: The device to lock while a candidate runs: `kind` and `class`.
        host: The description of the machine for records of trials.
        log: The file for the output of children; None for no log.
        timing: How each candidate is timed.
        timeout_s: The timeout of a trial in seconds.
        by_driver: Whether kernels are in C libraries; see `KernelRequest`.
    """

    target: Mapping[str, Json]
    rules_version: int
    device: Mapping[str, str]
    locks: Path
    tvm: str
    host: Mapping[str, Json]
    log: Path | None
    clock: WorkClock
    timing: Timing
    timeout_s: float
    by_driver: bool = False


class MeasureJob(NamedTuple):
    """A schedule to measure.

    Attributes:
        trace: The schedule; None for the untuned kernel.
        best_s: Seconds of the workload's best schedule so far; None if there is none.
        name: The readable name of the workload.
    """

    id: str
    mod: str
    trace: Json
    best_s: float | None
    seed: int
    name: str = ""


RecordTrial = Callable[[int, Trial], None]
"""A callback that takes the index of a job and its trial."""


class Measurer:
    """Measures candidates on this machine's CPU or GPU.

    There are as many builders as cores that the target leaves free; they go on while a candidate runs. If it leaves
    none free, there are as many as cores, and they pause meanwhile.
    """

    def __init__(self, context: MeasureContext, fork_server: ForkServer) -> None:
        self._context = context
        self._fork_server = fork_server
        cores = int(context.host.get("cores") or os.cpu_count() or 1)
        # GPU kernels do not use the CPU's cores.
        self._on_gpu = not backend_for(context.target).RUNS_ON_HOST_CPU
        own = 0 if self._on_gpu else split_threads(context.target)[1] or cores
        spare = cores - own
        self._builders = min(spare if spare > 0 else cores, _MAX_BUILDERS)
        self._gate = _BuildRunGate(concurrent=spare > 0)
        _log.debug("%d builders, %d spare cores", self._builders, spare)

    def measure(
        self,
        jobs: Sequence[MeasureJob],
        record: RecordTrial,
        may_continue: Callable[[], bool] = lambda: True,
    ) -> None:
        """Measure all jobs; `record` gets each trial as soon as it is measured, one at a time.

        When `may_continue` returns False, jobs that have not begun are skipped.

        Raises:
            StageError: Measuring fails for a reason other than a candidate; earlier trials have been recorded.
        """
        recording = threading.Lock()

        def measure_job(index: int) -> None:
            if may_continue():
                with spans.span(f"trial of {jobs[index].name or 'a kernel'}") as arguments:
                    trial = self._measure_job(jobs[index])
                    if trial.failure is None:
                        arguments["µs"] = round(trial.seconds * 1e6, 3)
                    else:
                        arguments["failed in"] = trial.failure.phase
                with recording:
                    record(index, trial)

        with ThreadPoolExecutor(min(self._builders, len(jobs)) or 1, "builder") as pool:
            # An error cancels the jobs that have not begun.
            list(pool.map(measure_job, range(len(jobs))))

    def _request(self, job: MeasureJob) -> TrialRequest:
        return TrialRequest(
            mod=job.mod,
            trace=job.trace,
            target=self._context.target,
            rules_version=self._context.rules_version,
            timing=self._context.timing,
            by_driver=self._context.by_driver,
            best_s=job.best_s,
        )

    def _measure_job(self, job: MeasureJob) -> Trial:
        load = tuple(round(value, 2) for value in os.getloadavg())
        return self._make_trial(job, *self._run(job), self._context.host, load)

    def _make_trial(
        self,
        job: MeasureJob,
        answer: Mapping[str, Json],
        failure: Failure | None,
        host: Mapping[str, Json],
        load: tuple[float, ...] = (),
    ) -> Trial:
        times = {} if failure else answer
        return Trial(
            id=job.id,
            trace=job.trace,
            run_secs=tuple(times.get("run_secs", ())),
            failure=failure,
            when=timestamp(),
            tvm=self._context.tvm,
            host=dict(host),
            load=load,
            seed=job.seed,
            ran=tuple(times.get("ran", ())),
            size_secs=tuple(map(tuple, times.get("size_secs", ()))),
        )

    def _run(self, job: MeasureJob) -> tuple[Mapping[str, Json], Failure | None]:
        """Run a job in a child; return the child's answer, and the failure of its candidate, if any."""
        phases = PhaseSpans()
        with contextlib.ExitStack() as locks:
            self._lock_for_building(locks)

            def follow(event: dict[str, Any]) -> None:
                phases.begin(event["phase"])
                if event.get("ask"):
                    locks.close()
                    with spans.span("wait for a turn"):
                        locks.enter_context(self._gate.running())
                    device = devices.exclusive(self._context.locks, self._context.device)
                    self._enter(locks, device)

            outcome = self._fork_server.call(
                measure_trial,
                self._request(job).to_json(),
                timeout_s=self._context.timeout_s,
                log=self._context.log,
                emit=follow,
            )
            phases.end()
        names = phases.names
        if outcome.kind == "timeout" and not names:
            names = ["start"]
        failure = read_failure(outcome, names)
        if failure is not None and failure.phase == DEVICE_PHASE:
            raise StageError(
                f"the {self._context.target['kind']} device of this machine cannot run kernels: "
                f"{failure.message}",
                fix="check what else uses it (`nvidia-smi` for a GPU), then run it again to resume",
            )
        return outcome.value, failure

    def _lock_for_building(self, locks: contextlib.ExitStack) -> None:
        """Take the locks for building; device locks are shared between all runs on this machine."""
        context = self._context
        with spans.span("wait for a turn"):
            locks.enter_context(self._gate.building())
        if self._on_gpu:
            # Builders do not disturb the GPU, but they would disturb measurements on the CPU.
            self._enter(locks, devices.shared(context.locks, devices.CPU))
        elif not self._gate.concurrent:
            self._enter(locks, devices.shared(context.locks, context.device))

    def _enter(
        self, locks: contextlib.ExitStack, device: contextlib.AbstractContextManager[None]
    ) -> None:
        """Take the lock of a device; after the gate, only another run can hold it."""
        with self._context.clock.waiting():
            locks.enter_context(device)


class _BuildRunGate:
    """Admits many builders or one runner; both at the same time only if `concurrent`.

    Waiting runners go first, so that no finished build waits for long.
    """

    def __init__(self, *, concurrent: bool) -> None:
        self.concurrent = concurrent
        self._changed = threading.Condition()
        self._building = 0
        self._waiting_runners = 0
        self._running = False

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(
                lambda: self.concurrent or not (self._waiting_runners or self._running)
            )
            self._building += 1
        try:
            yield
        finally:
            with self._changed:
                self._building -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self._changed:
            self._waiting_runners += 1
            self._changed.wait_for(
                lambda: not self._running and (self.concurrent or not self._building)
            )
            self._waiting_runners -= 1
            self._running = True
        try:
            yield
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()


class DriftMonitor:
    """Measures one schedule again from time to time, to detect drift of the machine's speed.

    Attributes:
        drift: The largest relative change of its time so far: 0.1 for a tenth slower or faster.
    """

    def __init__(self, measurer: Measurer, seed: int) -> None:
        self._measurer = measurer
        self._seed = seed
        self._baseline: tuple[str, Trial] | None = None
        self._last_check = 0
        self.drift = 0.0

    def offer(self, mod: str, trial: Trial) -> None:
        """Use the first successful trial of this run as the baseline."""
        if self._baseline is None and trial.run_secs:
            self._baseline = mod, trial

    def check(self, measured: int) -> None:
        """Measure the baseline again if enough trials were measured since the last time."""
        if self._baseline is None or measured - self._last_check < _TRIALS_BETWEEN_DRIFT_CHECKS:
            return
        self._last_check = measured
        mod, baseline = self._baseline
        repeats: list[Trial] = []
        job = MeasureJob(
            id=baseline.id, mod=mod, trace=baseline.trace, best_s=None, seed=self._seed
        )
        self._measurer.measure([job], lambda _, trial: repeats.append(trial))
        if repeats and repeats[0].run_secs:
            change = abs(repeats[0].seconds / baseline.seconds - 1)
            self.drift = max(self.drift, change)
            _log.debug("the baseline changed by %.1f %% after %d trials", change * 100, measured)


# ---------------------------------------------------------------- trial process


DEVICE_PHASE: Final = "device"
"""The phase that uses the device before the candidate: the candidate does not cause its errors."""


@dataclass(frozen=True, kw_only=True)
class TrialRequest(measure.KernelRequest):
    """A request to build and time one schedule of a workload."""

    trace: Json
    best_s: float | None = None

    def time(self, kernels: Sequence[Any], argument_lists: Sequence[list[Any]]) -> Json:
        """Time the kernel; return the times as fields of a `Trial`."""
        [kernel] = kernels
        start = time.time()
        rows = measure.time_candidate(kernel, argument_lists, self.timing, self.best_s)
        times = {"run_secs": geometric_means(rows), "ran": [start, time.time()]}
        return {**times, "size_secs": rows} if len(rows) > 1 else times


def measure_trial(payload: Json, emit: Emit) -> Json:
    """Build and run the schedule of a `TrialRequest`: the entry point of the child.

    Before it uses the device, the child asks for permission and waits for it.

    Returns:
        The times of `TrialRequest.time`, or `failure`; and `phase_secs`.
    """
    from tvmflow.runtime.c_loader import OutOfMemory

    request = TrialRequest.from_json(payload)
    request.load_compiler()

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("apply"):
            mod, _ = request.schedule(request.trace)
        with phases.phase("build"):
            kernel = request.build(mod)
            argument_lists = request.make_arguments()
        with phases.phase(DEVICE_PHASE, ask=True):
            measure.use_threads(request.target)
            argument_lists = request.place_arguments(argument_lists)
        with phases.phase("run"):
            try:
                return request.time([kernel], argument_lists)
            except OutOfMemory:
                phases.current = DEVICE_PHASE
                raise

    # Any exception is a failure of only this candidate.
    return report_failure(emit, work, fatal=())


# ---------------------------------------------------------------- finalists
# Measurements are interleaved, so that other load on the machine affects all finalists alike. They continue until it
# is clear whether the fastest finalist is faster than the untuned kernel.


# An untuned kernel that takes longer than this is timed once.
_SLOW_S: Final = 0.1
# After the requested rounds, only the fastest finalist and the untuned kernel are measured until it is clear which is
# faster, up to this multiple of the requested rounds.
_MAX_ROUNDS_FACTOR: Final = 4
_MAX_SECONDS: Final = 5.0
# Saving less than this share of a kernel's time is not a gain.
MIN_GAIN: Final = 0.02
# Accumulating in another order changes values by less than this share of the largest one; in float16 by less than ten
# times as much.
_MAX_ERROR: Final = 1e-3


@dataclass(frozen=True, kw_only=True)
class FinalistsRequest(measure.KernelRequest):
    """The finalists of one workload.

    Attributes:
        rounds: How often each finalist is timed; the fastest one may be timed more often.
    """

    traces: Sequence[Json]
    rounds: int

    @property
    def digest(self) -> str:
        """The digest of what is measured and how."""
        how = [self.rounds, _MAX_ROUNDS_FACTOR, self.rules_version, self.timing]
        return digest_of([self.traces, *how])

    def time(self, kernels: Sequence[Any], argument_lists: Sequence[list[Any]]) -> Json:
        """Return the result of `time_interleaved`; the first kernel is the untuned one."""
        untuned, *finalists = kernels
        return time_interleaved(untuned, finalists, argument_lists, self.timing, self.rounds)


class FinalistTimes(NamedTuple):
    """The times of a workload's finalists; for the fields see `FinalistsRecord`.

    Attributes:
        error: The reason why nothing was measured; otherwise empty.
        wrong: Why finalists compute wrong values, by index; these finalists have no samples.
    """

    rule: str = "none"
    untuned: tuple[float, ...] = ()
    samples: tuple[tuple[float, ...], ...] = ()
    error: str = ""
    sizes: tuple[tuple[tuple[float, ...], ...], ...] = ()
    wrong: Mapping[int, str] = MappingProxyType({})


def read_or_measure(
    request: FinalistsRequest, ledger: WorkloadLedger, compute: Callable[[], FinalistTimes]
) -> FinalistTimes:
    """Return the ledger's times of these finalists, or measure and record them.

    Without a record, a different one of several nearly equal finalists could win each time and change the library.
    Finalists with wrong values are banned.

    Raises:
        StoreError: The times cannot be recorded.
    """
    known = ledger.finalists.get(request.digest)
    if known is not None:
        return FinalistTimes(known.rule, known.untuned, known.samples, sizes=known.sizes)
    times = compute()
    bans = [
        Ban(trial_id(request.traces[index]), reason, timestamp())
        for index, reason in times.wrong.items()
    ]
    if not times.error:
        fields = (times.rule, times.untuned, times.samples)
        ledger.add([*bans, FinalistsRecord(request.digest, *fields, timestamp(), times.sizes)])
    return times


# ---------------------------------------------------------------- in the child


def time_finalists(payload: Json, emit: Emit) -> Json:
    """Build and time the finalists of a `FinalistsRequest`: the entry point of the child.

    Returns:
        `FinalistTimes` as JSON.
    """
    import tvm

    del emit
    request = FinalistsRequest.from_json(payload)
    request.load_compiler()
    scheduled, rule = request.schedule(None)
    untuned = request.build(scheduled)
    kernels = [_build_or_none(request, trace) for trace in request.traces]
    measure.use_threads(request.target)
    mod = tvm.ir.load_json(request.mod)
    reasons = [kernel and find_wrong_values(mod, untuned, kernel) for kernel in kernels]
    kernels = [None if reason else kernel for kernel, reason in zip(kernels, reasons, strict=True)]
    argument_lists = request.place_arguments(request.make_arguments())
    times = request.time([untuned, *kernels], argument_lists)
    wrong = {str(index): reason for index, reason in enumerate(reasons) if reason}
    return {"rule": rule, **times, "wrong": wrong}


def _build_or_none(request: FinalistsRequest, trace: Json) -> Any:
    """Build a finalist; None if its trace does not apply, so that the other finalists are still timed."""
    try:
        return request.build(request.schedule(trace)[0])
    # TVM raises anything here.
    except Exception:
        return None


def find_wrong_values(mod: tvm.IRModule, untuned: Any, kernel: Any) -> str:
    """Return how a kernel's values differ from the untuned kernel's; empty if they do not.

    A schedule for dynamic shapes was timed at only a few sizes: here it is called at these sizes, and at one that is
    no multiple of a tile. A kernel for a device is also called at its sizes, because drivers do not report a missing
    barrier. Kernels of fixed shapes for a CPU are not compared.
    """
    if isinstance(kernel, measure.LibraryKernel):
        pairs = zip(untuned.compute(), kernel.compute(), strict=True)
        return "" if all(starmap(_agree, pairs)) else "its values are wrong"
    for sizes in list_compared_sizes(mod):
        arrays = []
        for built in (untuned, kernel):
            arguments = measure.make_arguments(mod, sizes)
            built(*arguments)
            arrays.append([entry.numpy() for entry in arguments if not isinstance(entry, int)])
        if not all(starmap(_agree, zip(*arrays, strict=True))):
            return f"its values are wrong at sizes {', '.join(map(str, sizes.values()))}"
    return ""


def _agree(expected: Array, actual: Array) -> bool:
    """Return whether values differ by no more than accumulation in another order explains."""
    import numpy as np

    if np.array_equal(expected, actual):
        return True
    share = _MAX_ERROR * (10 if expected.dtype == "float16" else 1)
    expected, actual = expected.astype("float64"), actual.astype("float64")
    scale = np.max(np.abs(expected), initial=1.0, where=np.isfinite(expected))
    limit = share * float(scale)
    return np.allclose(actual, expected, rtol=0.0, atol=limit, equal_nan=True)


def time_interleaved(
    untuned: Any,
    kernels: Sequence[Any],
    argument_lists: Sequence[list[Any]],
    timing: Timing,
    rounds: int,
) -> Json:
    """Time kernels interleaved; return `untuned` times, `samples` and, with several sizes, `sizes`.

    A finalist is None if it could not be built. `argument_lists` holds the arguments on the device for each size.
    Each finalist gets at least `rounds` samples.
    """
    once = timing._replace(repeat=1)
    samples: dict[int, list[list[float]]] = {}

    def measure_at_all_sizes(kernel: Any, how: Timing) -> float:
        times = [measure.time_kernel(kernel, arguments, how)[:1] for arguments in argument_lists]
        rows = samples.setdefault(id(kernel), [[] for _ in times])
        for row, seconds in zip(rows, times, strict=True):
            row += seconds
        return geometric_means(times)[0]

    # A call of an untuned kernel can take seconds; then one call is enough.
    first_look = measure_at_all_sizes(untuned, Timing(1, 1, 0))
    is_slow = first_look > _SLOW_S
    if not is_slow:
        samples.clear()
    turns = [None] if is_slow else [untuned]
    known = [first_look] if is_slow else []
    times = run_rounds(
        [*turns, *kernels], lambda kernel: measure_at_all_sizes(kernel, once), rounds, known
    )
    if len(argument_lists) == 1:
        return times
    return {**times, "sizes": [samples.get(id(kernel), []) for kernel in (untuned, *kernels)]}


def run_rounds(
    kernels: Sequence[Any],
    measure_kernel: Callable[[Any], float],
    rounds: int,
    untuned: Sequence[float] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Json:
    """Measure kernels interleaved until it is clear whether one is faster than the untuned kernel.

    `kernels` are the untuned kernel, or None if `untuned` holds its time, then the finalists; None for one that could
    not be built. `measure_kernel` returns the seconds of a call. The fastest finalist and the untuned kernel get up
    to four times as many samples as the `rounds` of the others.

    Returns:
        The `untuned` times and the `samples` of the finalists.
    """
    samples: list[list[float]] = [[] for _ in kernels]
    samples[0] += untuned
    order = [(index, kernel) for index, kernel in enumerate(kernels) if kernel is not None]
    started = clock()
    for number in range(_MAX_ROUNDS_FACTOR * rounds):
        if number == rounds:
            fastest = min(filter(None, samples[1:]), key=median, default=[])
            order = [entry for entry in order if entry[0] == 0 or samples[entry[0]] is fastest]
        if number >= rounds and (clock() - started > _MAX_SECONDS or _is_decided(samples)):
            break
        seconds = interleave([partial(measure_kernel, kernel) for _, kernel in order], number)
        for (index, _), value in zip(order, seconds, strict=True):
            samples[index].append(value)
    return {"untuned": samples[0], "samples": samples[1:]}


def _is_decided(samples: Sequence[Sequence[float]]) -> bool:
    """Return whether no more rounds are needed: the fastest finalist clearly gains, or shows no gain."""
    measured = [times for times in samples[1:] if times]
    if not measured:
        return True
    times = pair_with_untuned(min(measured, key=median), samples[0])
    # a finalist without a gain in the first rounds seldom gains later, and each round takes seconds
    return times.is_decided or times.ratio >= 1 or times.limits[0] > 1 - MIN_GAIN


def pair_with_untuned(samples: Sequence[float], untuned: Sequence[float]) -> PairedTimes:
    """Pair the times of a finalist with those of the untuned kernel, round by round."""
    # A slow untuned kernel has a single time, which is repeated.
    same_rounds = untuned[: len(samples)] if len(untuned) > 1 else tuple(untuned) * len(samples)
    return PairedTimes(tuple(samples), tuple(same_rounds))
