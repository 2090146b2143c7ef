"""The dask plug-in: executor, scheduler and worker. Only its entry point refers to it.

Files go through the remote cache by digest; dask only transfers small JSON. If a worker ends during a stage, dask
gives the stage to another worker. A stage runs in a child of the worker, so that a crash in native code is a result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from tvmflow.core import codec, spans
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.errors import EXIT_OK, EnvironmentProblem, Interrupted, StoreError, UsageError
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import limit_lines
from tvmflow.core.generated_text import shell_word
from tvmflow.core.processes import kill_descendants
from tvmflow.core.types import StageCall, StageResult
from tvmflow.core.version import page_url
from tvmflow.executors import Event, ExecutorContext, Notify, OnEvent, cluster_worker
from tvmflow.executors.cluster_worker import (
    TOPIC,
    InputBlob,
    StageRequest,
    StageResponse,
    WorkerDescription,
    call_without_paths,
)
from tvmflow.store.file_digests import FileDigests
from tvmflow.store.http_client import TransferError
from tvmflow.store.local import LocalStore
from tvmflow.store.remote.connection import BlobRef, RemoteConnection
from tvmflow.tuning import remote_ledger

SCHEDULER_VARIABLE: Final = "TVMFLOW_SCHEDULER"

_log: Final = logging.getLogger(__name__)
_POLL_S: Final = 0.05
_CONNECT_S: Final = 10.0
_WAIT_STEP_S: Final = 0.5
_CHECK_WORKERS_S: Final = 2.0
# After a worker ends, its nanny starts it again within a few seconds.
_RESTART_S: Final = 20.0
# A stage is tried on at most this many workers, however long the scheduler has run.
_ALLOWED_FAILURES: Final = 2
_MAX_WORKERS: Final = 3
_MAX_LISTED: Final = 8
# Every stage needs the same build of TVM.
_COMMON_TOOLS: Final = ("apache-tvm", "apache-tvm-ffi")
_RETRY_S: Final = 2.0
_END_S: Final = 1.2
_DEATH_TIMEOUT_S: Final = 30.0
# dask's metrics page gets any free port, so that two processes on one machine do not clash.
_LOCAL_METRICS: Final = "127.0.0.1:0"


def find_scheduler(option: str | None) -> str:
    """Return the address that `--scheduler` or the environment names, or raise UsageError."""
    address = option or os.environ.get(SCHEDULER_VARIABLE, "")
    if not address:
        fix = f"give --scheduler tcp://HOST:PORT, or set ${SCHEDULER_VARIABLE}"
        raise UsageError("no scheduler is named", fix=fix)
    scheme, separator, rest = address.rpartition("://")
    host, _, port = rest.rpartition(":")
    if (separator and scheme not in ("tcp", "tls")) or not host or not port.isdecimal():
        fix = "give it as tcp://HOST:PORT, or tls://HOST:PORT"
        raise UsageError(f"--scheduler {address}: not an address of a scheduler", fix=fix)
    return address if separator else f"tcp://{address}"


class DaskExecutor:
    """Runs stages on a scheduler's workers. Connects when the first stage runs."""

    def __init__(self, context: ExecutorContext) -> None:
        self._context = context
        # Opened before planning, so that a missing remote cache is reported at once.
        self._remote_url, self._connection = context.open_remote(lambda: self.cancelled)
        self._files = FileTransfer(context.store, self._connection)
        self._lock = threading.Lock()
        self._cluster: DaskCluster | None = None
        self._running: dict[str, RemoteStage] = {}
        self.slots = 1
        self.cancelled = False

    def start(self) -> None:
        """Connect to the cluster."""
        self._connect()

    def _connect(self) -> DaskCluster:
        with self._lock:
            if self._cluster is None:
                self._cluster = DaskCluster(self._context, lambda: self.cancelled)
                self._cluster.client.subscribe_topic(TOPIC, self._on_cluster_event)
                self.slots = self._cluster.wait_for_slots()
            return self._cluster

    def _on_cluster_event(self, dask_event: tuple[float, Mapping[str, Any]]) -> None:
        """Take an event of any run on this cluster. dask calls this in a thread that must not block."""
        _, message = dask_event
        stage = self._running.get(message.get("token", ""))
        if stage is None:
            return
        if "event" in message:
            stage.events.append(dict(message["event"]))
        else:
            # The key is not "worker": dask itself adds a field of that name, the worker's address.
            stage.workers.append(str(message["begun"]))

    def execute(self, call: StageCall, log: Path, on_event: OnEvent) -> StageResult:
        """Run a stage on a worker and download its outputs; raises EnvironmentProblem or Interrupted."""
        cluster = self._connect()
        log.parent.mkdir(parents=True, exist_ok=True)
        cluster.wait_for_worker(call)
        with self._files.remote_errors():
            request = self._make_request(cluster, call)
            stage = RemoteStage(cluster, call, request)
            self._running[request.token] = stage
            try:
                with stage.submitted():
                    response = stage.wait(on_event, lambda: self.cancelled, self._context.wait_s)
            finally:
                del self._running[request.token]
            if response is None:
                return StageResult("cancelled", "the run was cancelled", log=str(log))
            with spans.span(f"download from {response.worker}"):
                self._files.download_outputs(Path(call.out), response.files)
        log.write_text(f"ran on worker {response.worker}\n{response.result.log}")
        machine_class = remote_ledger.measured_machine_class(call.settings)
        if call.traits.uses_ledger and machine_class is not None:
            # Fetch the trials that the worker measured.
            with contextlib.suppress(TransferError, StoreError, Interrupted):
                remote_ledger.pull_trials(self._connection, machine_class)
        return response.result._replace(log=str(log))

    def _make_request(self, cluster: DaskCluster, call: StageCall) -> StageRequest:
        with spans.span("send inputs"):
            inputs = {name: self._files.upload_input(path) for name, path in call.inputs.items()}
        contents = {name: blob.digest for name, blob in inputs.items()}
        parts = ["cluster", call.stage, call.settings, contents, cluster.planner.tvmflow]
        return StageRequest(
            token=uuid.uuid4().hex,
            key=digest_of(parts),
            remote_url=self._remote_url,
            remote_timeout_s=self._context.remote_timeout_s,
            call=call_without_paths(call),
            inputs=inputs,
            resources=cluster_worker.required_resources(call, cluster.planner),
        )

    def cancel(self) -> None:
        """Stop every running stage, and let none start."""
        # A signal handler may call this at any moment, so it only sets a flag, which waiting threads poll.
        self.cancelled = True

    def close(self) -> None:
        """Disconnect; this run's stages on the cluster are stopped."""
        if self._cluster is not None:
            # the scheduler may be gone
            with contextlib.suppress(Exception):
                self._cluster.client.close(timeout=5)
        self._connection.cache.close()


