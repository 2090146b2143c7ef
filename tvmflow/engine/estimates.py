"""Estimates: what the stages that must run will cost, as far as the history in the store says it.

What is not known is not invented: a stage of which no result was made here has no estimate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core.errors import TvmflowError
from tvmflow.core.types import Artifact, Json, Plan, StageSpec
from tvmflow.planning.decisions import PlanState, input_digests
from tvmflow.stages import STAGES
from tvmflow.stages.base import find_facts, parse_settings
from tvmflow.stages.tune import TuneFacts
from tvmflow.store.local import ActionRecord, LocalStore
from tvmflow.tuning.budget import TrialForecast

_log = logging.getLogger(__name__)

# A range that is wider than this says nothing.
_WIDEST_RANGE: Final = 4.0

Basis = str
"""Where an estimate comes from: `same stage`, `other targets`, `ledger` or `time limit`."""


class Estimate(NamedTuple):
    """The cost of a stage that must run.

    `seconds` is the least and the most that it will probably take, and `bytes` the disk space for its result: None
    without history. `trials` is what its search will find in the ledger; None for a stage that searches nothing.
    """

    stage_id: str
    seconds: tuple[float, float] | None = None
    basis: Basis = ""
    bytes: int | None = None
    trials: TrialForecast | None = None

    def to_json(self) -> Json:
        """Return the estimate as plain JSON."""
        return {
            "seconds": self.seconds and list(self.seconds),
            "basis": self.basis or None,
            "bytes": self.bytes,
            "trials": self.trials and _trials_to_json(self.trials),
        }


def _trials_to_json(trials: TrialForecast) -> Json:
    is_known = trials.kernels is not None
    return {
        "budget": None if trials.is_unlimited else trials.budget,
        "minutes": trials.minutes,
        "spent_s": round(trials.spent_s, 1) if is_known else None,
        "kernels": list(trials.kernels or ()) if is_known else None,
        "new_kernels": list(trials.new_kernels) if is_known else None,
        "finished_kernels": list(trials.finished_kernels) if is_known else None,
        "in_ledger": trials.reused if is_known else None,
        "at_most": trials.at_most if is_known and not trials.is_unlimited else None,
    }


class Total(NamedTuple):
    """The cost of all stages that must run, one after the other; `unknown` are those without an estimate."""

    stages: int
    seconds: tuple[float, float] | None
    unknown: tuple[str, ...]
    bytes: int


def estimate_stages(plan: Plan, state: PlanState) -> dict[str, Estimate]:
    """Return the estimate of each stage of a plan that is not up to date, by its id."""
    return {
        spec.id: _estimate_stage(spec, state)
        for spec in plan.stages
        if state.decisions[spec.id].kind != "hit"
    }


def find_hits_with_new_weights(plan: Plan, state: PlanState) -> frozenset[str]:
    """Return the stages that a run will keep if only the weights of the models changed.

    The import of such a model makes the same files as last time, except those of weights. What needs
    only the others is then in the store already (early cutoff).
    """
    artifacts = dict(state.artifacts)
    kept: set[str] = set()
    for spec in plan.stages:
        if spec.id in artifacts:
            continue
        last = _find_weights_only_import(spec, state)
        if last is not None:
            artifacts[spec.id] = last
        elif _knows_inputs(spec, artifacts):
            artifact = state.find_result(spec, artifacts)
            if artifact is not None:
                artifacts[spec.id] = artifact
                kept.add(spec.id)
    return frozenset(kept)


def _knows_inputs(spec: StageSpec, artifacts: Mapping[str, Artifact]) -> bool:
    return all(
        need.stage_id in artifacts
        and bool(need.files)
        and set(need.files) <= artifacts[need.stage_id].digests(need.files).keys()
        for need in spec.needs
    )


def _find_weights_only_import(spec: StageSpec, state: PlanState) -> Artifact | None:
    """Return the last result of an import without its weights, if only a model's content changed."""
    key, last = state.keys.get(spec.id), state.store.last_key(spec.recipe, spec.label)
    stage = STAGES.get(spec.stage)
    weights = stage.TRAITS.weights if stage is not None else ()
    before = state.store.preimage(last) if last and weights else None
    artifact = state.store.find(last) if last and before is not None else None
    if key is None or before is None or artifact is None:
        return None
    if _without_content(before) != _without_content(key.preimage):
        return None
    return artifact._replace(files=tuple(f for f in artifact.files if f.name not in weights))


def _without_content(preimage: Mapping[str, Json]) -> Json:
    """Return the pre-image of a key with the names of files alone."""
    return {**preimage, "inputs": sorted(preimage["inputs"])}


