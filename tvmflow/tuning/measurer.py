"""Measurement of candidates on this machine, each in a child: several are built at a time, one runs."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core import spans
from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.statistics import geometric_means
from tvmflow.core.types import Json
from tvmflow.targets import devices
from tvmflow.targets.backends import backend_for
from tvmflow.targets.tvm_target import split_threads
from tvmflow.tuning import measure
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.trials import Failure, Trial, timestamp
from tvmflow.tuning.tuning_job import (
    PhaseReporter,
    PhaseSpans,
    WorkClock,
    read_failure,
    report_failure,
)

_TRIALS_BETWEEN_DRIFT_CHECKS: Final = 64
# Each builder is a process with TVM in it.
_MAX_BUILDERS: Final = 8
_log = logging.getLogger(__name__)


class MeasureContext(NamedTuple):
    """The place where trials are made, and what their records say of it.

    Attributes:
        rules_version: The version of the schedule rules for untuned kernels.
        device: The device to hold while a candidate runs: `kind` and `class`.
        host: The machine, for the record of a trial.
        log: The file for what children print; None for none.
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
    by_driver: bool = False


class MeasureJob(NamedTuple):
    """A schedule to measure.

    Attributes:
        trace: The schedule; None for that of the untuned kernel.
        best_s: Seconds of the workload's best schedule so far; None when there is none.
        name: The name of the workload, for people.
    """

    id: str
    mod: str
    trace: Json
    best_s: float | None
    seed: int
    name: str = ""


RecordTrial = Callable[[int, Trial], None]
"""Takes the index of a job and its trial."""


class Measurer:
    """Measures candidates on this machine's CPU or GPU.

    There are as many builders as cores. Where the target leaves cores free they go on while a
    candidate runs; elsewhere they pause for that time.
    """

    def __init__(
        self, context: MeasureContext, timing: Timing, timeout_s: float, fork_server: ForkServer
    ) -> None:
        self._context = context
        self._timing = timing
        self._timeout_s = timeout_s
        self._fork_server = fork_server
        cores = int(context.host.get("cores") or os.cpu_count() or 1)
        # The kernels of a GPU leave the CPU alone.
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
        """Measure all jobs.

        Args:
            jobs: The schedules.
            record: Called with each trial as soon as it is measured, one at a time.
            may_continue: Jobs that have not begun when it turns false are left out.

        Raises:
            StageError: Measuring itself does not work; earlier trials have been recorded.
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
            timing=self._timing,
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
        """Return the answer of a child and the failure of its candidate, if any."""
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
                timeout_s=self._timeout_s,
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
        """Take the locks of a builder. The device locks are for all runs on this machine."""
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
        """Take the lock of a device. The gate has been passed, so that only other runs may hold it."""
        with self._context.clock.waiting():
            locks.enter_context(device)


class _BuildRunGate:
    """Admits builders together and runners one by one, and unless `concurrent`, never both.

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
    """Measures one good schedule again now and then.

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
        """Take the first trial of this run that worked as the baseline."""
        if self._baseline is None and trial.run_secs:
            self._baseline = mod, trial

    def check(self, measured: int) -> None:
        """Measure the baseline again when enough trials were measured since the last time."""
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
"""The phase that uses the device but not the candidate: its errors are not the candidate's."""


@dataclass(frozen=True, kw_only=True)
class TrialRequest(measure.KernelRequest):
    """A schedule of a workload that is to be built and timed."""

    trace: Json
    best_s: float | None = None

    def time(self, kernels: Sequence[Any], argument_lists: Sequence[list[Any]]) -> Json:
        """Return the times of the kernel as fields of a `Trial`."""
        [kernel] = kernels
        start = time.time()
        rows = measure.time_candidate(kernel, argument_lists, self.timing, self.best_s)
        times = {"run_secs": geometric_means(rows), "ran": [start, time.time()]}
        return {**times, "size_secs": rows} if len(rows) > 1 else times


def measure_trial(payload: Json, emit: Emit) -> Json:
    """Build and run the schedule of a `TrialRequest`: the entry point of the child.

    The child asks before it uses the device, and waits until it may.

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

    # Whatever is raised is the failure of this candidate alone.
    return report_failure(emit, work, fatal=())
