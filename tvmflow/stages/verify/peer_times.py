"""Other runtimes and the reference, each in its own process: agreement with a library, and slowdown."""

from __future__ import annotations

import contextlib

from tvmflow.core.errors import EnvironmentProblem, StageError
from tvmflow.frontends.peers import PEERS, open_peer
from tvmflow.recipe import Recipe
from tvmflow.recipe.sections import AUTO, FIXED
from tvmflow.stages.verify import comparison
from tvmflow.stages.verify.latency import (
    exclusive_devices,
    make_latency,
    make_speedup,
    measure_peer,
)
from tvmflow.stages.verify.libraries import UNTIMED_REASONS, Library, Timed
from tvmflow.stages.verify.reference_run import Case
from tvmflow.stages.verify.verdict import ComparedRuntime, Verdict
from tvmflow.stages.verify_settings import LOCAL, CompareSettings
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget


def compare_settings(
    recipe: Recipe, target: ResolvedTarget | PartitionedTarget
) -> CompareSettings | None:
    """Return the runtimes that a library is timed beside, and those that could be and are not installed."""
    requested, limited = recipe.verify.compare, tuple(recipe.verify.max_vs)
    if not requested and not limited:
        return None
    if requested != (AUTO,):
        runtimes = tuple(dict.fromkeys(n for n in (*requested, *limited) if n != FIXED))
        return CompareSettings(runtimes=runtimes, fixed=FIXED in requested)
    suitable = [
        name
        for name, peer in PEERS.items()
        if not peer.unsupported_reason(recipe.model.kind, device_of(target))
    ]
    runtimes = tuple(name for name in suitable if PEERS[name].is_installed())
    return CompareSettings(
        runtimes=runtimes, missing=tuple(name for name in suitable if name not in runtimes)
    )


def device_of(target: ResolvedTarget | PartitionedTarget) -> str:
    """Return the kind of device that a target runs on; a partitioned one runs on the CPU, too."""
    return "cpu" if isinstance(target, PartitionedTarget) else str(target.device["kind"])


def add_reference_time(verdict: Verdict, library: Library, case: Case) -> None:
    """Time the reference in turns with the library, unless it is one of the requested runtimes."""
    requested = case.settings.compare.runtimes if case.settings.compare else ()
    reference = case.reference.timed if case.reference else None
    if library.timed is None or reference is None:
        return
    if any(PEERS[name].is_reference for name in requested):
        return
    feed = {spec.name: case.data.batches[0][spec.name] for spec in library.inputs}
    with exclusive_devices(case.settings, case.context):
        peer_feed = {**feed, **case.model.bound}
        times = measure_peer(library.timed, feed, reference, peer_feed, is_requested=False)
    verdict["latency"]["reference"] = make_latency(times.second)
    verdict["reference_speedup"] = make_speedup(times)


def add_compared(verdict: Verdict, library: Library, case: Case) -> None:
    """Compare the requested runtimes with the reference, and time them beside the library."""
    compare, run_on = case.settings.compare, case.settings.run_on
    if compare is None or not (compare.runtimes or compare.missing):
        return
    compared: dict[str, ComparedRuntime] = {}
    for name in compare.runtimes:
        if library.timed is None:
            compared[name] = _not_timed(name, UNTIMED_REASONS[run_on])
        elif run_on != LOCAL:
            compared[name] = _not_timed(name, "it would run on another machine than the library")
        else:
            compared[name] = _run(name, library.timed, library, case)
    for name in compare.missing:
        traits = PEERS[name].traits
        compared[name] = _not_timed(name, f"it is not installed ({traits.install})")
    verdict["compared"] = compared


def _not_timed(name: str, reason: str) -> ComparedRuntime:
    return {"name": PEERS[name].traits.name, "not_timed": reason}


def _run(name: str, timed: Timed, library: Library, case: Case) -> ComparedRuntime:
    """Compare a runtime with the reference, and time it and the library in turns.

    A model that it rejects is no failure of the library.
    """
    settings, context, model, data, reference = case
    scratch = context.work / name
    scratch.mkdir(exist_ok=True)
    own_feed = {spec.name: data.batches[0][spec.name] for spec in library.inputs}
    running = reference.timed if reference and PEERS[name].is_reference else None
    try:
        with (
            exclusive_devices(settings, context),
            contextlib.nullcontext(running)
            if running
            else open_peer(
                name,
                model.files,
                model.inputs,
                model.outputs,
                threads=settings.threads,
                precision=settings.precision,
                scratch=scratch,
            ) as peer,
        ):
            if peer.note:
                return _not_timed(name, peer.note)
            runtime: ComparedRuntime = {"name": peer.name}
            if reference is not None:
                outputs = [peer.run_as_timed({**feed, **model.bound}) for feed in data.batches]
                runtime["outputs"] = comparison.compare_batches(
                    outputs[0], outputs, reference.results.outputs, data, reference.tolerance
                )
            limit = settings.verify.max_vs.get(name)
            times = measure_peer(timed, own_feed, peer, {**own_feed, **model.bound}, limit)
            return {
                **runtime,
                "latency": make_latency(times.second),
                "library": make_latency(times.first),
                "speedup": make_speedup(times),
            }
    except (StageError, EnvironmentProblem) as error:
        return _not_timed(name, str(error))
