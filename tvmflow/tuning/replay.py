"""Whether recorded schedules still apply to their kernels: each is applied again, none is run.

Nothing here imports TVM but `apply_all`, which runs in a forked child: a schedule that came
from elsewhere may crash the compiler, and that ends one child.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.errors import StageError
from tvmflow.executors.nursery import Nursery
from tvmflow.stores.local import Damaged, LocalStore
from tvmflow.tuning.ledger import Trial, WorkloadLedger
from tvmflow.tuning.records import folders
from tvmflow.values import Json

_TIMEOUT_S: Final = 60.0
_APPLY: Final = "tvmflow.tuning.replay:apply_all"


class Replayed(NamedTuple):
    """What was applied again. Of `unknown` workloads the store has nothing but trials."""

    workloads: int
    trials: int
    unknown: int
    findings: list[str]
    lost: int


def known_kernels(store: LocalStore) -> dict[str, str]:
    """The kernels, by workload key, of all models whose latest `extract_tasks` the store still has."""
    found: dict[str, str] = {}
    for note in sorted(Path(store.root, "last").glob("*/extract_tasks*")):
        artifact = store.find(note.read_text())
        for file in artifact.files if artifact else ():
            if file.name == "workloads.json":
                # what is damaged is made again by the next run; until then it is not known
                with contextlib.suppress(Damaged):
                    found.update(json.loads(Path(store.checked_blob(file.digest)).read_bytes()))
    return found


def replay(root: Path, kernels: Mapping[str, str], targets: Sequence[str] = ()) -> Replayed:
    """Apply every trace of the workloads that the ledger or `kernels` has, and set those aside that do not apply."""
    workloads = trials = unknown = lost = 0
    findings: list[str] = []
    with Nursery.start(("tvmflow.tuning.measure",)) as nursery:
        for folder in folders(root, targets):
            for key, _ in folder.workloads():
                mod = folder.ledger.kernel(key) or kernels.get(key, "")
                if not mod or not folder.about:
                    unknown += 1
                    continue
                ledger = folder.ledger.workload(key)
                tried, bad = set_aside(nursery, mod, folder.about["target"], ledger)
                workloads += 1
                trials += tried
                lost += bad
                findings += ledger.repairs
    return Replayed(workloads, trials, unknown, findings, lost)


def set_aside(
    nursery: Nursery, mod: str, target: Mapping[str, Json], ledger: WorkloadLedger
) -> tuple[int, int]:
    """Quarantine the trials of a workload (saved as `mod`) whose traces do not apply: how many were tried, how many went."""
    chosen = [each for each in ledger.trials.values() if _applied(each)]
    reasons = _reasons(nursery, mod, dict(target), chosen) if chosen else {}
    for trial_id, reason in reasons.items():
        ledger.quarantine([trial_id], f"its trace does not apply: {reason}")
    return len(chosen), len(reasons)


def _applied(trial: Trial) -> bool:
    """Whether the trace applied when it was measured. One that did not is known to fail, and stays."""
    return trial.failure is None or trial.failure.phase != "apply"


def _reasons(nursery: Nursery, mod: str, target: Json, trials: Sequence[Trial]) -> dict[str, str]:
    """Why trials do not apply, by their ids."""
    payload = {"mod": mod, "target": target, "traces": [trial.trace for trial in trials]}
    outcome = nursery.call(_APPLY, payload, timeout_s=_TIMEOUT_S + len(trials))
    if outcome.kind == "ok":
        pairs = zip(trials, outcome.value, strict=True)
        return {trial.id: reason for trial, reason in pairs if reason}
    if outcome.kind in ("error", "cancelled") or not trials:
        # no trace's fault: TVM cannot be loaded, or the kernel cannot
        raise StageError(
            f"schedules cannot be applied here: {outcome.message}", fix="run `tvmflow doctor`"
        )
    if len(trials) == 1:
        _reasons(nursery, mod, target, [])
        return {trials[0].id: outcome.message}
    # one of them crashes or hangs: which?
    half = len(trials) // 2
    return {
        **_reasons(nursery, mod, target, trials[:half]),
        **_reasons(nursery, mod, target, trials[half:]),
    }


def apply_all(payload: Any, _: Callable[[dict[str, Any]], None]) -> list[str]:
    """For each of `traces` why it does not apply to `mod` (saved) for `target`; empty when it does."""
    import tvm

    from tvmflow.schedules.intrinsics import load_intrinsics
    from tvmflow.tuning.measure import scheduled

    load_intrinsics(payload["target"])
    mod = tvm.ir.load_json(payload["mod"])
    reasons = []
    for trace in payload["traces"]:
        try:
            scheduled(mod, trace)
        # whatever TVM raises here is about this trace
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            reasons.append(f"{type(error).__name__}: {lines[-1]}"[:200])
        else:
            reasons.append("")
    return reasons
