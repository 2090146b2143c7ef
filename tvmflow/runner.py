"""Runs a plan: doit decides the order, the store remembers, the executor does the work. The one door to doit."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from doit.cmd_base import TaskLoader2
from doit.dependency import JsonDB
from doit.doit_cmd import DoitMain
from doit.exceptions import TaskFailed
from doit.task import Task

from tvmflow import delivery, sources
from tvmflow.decide import Survey, check_pinned
from tvmflow.errors import Interrupted, TvmflowError, outcome_of
from tvmflow.provenance import beside
from tvmflow.report import RunReport, StageReport
from tvmflow.stores.filestat import FileDigests, stamp
from tvmflow.stores.local import Damaged, LocalStore, Slot
from tvmflow.targets import devices
from tvmflow.values import Artifact, Decision, Plan, StageCall, StageResult, StageSpec

if TYPE_CHECKING:
    # few runs have a remote
    from tvmflow.stores.remote.tier import Fetched, Tier

Event = dict[str, Any]
OnEvent = Callable[[Event], None]

_ROUNDS: Final = 3


class Executor(Protocol):
    """What runs a stage: see `executors.processes`. `slots` are the stages that it runs at a time, once started."""

    def start(self) -> None: ...
    @property
    def slots(self) -> int: ...
    def execute(self, call: StageCall, log: Path, on_event: OnEvent) -> StageResult: ...
    def cancel(self) -> None: ...
    @property
    def cancelled(self) -> bool: ...
    def close(self) -> None: ...


class RunOptions(NamedTuple):
    """How to run, none of which changes what comes out. Without `jobs` as many stages at a time as the executor has slots."""

    jobs: int | None = 1
    keep_going: bool = False
    dist: str = "dist"
    stage_timeout_s: float | None = None


def run(
    plan: Plan,
    store: LocalStore,
    executor: Executor,
    on_event: OnEvent,
    options: RunOptions,
    tier: Tier | None = None,
) -> RunReport:
    """Bring every stage of the plan up to date and deliver what the recipes ask for.

    Failures are in the report; raises only for what concerns the whole run, such as a full
    disk. A stored file that turns out to be damaged is set aside and made again. `tier` is
    where results are fetched from, and sent to, before a stage runs here and after it.
    """
    started = time.monotonic()
    with store.running(), _remote_at_work(tier, executor):
        session = Session(plan, store, executor, on_event, options, tier)
        delivered: list[str] = []
        for _ in range(_ROUNDS):
            session.walk()
            with contextlib.suppress(Damaged):
                artifacts = session.survey.artifacts
                delivered = delivery.deliver(plan, artifacts, store, options.dist)
                delivered += beside.attach(plan, artifacts, store, options.dist)
                if not session.damaged:
                    break
        rejected = [spec for spec in plan.stages if session.outcome(spec) == "rejected"]
        delivered += delivery.deliver_verdicts(rejected, session.verdicts, store, options.dist)
    seconds = time.monotonic() - started
    traffic = tier.traffic() if tier else None
    return RunReport(session.reports(), tuple(delivered), tuple(store.damage), seconds, traffic)


@contextlib.contextmanager
def _remote_at_work(tier: Tier | None, executor: Executor) -> Iterator[None]:
    """While this is open results may be sent; afterwards a limited time is waited for the last of them."""
    if tier is None:
        yield
        return
    tier.start()
    try:
        yield
    except BaseException:
        tier.finish(0.0)
        raise
    tier.finish(0.0 if executor.cancelled else None)


class Session:
    """One run of a plan: what is known of each stage, and the three things that may happen to it."""

    def __init__(
        self,
        plan: Plan,
        store: LocalStore,
        executor: Executor,
        on_event: OnEvent,
        options: RunOptions,
        tier: Tier | None = None,
    ) -> None:
        self._plan = plan
        self._store = store
        self._executor = executor
        self._on_event = on_event
        self._options = options
        self._tier = tier
        self._reports: dict[str, StageReport] = {}
        self._specs = {spec.id: spec for spec in plan.stages}
        self.survey = Survey(store, FileDigests(store))
        self.damaged: set[str] = set()
        self.verdicts: dict[str, str] = {}

    def outcome(self, spec: StageSpec) -> str:
        """How the stage ended in this run; empty while it has not."""
        report = self._reports.get(spec.id)
        return report.outcome if report else ""

    def reports(self) -> tuple[StageReport, ...]:
        """Every stage's end, in the plan's order; those that never got a turn were skipped."""
        missing = "a stage before it did not succeed"
        return tuple(
            self._reports.get(spec.id) or StageReport(spec.id, "skipped", missing, 0.0, {})
            for spec in self._plan.stages
        )

    def walk(self) -> None:
        """Survey the plan, fetch what others have made, then give doit what is not up to date."""
        self.damaged.clear()
        self.survey.look(self._plan)
        self._fetch_ahead()
        pending = [spec for spec in self._plan.stages if not self._note_hit(spec)]
        if not pending:
            return
        self._executor.start()
        names = {spec.id for spec in pending}
        tasks = [Task(**self.task(spec, names)) for spec in pending]
        _Doit(tasks, self._options.jobs or self._executor.slots, self._options.keep_going).run()

    def _fetch_ahead(self) -> None:
        if self._tier is not None and any(d.kind != "hit" for d in self.survey.decisions.values()):
            from tvmflow.stores.remote.ahead import fetch_ahead

            fetch_ahead(self._plan, self.survey, self._tier, self._note_fetched)

    def _note_fetched(self, spec: StageSpec, found: Fetched) -> None:
        reason = f"from {found.origin}"
        self._finish(spec, StageReport(spec.id, "fetched", reason, 0.0, found.artifact.facts))

    def _note_hit(self, spec: StageSpec) -> bool:
        decision = self.survey.decisions[spec.id]
        if decision.kind != "hit":
            return False
        artifact = self.survey.artifacts[spec.id]
        if self.outcome(spec) not in ("ran", "fetched"):
            self._finish(spec, StageReport(spec.id, "hit", decision.reason, 0.0, artifact.facts))
        self._store.remember(spec.recipe, spec.label, artifact.key)
        return True

    def task(self, spec: StageSpec, pending: set[str]) -> dict[str, Any]:
        """The stage as doit's own description of a task; it waits for those that it needs and are `pending`."""
        return {
            "name": spec.id,
            "actions": [(self._act, [spec])],
            "task_dep": [need.stage_id for need in spec.needs if need.stage_id in pending],
            "uptodate": [lambda: self._up_to_date(spec)],
            # doit's capturing of output breaks when tasks run in threads
            "io": {"capture": False},
        }

    def _up_to_date(self, spec: StageSpec) -> bool:
        """Asked by doit when the stages that this one needs are done."""
        try:
            self.survey.decide(spec)
            return self._note_hit(spec)
        except TvmflowError:
            # an error here would end doit's whole run: the action meets it again and reports it
            return False

    def _act(self, spec: StageSpec) -> TaskFailed | None:
        """Asked by doit to make a stage's result."""
        try:
            decision = self.survey.decide(spec)
            report = self._execute(spec, decision)
        except Damaged as found:
            self._mark_damaged(spec, found)
            return TaskFailed("an input is damaged")
        except TvmflowError as error:
            report = StageReport(
                spec.id, outcome_of(type(error)), "", 0.0, {}, error.message, error.fix
            )
        self._finish(spec, report)
        return None if report.outcome in ("ran", "hit", "fetched") else TaskFailed(report.message)

    def _mark_damaged(self, spec: StageSpec, found: Damaged) -> None:
        for need in spec.needs:
            artifact = self.survey.artifacts.get(need.stage_id)
            if artifact and any(file.digest == found.digest for file in artifact.files):
                self.damaged.add(need.stage_id)
                self.survey.forget(self._specs[need.stage_id])

    def _finish(self, spec: StageSpec, report: StageReport) -> None:
        self._reports[spec.id] = report
        self._on_event({"event": "stage_finished", **report._asdict()})

    # ------------------------------------------------------------ one stage

    def _execute(self, spec: StageSpec, decision: Decision) -> StageReport:
        """Claim the stage's key, look again, run it, publish what it made."""
        key = self.survey.keys[spec.id]
        reason = decision.reason
        with self._store.claim(key.digest) as slot:
            # another process may have finished it while we waited
            artifact, outcome = self._store.find(key.digest), "hit"
            if artifact is None and self._tier and (found := self._tier.fetch(key)):
                artifact, outcome, reason = found.artifact, "fetched", f"from {found.origin}"
            if artifact is not None:
                self._store.release(slot)
                result = StageResult("ok", "", "", artifact.facts, 0.0, "")
            else:
                self._on_event({"event": "stage_started", "stage_id": spec.id, "reason": reason})
                with self._trials_shared(spec):
                    result = self._run_in_worker(spec, slot)
                outcome = "ran" if result.outcome == "ok" else result.outcome
                if result.outcome == "ok":
                    artifact = self._store.publish(slot, key, result.facts, result.seconds, spec.id)
                else:
                    self._keep_verdict(spec, slot, result)
        if outcome == "ran" and self._tier:
            self._tier.offer(key.digest)
        if artifact is not None:
            check_pinned(spec, artifact)
            self.survey.artifacts[spec.id] = artifact
            self._store.remember(spec.recipe, spec.label, artifact.key)
        return StageReport(
            spec.id,
            outcome,
            reason,
            result.seconds,
            result.facts,
            result.message,
            result.fix,
            result.log if result.message else "",
        )

    @contextlib.contextmanager
    def _trials_shared(self, spec: StageSpec) -> Iterator[None]:
        """Before tuning, take the trials of others; after it, however it ended, give them ours."""
        if self._tier is None or spec.stage != "tune":
            yield
            return
        self._tier.pull_ledger(spec.settings)
        yield
        self._tier.offer_ledger(spec.settings)

    def _keep_verdict(self, spec: StageSpec, slot: Slot, result: StageResult) -> None:
        """A verdict against a library is worth keeping, but is no result that a later run may take."""
        verdict = Path(slot.out, "verdict.json")
        if result.outcome == "rejected" and verdict.is_file():
            self.verdicts[spec.id] = self._store.add_file(str(verdict))

    def _run_in_worker(self, spec: StageSpec, slot: Slot) -> StageResult:
        files, stamps = self._outside_files(spec)
        inputs = {**files, **self._stored_files(spec)}
        call = StageCall(
            stage=spec.stage,
            settings=spec.settings,
            inputs=inputs,
            out=slot.out,
            work=slot.work,
            ledger=self._store.ledger,
            locks=devices.machine_locks(),
            timeout_s=self._options.stage_timeout_s or spec.timeout_s,
            tools=spec.tools,
        )
        log = Path(self._store.root, "logs", spec.recipe, f"{spec.label.replace('/', '+')}.log")
        result = self._executor.execute(
            call, log, lambda event: self._on_event({**event, "stage_id": spec.id})
        )
        edited = [path for path, before in stamps.items() if _stamp_or_none(path) != before]
        if edited and result.outcome == "ok":
            message = f"{edited[0]} was changed while the stage read it"
            return result._replace(outcome="failed", message=message, fix="run again")
        return result

    def _outside_files(self, spec: StageSpec) -> tuple[dict[str, str], dict[str, list[int]]]:
        """Paths by role, downloads included, and the stamps that they must still have afterwards."""
        paths: dict[str, str] = {}
        for file in spec.files:
            paths[file.role] = file.path
            if file.url:
                fetched = sources.fetch(
                    file.url,
                    file.sha256,
                    Path(self._store.downloads),
                    emit=lambda event: self._on_download(spec, event),
                )
                paths[file.role] = str(fetched)
        return paths, {path: stamp(path) for path in paths.values()}

    def _on_download(self, spec: StageSpec, event: Event) -> None:
        if self._executor.cancelled:
            raise Interrupted("stopped while downloading; what has come is kept")
        self._on_event({**event, "stage_id": spec.id})

    def _stored_files(self, spec: StageSpec) -> dict[str, str]:
        """Paths of the other stages' files, each read once and found to have its digest."""
        paths = {}
        for need in spec.needs:
            artifact: Artifact = self.survey.artifacts[need.stage_id]
            for name, digest in artifact.digests(need.files).items():
                paths[f"{need.stage}/{name}"] = self._store.checked_blob(digest)
        return paths