open_executor = DaskExecutor


class FileTransfer:
    """Uploads the inputs of stages, and downloads their outputs."""

    def __init__(self, store: LocalStore, connection: RemoteConnection) -> None:
        self._store = store
        self._connection = connection
        self._digests = FileDigests(store)

    def upload_input(self, path: str) -> InputBlob:
        """Upload an input of a stage, unless the remote cache has it."""
        size, name = Path(path).stat().st_size, Path(path).name
        if path == self._store.blobs.path(name):
            self._connection.upload_missing_blob(BlobRef(name, size), Path(path))
            return InputBlob(name, size, "")
        blob = BlobRef(self._digests.digest(path), size)
        if not self._connection.has_blob(blob):
            self._upload_copy(path, blob)
        return InputBlob(blob.digest, size, path)

    def _upload_copy(self, path: str, blob: BlobRef) -> None:
        """Upload a copy, because a file that changes meanwhile must not be stored under its earlier digest."""
        copy = Path(self._store.blobs.temporary_path())
        try:
            with disk_errors(self._store.root):
                shutil.copyfile(path, copy)
            if hash_file(str(copy)) != blob.digest:
                text = f"{path} was changed while the run read it"
                raise EnvironmentProblem(text, fix="run again")
            self._connection.upload_missing_blob(blob, copy)
        finally:
            copy.unlink(missing_ok=True)

    def download_outputs(self, folder: Path, files: Mapping[str, BlobRef]) -> None:
        """Download the outputs of a stage into a folder."""
        for name, blob in files.items():
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise EnvironmentProblem(f"a worker gave a file the name {name!r}")
            path = folder / name
            with disk_errors(str(folder)):
                path.parent.mkdir(parents=True, exist_ok=True)
            if not self._connection.download_blob(blob, path):
                raise EnvironmentProblem(
                    f"{self._connection.address} no longer has {name}, which a worker has just uploaded",
                    fix="run again; a remote cache must keep contents for as long as a run lasts",
                )

    @contextlib.contextmanager
    def remote_errors(self) -> Iterator[None]:
        """Re-raise the remote cache's errors in the block as EnvironmentProblem."""
        try:
            yield
        except TransferError as problem:
            raise EnvironmentProblem(
                f"the remote cache {self._connection.address}: {problem}",
                fix="--executor dask needs a remote cache that this machine and every worker can reach and may write to",
            ) from problem


