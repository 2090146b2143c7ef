"""The choice for the whole library: the tuned kernels that are slower between the others stay untuned, and all of them if the library is not faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Final

from tvmflow.core.errors import StageError
from tvmflow.core.formatting import count_text, duration_text
from tvmflow.core.types import Json
from tvmflow.stages._base import Facts, StageContext, name_some
from tvmflow.stages._finalists import LOG, Judgement
from tvmflow.targets.backends import backend_for

if TYPE_CHECKING:
    from tvmflow.core.fork_server import ForkServer
    from tvmflow.stages._tune_settings import PickBestSettings
    from tvmflow.tuning.ledger import Ledger
    from tvmflow.tuning.library_comparison import LibraryRequest, LibraryTimes

SLOWER_IN_LIBRARY: Final = "slower in the library"
LIBRARY_SLOWER: Final = "the library is not faster"
"""Why a kernel has its untuned schedule, though it is faster tuned when it runs alone."""

# Two compilations of the model, and its calls.
_TIMEOUT_S: Final = 1800.0


def compare_libraries(
    settings: PickBestSettings,
    context: StageContext,
    fork_server: ForkServer,
    tasks: Sequence[Facts],
    chosen: Mapping[str, Json],
    ledger: Ledger,
) -> LibraryTimes | None:
    """Return the tuned library compared with the untuned one; None where there is none or it cannot be timed here."""
    from tvmflow.tuning.library_comparison import LibraryRequest, read_or_compare

    if not chosen or settings.remote or not backend_for(settings.target).RUNS_ON_HOST_CPU:
        return None
    assert settings.threads is not None
    request = LibraryRequest(
        model=str(context.inputs["import/model.json"]),
        workloads=str(context.inputs["extract_tasks/workloads.json"]),
        calls={task["key"]: task["weight"] for task in tasks},
        names={task["key"]: task["names"] for task in tasks if task["key"] in chosen},
        chosen=chosen,
        target=settings.target,
        threads=settings.threads,
        lowering=settings.lowering.to_json(),
        runtime=settings.runtime,
        rules_version=settings.schedules,
    )
    records = ledger.workload(request.library_key)
    return read_or_compare(
        request, records, lambda: _compare(request, settings, context, fork_server)
    )


def _compare(
    request: LibraryRequest,
    settings: PickBestSettings,
    context: StageContext,
    fork_server: ForkServer,
) -> LibraryTimes:
    """Compare the libraries in a child that has the device alone."""
    from tvmflow.targets import devices
    from tvmflow.tuning.library_comparison import COMPARE_LIBRARIES, LibraryTimes

    with devices.exclusive(context.locks, settings.device):
        outcome = fork_server.call(
            COMPARE_LIBRARIES,
            dict(vars(request)),
            timeout_s=_TIMEOUT_S,
            log=context.work / LOG,
            emit=lambda _: None,
        )
    if outcome.kind == "cancelled":
        raise StageError("measuring was cancelled", fix="run it again")
    if outcome.kind != "ok":
        return LibraryTimes(error=outcome.message)
    times = outcome.value
    return LibraryTimes(tuple(times["slower"]), tuple(times["tuned"]), tuple(times["untuned"]))


def drop_slower(judgements: Mapping[str, Judgement], times: LibraryTimes | None) -> None:
    """Take the schedules from the winners that lose in the library."""
    for key, judgement in judgements.items():
        if times is None or judgement["winner"] is None:
            continue
        if key in times.slower:
            judgement["overruled"] = SLOWER_IN_LIBRARY
        elif not times.keeps_tuned:
            judgement["overruled"] = LIBRARY_SLOWER
        if judgement["overruled"]:
            judgement["winner"] = judgement["tuned_us"] = None


def make_facts(judgements: Mapping[str, Judgement], times: LibraryTimes | None) -> Facts:
    """Return what became of the library; times in µs.

    `overruled` names kernels by the reason why they are not tuned; `pairs` counts the turns, and
    `low` and `high` are the limits of the speedup; `error` says why nothing was compared.
    """
    if times is None:
        return {}
    overruled: dict[str, list[str]] = {}
    for judgement in judgements.values():
        if judgement["overruled"]:
            overruled.setdefault(judgement["overruled"], []).append(judgement["name"])
    facts: dict[str, Json] = {"overruled": overruled, "error": times.error}
    if times.tuned:
        low, high = times.pairs.limits
        facts |= {
            "tuned_us": round(median(times.tuned) * 1e6, 3),
            "untuned_us": round(median(times.untuned) * 1e6, 3),
            "pairs": len(times.tuned),
            "speedup": round(1 / times.pairs.ratio, 4),
            "low": round(1 / high, 4),
            "high": round(1 / low, 4),
        }
    return facts


def describe(facts: Facts) -> list[str]:
    """Return which kernels lost in the whole library, or that all of them did."""
    if not facts:
        return []
    if facts["error"]:
        return [f"the tuned library was not compared with the untuned one: {facts['error']}"]
    lines = []
    if names := facts["overruled"].get(SLOWER_IN_LIBRARY):
        verb = "is" if len(names) == 1 else "are"
        lines.append(
            f"{count_text(len(names), 'kernel')} {verb} faster tuned alone and slower in the library, "
            f"so left untuned: {name_some(names)}"
        )
    if "pairs" in facts and facts["overruled"].get(LIBRARY_SLOWER):
        # of a library that stays tuned, `verify` measures the speedup as it is delivered
        lines.append(
            f"NOT TUNED: with its tuned kernels the whole library has a speedup of {facts['speedup']:.3g} "
            f"({facts['low']:.3g} to {facts['high']:.3g}, measured in turns, "
            f"{count_text(facts['pairs'], 'pair')}); all kernels keep their untuned schedules"
        )
    return lines


def describe_roofline(facts: Facts, tuned: Facts) -> list[str]:
    """Return the speedup that the roofline would allow, beside the time that was spent on tuning.

    Args:
        facts: The facts of `pick_best`.
        tuned: Those of `tune`.
    """
    least_us = {w["name"]: w.get("roofline_us") for w in tuned.get("workloads", ())}
    kernels = facts["kernels"]
    if not tuned.get("measured") or not all(least_us.get(kernel["name"]) for kernel in kernels):
        return []
    possible_us = sum(
        kernel["calls"] * min(kernel["tuned_us"] or kernel["untuned_us"], least_us[kernel["name"]])
        for kernel in kernels
    )
    return [
        f"{duration_text(tuned['seconds'])} of tuning; by the roofline of this machine, "
        f"at most a speedup of {facts['untuned_us'] / possible_us:.3g} over untuned is possible"
    ]
