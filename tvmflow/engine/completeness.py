"""The check at the end of a run: exit code 0 means that everything that was requested is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from tvmflow.core.errors import EXIT_OK, InternalError
from tvmflow.core.files import write_atomically
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Artifact, Plan
from tvmflow.engine import delivery
from tvmflow.engine.report import RunReport
from tvmflow.store.local import LocalStore

_SHOWN = 3


def check_complete(
    plan: Plan, report: RunReport, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> None:
    """Check the plan against the report, the store and the delivered files.

    Args:
        plan: Every stage and every file that was requested.
        report: The report of the run. One that names a failure is not checked further.
        artifacts: The results by stage id, as far as the run knows.
        store: Where the results are.
        dist: The folder for delivered files.

    Raises:
        InternalError: when the report names no failure although a result or a file is missing.
    """
    if report.exit_code != EXIT_OK:
        return
    missing = _list_missing(plan, report, artifacts, store)
    if not missing and delivery.delivered_paths(plan, artifacts, store, dist) is None:
        missing = [f"delivered files in {dist}"]
    if not missing:
        return
    log = os.path.join(store.root, "logs", "incomplete-run.log")
    outcomes = [f"{stage.stage_id}: {stage.outcome}: {stage.reason}" for stage in report.stages]
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(log), exist_ok=True)
        write_atomically(log, "\n".join(["missing:", *missing, "", "stages:", *outcomes, ""]))
    shown = ", ".join(missing[:_SHOWN])
    more = f", and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    raise InternalError(
        f"the run ended without an error, but {count_text(len(missing), 'result')} of it "
        f"cannot be found: {shown}{more}",
        fix=f"run again; if that does not help, report this with {log}",
    )


def _list_missing(
    plan: Plan, report: RunReport, artifacts: Mapping[str, Artifact], store: LocalStore
) -> list[str]:
    outcomes = {stage.stage_id: stage.outcome for stage in report.stages}
    missing = []
    for spec in plan.stages:
        outcome = outcomes.get(spec.id, "not reported")
        if outcome not in ("hit", "ran", "fetched"):
            missing.append(f"{spec.id} ({outcome})")
        elif spec.id not in artifacts:
            missing.append(f"{spec.id} ({outcome}, without a result)")
        # This run found the hits in the store already; what it made is read once more.
        elif outcome != "hit" and store.find(artifacts[spec.id].key) is None:
            missing.append(f"{spec.id} ({outcome}, not in the store)")
    return missing