class RemoteStage:
    """A stage submitted to the cluster; dask's thread fills `events` and `workers`."""

    def __init__(self, cluster: DaskCluster, call: StageCall, request: StageRequest) -> None:
        self.events: deque[Event] = deque()
        self.workers: list[str] = []
        self._cluster = cluster
        self._call = call
        self._request = request
        self._future: Any = None
        self._reported_workers = 1

    @contextlib.contextmanager
    def submitted(self) -> Iterator[None]:
        """Submit the stage. At the end of the block, release it; if it still runs, stop it."""
        self._future = self._cluster.client.submit(
            cluster_worker.run_stage,
            codec.to_json(self._request),
            key=f"tvmflow-{self._call.stage}-{self._request.token}",
            resources=self._request.resources,
            pure=False,
        )
        try:
            yield
        finally:
            # The connection may be lost by then.
            with contextlib.suppress(Exception):
                if self._future.done():
                    self._future.release()
                else:
                    self._future.cancel()

    def wait(
        self, on_event: OnEvent, is_cancelled: Callable[[], bool], patience_s: float
    ) -> StageResponse | None:
        """Pass on a stage's events until it ends; return its response, or None if it was cancelled.

        Gives up if for `patience_s` seconds no worker can run the stage.
        """
        served_s = next_s = time.monotonic()
        while self._future.status == "pending":
            if is_cancelled():
                return None
            self._pass_on(on_event)
            if (now_s := time.monotonic()) > next_s:
                next_s = now_s + _CHECK_WORKERS_S
                refusals = self._cluster.refusals(self._call)
                if refusals is None:
                    served_s = now_s
                elif now_s - served_s > max(patience_s, _RESTART_S):
                    raise self._cluster.no_worker(refusals)
            time.sleep(_POLL_S)
        self._pass_on(on_event)
        if self._future.status == "finished":
            return codec.from_json(StageResponse, self._future.result(timeout=_CONNECT_S))
        if self._future.status == "error":
            raise self._describe_failure(self._future.exception(timeout=_CONNECT_S))
        if is_cancelled():
            return None
        raise self._cluster.connection_lost()

    def _pass_on(self, on_event: OnEvent) -> None:
        while self.events:
            on_event(self.events.popleft())
        if len(self.workers) > _MAX_WORKERS:
            raise _workers_lost(self.workers[:-1])
        if len(self.workers) > self._reported_workers:
            self._reported_workers = len(self.workers)
            lost, successor = self.workers[-2:]
            message = f"worker {lost} ended while it ran this stage; {successor} runs it again"
            on_event({"event": "cluster", "message": message})

    def _describe_failure(self, error: Exception) -> EnvironmentProblem:
        from distributed import KilledWorker

        _log.debug("%s failed on %s: %r", self._call.stage, self.workers, error)
        if isinstance(error, KilledWorker):
            return _workers_lost(self.workers)
        worker = self.workers[-1] if self.workers else "a worker"
        text = f"worker {worker} could not run it: {type(error).__name__}: {error}"
        return EnvironmentProblem(text, fix="look at what `tvmflow worker` printed there")


def _workers_lost(names: list[str]) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{len(names)} workers ended while they ran it: {', '.join(names)}",
        fix="look at what `tvmflow worker` printed there, and whether those machines ran out of memory",
    )


class Worker(NamedTuple):
    """A worker of the cluster: its name, its slots (stages at a time), and its description."""

    name: str
    slots: int
    description: WorkerDescription | None


