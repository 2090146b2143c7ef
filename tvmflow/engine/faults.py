"""After `verify` has rejected a library: what is to blame is searched, and a wrong schedule banned.

A banned schedule is never chosen again, so that the next best one is built and verified. Nothing
here lets a library pass: only a `verify` that succeeds does.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Final

from tvmflow.core import packages
from tvmflow.core.errors import TvmflowError
from tvmflow.core.fork_server import ForkServer
from tvmflow.core.types import Json, Plan, StageSpec
from tvmflow.engine.stage_execution import log_path
from tvmflow.planning.decisions import PlanState, input_digests
from tvmflow.stages import STAGES, build, import_model, tune
from tvmflow.stages.base import find_facts, parse_settings
from tvmflow.stages.import_model import ImportFacts
from tvmflow.stages.verify.verdict import PartVerdict, Verdict, list_compared
from tvmflow.store.source_files import fetch_file
from tvmflow.tuning.ledger import Ledger
from tvmflow.tuning.trials import Ban, timestamp

_log = logging.getLogger(__name__)

_PRELOAD: Final = ("numpy", "tvm")
_TIMEOUT_S: Final = 900.0


def has_wrong_outputs(verdict: Verdict) -> bool:
    """Return whether a verdict rejects a library for its outputs, and not for its speed or accuracy alone."""
    libraries = [*verdict.get("parts", {}).values(), verdict.get("vm", PartVerdict())]
    if find_wrong_sizes(verdict):
        return True
    inner = [output for library in libraries for output in library.get("outputs", {}).values()]
    return not verdict.get("layers", {}).get("passed", True) or any(
        not comparison.get("passed") and "incomparable" not in comparison
        for comparison in (*list_compared(verdict), *inner)
    )


def find_faults(
    spec: StageSpec, plan: Plan, state: PlanState, verdict: Verdict
) -> list[dict[str, Json]]:
    """Return what is to blame for a library that a stage rejected, in a process of its own; never raises."""
    try:
        return _search(spec, plan, state, find_wrong_sizes(verdict))
    except (TvmflowError, OSError, KeyError) as error:
        _log.debug("%s: what is to blame cannot be searched", spec.id, exc_info=True)
        return [{"text": f"what is to blame cannot be searched: {error}", "fix": ""}]


def find_wrong_sizes(verdict: Verdict) -> dict[str, int] | None:
    """Return the first sizes at which outputs are wrong; None where they are also at those of the verdict."""
    if any(not output.get("passed") for output in list_compared(verdict)):
        return None
    wrong = (
        entry["sizes"]
        for entry in verdict.get("sizes", ())
        if any(not output["passed"] for output in entry.get("outputs", {}).values())
    )
    return next(wrong, None)


def _search(
    spec: StageSpec, plan: Plan, state: PlanState, at: dict[str, int] | None
) -> list[dict[str, Json]]:
    search = STAGES[spec.stage].TRAITS.find_faults
    assert search is not None
    with (
        tempfile.TemporaryDirectory(prefix="tvmflow-") as work,
        ForkServer.start(_PRELOAD) as fork_server,
    ):
        outcome = fork_server.call(
            search,
            make_payload(spec, plan, state, Path(work), at),
            timeout_s=_TIMEOUT_S,
            log=log_path(state.store, spec.recipe, f"{spec.label}-faults"),
        )
    if outcome.kind == "ok":
        return list(outcome.value)
    return [{"text": f"what is to blame was not found: {outcome.message}", "fix": ""}]


def make_payload(
    spec: StageSpec, plan: Plan, state: PlanState, work: Path, at: dict[str, int] | None = None
) -> dict[str, Json]:
    """Return what the search takes: settings and files of a stage and of its build, and wrong sizes."""
    makers = _find_makers(spec, plan)
    built = makers.get(build.NAME)
    files = {file.role: fetch_file(file, state.store) for file in spec.files}
    digests = {
        role: digest
        for stage in (*([built] if built else []), spec)
        for role, digest in input_digests(stage, state.artifacts).items()
    }
    inputs = {role: state.store.blobs.verified_path(digest) for role, digest in digests.items()}
    imported = find_facts(ImportFacts, state.artifacts[makers[import_model.NAME].id].facts)
    return {
        "verify": spec.settings,
        "build": built.settings if built else None,
        "inputs": {**files, **inputs},
        "nodes": imported.nodes if imported else (),
        "work": str(work),
        "at": at,
    }


def _find_makers(spec: StageSpec, plan: Plan) -> dict[str, StageSpec]:
    """Return the stages that lead to one, by stage; none of those that several parts have."""
    specs = {stage.id: stage for stage in plan.stages}
    makers: dict[str, dict[str, StageSpec]] = {}
    pending = [spec]
    while pending:
        for need in pending.pop().needs:
            maker = specs.get(need.stage_id)
            if maker is not None and maker.id not in makers.setdefault(maker.stage, {}):
                makers[maker.stage][maker.id] = maker
                pending.append(maker)
    return {stage: next(iter(by_id.values())) for stage, by_id in makers.items() if len(by_id) == 1}


def ban_schedules(
    faults: list[dict[str, Json]], spec: StageSpec, plan: Plan, state: PlanState
) -> str:
    """Ban the schedules that are to blame; return the stage that must choose again, or nothing.

    A locked run bans nothing: its schedules are those of the lock file.
    """
    search = _find_makers(spec, plan).get(tune.NAME)
    culprits = [fault for fault in faults if fault.get("trial")]
    is_locked = any(stage.pinned for stage in plan.stages if stage.recipe == spec.recipe)
    if search is None or not culprits or is_locked:
        return ""
    settings = parse_settings(tune.run, search.settings)
    tvm = packages.identity("apache-tvm")
    ledger = Ledger.open(Path(state.store.ledger), settings.measured_target, tvm, settings.device)
    for fault in culprits:
        reason = f"{fault['text']} ({spec.recipe})"
        ledger.workload(fault["workload"]).add([Ban(fault["trial"], reason, timestamp())])
        fault["text"] += "; the schedule is banned"
    return search.id


def choose_again(search: str, plan: Plan, state: PlanState) -> None:
    """Let a `tune` stage run again, and all that depends on it."""
    state.forced[search] = "a schedule was banned"
    outdated = {search}
    for spec in plan.stages:
        if spec.id in outdated or any(need.stage_id in outdated for need in spec.needs):
            outdated.add(spec.id)
            state.artifacts.pop(spec.id, None)


def add_faults(message: str, faults: list[dict[str, Json]]) -> str:
    """Return a message with what is to blame."""
    return "; ".join([message, *(fault["text"] for fault in faults)])
