"""Runs one stage in a dask worker; its files go through the remote cache.

A worker has its own store: inputs are fetched into it once and verified; outputs go into it and to the remote cache.
If a stage was killed, the next attempt on the same machine finds its work folder and trials.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core import packages, signing, spans
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.codec import from_json, to_json
from tvmflow.core.errors import EnvironmentProblem, TvmflowError, outcome_for
from tvmflow.core.files import symlink_or_copy
from tvmflow.core.types import Json, StageCall, StageResult
from tvmflow.core.version import VERSION
from tvmflow.executors import PLACE, Event, OnEvent
from tvmflow.executors.local import ProcessExecutor, read_end
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.peers import PEERS
from tvmflow.stages import STAGES
from tvmflow.store.disk import Claim
from tvmflow.store.http_client import TransferError
from tvmflow.store.local import DamagedBlob, LocalStore
from tvmflow.store.remote import open_remote_cache
from tvmflow.store.remote.connection import Access, BlobRef, RemoteConnection
from tvmflow.targets import devices
from tvmflow.targets.backends import BACKENDS
from tvmflow.targets.devices import device_locks_folder
from tvmflow.targets.host import read_host
from tvmflow.tuning import remote_ledger

TOPIC: Final = "tvmflow"
"""dask's event topic for progress reports of workers."""

_PATHS: Final = ("inputs", "out", "work", "ledger", "locks")


class InputBlob(NamedTuple):
    """An input file of a stage, identified by its content in the remote cache.

    `path` is the user's path of a file from outside the store; empty for another stage's file.
    """

    digest: str
    size: int
    path: str


class StageRequest(NamedTuple):
    """A stage to run on a worker.

    `token` marks its events, `key` covers all of its inputs, `call` is a StageCall without paths, and `resources` are
    those that dask assigned to it.
    """

    token: str
    key: str
    remote_url: str
    remote_timeout_s: float
    call: dict[str, Json]
    inputs: dict[str, InputBlob]
    resources: dict[str, float]


class StageResponse(NamedTuple):
    """The outcome of a stage on a worker: its result, the end of its log, and its files by name."""

    result: StageResult
    files: dict[str, BlobRef]
    worker: str


def call_without_paths(call: StageCall) -> dict[str, Json]:
    """Return a call as JSON, without paths, because these are valid on one machine only."""
    return {name: value for name, value in to_json(call).items() if name not in _PATHS}


# The amount of a resource that any number of stages may use at a time.
_UNLIMITED: Final = 1e6
_SHORT_DIGEST: Final = 12
_MISSING: Final = "not installed"


class WorkerDescription(NamedTuple):
    """The software and hardware that determine a worker's results and measurements.

    `tvmflow` is the version and digest of this package, `cpu` a digest of the CPU features and usable cores, `host` the
    CPU's name for people, `tools` the identity of each distribution that a stage may use.
    """

    tvmflow: str
    platform: str
    cpu: str
    host: str
    tools: dict[str, str]


def describe_this_host(tools: Iterable[str] | None = None) -> WorkerDescription:
    """Return the description of this machine, with all tools that stages may use, or only `tools`."""
    host = read_host()
    return WorkerDescription(
        tvmflow=f"{VERSION}+{_digest_package()}",
        platform=packages.host_platform(),
        cpu=digest_of([host.fingerprint(), host.cores])[:_SHORT_DIGEST],
        host=f"{host.model}, {host.cores} cores",
        tools=packages.identify_installed(list_tools() if tools is None else tools),
    )


def list_tools() -> list[str]:
    """Return all distributions that stages may use."""
    tools = {tool for stage in STAGES.values() for tool in stage.TRAITS.tools}
    tools |= {tool for backend in BACKENDS.values() for tool in backend.TOOLS}
    for frontend in FRONTENDS.values():
        tools |= {*frontend.TOOLS, *frontend.REFERENCE.tools}
    return sorted(tools | {tool for peer in PEERS.values() for tool in peer.traits.tools})


