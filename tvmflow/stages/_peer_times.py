"""Other runtimes timed beside a library, in turns, each in a process of its own: which, and by how much they are slower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tvmflow.core.errors import EnvironmentProblem, StageError
from tvmflow.core.types import Json, TensorSpec
from tvmflow.frontends._inputs import array_of
from tvmflow.frontends._peers import PEERS, open_peer
from tvmflow.recipe import Recipe
from tvmflow.recipe._verify import AUTO
from tvmflow.stages._base import StageContext
from tvmflow.stages._latency import exclusive_devices, make_latency, make_speedup, measure_peer
from tvmflow.stages._libraries import UNTIMED_REASONS, Library
from tvmflow.stages._verdict import ComparedRuntime, Verdict
from tvmflow.stages._verify_settings import LOCAL, CompareSettings, VerifySettings
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def compare_settings(
    recipe: Recipe, target: ResolvedTarget | PartitionedTarget
) -> CompareSettings | None:
    """Return the runtimes that a library is timed beside, and those that could be and are not installed."""
    requested = recipe.verify.compare
    if not requested:
        return None
    if requested != (AUTO,):
        return CompareSettings(runtimes=requested)
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


def add_compared(
    verdict: Verdict,
    library: Library,
    feed: Mapping[str, Array],
    signature: Mapping[str, Json],
    settings: VerifySettings,
    context: StageContext,
) -> None:
    """Time the requested runtimes beside the library.

    Args:
        verdict: Gets the latencies, or the reasons why there are none.
        library: The library.
        feed: The first batch.
        signature: The signature of the imported model.
        settings: Those of `verify`.
        context: That of the stage.
    """
    compare = settings.compare
    if compare is None:
        return
    compared: dict[str, ComparedRuntime] = {}
    for name in compare.runtimes:
        if library.timed is None:
            compared[name] = _not_timed(name, UNTIMED_REASONS[settings.run_on])
        elif settings.run_on != LOCAL:
            compared[name] = _not_timed(name, "it would run on another machine than the library")
        else:
            compared[name] = _time(name, library, feed, signature, settings, context)
    for name in compare.missing:
        traits = PEERS[name].traits
        compared[name] = _not_timed(name, f"it is not installed ({traits.install})")
    verdict["compared"] = compared


def _not_timed(name: str, reason: str) -> ComparedRuntime:
    return {"name": PEERS[name].traits.name, "not_timed": reason}


def _time(
    name: str,
    library: Library,
    feed: Mapping[str, Array],
    signature: Mapping[str, Json],
    settings: VerifySettings,
    context: StageContext,
) -> ComparedRuntime:
    """Time a runtime and the library in turns; a model that it rejects is no failure of the library."""
    assert library.timed is not None
    timed = library.timed
    bound = {
        entry["name"]: array_of(TensorSpec.from_json(entry), entry["value"])
        for entry in signature.get("bound", ())
    }
    inputs, more, outputs = (
        tuple(map(TensorSpec.from_json, signature.get(kind, ())))
        for kind in ("inputs", "bound", "outputs")
    )
    scratch = context.work / name
    scratch.mkdir(exist_ok=True)
    files = {role: path for role, path in context.inputs.items() if role != "data"}
    threads = max(machine.threads for machine in settings.machines.values())
    own_feed = {spec.name: feed[spec.name] for spec in library.inputs}
    try:
        with (
            exclusive_devices(settings, context),
            open_peer(
                name,
                files,
                (*inputs, *more),
                outputs,
                threads=threads,
                precision=settings.precision,
                scratch=scratch,
            ) as peer,
        ):
            if peer.note:
                return _not_timed(name, peer.note)
            times = measure_peer(timed, own_feed, peer, {**own_feed, **bound})
            return {
                "name": peer.name,
                "latency": make_latency(times.second),
                "library": make_latency(times.first),
                "speedup": make_speedup(times),
            }
    except (StageError, EnvironmentProblem) as error:
        return _not_timed(name, str(error))
