"""The text of a plan with estimated costs, and the explanation of a single stage."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core.codec import Mismatch
from tvmflow.core.disk_errors import find_file_system
from tvmflow.core.errors import TvmflowError
from tvmflow.core.formatting import age_text, count_text, duration_text, names_text, size_text
from tvmflow.core.project import shortest_path
from tvmflow.core.types import Artifact, Decision, Json, Plan, StageKey, StageSpec
from tvmflow.engine.report import MAX_SHOWN, unreadable_facts_text
from tvmflow.planning.decisions import PlanState, input_digests
from tvmflow.stages import STAGES, read_facts
from tvmflow.stages.base import find_facts, parse_settings
from tvmflow.store.local import ActionRecord, Failure, LocalStore
from tvmflow.tuning.budget import TrialForecast
from tvmflow.tuning.tuning_job import TuneFacts

_log = logging.getLogger(__name__)

# ---------------------------------------------------------------- estimates
# Costs of stages that must run, estimated from the store's history. A stage that never ran here has no estimate.

# A range whose ends differ by more than this factor is not shown, because it says too little.
_WIDEST_RANGE: Final = 4.0

Basis = str
"""The source of an estimate: `same stage`, `other targets`, `ledger` or `time limit`."""


class Estimate(NamedTuple):
    """The cost of a stage that must run; None without history.

    `seconds` is the probable minimum and maximum, `bytes` the disk space of the result. `trials` is what its search
    will find in the ledger; None for a stage without a search.
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
    """The cost of all stages that must run, one after the other; `unknown` of them have no estimate."""

    stages: int
    seconds: tuple[float, float] | None
    unknown: tuple[str, ...]
    bytes: int


def estimate_stages(plan: Plan, state: PlanState) -> dict[str, Estimate]:
    """Return the estimate of each stage that is not up to date, by its id."""
    return {
        spec.id: _estimate_stage(spec, state)
        for spec in plan.stages
        if state.decisions[spec.id].kind != "hit"
    }


def find_hits_with_new_weights(plan: Plan, state: PlanState) -> frozenset[str]:
    """Return the stages that must run, but will turn out up to date if only models' weights changed.

    Importing such a model changes only the files of weights. Stages that need only the other files are then up to date
    (early cutoff).
    """
    artifacts = dict(state.artifacts)
    kept: set[str] = set()
    for spec in plan.stages:
        if spec.id in artifacts:
            continue
        last = _find_weights_only_import(spec, state)
        if last is not None:
            artifacts[spec.id] = last
        elif all(
            need.files
            and need.stage_id in artifacts
            and set(need.files) <= artifacts[need.stage_id].digests(need.files).keys()
            for need in spec.needs
        ):
            artifact = state.find_result(spec, artifacts)
            if artifact is not None:
                artifacts[spec.id] = artifact
                kept.add(spec.id)
    return frozenset(kept)


def _find_weights_only_import(spec: StageSpec, state: PlanState) -> Artifact | None:
    """Return the last result of an import without its weights, if only the model's content changed."""
    key, last = state.keys.get(spec.id), state.store.last_key(spec.recipe, spec.label)
    stage = STAGES.get(spec.stage)
    weights = stage.TRAITS.weights if stage is not None else ()
    before = state.store.preimage(last) if last and weights else None
    artifact = state.store.find(last) if last and before is not None else None
    if key is None or before is None or artifact is None:
        return None
    old, new = ({**image, "inputs": sorted(image["inputs"])} for image in (before, key.preimage))
    files = tuple(file for file in artifact.files if file.name not in weights)
    return artifact._replace(files=files) if old == new else None


def add_up(estimates: Iterable[Estimate]) -> Total:
    """Return the total cost of several stages."""
    estimates = list(estimates)
    known = [estimate.seconds for estimate in estimates if estimate.seconds]
    return Total(
        len(known),
        (sum(least for least, _ in known), sum(most for _, most in known)) if known else None,
        tuple(estimate.stage_id for estimate in estimates if not estimate.seconds),
        sum(estimate.bytes or 0 for estimate in estimates),
    )


def list_past_runs(spec: StageSpec, store: LocalStore) -> tuple[list[ActionRecord], Basis]:
    """Return records of a stage's last runs here; if there are none, of the stage for other targets."""
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
    """Return what the ledger has for a stage's search; None for a stage without a search."""
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
        # The stage itself will meet this problem, and report it with a remedy.
        _log.debug("%s: no forecast: %s", spec.id, error)
        return None