def _digest_package() -> str:
    """Return a digest of this package, because two checkouts can have the same version."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:_SHORT_DIGEST]


def offered_resources(worker: WorkerDescription) -> dict[str, float]:
    """Return a worker's resources. It offers its CPU once, so only one measurement uses it at a time."""
    unlimited = [*_resource_names(worker, worker.tools), f"host:{worker.host}"]
    return {**dict.fromkeys(unlimited, _UNLIMITED), f"cpu:{worker.cpu}": 1.0}


def parse_resources(resources: Mapping[str, float]) -> WorkerDescription | None:
    """Return the description in a worker's resources; None if `tvmflow worker` did not start the worker."""
    values = dict(name.split(":", 1) for name in resources if ":" in name)
    own = {name: values.pop(name, None) for name in ("tvmflow", "platform", "cpu", "host")}
    if None in own.values():
        return None
    return WorkerDescription(**{name: str(value) for name, value in own.items()}, tools=values)


def required_resources(call: StageCall, planner: WorkerDescription) -> dict[str, float]:
    """Return the dask resources that a stage requires if the plan was made on the machine `planner`."""
    required = dict.fromkeys(_resource_names(planner, call.tools), 1.0)
    return {**required, f"cpu:{planner.cpu}": 1.0} if measures_cpu(call) else required


def _resource_names(worker: WorkerDescription, tools: Iterable[str]) -> list[str]:
    return [f"{name}:{version}" for name, version in _versions(worker, tools).items()]


def _versions(worker: WorkerDescription, tools: Iterable[str]) -> dict[str, str]:
    """Return the versions that must be equal on the planning machine and where the stage runs."""
    tool_versions = {tool: worker.tools.get(tool, _MISSING) for tool in tools}
    return {"tvmflow": worker.tvmflow, "platform": worker.platform, **tool_versions}


def measures_cpu(call: StageCall) -> bool:
    """Return whether a stage measures on the CPU of the planning machine."""
    return devices.CPU["kind"] in call.devices


def list_incompatibilities(
    call: StageCall, planner: WorkerDescription, worker: WorkerDescription | None
) -> list[str]:
    """Return the reasons why a worker cannot run a stage; empty if it can."""
    reasons = list_version_mismatches(planner, worker, call.tools)
    if worker and measures_cpu(call) and worker.cpu != planner.cpu:
        reasons.append(f"its CPU is {worker.host}, and the plan is for {planner.host}")
    return reasons


def list_version_mismatches(
    planner: WorkerDescription, worker: WorkerDescription | None, tools: Iterable[str]
) -> list[str]:
    """Return the version differences due to which a worker's result would differ from the planner's."""
    if worker is None:
        return ["it was not started by `tvmflow worker`"]
    versions = _versions(worker, tools)
    return [
        f"its {name} is {versions[name]}, and this machine has {expected}"
        for name, expected in _versions(planner, tools).items()
        if versions[name] != expected
    ]


STORE_VARIABLE: Final = "TVMFLOW_WORKER_STORE"
REMOTE_VARIABLE: Final = "TVMFLOW_WORKER_REMOTE"
"""Variables of the process that dask starts: its store, and the remote cache if the command names one."""

_MAX_LOG_BYTES: Final = 1 << 18
_POLL_S: Final = 0.2
_PUSH_INTERVAL_S: Final = 20.0

# Fork servers that have TVM loaded, and wait for the next stage.
_idle: Final[list[ProcessExecutor]] = []


class WorkerTask:
    """The dask task that this thread runs."""

    def __init__(self, token: str) -> None:
        from distributed.worker import get_worker, thread_state

        self._worker = get_worker()
        self._key = thread_state.key
        self._token = token
        self.worker = str(self._worker.name)

    def send(self, message: Mapping[str, Json]) -> None:
        """Send a message about the stage to the run that submitted it."""
        self._worker.log_event(TOPIC, {"token": self._token, **message})

    def report(self, event: Event) -> None:
        """Send a progress event to the run."""
        if event["event"] == PLACE:
            event = {**event, "worker": self.worker}
        self.send({"event": event})

    def is_abandoned(self) -> bool:
        """Return whether the run that submitted the stage is gone or was cancelled."""
        state = self._worker.state.tasks.get(self._key)
        return state is None or state.state in ("cancelled", "released", "forgotten")


