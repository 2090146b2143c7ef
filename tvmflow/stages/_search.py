"""The search of `tune`: where it measures, and the time that it may take."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tvm

from tvmflow.core import packages
from tvmflow.core.errors import StageError
from tvmflow.core.files import write_atomically
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.stages._base import Event, StageContext
from tvmflow.targets import devices
from tvmflow.targets.backends import backend_for
from tvmflow.targets.host import read_host
from tvmflow.tuning import device_pool, measure, measurer, remote_measurer, roofline
from tvmflow.tuning.ledger import Ledger, WorkloadDescription
from tvmflow.tuning.search import Tuning
from tvmflow.tuning.tuning_job import SearchOptions, Task, TuningResult
from tvmflow.tuning.work_clock import WorkClock
from tvmflow.tuning.workloads import family_key

if TYPE_CHECKING:
    from tvmflow.stages._tune_settings import SearchSettings, TuneSettings


def search(
    settings: TuneSettings, context: StageContext, tasks: Sequence[Task]
) -> tuple[Ledger, TuningResult]:
    """Search schedules for the tasks, and return the ledger with all trials."""
    if settings.unmeasurable_reason:
        raise StageError(
            f"nothing can be measured for this target on this machine: {settings.unmeasurable_reason}",
            fix="set tune.trials to 0 for it, or tune on a machine that can run it",
        )
    tvm_build = packages.identity("apache-tvm")
    ledger = Ledger.open(context.ledger, settings.measured_target, tvm_build, settings.device)
    _describe_workloads(ledger, tasks)
    work_clock = WorkClock()
    measure_context = _make_measure_context(settings, context, tvm_build, work_clock)
    # both before the search starts its threads: what the children need, and the server they fork from
    measure.load_compiler(settings.target, runs=settings.remote is None)
    clock = TuningClock(context.work / "seconds", settings.tune.minutes, work_clock)
    with ForkServer.fork() as fork_server, clock:
        options = _make_options(settings.tune, clock.seconds_left)
        remote: measurer.Measurer | None = None
        if settings.remote:
            remote = remote_measurer.RemoteMeasurer(
                measure_context,
                options.timing,
                options.trial_timeout_s,
                fork_server,
                device_pool.RpcEndpoint.from_settings(settings.remote),
                context.work,
            )
        emit = clock.recording(context.emit)
        tuning = Tuning(
            *(tasks, options, measure_context, ledger, fork_server, emit, remote),
            measure_roofline=lambda: _measure_roofline(settings, measure_context, fork_server),
        )
        return ledger, tuning.run()


def _make_options(tune: SearchSettings, seconds: float | None) -> SearchOptions:
    return SearchOptions(
        rules=tune.budget_rules,
        seed=tune.seed,
        strategy=tune.strategy,
        cost_model=tune.cost_model,
        timing=measure.Timing(tune.number, tune.repeat, tune.min_repeat_ms, tune.flush_cache),
        trial_timeout_s=tune.trial_timeout_s,
        seconds=seconds,
    )


def _make_measure_context(
    settings: TuneSettings, context: StageContext, tvm_build: str, clock: WorkClock
) -> measurer.MeasureContext:
    host = read_host()
    return measurer.MeasureContext(
        target=settings.measured_target,
        device=settings.device,
        rules_version=settings.schedules,
        locks=context.locks,
        tvm=tvm_build,
        host={
            "arch": host.arch,
            "model": host.model,
            "cores": host.cores,
            **({"threads": settings.threads} if settings.threads else {}),
        },
        log=context.work / "trials.log",
        clock=clock,
    )


def _measure_roofline(
    settings: TuneSettings, context: measurer.MeasureContext, fork_server: ForkServer
) -> roofline.Roofline | None:
    """Return what this machine can do; None for a GPU, a remote device, and where it cannot be measured."""
    if settings.remote or not backend_for(settings.target).RUNS_ON_HOST_CPU:
        return None
    with contextlib.ExitStack() as stack:
        with context.clock.waiting():
            stack.enter_context(devices.exclusive(context.locks, context.device))
        outcome = fork_server.call(
            roofline.MEASURE_ROOFLINE,
            {"target": dict(context.target), "rules_version": context.rules_version},
            timeout_s=settings.tune.trial_timeout_s,
            log=context.log,
        )
    if outcome.kind != "ok" or outcome.value["gflops"] is None:
        return None
    bandwidths = tuple((size, speed) for size, speed in outcome.value["bandwidths"])
    return roofline.Roofline(outcome.value["gflops"], bandwidths)


def _describe_workloads(ledger: Ledger, tasks: Sequence[Task]) -> None:
    """Describe workloads whose kernel the ledger lacks, for people and for related workloads."""
    for task in tasks:
        if not ledger.description(task.key).name or ledger.kernel(task.key) != task.mod:
            mod = tvm.ir.load_json(task.mod)
            types = [parameter.ty for parameter in mod["main"].params]
            buffers = tuple(
                f"{ty.dtype}[{'×'.join(str(int(extent)) for extent in ty.shape)}]" for ty in types
            )
            description = WorkloadDescription(task.name, task.flops, buffers, family_key(mod))
            ledger.describe(task.key, description, task.mod)


class TuningClock:
    """The time that a tuning has taken, counting what it took before it was killed."""

    def __init__(self, path: Path, minutes: float | None, clock: WorkClock) -> None:
        self._path = path
        self._limit_s = None if minutes is None else minutes * 60
        self._earlier_s = float(path.read_text()) if path.exists() else 0.0
        self._clock = clock
        self._started = clock.now()

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the limit, as the tuning starts; None without a limit."""
        return None if self._limit_s is None else max(self._limit_s - self._earlier_s, 0.0)

    def recording(self, emit: Emit) -> Emit:
        """Return an `emit` that also records the time."""

        def record_and_emit(event: Event) -> None:
            self._record()
            emit(event)

        return record_and_emit

    def _record(self) -> None:
        write_atomically(self._path, str(self._earlier_s + self._clock.now() - self._started))

    def __enter__(self) -> TuningClock:
        return self

    def __exit__(self, *_: object) -> None:
        self._record()
