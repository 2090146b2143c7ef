"""The text of a plan, with what all of it will cost, and the explanation of one stage."""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final

from tvmflow.core.codec import Mismatch
from tvmflow.core.disk_errors import find_file_system
from tvmflow.core.formatting import age_text, count_text, duration_text, names_text, size_text
from tvmflow.core.project import shortest_path
from tvmflow.core.types import Decision, Json, StageKey
from tvmflow.engine.estimates import Estimate, Total, add_up
from tvmflow.engine.report import MAX_SHOWN, unreadable_facts_text
from tvmflow.stages import STAGES, read_facts
from tvmflow.store.local import Failure
from tvmflow.tuning.budget import TrialForecast

KINDS: Final = {"hit": "up to date", "run": "run", "wait": "may run"}
"""The words for the kinds of decisions."""

_SHOWN_NAMES: Final = 3
_KEPT: Final = "; kept if only the weights changed"
_IF_WEIGHTS: Final = " if only the weights of the model changed"
# Two durations that differ by less than this are one.
_SAME_DURATION: Final = 1.05


def format_plan(
    decisions: Sequence[Decision],
    estimates: Mapping[str, Estimate],
    store_root: str,
    kept: Container[str] = (),
) -> list[str]:
    """Return a line for each stage, and what those will cost that must run.

    Estimates are those of the stages that are not up to date. The stages `kept` are kept if only the weights of the
    models changed.
    """
    lines = []
    if len(decisions) > MAX_SHOWN:
        # Nobody reads that many lines about stages that need nothing.
        shown = [decision for decision in decisions if decision.kind != "hit"]
        lines.append(f"up to date: {count_text(len(decisions) - len(shown), 'stage')}")
        decisions = shown
    width = max([len(decision.stage_id) for decision in decisions], default=0)
    costs = {stage_id: _cost_text(estimate) for stage_id, estimate in estimates.items()}
    cost_width = max(map(len, costs.values()), default=0)
    for decision in decisions:
        cost = f"{costs.get(decision.stage_id, ''):<{cost_width}}  " if cost_width else ""
        reason = decision.reason
        reason += _KEPT if decision.stage_id in kept else ""
        lines.append(f"{decision.stage_id:<{width}}  {KINDS[decision.kind]:<10}  {cost}{reason}")
    for estimate in estimates.values():
        lines += _describe_trials(estimate)
    if estimates:
        fewer = [estimate for stage_id, estimate in estimates.items() if stage_id not in kept]
        few = add_up(fewer) if len(fewer) < len(estimates) else None
        lines += _describe_total(add_up(estimates.values()), few, store_root)
    return lines


def range_text(seconds: tuple[float, float]) -> str:
    """Return an estimated duration: `about 12 s`, or `1 min 10 s to 3 min`."""
    least, most = (rounded_text(value) for value in seconds)
    is_one = least == most or seconds[1] < _SAME_DURATION * seconds[0]
    return f"about {most}" if is_one else f"{least} to {most}"


def rounded_text(seconds: float) -> str:
    """Return a duration without digits that no estimate has."""
    if seconds < 1:
        return "1 s"
    if seconds >= 60:
        seconds = round(seconds / 5) * 5
    text = duration_text(float(round(seconds)))
    return text.replace(".0 s", " s").replace(" 00 s", "")


def _cost_text(estimate: Estimate) -> str:
    if not estimate.seconds:
        return ""
    if estimate.basis == "time limit":
        return f"at most {rounded_text(estimate.seconds[1])}"
    return range_text(estimate.seconds)


def _describe_trials(estimate: Estimate) -> Iterator[str]:
    trials = estimate.trials
    if trials is None or not trials.budget:
        return
    label = estimate.stage_id
    if trials.kernels is None:
        yield f"{label}: measures {_budget_text(trials)}; its kernels are known after the stages before it"
        return
    kernels = count_text(len(trials.kernels), "kernel")
    new = len(trials.new_kernels)
    if not new:
        ledger = f"{kernels}, all with trials in the ledger"
    elif new == len(trials.kernels):
        ledger = f"{kernels}, none with trials in the ledger"
    else:
        ledger = f"{new} of {kernels} new: {names_text(trials.new_kernels, _SHOWN_NAMES)}"
    if not trials.at_most:
        yield f"{label}: nothing to measure, {trials.reused} trials are in the ledger; {ledger}"
        return
    spent = f", {rounded_text(trials.spent_s)} of the budget" if trials.spent_s >= 1 else ""
    reused = f" ({trials.reused} more are in the ledger{spent})" if trials.reused else ""
    finished = len(trials.finished_kernels)
    share = (
        f"; {count_text(finished, 'kernel')} had a share of this budget before" if finished else ""
    )
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
        text = f"{otherwise}{range_text(total.seconds)} for {stages}, one after the other, as they last took here"
        yield f"{text}; no history yet for {unknown} more" if unknown else text
    else:
        yield f"{count_text(unknown, 'stage')} to run; how long they take is known after their first run"
    if total.bytes:
        free = size_text(find_file_system(store_root).free)
        yield f"about {size_text(total.bytes)} in {shortest_path(store_root)} ({free} free)"


# ---------------------------------------------------------------- explanation
# Explanations: why a stage must run or need not, and everything that its result depends on.


def explain_stage(
    decision: Decision,
    key: StageKey | None,
    facts: Mapping[str, Json] | None = None,
    *,
    with_recipe: bool = False,
    origin: str = "",
    failure: Failure | None = None,
) -> str:
    """Return why a stage must run or need not, and everything that its result depends on.

    The key is None when stages before it must run first, and the origin empty when the result was made here.
    """
    label = decision.stage_id if with_recipe else decision.stage_id.partition(":")[2]
    if key is None:
        lines = [f"{label}: not known yet: {decision.reason}"]
        return "\n".join(lines + _describe_failure(failure, key))
    lines = [f"{label}: must run" if decision.kind == "run" else f"{label}: up to date"]
    lines += [f"  because {cause}" for cause in decision.causes]
    lines += _describe_failure(failure, key) if decision.kind == "run" else []
    lines += [f"  fetched: {origin}"] if origin else []
    lines += ["  depends on", *_list_inputs(key.preimage)]
    lines += [f"  {line}" for line in _explain_result(key.preimage["stage"], facts or {})]
    lines.append(f"  key {key.digest}")
    return "\n".join(lines)


def _explain_result(stage: str, facts: Mapping[str, Json]) -> list[str]:
    """Return what a stage says of its result; of facts that cannot be read, that they cannot."""
    try:
        value = read_facts(stage, facts)
        return [] if value is None else STAGES[stage].explain(value)
    except Mismatch as error:
        return [unreadable_facts_text(stage, error)]


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
    """Return a line for each setting, file, package and machine that a key is made of."""
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
    """Yield every setting with its path; lists are leaves."""
    if not isinstance(value, dict):
        yield path, value
        return
    for name in sorted(value):
        yield from _leaves(value[name], (*path, name))