def run_stage(request: dict[str, Json]) -> dict[str, Json]:
    """Run a stage to its end. Called by dask with a StageRequest as JSON; returns a StageResponse as JSON."""
    task, started = WorkerTask(str(request["token"])), time.monotonic()
    task.send({"begun": task.worker})
    try:
        response = _run(from_json(StageRequest, request), task)
    except (TvmflowError, TransferError, DamagedBlob) as error:
        fix = "`tvmflow worker` must be able to reach the remote cache and to write to it"
        unknown = EnvironmentProblem(str(error), fix=fix)
        problem = error if isinstance(error, TvmflowError) else unknown
        outcome: Any = outcome_for(type(problem))
        message, seconds = f"worker {task.worker}: {problem.message}", time.monotonic() - started
        result = StageResult(outcome, message, problem.fix, seconds=seconds)
        response = StageResponse(result, {}, task.worker)
    encoded: dict[str, Json] = to_json(response)
    return encoded


def _run(request: StageRequest, task: WorkerTask) -> StageResponse:
    _check_unchanged(request)
    store = _open_store(os.environ[STORE_VARIABLE])
    with store.running(), _connect(request, store, task) as connection:
        began_s = time.time()
        for blob in request.inputs.values():
            _fetch(connection, store, BlobRef(blob.digest, blob.size))
        task.report(spans.describe_span("fetch inputs", began_s, time.time()))
        with store.claim(request.key) as claim:
            call = _make_call(request, store, claim)
            log = Path(store.root, "logs", "cluster", f"{request.key}.log")
            with (
                _share_trials(connection, call, task.report) as on_event,
                _lend_executor(task.is_abandoned) as executor,
            ):
                result = executor.execute(call, log, on_event)
            has_files, began_s = result.outcome in ("ok", "rejected"), time.time()
            files = _upload_outputs(connection, store, claim) if has_files else {}
            task.report(spans.describe_span("upload outputs", began_s, time.time()))
            if result.outcome == "ok":
                store.release(claim)
    return StageResponse(_with_user_paths(result, log, request, call), files, task.worker)


def _check_unchanged(request: StageRequest) -> None:
    """Raise EnvironmentProblem if this machine changed since its worker announced its resources."""
    packages.forget()
    here = describe_this_host(request.call["tools"])
    offered = offered_resources(here)
    if missing := sorted(request.resources.keys() - offered.keys()):
        raise EnvironmentProblem(
            f"its software or hardware has changed since it was started: it no longer has {', '.join(missing)}",
            fix="start `tvmflow worker` again there",
        )


@functools.cache
def _open_store(folder: str) -> LocalStore:
    """Return this process's store, which remembers the files that it has verified."""
    store = LocalStore(folder)
    store.create()
    return store


@contextlib.contextmanager
def _connect(
    request: StageRequest, store: LocalStore, task: WorkerTask
) -> Iterator[RemoteConnection]:
    access = Access(
        writes=True,
        signer=signing.load_signing_key(),
        trusted=signing.load_trusted_keys(),
        patience_s=request.remote_timeout_s,
    )
    url = os.environ.get(REMOTE_VARIABLE) or request.remote_url
    remote = open_remote_cache(url, timeout_s=request.remote_timeout_s)

    def report(text: str) -> None:
        task.report({"event": "remote", "message": f"worker {task.worker}: {text}"})

    connection = RemoteConnection(remote, store, access, report, task.is_abandoned)
    try:
        yield connection
    except TransferError as problem:
        raise type(problem)(f"{remote.address}: {problem}") from problem
    finally:
        connection.cache.close()


def _fetch(connection: RemoteConnection, store: LocalStore, blob: BlobRef) -> None:
    with contextlib.suppress(DamagedBlob):
        store.blobs.verified_path(blob.digest)
        return
    path = Path(store.blobs.temporary_path())
    try:
        if not connection.download_blob(blob, path):
            raise EnvironmentProblem(
                f"{connection.address} does not have the content {blob.digest[:12]}",
                fix="run again, which uploads what is missing; a remote cache must keep contents for as long as a run lasts",
            )
        store.blobs.add(str(path))
    finally:
        path.unlink(missing_ok=True)