@contextlib.contextmanager
def interruptible(executor: Executor, on_interrupt: Callable[[], None]) -> Iterator[None]:
    """While this is open, Ctrl-C and a polite kill stop the running stages and let the run end in order."""

    def stop(number: int, frame: Any) -> None:
        # whoever asks a second time does not want to wait
        signal.signal(number, before[number])
        executor.cancel()
        on_interrupt()

    before: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stamp_or_none(path: str) -> list[int] | None:
    try:
        return stamp(path)
    except OSError:
        return None


# ---------------------------------------------------------------- doit


class _Memory(JsonDB):  # type: ignore[misc]
    """doit's own memory, made to forget: the store remembers."""

    def __init__(self, name: str, codec: Any, **_: Any) -> None:
        self.name = name
        self.codec = codec
        self._db: dict[str, Any] = {}

    def dump(self) -> None:
        """Nothing of it outlives the run."""


class _Silent:
    """A doit reporter that leaves reporting to us."""

    desc = "silent"

    def __init__(self, outstream: Any, options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Doit(TaskLoader2):  # type: ignore[misc]
    """Our tasks and settings, handed to doit's own command through its public interface."""

    def __init__(self, tasks: list[Task], jobs: int, keep_going: bool) -> None:
        super().__init__()
        self._tasks = tasks
        self._jobs = jobs
        self._keep_going = keep_going

    def setup(self, opt_values: Any) -> None:
        """Nothing to read from disk."""

    def load_doit_config(self) -> dict[str, Any]:
        return {
            "backend": "memory",
            "reporter": _Silent,
            "verbosity": 0,
            "num_process": self._jobs if self._jobs > 1 else 0,
            "par_type": "thread",
            "continue": self._keep_going,
        }

    def load_tasks(self, cmd: Any, pos_args: Any) -> list[Task]:
        return self._tasks

    def run(self) -> None:
        """doit's exit status says less than our reports do, unless doit itself failed."""
        backend = {"memory": f"{__name__}:{_Memory.__name__}"}
        main = DoitMain(self, config_filenames=(), extra_config={"BACKEND": backend})
        if main.run(["run"]) == 3:
            raise AssertionError("doit could not run the plan")


def doit_tasks(
    session: Session, plan: Plan, deliver: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """The plan as tasks of a dodo file, named `recipe:stage/target`, and one that delivers: `recipe:deliver`."""
    names = {spec.id for spec in plan.stages}
    for spec in plan.stages:
        yield {**session.task(spec, names), "basename": spec.recipe, "name": spec.label}
    for recipe in dict.fromkeys(spec.recipe for spec in plan.stages):
        own = [spec.id for spec in plan.stages if spec.recipe == recipe]
        yield {
            "basename": recipe,
            "name": "deliver",
            "actions": [deliver],
            "task_dep": own,
            "io": {"capture": False},
        }
