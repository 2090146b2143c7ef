"""Interim libraries: what a long search has found so far is delivered while it goes on.

A search resumes from the ledger at no cost, so it runs in parts, each with a longer time than the
one before. After each part the rest of the plan runs, as after any search: it is built, verified and
delivered, and nothing is measured meanwhile. The last part is the plan as it was requested.
The first library has no choices that would have to be measured before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from tvmflow.core.types import Artifact, Delivery, Json, Plan, StageSpec
from tvmflow.planning.decisions import PlanState
from tvmflow.stages import STAGES, choose
from tvmflow.stages.base import find_facts
from tvmflow.stages.tune import TuneFacts

_NO_TIME: Final = 0.0


def is_search(spec: StageSpec) -> bool:
    """Return whether a stage searches for schedules, and has something to search on."""
    stage = STAGES.get(spec.stage)
    is_planned = stage is not None and bool(stage.TRAITS.forecast)
    is_unmeasurable = bool(spec.settings.get("unmeasurable_reason"))
    return is_planned and bool(spec.settings["tune"]["trials"]) and not is_unmeasurable


def with_best_so_far(plan: Plan) -> Plan:
    """Return the plan with searches that measure nothing, and take the best trials of the ledger."""
    return _with_minutes(plan, {spec.id: _NO_TIME for spec in plan.stages if is_search(spec)})


def select_stages(plan: Plan, ids: Iterable[str], deliveries: Iterable[Delivery] = ()) -> Plan:
    """Return the plan of these stages and of those that they need, with these deliveries alone."""
    specs = {spec.id: spec for spec in plan.stages}
    pending = [specs[stage_id] for stage_id in dict.fromkeys(ids)]
    selected = {spec.id for spec in pending}
    for spec in pending:
        pending += [specs[need.stage_id] for need in spec.needs if need.stage_id not in selected]
        selected |= {need.stage_id for need in spec.needs}
    stages = tuple(spec for spec in plan.stages if spec.id in selected)
    return Plan(stages, tuple(deliveries), plan.origins)


def run_parts(plan: Plan, run: Callable[[Plan, frozenset[str]], PlanState | None]) -> bool:
    """Run all parts of the long searches of a plan except the last, and return whether all succeeded.

    Args:
        plan: The plan.
        run: Brings a plan up to date and delivers it; takes the stages that run also if they are up to
            date. Returns the state of the plan; None when it did not succeed.
    """
    searches = {spec.id: spec for spec in plan.stages if spec.deliver_every_s and is_search(spec)}
    if not searches:
        return True
    needed = [need.stage_id for spec in searches.values() for need in spec.needs]
    # what decides whether there is anything to choose, then whether there is anything to search
    choosers = [spec for spec in select_stages(plan, needed).stages if spec.stage == choose.NAME]
    current = plan
    if choosers:
        state = run(
            select_stages(plan, [need.stage_id for spec in choosers for need in spec.needs]),
            frozenset(),
        )
        if state is None:
            return False
        # these take the choices that the ledger has
        pending = {spec.id for spec in choosers if state.decide(spec).kind != "hit"}
        current = _with_settings(plan, {key: {"interim": True} for key in pending})
    state = run(select_stages(current, needed), frozenset())
    if state is None:
        return False
    # the first part takes what the ledger has, which no key knows
    minutes = {
        stage_id: _NO_TIME
        for stage_id, spec in searches.items()
        if state.decide(spec).kind != "hit"
    }
    while part := _make_part(current, minutes):
        forced = [spec.id for spec in part.stages if minutes.get(spec.id) == _NO_TIME]
        state = run(part, frozenset(forced))
        if state is None:
            return False
        current, minutes = plan, dict(_list_next(searches, minutes, state.artifacts))
    return True


def _make_part(plan: Plan, minutes: Mapping[str, float]) -> Plan | None:
    """Return the plan of the targets all of whose searches run in parts; None when none goes on."""
    deliveries: list[Delivery] = []
    ids: list[str] = []
    for delivery in plan.deliveries:
        makers = [delivery.stage_id, *filter(None, [delivery.verified_by])]
        searches = list(filter(is_search, select_stages(plan, makers).stages))
        if minutes.keys() & {spec.id for spec in searches} and all(
            spec.deliver_every_s for spec in searches
        ):
            deliveries.append(delivery)
            ids += makers
    return _with_minutes(select_stages(plan, ids, deliveries), minutes) if ids else None


def _list_next(
    searches: Mapping[str, StageSpec],
    minutes: Mapping[str, float],
    artifacts: Mapping[str, Artifact],
) -> Iterator[tuple[str, float]]:
    """Yield the searches that go on after the present part, with the minutes of the next one."""
    for stage_id, limit in minutes.items():
        every_s = searches[stage_id].deliver_every_s
        made = artifacts[stage_id].facts if stage_id in artifacts else {}
        facts = find_facts(TuneFacts, made)
        if every_s and facts and (facts.stopped == "time" or limit == _NO_TIME):
            following = round((facts.spent_s + every_s) / 60, 3)
            requested = searches[stage_id].settings["tune"]["minutes"]
            if requested is None or following < requested:
                yield stage_id, following


def _with_minutes(plan: Plan, minutes: Mapping[str, float]) -> Plan:
    specs = (spec for spec in plan.stages if spec.id in minutes)
    return _with_settings(
        plan,
        {
            spec.id: {
                "tune": {**spec.settings["tune"], "minutes": minutes[spec.id], "interim": True}
            }
            for spec in specs
        },
    )


def _with_settings(plan: Plan, changes: Mapping[str, Mapping[str, Json]]) -> Plan:
    stages = (
        spec._replace(settings={**spec.settings, **changes.get(spec.id, {})})
        for spec in plan.stages
    )
    return plan._replace(stages=tuple(stages))
