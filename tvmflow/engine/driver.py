"""The driver prepares, runs and reports the requests of commands, programs and dodo files.

Each run: plan, prefetch from the remote cache, run, localize faults, deliver, report.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tvmflow.core import file_locks, signing, spans
from tvmflow.core.codec import to_json
from tvmflow.core.errors import UsageError
from tvmflow.core.termination import Cancelling
from tvmflow.core.types import Json, Plan
from tvmflow.engine import remote_access
from tvmflow.engine.remote_access import RemoteSettings
from tvmflow.engine.report import RunReport
from tvmflow.engine.session import SessionOptions, is_search, run_plan, with_best_so_far
from tvmflow.engine.stage_runs import RunContext
from tvmflow.engine.timeline import TimelineRecording
from tvmflow.executors import PROCESSES, Event, Executor, ExecutorContext, load_plugin
from tvmflow.planning.prepare import PreparedRun, RunRequest, prepare_run
from tvmflow.provenance import read_builder_id
from tvmflow.store.downloads import OnProgress
from tvmflow.store.local import LocalStore
from tvmflow.store.remote.client import RemoteCacheClient


class DriverSettings(NamedTuple):
    """The settings of a run; with None as scheduler, the environment's is used.

    Only `best_so_far` changes results: the searches measure no trial, and take the best ones of the ledger.
    """

    session: SessionOptions
    remote: RemoteSettings = RemoteSettings()
    executor: str = PROCESSES
    scheduler: str | None = None
    wait_for_workers_s: float = 0.0
    best_so_far: bool = False


class Observer(Protocol):
    """Is notified of the events of runs."""

    def event(self, event: Event) -> None:
        """Take a progress event, from any thread."""
        ...

    def interrupted(self) -> str:
        """Return what is kept of an interrupted run, and how to continue; a signal handler calls it."""
        ...


def prepare(
    request: RunRequest,
    store: LocalStore,
    settings: DriverSettings,
    on_download: OnProgress | None = None,
) -> PreparedRun:
    """Return the plan of a request, after checking that it can be run."""
    check_settings(settings)
    if settings.executor == PROCESSES:
        prepared = _prepare_for_processes(request, store, on_download)
    else:
        prepared = prepare_run(request, store, on_download)
    if not settings.best_so_far:
        return prepared
    if not prepared.is_plain:
        raise UsageError(
            "--best-so-far is for recipes, and this pipeline releases or retunes several",
            fix="run its recipes with --best-so-far",
        )
    # The ledger's content is in no key, so these searches must run even if they seem up to date.
    searches = {spec.id for spec in prepared.plan.stages if is_search(spec)}
    plan, forced = with_best_so_far(prepared.plan), prepared.forced | searches
    return prepared._replace(plan=plan, forced=forced)


def _prepare_for_processes(
    request: RunRequest, store: LocalStore, on_download: OnProgress | None
) -> PreparedRun:
    """Plan; the process that later runs the stages answers queries about targets."""

    def query(targets: Sequence[Json]) -> list[Json]:
        # An up-to-date run needs no query, and starts no process.
        from tvmflow.executors import local

        local.start_early()
        # While that process loads TVM, this one imports the module that will run the stages.
        importlib.import_module("tvmflow.engine.doit_adapter")
        return local.query_targets(targets)

    try:
        return prepare_run(request, store, on_download, query)
    except BaseException:
        from tvmflow.executors.local import close_spare

        close_spare()
        raise


def check_settings(settings: DriverSettings) -> None:
    """Raise UsageError if the scheduler, remote cache or signing key is missing or invalid."""
    if settings.executor != PROCESSES:
        load_plugin(settings.executor).find_scheduler(settings.scheduler)
        remote_access.cluster_remote_url(settings.remote)
    elif settings.scheduler:
        raise UsageError("--scheduler is only for --executor dask", fix="add --executor dask")
    signing.load_signing_key()
    read_builder_id()


NoteProgress = Callable[[Callable[[], RunReport]], None]
"""Receives a function that returns the report so far: when stages begin, and after each stage."""


class Driver:
    """Runs plans one after the other on one executor, and notifies an observer."""

    def __init__(
        self,
        prepared: PreparedRun,
        store: LocalStore,
        settings: DriverSettings,
        observer: Observer,
        note_progress: NoteProgress = lambda _: None,
    ) -> None:
        """Open the executor; it starts when the first stage runs."""
        self._store = store
        self._settings = settings
        self._observer = observer
        self._note_progress = note_progress
        self._forced = prepared.forced
        self._delivers_interim = prepared.is_plain and not settings.best_so_far
        self._report_wait = file_locks.report_waits(lambda text: self._tell("waiting", text))
        self._executor = self._open_executor()

    def _open_executor(self) -> Executor:
        settings, store = self._settings, self._store
        if settings.executor == PROCESSES:
            from tvmflow.executors.local import ProcessExecutor

            return ProcessExecutor()
        plugin = load_plugin(settings.executor)
        return plugin.open_executor(
            ExecutorContext(
                store=store,
                scheduler=plugin.find_scheduler(settings.scheduler),
                open_remote=lambda is_cancelled: remote_access.open_cluster_client(
                    settings.remote, store, lambda text: self._tell("remote", text), is_cancelled
                ),
                remote_timeout_s=settings.remote.timeout_s,
                wait_s=settings.wait_for_workers_s,
                notify=lambda text: self._tell("cluster", text),
            )
        )

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.close()
        file_locks.report_waits(self._report_wait)

    @property
    def is_cancelled(self) -> bool:
        """True once the user has asked to stop."""
        return self._executor.cancelled

    def cancel(self) -> None:
        """Stop the running stages. May be called by a signal handler."""
        self._executor.cancel()

    def run(self, plan: Plan) -> RunReport:
        """Bring a plan up to date, deliver, and report; forced stages run only in the first call."""
        options = self._settings.session._replace(
            forced=self._forced, delivers_interim=self._delivers_interim
        )
        client = self._open_client(self._settings.remote)
        recorder = TimelineRecording(self._observer.event)
        jobs = options.jobs or self._executor.slots

        def add_timeline(report: RunReport) -> RunReport:
            return report._replace(timeline=to_json(recorder.finish(plan, jobs)))

        report_before = spans.report_spans(recorder.event)
        try:
            with Cancelling(self.cancel, self._observer.interrupted):
                report = run_plan(
                    plan,
                    self._store,
                    self._executor,
                    recorder.event,
                    options,
                    client,
                    lambda make: self._note_progress(lambda: add_timeline(make())),
                )
        finally:
            spans.report_spans(report_before)
        report = add_timeline(report)
        self._forced -= {stage.stage_id for stage in report.stages if stage.outcome == "ran"}
        return report

    def open_context(self) -> RunContext:
        """Return a context for stages that another program schedules, in any process; nothing is uploaded."""
        session, remote = self._settings.session, self._settings.remote
        client = self._open_client(remote._replace(reads_only=True))
        return RunContext(
            store=self._store,
            executor=self._executor,
            on_event=TimelineRecording(self._observer.event).event,
            timeout_s=session.stage_timeout_s,
            remote_client=client,
            memory_bytes=session.stage_memory,
        )

    def _open_client(self, remote: RemoteSettings) -> RemoteCacheClient | None:
        return remote_access.open_run_client(
            remote,
            self._store,
            lambda text: self._tell("remote", text),
            lambda: self._executor.cancelled,
        )

    def _tell(self, kind: str, message: str) -> None:
        self._observer.event({"event": kind, "message": message})