def _make_call(request: StageRequest, store: LocalStore, claim: Claim) -> StageCall:
    """Return the stage with this machine's paths; outside files keep their names, for messages."""
    inputs = {}
    links = Path(claim.folder, "inputs")
    for number, (name, blob) in enumerate(request.inputs.items()):
        path = Path(store.blobs.path(blob.digest))
        if blob.path:
            link = links / str(number) / Path(blob.path).name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            symlink_or_copy(path, link)
            path = link
        inputs[name] = str(path)
    paths = {"inputs": inputs, "out": claim.out, "work": claim.work, "ledger": store.ledger}
    return from_json(StageCall, {**request.call, **paths, "locks": device_locks_folder()})


def _upload_outputs(
    connection: RemoteConnection, store: LocalStore, claim: Claim
) -> dict[str, BlobRef]:
    files = {}
    for path in sorted(path for path in Path(claim.out).rglob("*") if path.is_file()):
        size = path.stat().st_size
        blob = BlobRef(store.blobs.add(str(path)), size)
        connection.upload_missing_blob(blob, Path(store.blobs.path(blob.digest)))
        files[path.relative_to(claim.out).as_posix()] = blob
    return files


def _with_user_paths(
    result: StageResult, log: Path, request: StageRequest, call: StageCall
) -> StageResult:
    """Return the result with the end of its log, with the user's paths for files from outside the store."""
    texts = [result.message, result.fix, read_end(log, _MAX_LOG_BYTES)]
    for name, blob in request.inputs.items():
        if blob.path:
            texts = [text.replace(call.inputs[name], blob.path) for text in texts]
    message, fix, end = texts
    return result._replace(message=message, fix=fix, log=end)


@contextlib.contextmanager
def _lend_executor(is_abandoned: Callable[[], bool]) -> Iterator[ProcessExecutor]:
    """Yield an executor; its stage is cancelled once nobody waits for it any more."""
    try:
        executor = _idle.pop()
    except IndexError:
        executor = ProcessExecutor()
    # Started before anybody can cancel, because a server that has not started cannot be cancelled.
    executor.start()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            if is_abandoned():
                executor.cancel()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield executor
    finally:
        done.set()
        watcher.join()
        if executor.cancelled:
            executor.close()
        else:
            _idle.append(executor)


@contextlib.contextmanager
def _share_trials(
    connection: RemoteConnection, call: StageCall, on_event: OnEvent
) -> Iterator[OnEvent]:
    """Pull others' trials before a search; push new ones repeatedly, because a worker may be lost.

    Yields the function to call with the stage's events instead of `on_event`. Stages without trials are not affected.
    """
    uses_ledger = call.traits.uses_ledger
    machine_class = remote_ledger.measured_machine_class(call.settings) if uses_ledger else None
    if machine_class is None:
        yield on_event
        return
    with _reported(connection):
        remote_ledger.pull_trials(connection, machine_class)
    has_new_trials, done = threading.Event(), threading.Event()

    def note_and_pass_on(event: Event) -> None:
        has_new_trials.set()
        on_event(event)

    def push() -> None:
        with _reported(connection):
            remote_ledger.push_trials(connection, machine_class)

    def push_repeatedly() -> None:
        while not done.wait(_PUSH_INTERVAL_S):
            if has_new_trials.is_set():
                has_new_trials.clear()
                push()

    pusher = threading.Thread(target=push_repeatedly, daemon=True)
    pusher.start()
    try:
        yield note_and_pass_on
    finally:
        done.set()
        pusher.join()
        push()


@contextlib.contextmanager
def _reported(connection: RemoteConnection) -> Iterator[None]:
    """Report problems in the block instead of raising them: unshared trials stay in this machine's ledger."""
    try:
        yield
    except (TransferError, TvmflowError) as problem:
        connection.report(f"trials are not shared: {problem}")