def add_up(estimates: Iterable[Estimate]) -> Total:
    """Return the cost of several stages together."""
    estimates = list(estimates)
    known = [estimate.seconds for estimate in estimates if estimate.seconds]
    return Total(
        len(known),
        (sum(least for least, _ in known), sum(most for _, most in known)) if known else None,
        tuple(estimate.stage_id for estimate in estimates if not estimate.seconds),
        sum(estimate.bytes or 0 for estimate in estimates),
    )


def list_past_runs(spec: StageSpec, store: LocalStore) -> tuple[list[ActionRecord], Basis]:
    """Return what the store keeps of the last run of a stage, or else of the same stage for other targets.

    Results that were fetched say how long another machine took, and are left out.
    """
    own = _read_last(spec.recipe, [spec.label], store)
    if own:
        return own, "same stage"
    labels = [
        name.replace("+", "/", 1)
        for name in store.notes.list("last", spec.recipe)
        if name.partition("+")[0] == spec.stage
    ]
    return _read_last(spec.recipe, labels, store), "other targets"


def _read_last(recipe: str, labels: Sequence[str], store: LocalStore) -> list[ActionRecord]:
    keys = [store.last_key(recipe, label) for label in labels]
    records = [store.record(key) for key in keys if key]
    return [record for record in records if record and record.origin is None]


def _estimate_stage(spec: StageSpec, state: PlanState) -> Estimate:
    records, basis = list_past_runs(spec, state.store)
    sizes = [sum(file.size for file in record.files) for record in records]
    estimate = Estimate(
        spec.id,
        _range_of(record.seconds for record in records),
        basis if records else "",
        max(sizes, default=None),
    )
    trials = _forecast(spec, state)
    return estimate if trials is None else estimate_search(estimate, trials, records)


def _forecast(spec: StageSpec, state: PlanState) -> TrialForecast | None:
    """Return what the search of a stage will find in the ledger; None for a stage that searches nothing."""
    stage = STAGES.get(spec.stage)
    if stage is None or not stage.TRAITS.forecast:
        return None
    store = state.store
    inputs = {}
    if all(need.stage_id in state.artifacts for need in spec.needs):
        digests = input_digests(spec, state.artifacts)
        inputs = {role: Path(store.blobs.path(digest)) for role, digest in digests.items()}
    try:
        settings: Any = parse_settings(stage.run, spec.settings)
        tvm_build = state.tool_identities(spec)["apache-tvm"]
        return stage.TRAITS.forecast(settings, inputs, Path(store.ledger), tvm_build)
    except (TvmflowError, OSError, ValueError, LookupError) as error:
        # The stage meets the same problem, and reports it with a remedy.
        _log.debug("%s: no forecast: %s", spec.id, error)
        return None


def estimate_search(
    estimate: Estimate, trials: TrialForecast, records: Sequence[ActionRecord]
) -> Estimate:
    """Return the estimate of a search: its trials at the pace of earlier ones, and what is beside."""
    estimate = estimate._replace(trials=trials)
    if not trials.budget:
        return estimate
    # what earlier searches spent, such as one that was interrupted, is not spent again
    limit_s = trials.seconds_left
    known = [(record.seconds, find_facts(TuneFacts, record.facts)) for record in records]
    searches = [(seconds, search) for seconds, search in known if search is not None]
    overhead = _range_of(max(seconds - search.seconds, 0.0) for seconds, search in searches)
    measured = [search for _, search in searches if search.measured]
    paces = _range_of(search.seconds / search.measured for search in measured)
    basis = estimate.basis
    if paces is None and trials.seconds_per_trial is not None:
        paces, basis = (trials.seconds_per_trial,) * 2, "ledger"
    if trials.kernels is not None and not trials.at_most:
        return estimate._replace(seconds=overhead)
    missing = trials.budget if trials.kernels is None else trials.at_most
    seconds = None
    if paces and not trials.is_unlimited:
        least, most = overhead or (0.0, 0.0)
        seconds = (least + missing * paces[0], most + missing * paces[1])
    if limit_s is not None and (seconds is None or seconds[1] > limit_s):
        seconds, basis = (min(seconds[0], limit_s) if seconds else limit_s, limit_s), "time limit"
    return estimate._replace(seconds=seconds, basis=basis if seconds else "")


def _range_of(values: Iterable[float]) -> tuple[float, float] | None:
    """Return the least and the most of values; None where there are none, or where they differ too much."""
    known = sorted(values)
    if not known or known[-1] > _WIDEST_RANGE * max(known[0], 1.0):
        return None
    return known[0], known[-1]
