"""Runs of plans: doit orders the stages, an executor runs them, the store keeps their results."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core import spans, termination
from tvmflow.core.errors import EXIT_OK, InternalError, TvmflowError
from tvmflow.core.files import write_atomically
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Artifact, Decision, Delivery, Json, Plan, StageSpec
from tvmflow.engine import delivery
from tvmflow.engine.plan_text import estimate_stages
from tvmflow.engine.remote_access import estimate_work, prefetch
from tvmflow.engine.report import (
    SUCCEEDED,
    ReportedFacts,
    RunReport,
    StageReport,
    compare_libraries,
)
from tvmflow.engine.stage_runs import RunContext, StageRuns, choose_again
from tvmflow.executors import Event, Executor, OnEvent
from tvmflow.planning.decisions import PlanState
from tvmflow.provenance import write_sidecars
from tvmflow.stages import STAGES, choose
from tvmflow.stages.base import find_facts
from tvmflow.store.inventory import update_recipe_pins
from tvmflow.store.local import DamagedBlob, LocalStore
from tvmflow.store.remote.client import Fetched, RemoteCacheClient
from tvmflow.tuning.remote_ledger import LedgerSync
from tvmflow.tuning.tuning_job import TuneFacts

_log = logging.getLogger(__name__)

# How often a run starts again because a stored file is damaged or a schedule is wrong.
_ROUNDS: Final = 4
_DECISIONS: Final = {"hit": "up to date", "run": "runs", "wait": "decided"}


class SessionOptions(NamedTuple):
    """The options of a run; none of them changes the results.

    Without `jobs`, as many stages run at a time as the executor has slots. `forced` are the ids of stages that run once
    even if they are up to date. With `delivers_interim`, long searches pause to deliver the best results so far.
    """

    jobs: int | None = 1
    keep_going: bool = False
    dist: str = "dist"
    stage_timeout_s: float | None = None
    stage_memory: int | None = None
    forced: frozenset[str] = frozenset()
    delivers_interim: bool = True


def run_plan(
    plan: Plan,
    store: LocalStore,
    executor: Executor,
    on_event: OnEvent,
    options: SessionOptions,
    remote_client: RemoteCacheClient | None = None,
    on_progress: Callable[[Callable[[], RunReport]], None] = lambda _: None,
) -> RunReport:
    """Bring every stage of a plan up to date and deliver the files of its recipes.

    A damaged file in the store is set aside, and its stage runs again. Events come from several threads.
    `on_progress` is called when stages begin, and after each stage that was not a hit, with a function that returns
    the report so far.

    Raises:
        TvmflowError: for a problem that ends the whole run, such as a full disk.
        InternalError: when no stage failed, but a result is missing.
    """
    started = time.monotonic()
    # Create this before uploads start, because earlier runs may have left trials to push.
    ledger_sync = LedgerSync(remote_client) if remote_client else None

    def make_report(delivered: Iterable[str] = ()) -> RunReport:
        return RunReport(
            stages=runs.list_reports(plan),
            delivered=tuple(delivered),
            damage=tuple(store.damage),
            seconds=time.monotonic() - started,
            origins=plan.origins,
        )

    def pass_on(event: Event) -> None:
        on_event(event)
        is_news = event["event"] == "stage_finished" and event["outcome"] != "hit"
        if is_news or event["event"] == "run_started":
            on_progress(make_report)

    context = RunContext(
        store=store,
        executor=executor,
        on_event=pass_on,
        timeout_s=options.stage_timeout_s,
        remote_client=remote_client,
        ledger_sync=ledger_sync,
        memory_bytes=options.stage_memory,
    )
    runs = StageRuns(context)
    session = Session(plan, runs, options)
    with store.running(), _uploading(remote_client, executor):
        has_succeeded = not options.delivers_interim or run_parts(plan, session.run_part)
        session.begin(plan, options.forced)
        delivered = session.run() if has_succeeded else []
        update_recipe_pins(store, plan.origins)
        delivered += delivery.deliver_verdicts(plan, runs.verdicts, store, options.dist)
        artifacts = session.state.artifacts
        report = make_report(delivered)
        check_complete(plan, report, artifacts, store, options.dist)
    return report._replace(
        seconds=time.monotonic() - started,
        remote=remote_client.traffic() if remote_client else None,
        signal=termination.signal_number(),
        compared_libraries=compare_libraries(plan, artifacts),
    )


@contextlib.contextmanager
def _uploading(remote_client: RemoteCacheClient | None, executor: Executor) -> Iterator[None]:
    """Upload results in the background; at the end, wait a limited time for the last of them."""
    if remote_client is None:
        yield
        return
    started = time.monotonic()
    remote_client.uploader.start()
    try:
        yield
    except BaseException:
        remote_client.finish(is_cancelled=True)
        raise
    with spans.span("wait for uploads"):
        remote_client.finish(time.monotonic() - started, is_cancelled=executor.cancelled)


class Session:
    """One run of a plan: the state of its stages, and the tasks that bring them up to date."""

    def __init__(self, plan: Plan, runs: StageRuns, options: SessionOptions) -> None:
        self._plan = plan
        self._runs = runs
        self._context = context = runs.context
        self._options = options
        self._logged: dict[str, Decision] = {}
        self.state = PlanState(context.store, options.forced)

    def begin(self, plan: Plan, forced: frozenset[str]) -> None:
        """Begin a plan; reports about its stages from earlier plans stay valid."""
        self._plan = plan
        self.state = PlanState(self._context.store, forced)

    def run_part(self, plan: Plan, forced: frozenset[str]) -> PlanState | None:
        """Run a plan that precedes the requested one; return its state, or None if it did not succeed."""
        self.begin(plan, forced)
        paths = self.run()
        reports = self._runs.list_reports(plan)
        if any(report.outcome not in SUCCEEDED for report in reports):
            return None
        if paths:
            searches = ReportedFacts(reports).list_of(TuneFacts, reports)
            trials = sum(search.measured + search.reused for search in searches if search)
            folders = sorted({str(Path(path).parent) for path in paths})
            self._context.on_event({"event": "delivered", "folders": folders, "trials": trials})
        return self.state

    def run(self) -> list[str]:
        """Bring the plan up to date, deliver finished and verified libraries, and return all delivered paths."""
        delivered: list[str] = []
        for _ in range(_ROUNDS):
            self.update()
            with contextlib.suppress(DamagedBlob):
                delivered = self.deliver()
                if not self._runs.damaged and not self._runs.retries:
                    break
        return delivered

    def update(self) -> None:
        """Decide which stages are up to date, fetch results from a remote cache, and run the other stages."""
        self._runs.damaged.clear()
        for tune in self._runs.retries:
            choose_again(tune, self._plan, self.state)
        self._runs.retries.clear()
        self.state.decide_all(self._plan)
        decisions, client = self.state.decisions, self._context.remote_client
        for decision in decisions.values():
            self._log_decision(decision)
        missing = [spec for spec in self._plan.stages if decisions[spec.id].kind != "hit"]
        delivery.check_folders(self._plan, self._options.dist, {spec.id for spec in missing})
        if client is not None and missing:
            client.limit_time(estimate_work(missing, self._context.store))
            with spans.span("prefetch"):
                prefetch(self._plan, self.state, client, self._report_fetched)
        if missing:
            self._announce()
        pending = [spec for spec in self._plan.stages if not self._report_hit(spec)]
        _log.debug("%d of %d stages are not up to date", len(pending), len(self._plan.stages))
        if not pending:
            return
        # An up-to-date plan needs no doit; importing it takes longer than confirming the plan.
        from tvmflow.engine.doit_adapter import EngineTask, run_tasks

        self._context.executor.start()
        names = {spec.id for spec in pending}
        tasks = [
            EngineTask(
                spec.id,
                functools.partial(self._run, spec),
                functools.partial(self._is_up_to_date, spec),
                tuple(need.stage_id for need in spec.needs if need.stage_id in names),
            )
            for spec in pending
        ]
        jobs = self._options.jobs or self._context.executor.slots
        run_tasks(tasks, jobs=jobs, keep_going=self._options.keep_going)

    def _announce(self) -> None:
        estimates = estimate_stages(self._plan, self.state)
        seconds = {stage_id: estimate.seconds for stage_id, estimate in estimates.items()}
        stages = [
            {"stage_id": stage_id, "kind": decision.kind, "seconds": seconds.get(stage_id)}
            for stage_id, decision in self.state.decisions.items()
        ]
        self._context.on_event({"event": "run_started", "stages": stages})

    def deliver(self) -> list[str]:
        """Deliver finished and verified libraries, with sidecar files, and return all paths."""
        artifacts, dist = self.state.artifacts, self._options.dist
        with spans.span("deliver"):
            paths = delivery.deliver(self._plan, artifacts, self._context.store, dist)
            return paths + write_sidecars(self._plan, artifacts, self._context.store, dist)

    def _report_fetched(self, spec: StageSpec, fetched: Fetched) -> None:
        facts, key, reason = fetched.artifact.facts, fetched.artifact.key, f"from {fetched.origin}"
        report = StageReport(spec.id, "fetched", reason, facts=facts, key=key)
        self._runs.report(report, self.state.keys)

    def _log_decision(self, decision: Decision) -> None:
        if self._logged.get(decision.stage_id) != decision:
            self._logged[decision.stage_id] = decision
            text = _DECISIONS[decision.kind]
            _log.info("%s: %s: %s", decision.stage_id, text, decision.reason)

    def _report_hit(self, spec: StageSpec) -> bool:
        """Report a stage whose result is in the store; return whether there is one."""
        decision = self.state.decisions[spec.id]
        if decision.kind != "hit":
            return False
        artifact = self.state.artifacts[spec.id]
        # An earlier part of a search may have reported another result of this stage.
        if not self._runs.has_reported(spec.id, artifact.key):
            facts, key = artifact.facts, artifact.key
            report = StageReport(spec.id, reason=decision.reason, facts=facts, key=key)
            self._runs.report(report, self.state.keys)
        self._context.store.remember(spec.recipe, spec.label, artifact.key)
        return True

    def _is_up_to_date(self, spec: StageSpec) -> bool:
        """Decide about a stage again once the stages that it needs are done."""
        try:
            self._log_decision(self.state.decide(spec))
        except (TvmflowError, OSError):
            # `_run` meets the same problem, and reports it as the stage's outcome.
            return False
        return self._report_hit(spec)

    def _run(self, spec: StageSpec) -> str:
        try:
            decision = self.state.decide(spec)
        except Exception as error:
            return self._runs.fail(spec, "", error, self.state.keys)
        self._log_decision(decision)
        again = spec.id in self.state.forced
        return self._runs.run(spec, self._plan, self.state, decision.reason, again=again)


# ---------------------------------------------------------------- completeness
# Exit code 0 means that everything requested exists.

_SHOWN = 3


def check_complete(
    plan: Plan, report: RunReport, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> None:
    """Raise InternalError if the report has no failure, but a result or delivered file is missing."""
    if report.exit_code != EXIT_OK:
        return
    missing = list(_list_missing(plan, report, artifacts, store))
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
) -> Iterator[str]:
    outcomes = {stage.stage_id: stage.outcome for stage in report.stages}
    for spec in plan.stages:
        outcome = outcomes.get(spec.id, "not reported")
        if outcome not in SUCCEEDED:
            yield f"{spec.id} ({outcome})"
        elif spec.id not in artifacts:
            yield f"{spec.id} ({outcome}, without a result)"
        # Results of this run are read again; hits have just been read from the store.
        elif outcome != "hit" and store.find(artifacts[spec.id].key) is None:
            yield f"{spec.id} ({outcome}, not in the store)"


# ---------------------------------------------------------------- interim libraries
# A long search delivers its best results while it goes on. It runs in parts with growing time limits, because resuming
# from the ledger costs nothing. After each part, the rest of the plan builds, verifies and delivers. The last part is
# the requested plan. The first library uses the rules' choices, because measuring choices would delay it.

_NO_TIME: Final = 0.0


def is_search(spec: StageSpec) -> bool:
    """Return whether a stage searches for schedules and can measure."""
    stage = STAGES.get(spec.stage)
    is_planned = stage is not None and bool(stage.TRAITS.forecast)
    is_unmeasurable = bool(spec.settings.get("unmeasurable_reason"))
    return is_planned and bool(spec.settings["tune"]["trials"]) and not is_unmeasurable


def with_best_so_far(plan: Plan) -> Plan:
    """Return the plan with searches that measure nothing, but take the best trials of the ledger."""
    return _with_minutes(plan, {spec.id: _NO_TIME for spec in plan.stages if is_search(spec)})


def select_stages(plan: Plan, ids: Iterable[str], deliveries: Iterable[Delivery] = ()) -> Plan:
    """Return the plan of these stages and the stages that they need, with only these deliveries."""
    specs = {spec.id: spec for spec in plan.stages}
    pending = [specs[stage_id] for stage_id in dict.fromkeys(ids)]
    selected = {spec.id for spec in pending}
    for spec in pending:
        pending += [specs[need.stage_id] for need in spec.needs if need.stage_id not in selected]
        selected |= {need.stage_id for need in spec.needs}
    stages = tuple(spec for spec in plan.stages if spec.id in selected)
    return Plan(stages, tuple(deliveries), plan.origins)


def run_parts(plan: Plan, run: Callable[[Plan, frozenset[str]], PlanState | None]) -> bool:
    """Run all parts of long searches except the last; return whether all parts succeeded.

    `run` gets a plan and the ids of stages to run even if they are up to date. It delivers, and returns the state of
    the plan, or None if the plan did not succeed.
    """
    searches = {spec.id: spec for spec in plan.stages if spec.deliver_every_s and is_search(spec)}
    if not searches:
        return True
    needed = [need.stage_id for spec in searches.values() for need in spec.needs]
    # First run the stages before the choices, then those before the search.
    choosers = [spec for spec in select_stages(plan, needed).stages if spec.stage == choose.NAME]
    current = plan
    if choosers:
        before = select_stages(plan, [need.stage_id for spec in choosers for need in spec.needs])
        state = run(before, frozenset())
        if state is None:
            return False
        # In interim mode, these stages take the choices in the ledger instead of measuring.
        pending = {spec.id for spec in choosers if state.decide(spec).kind != "hit"}
        current = _with_settings(plan, {key: {"interim": True} for key in pending})
    state = run(select_stages(current, needed), frozenset())
    if state is None:
        return False
    # The first part takes the ledger's trials; no key has the ledger's content, so these stages are forced.
    minutes = {key: _NO_TIME for key, spec in searches.items() if state.decide(spec).kind != "hit"}
    while part := _make_part(current, minutes):
        forced = [spec.id for spec in part.stages if minutes.get(spec.id) == _NO_TIME]
        state = run(part, frozenset(forced))
        if state is None:
            return False
        current, minutes = plan, dict(_list_next(searches, minutes, state.artifacts))
    return True


def _make_part(plan: Plan, minutes: Mapping[str, float]) -> Plan | None:
    """Return the plan of targets whose searches all run in parts; None if no search is left to continue."""
    deliveries: list[Delivery] = []
    ids: list[str] = []
    for entry in plan.deliveries:
        makers = [entry.stage_id, *filter(None, [entry.verified_by])]
        searches = list(filter(is_search, select_stages(plan, makers).stages))
        if minutes.keys() & {spec.id for spec in searches} and all(
            spec.deliver_every_s for spec in searches
        ):
            deliveries.append(entry)
            ids += makers
    return _with_minutes(select_stages(plan, ids, deliveries), minutes) if ids else None


def _list_next(
    searches: Mapping[str, StageSpec],
    minutes: Mapping[str, float],
    artifacts: Mapping[str, Artifact],
) -> Iterator[tuple[str, float]]:
    """Yield the searches to continue after this part, each with its new time limit in minutes."""
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
    searches = ((spec.id, spec.settings["tune"]) for spec in plan.stages if spec.id in minutes)
    changes = {
        key: {"tune": {**tune, "minutes": minutes[key], "interim": True}} for key, tune in searches
    }
    return _with_settings(plan, changes)


def _with_settings(plan: Plan, changes: Mapping[str, Mapping[str, Json]]) -> Plan:
    stages = (
        spec._replace(settings={**spec.settings, **changes.get(spec.id, {})})
        for spec in plan.stages
    )
    return plan._replace(stages=tuple(stages))