class DaskCluster:
    """A connection to a dask cluster; only workers with the planning machine's versions are used."""

    def __init__(self, context: ExecutorContext, is_cancelled: Callable[[], bool]) -> None:
        self._context = context
        self._is_cancelled = is_cancelled
        self.planner = cluster_worker.describe_this_host()
        self.client = _connect(context.scheduler)

    def list_workers(self) -> list[Worker]:
        """Return the workers of the cluster."""
        while self.client.status == "connecting":
            time.sleep(_POLL_S)
        if self.client.status != "running":
            raise self.connection_lost()
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        return [
            Worker(
                str(info["name"]),
                info["nthreads"],
                cluster_worker.parse_resources(info["resources"] or {}),
            )
            for info in workers
        ]

    def wait_for_slots(self) -> int:
        """Wait for workers; return how many stages they run at a time, and tell the user about unusable ones."""
        slots, refused = 0, list[str]()
        for _ in self._wait_steps():
            slots, refused = self._count_slots()
            if slots:
                break
        if not slots:
            scheduler = self._context.scheduler
            reasons = (
                "\n  ".join(["", *limit_lines(refused, _MAX_LISTED)]) if refused else "it has none"
            )
            raise EnvironmentProblem(
                f"no worker of {scheduler} can run stages: {reasons}",
                fix=f"start some with `tvmflow worker --scheduler {shell_word(scheduler)}`, where the same "
                "tvmflow and TVM are installed; --wait-for-workers SECONDS waits for them",
            )
        for reason in refused:
            self._context.notify(f"worker {reason}; it is not used")
        return slots

    def _count_slots(self) -> tuple[int, list[str]]:
        """Return the slots of all usable workers, and why the others are unusable."""
        slots, refused = 0, []
        for worker in self.list_workers():
            mismatches = cluster_worker.list_version_mismatches(
                self.planner, worker.description, _COMMON_TOOLS
            )
            if mismatches:
                refused.append(f"{worker.name}: {'; '.join(mismatches)}")
            else:
                slots += worker.slots
        _log.debug("%d slots; refused workers: %s", slots, refused)
        return slots, refused

    def wait_for_worker(self, call: StageCall) -> None:
        """Wait until a worker can run a stage."""
        for _ in self._wait_steps():
            reasons = self.refusals(call)
            if reasons is None:
                return
        raise self.no_worker(reasons or [])

    def refusals(self, call: StageCall) -> list[str] | None:
        """Return why no worker can run a stage, a reason for each; None if one of them can."""
        refusals = []
        for worker in self.list_workers():
            reasons = cluster_worker.list_incompatibilities(call, self.planner, worker.description)
            if not reasons:
                return None
            refusals.append(f"{worker.name}: {'; '.join(reasons)}")
        _log.debug("no worker can run %s: %s", call.stage, refusals)
        return refusals

    def _wait_steps(self) -> Iterator[None]:
        """Yield at intervals while waiting for workers, and once more at the end."""
        deadline = time.monotonic() + self._context.wait_s
        while time.monotonic() < deadline and not self._is_cancelled():
            yield
            time.sleep(_WAIT_STEP_S)
        yield

    def no_worker(self, refusals: list[str]) -> EnvironmentProblem:
        """Return the error for a stage that no worker can run."""
        return EnvironmentProblem(
            "no worker of the cluster can run this stage: "
            + ("; ".join(limit_lines(refusals, _MAX_LISTED)) or "it has none"),
            fix=f"start one that can with `tvmflow worker --scheduler {shell_word(self._context.scheduler)}`; "
            "--wait-for-workers SECONDS waits for it",
        )

    def connection_lost(self) -> EnvironmentProblem:
        """Return the error for a lost scheduler."""
        return EnvironmentProblem(
            f"the connection to the scheduler {self._context.scheduler} was lost",
            fix="run again when it is back; finished results are kept",
        )


def _connect(scheduler: str) -> Any:
    distributed = _import_distributed("--executor dask")
    _check_certificates(scheduler, "client")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return distributed.Client(
                scheduler, timeout=_CONNECT_S, set_as_default=False, name="tvmflow"
            )
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"the scheduler {scheduler} does not answer: {_first_line(error)}",
            fix="start one with `tvmflow scheduler`, and give the address that it prints: "
            "tcp://HOST:PORT, or tls://HOST:PORT",
        ) from error


def _import_distributed(user: str) -> Any:
    """Import distributed and silence its log; an error names the `user` that needs the package."""
    try:
        import distributed
    except ImportError as missing:
        raise EnvironmentProblem(
            f"{user} needs the package distributed ({missing})", fix="pip install 'tvmflow[dask]'"
        ) from missing
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    return distributed


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message; if there is no message, the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_certificates(address: str, role: str) -> None:
    """Raise EnvironmentProblem if dask has no certificates for a role with `tls://…`."""
    if not address.startswith("tls://"):
        return
    from distributed import Security

    try:
        context = Security().get_connection_args(role).get("ssl_context")
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(
            f"dask cannot use the certificates that its configuration names: {error}",
            fix=f"see {page_url('teams')}",
        ) from error
    if context is None:
        raise EnvironmentProblem(
            f"{address} needs certificates, and dask's configuration names none",
            fix="set DASK_DISTRIBUTED__COMM__TLS__CA_FILE and, ending in __CERT and __KEY, "
            f"DASK_DISTRIBUTED__COMM__TLS__{role.upper()}__…: see {page_url('teams')}",
        )


# ---------------------------------------------------------------- processes of a cluster