def estimate_search(
    estimate: Estimate, trials: TrialForecast, records: Sequence[ActionRecord]
) -> Estimate:
    """Return the estimate of a search: trials at the pace of earlier searches, plus their overhead."""
    estimate = estimate._replace(trials=trials)
    if not trials.budget:
        return estimate
    # Time spent by earlier searches, such as an interrupted one, counts towards the limit.
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
    """Return the minimum and maximum of values; None if there are none, or if they differ too much."""
    known = sorted(values)
    if not known or known[-1] > _WIDEST_RANGE * max(known[0], 1.0):
        return None
    return known[0], known[-1]


# ---------------------------------------------------------------- plan

KINDS: Final = {"hit": "up to date", "run": "run", "wait": "may run"}
"""The words for the kinds of decisions."""

_SHOWN_NAMES: Final = 3
_KEPT: Final = "; kept if only the weights changed"
_IF_WEIGHTS: Final = " if only the weights of the model changed"
# Two durations whose ratio is below this are shown as one.
_SAME_DURATION: Final = 1.05


def format_plan(
    decisions: Sequence[Decision],
    estimates: Mapping[str, Estimate],
    store_root: str,
    kept: Container[str] = (),
) -> list[str]:
    """Return a line for each stage, and the total cost of the stages that must run.

    The stages in `kept` will not run if only the weights of the models changed.
    """
    lines = []
    if len(decisions) > MAX_SHOWN:
        shown = [decision for decision in decisions if decision.kind != "hit"]
        lines.append(f"up to date: {count_text(len(decisions) - len(shown), 'stage')}")
        decisions = shown
    width = max([len(decision.stage_id) for decision in decisions], default=0)
    costs = {
        stage_id: f"at most {rounded_text(estimate.seconds[1])}"
        if estimate.basis == "time limit"
        else range_text(estimate.seconds)
        for stage_id, estimate in estimates.items()
        if estimate.seconds
    }
    cost_width = max(map(len, costs.values()), default=0)
    for decision in decisions:
        cost = f"{costs.get(decision.stage_id, ''):<{cost_width}}  " if cost_width else ""
        reason = decision.reason + (_KEPT if decision.stage_id in kept else "")
        lines.append(f"{decision.stage_id:<{width}}  {KINDS[decision.kind]:<10}  {cost}{reason}")
    for estimate in estimates.values():
        lines += _describe_trials(estimate)
    if estimates:
        fewer = [estimate for stage_id, estimate in estimates.items() if stage_id not in kept]
        few = add_up(fewer) if len(fewer) < len(estimates) else None
        lines += _describe_total(add_up(estimates.values()), few, store_root)
    return lines


def describe_plan(plan: Plan, state: PlanState) -> dict[str, Json]:
    """Return the stages of a plan as JSON, with costs for those that must run."""
    estimates, kept = estimate_stages(plan, state), find_hits_with_new_weights(plan, state)
    stages = [
        {
            **state.decisions[spec.id]._asdict(),
            "needs": [need.stage_id for need in spec.needs],
            "estimate": estimates.get(spec.id),
            "kept_with_new_weights": spec.id in kept,
        }
        for spec in plan.stages
    ]
    fewer = [estimate for stage_id, estimate in estimates.items() if stage_id not in kept]
    return {
        "stages": stages,
        "total": add_up(estimates.values()),
        "total_with_new_weights": add_up(fewer) if kept else None,
    }


def range_text(seconds: tuple[float, float]) -> str:
    """Return an estimated duration: `about 12 s`, or `1 min 10 s to 3 min`."""
    least, most = (rounded_text(value) for value in seconds)
    is_one = least == most or seconds[1] < _SAME_DURATION * seconds[0]
    return f"about {most}" if is_one else f"{least} to {most}"


def rounded_text(seconds: float) -> str:
    """Return a duration rounded to the precision that an estimate can have."""
    if seconds < 1:
        return "1 s"
    if seconds >= 60:
        seconds = round(seconds / 5) * 5
    text = duration_text(float(round(seconds)))
    return text.replace(".0 s", " s").replace(" 00 s", "")


def _describe_trials(estimate: Estimate) -> Iterator[str]:
    trials = estimate.trials
    if trials is None or not trials.budget:
        return
    label = estimate.stage_id
    if trials.kernels is None:
        yield f"{label}: measures {_budget_text(trials)}; its kernels are known after the stages before it"
        return
    kernels, new = count_text(len(trials.kernels), "kernel"), len(trials.new_kernels)
    ledger = f"{kernels}, {'none' if new else 'all'} with trials in the ledger"
    if 0 < new < len(trials.kernels):
        ledger = f"{new} of {kernels} new: {names_text(trials.new_kernels, _SHOWN_NAMES)}"
    if not trials.at_most:
        yield f"{label}: nothing to measure, {trials.reused} trials are in the ledger; {ledger}"
        return
    spent = f", {rounded_text(trials.spent_s)} of the budget" if trials.spent_s >= 1 else ""
    reused = f" ({trials.reused} more are in the ledger{spent})" if trials.reused else ""
    finished = count_text(len(trials.finished_kernels), "kernel")
    share = f"; {finished} had a share of this budget before" if trials.finished_kernels else ""
    yield f"{label}: measures {_budget_text(trials, trials.at_most)}{reused}; {ledger}{share}"


