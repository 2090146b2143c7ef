"""The search of `tune`: where it measures, and the time that it may take."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tvm

from tvmflow.core import packages
from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import ForkServer
from tvmflow.stages.base import StageContext
from tvmflow.targets import devices
from tvmflow.targets.backends import backend_for
from tvmflow.targets.host import read_host
from tvmflow.tuning import measure, measurer, roofline, rpc_device
from tvmflow.tuning.budget import Task
from tvmflow.tuning.ledger import Ledger, WorkloadDescription
from tvmflow.tuning.search import Tuning
from tvmflow.tuning.tuning_job import SearchOptions, TuningResult, WorkClock
from tvmflow.tuning.workloads import shapes_text

if TYPE_CHECKING:
    from tvmflow.stages.tune_settings import TuneSettings


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
    measure_context = _make_measure_context(settings, context, tvm_build)
    # both before the search starts its threads: what the children need, and the server they fork from
    measure.load_compiler(
        settings.target, runs=settings.remote is None, by_driver=settings.by_driver
    )
    with ForkServer.fork() as fork_server:
        options = _make_options(settings)
        remote: measurer.Measurer | None = None
        if settings.remote:
            remote = rpc_device.RemoteMeasurer(
                measure_context,
                options.timing,
                options.trial_timeout_s,
                fork_server,
                rpc_device.RpcEndpoint.from_settings(settings.remote),
                context.work,
            )
        tuning = Tuning(
            *(tasks, options, measure_context, ledger, fork_server, context.emit, remote),
            measure_roofline=lambda: _measure_roofline(settings, measure_context, fork_server),
        )
        with measure_context.clock.ticking():
            return ledger, tuning.run()


def _make_options(settings: TuneSettings) -> SearchOptions:
    tune = settings.tune
    return SearchOptions(
        rules=tune.budget_rules,
        seed=tune.seed,
        strategy=tune.strategy,
        cost_model=tune.cost_model,
        timing=measure.Timing(tune.number, tune.repeat, tune.min_repeat_ms, tune.flush_cache),
        trial_timeout_s=tune.trial_timeout_s,
        schedules=settings.schedules,
    )


def _make_measure_context(
    settings: TuneSettings, context: StageContext, tvm_build: str
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
        clock=WorkClock(),
        by_driver=settings.by_driver,
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
            roofline.measure_roofline,
            {"target": dict(context.target), "rules_version": context.rules_version},
            timeout_s=settings.tune.trial_timeout_s,
            log=context.log,
        )
    if outcome.kind != "ok" or outcome.value["gflops"] is None:
        return None
    bandwidths = tuple((size, speed) for size, speed in outcome.value["bandwidths"])
    return roofline.Roofline(outcome.value["gflops"], bandwidths)


def _describe_workloads(ledger: Ledger, tasks: Sequence[Task]) -> None:
    """Describe workloads whose kernel the ledger lacks."""
    for task in tasks:
        if not ledger.description(task.key).name or ledger.kernel(task.key) != task.mod:
            mod = tvm.ir.load_json(task.mod)
            buffers = shapes_text(mod)
            description = WorkloadDescription(task.name, task.flops, buffers)
            ledger.describe(task.key, description, task.mod)