def serve_scheduler(host: str, port: int, *, tls: bool, notify: Notify) -> None:
    """Run a scheduler until it is interrupted; EnvironmentProblem if it cannot listen at the address."""
    distributed = _import_for_server()
    if tls:
        _check_certificates("tls://", "scheduler")

    async def serve(stopped: asyncio.Event) -> None:
        try:
            scheduler = await distributed.Scheduler(
                host=host,
                port=port,
                protocol="tls" if tls else "tcp",
                dashboard=False,
                dashboard_address=_LOCAL_METRICS,
                allowed_failures=_ALLOWED_FAILURES,
            )
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise EnvironmentProblem(
                f"cannot start a scheduler at {host}:{port}: {error}",
                fix="give another --port; for --tls dask's configuration must name the certificates",
            ) from error
        notify(f"scheduler at {scheduler.address}; start workers with")
        notify(f"  tvmflow worker --scheduler {scheduler.address}")
        async with scheduler:
            await stopped.wait()

    asyncio.run(_serve_until_interrupted(serve))


def serve_worker(
    scheduler: str,
    *,
    host: str | None,
    name: str | None,
    slots: int,
    store: str,
    remote_url: str,
    notify: Notify,
) -> None:
    """Run a worker until it is interrupted; if the scheduler goes away, wait until it returns."""
    distributed = _import_for_server()
    _check_certificates(scheduler, "worker")
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    environment = {cluster_worker.STORE_VARIABLE: store}
    if remote_url:
        environment[cluster_worker.REMOTE_VARIABLE] = remote_url
    description = cluster_worker.describe_this_host()
    announcement = (
        f"worker {name} of {scheduler}: {description.host}; {slots} at a time; "
        f"apache-tvm {description.tools['apache-tvm']}; store {store}"
    )

    async def start_nanny() -> Any:
        """Start dask's nanny, which starts the worker's process, and restarts it if it dies."""
        # Without an address, dask would listen on all of this machine's networks.
        own_address = host or await _find_own_address(scheduler)
        return await distributed.Nanny(
            scheduler,
            nthreads=slots,
            name=name,
            host=own_address,
            resources=cluster_worker.offered_resources(description),
            # No limit, because dask would count the memory of stages as the worker's own.
            memory_limit=0,
            death_timeout=_DEATH_TIMEOUT_S,
            silence_logs=logging.CRITICAL,
            env=environment,
            dashboard=False,
            dashboard_address=_LOCAL_METRICS,
        )

    async def serve(stopped: asyncio.Event) -> None:
        is_waiting = False
        while not stopped.is_set():
            try:
                nanny = await start_nanny()
            except (OSError, RuntimeError, ValueError, TypeError, asyncio.TimeoutError) as error:
                if not is_waiting:
                    notify(
                        f"the scheduler {scheduler} does not answer ({_describe_cause(error)}); "
                        "trying again until it does"
                    )
                is_waiting = True
                await _pause(stopped)
                continue
            is_waiting = False
            notify(announcement)
            async with nanny:
                waits = [asyncio.ensure_future(wait) for wait in (nanny.finished(), stopped.wait())]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            if not stopped.is_set():
                notify(f"the scheduler {scheduler} is gone; waiting for it")
                await _pause(stopped)
        notify(f"worker {name} has ended")

    asyncio.run(_serve_until_interrupted(serve))


async def _find_own_address(scheduler: str) -> str:
    """Return the address of this machine on the network that leads to the scheduler."""
    host, _, port = scheduler.partition("://")[2].rpartition(":")
    connection = asyncio.open_connection(host.strip("[]"), int(port))
    _, writer = await asyncio.wait_for(connection, _RETRY_S)
    address = str(writer.get_extra_info("sockname")[0])
    writer.close()
    return address


async def _pause(stopped: asyncio.Event) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(stopped.wait(), _RETRY_S)


async def _serve_until_interrupted(
    serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
) -> None:
    """Serve until SIGINT or SIGTERM, then shut down cleanly, but for at most `_END_S` seconds."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, stopped)
    await serve(stopped)


def _stop(stopped: asyncio.Event) -> None:
    def end() -> None:
        kill_descendants(os.getpid())
        os._exit(EXIT_OK)

    if not stopped.is_set():
        stopped.set()
        # dask's shutdown waits for other machines.
        timer = threading.Timer(_END_S, end)
        timer.daemon = True
        timer.start()


def _import_for_server() -> Any:
    # The process that dask starts inherits this, and configures logging when it is imported.
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "warning")
    return _import_distributed("this")


def _describe_cause(error: BaseException) -> str:
    # dask's own message only says that its process failed; the cause says why.
    while error.__cause__ is not None:
        error = error.__cause__
    return _first_line(error)