def _budget_text(trials: TrialForecast, number: int | None = None) -> str:
    if trials.is_unlimited:
        return f"as many trials as fit in {rounded_text(trials.seconds_left or 0.0)}"
    return f"up to {count_text(trials.budget if number is None else number, 'trial')}"


def _describe_total(total: Total, few: Total | None, store_root: str) -> Iterator[str]:
    if few is not None and few.seconds:
        text = f"{range_text(few.seconds)} for {count_text(few.stages, 'stage')}{_IF_WEIGHTS}"
        yield f"{text}; no history yet for {len(few.unknown)} more" if few.unknown else text
    elif few is not None:
        yield f"{count_text(len(few.unknown), 'stage')} to run{_IF_WEIGHTS}"
    unknown = len(total.unknown)
    if total.seconds:
        stages = count_text(total.stages, "stage")
        otherwise = "otherwise " if few is not None else ""
        text = f"{otherwise}{range_text(total.seconds)} for {stages} one after the other, based on their last runs"
        yield f"{text}; no history yet for {unknown} more" if unknown else text
    else:
        yield f"{count_text(unknown, 'stage')} to run; how long they take is known after their first run"
    if total.bytes:
        free = size_text(find_file_system(store_root).free)
        yield f"about {size_text(total.bytes)} in {shortest_path(store_root)} ({free} free)"


def explain_stage(
    decision: Decision,
    key: StageKey | None,
    facts: Mapping[str, Json] | None = None,
    *,
    with_recipe: bool = False,
    origin: str = "",
    failure: Failure | None = None,
) -> str:
    """Return why a stage must run or is up to date, and everything that its result depends on.

    The key is None if stages before it must run first. The origin is empty for a result made on this machine.
    """
    label = decision.stage_id if with_recipe else decision.stage_id.partition(":")[2]
    if key is None:
        unknown = f"{label}: not known yet: {decision.reason}"
        return "\n".join([unknown, *_describe_failure(failure, key)])
    lines = [f"{label}: must run" if decision.kind == "run" else f"{label}: up to date"]
    lines += [f"  because {cause}" for cause in decision.causes]
    lines += _describe_failure(failure, key) if decision.kind == "run" else []
    lines += [f"  fetched: {origin}"] if origin else []
    lines += ["  depends on", *_list_inputs(key.preimage)]
    stage = key.preimage["stage"]
    try:
        value = read_facts(stage, facts or {})
        lines += [f"  {line}" for line in ([] if value is None else STAGES[stage].explain(value))]
    except Mismatch as error:
        lines.append(f"  {unreadable_facts_text(stage, error)}")
    return "\n".join([*lines, f"  key {key.digest}"])


def _describe_failure(failure: Failure | None, key: StageKey | None) -> list[str]:
    if failure is None:
        return []
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time_s))
    age = age_text(time.time() - failure.time_s)
    before = "" if key is None or failure.key in ("", key.digest) else ", before it changed"
    lines = [f"{failure.text} on {when} ({age} ago){before}: {failure.message}"]
    lines += [f"fix: {failure.fix}"] if failure.fix else []
    lines += [f"log: {shortest_path(failure.log)}"] if failure.log else []
    first, *rest = "\n".join(lines).split("\n")
    return [f"  {first}", *(f"    {line}" for line in rest)]


def _list_inputs(preimage: Mapping[str, Json]) -> list[str]:
    rows = [("tvmflow", f"version {preimage.get('version')} of {preimage['stage']}", "")]
    rows += [
        ("setting", ".".join(path), json.dumps(value))
        for path, value in _leaves(preimage["settings"])
    ]
    rows += [("file", name, digest[:12]) for name, digest in sorted(preimage["inputs"].items())]
    rows += [("package", name, identity) for name, identity in sorted(preimage["tools"].items())]
    rows.append(("machine", preimage["machine"], ""))
    width = max(len(name) for _, name, _ in rows)
    return [f"    {kind:<8} {name:<{width}}  {value}".rstrip() for kind, name, value in rows]


def _leaves(value: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Json]]:
    """Yield every setting with its path; a list counts as one setting."""
    if not isinstance(value, dict):
        yield path, value
        return
    for name in sorted(value):
        yield from _leaves(value[name], (*path, name))
