"""The executor that runs stages on a dask cluster.

Files go through the remote cache by digest; what crosses the wire to dask is small JSON. A worker
that ends while it runs a stage costs that attempt: dask gives the stage to another one. The stage
itself runs in a child of the worker, so that a crash in native code is a result.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.errors import EnvironmentProblem, Interrupted, StoreError, UsageError
from tvmflow.core.files import hash_file
from tvmflow.core.types import StageCall, StageResult
from tvmflow.executors import worker_matching
from tvmflow.executors._base import ExecutorContext, OnEvent
from tvmflow.executors._dask_cluster import DaskCluster
from tvmflow.executors._dask_stage import RemoteStage
from tvmflow.executors.cluster_messages import TOPIC, InputBlob, StageRequest, call_without_paths
from tvmflow.store.file_digests import FileDigests
from tvmflow.store.local import LocalStore
from tvmflow.store.remote._base import BlobRef, RemoteCacheError
from tvmflow.store.remote.connection import RemoteConnection
from tvmflow.tuning import remote_ledger


class DaskExecutor:
    """Runs stages on the workers of a scheduler. It connects when the first stage must run."""

    def __init__(self, context: ExecutorContext) -> None:
        if not context.scheduler:
            raise UsageError(
                "--executor dask needs the address of a scheduler",
                fix="give --scheduler tcp://HOST:PORT, or set $TVMFLOW_SCHEDULER",
            )
        self._context = context
        # opened now: a run without a remote cache must not find out after an hour
        self._remote_url, self._connection = context.open_remote(lambda: self.cancelled)
        self._files = FileTransfer(context.store, self._connection)
        self._lock = threading.Lock()
        self._cluster: DaskCluster | None = None
        self._running: dict[str, RemoteStage] = {}
        self.slots = 1
        self.cancelled = False

    def start(self) -> None:
        """Connect to the cluster.

        Raises:
            EnvironmentProblem: when the scheduler does not answer, or no worker can run stages.
        """
        self._connect()

    def _connect(self) -> DaskCluster:
        with self._lock:
            if self._cluster is None:
                self._cluster = DaskCluster(self._context, lambda: self.cancelled)
                self._cluster.client.subscribe_topic(TOPIC, self._on_cluster_event)
                self.slots = self._cluster.wait_for_slots()
            return self._cluster

    def _on_cluster_event(self, dask_event: tuple[float, Mapping[str, Any]]) -> None:
        """Take an event of any run on this cluster: called by dask in a thread that must not wait."""
        _, message = dask_event
        stage = self._running.get(message.get("token", ""))
        if stage is None:
            return
        if "event" in message:
            stage.events.append(dict(message["event"]))
        else:
            # dask itself adds a field `worker`, which is an address
            stage.workers.append(str(message["begun"]))

    def execute(self, call: StageCall, log: Path, on_event: OnEvent) -> StageResult:
        """Run a stage on a worker, and download what it made.

        Raises:
            EnvironmentProblem: when no worker can run it, or the remote cache or the scheduler is lost.
            Interrupted: when the run is cancelled during a transfer.
        """
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
                return StageResult("cancelled", "the run was cancelled", "", {}, 0.0, str(log))
            self._files.download_outputs(Path(call.out), response.files)
        log.write_text(f"ran on worker {response.worker}\n{response.result.log}")
        if call.traits.uses_ledger:
            self._pull_trials(call)
        return response.result._replace(log=str(log))

    def _make_request(self, cluster: DaskCluster, call: StageCall) -> StageRequest:
        inputs = {name: self._files.upload_input(path) for name, path in call.inputs.items()}
        contents = {name: blob.digest for name, blob in inputs.items()}
        return StageRequest(
            token=uuid.uuid4().hex,
            key=digest_of(
                ["cluster", call.stage, call.settings, contents, cluster.planner.tvmflow]
            ),
            remote_url=self._remote_url,
            remote_timeout_s=self._context.remote_timeout_s,
            call=call_without_paths(call),
            inputs=inputs,
            resources=worker_matching.required_resources(call, cluster.planner),
        )

    def _pull_trials(self, call: StageCall) -> None:
        """Copy trials that the worker measured to this machine's ledger; the remote cache keeps them in any case."""
        machine_class = remote_ledger.measured_machine_class(call.settings)
        if machine_class is not None:
            with contextlib.suppress(RemoteCacheError, StoreError, Interrupted):
                remote_ledger.pull_trials(self._connection, machine_class)

    def cancel(self) -> None:
        """Stop every running stage, and let none start."""
        # may be called by a signal handler at any moment: those who wait for a stage poll this
        self.cancelled = True

    def close(self) -> None:
        """Disconnect; stages of this run that still run on the cluster are stopped."""
        if self._cluster is not None:
            # the scheduler may be gone
            with contextlib.suppress(Exception):
                self._cluster.client.close(timeout=5)
        self._connection.close()


# ---------------------------------------------------------------- files


class FileTransfer:
    """Uploads what stages read, and downloads what they made."""

    def __init__(self, store: LocalStore, connection: RemoteConnection) -> None:
        self._store = store
        self._connection = connection
        self._digests = FileDigests(store)

    def upload_input(self, path: str) -> InputBlob:
        """Upload a file that a stage reads, unless the remote cache has it.

        Raises:
            EnvironmentProblem: when the file changes meanwhile.
        """
        size, name = Path(path).stat().st_size, Path(path).name
        if path == self._store.blobs.path(name):
            self._connection.upload_missing_blob(BlobRef(name, size), Path(path))
            return InputBlob(name, size, "")
        blob = BlobRef(self._digests.digest(path), size)
        if not self._connection.has_blob(blob):
            self._upload_copy(path, blob)
        return InputBlob(blob.digest, size, path)

    def _upload_copy(self, path: str, blob: BlobRef) -> None:
        """Upload a copy: a file that changes meanwhile must not be known by the digest that it had."""
        copy = Path(self._store.blobs.temporary_path())
        try:
            with disk_errors(self._store.root):
                shutil.copyfile(path, copy)
            if hash_file(str(copy)) != blob.digest:
                raise EnvironmentProblem(
                    f"{path} was changed while the run read it", fix="run again"
                )
            self._connection.upload_missing_blob(blob, copy)
        finally:
            copy.unlink(missing_ok=True)

    def download_outputs(self, folder: Path, files: Mapping[str, BlobRef]) -> None:
        """Download the files that a stage made into a folder.

        Raises:
            EnvironmentProblem: when the remote cache lacks one, or when it has a name outside the folder.
        """
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
        """Raise problems of the remote cache in the block as EnvironmentProblem."""
        try:
            yield
        except RemoteCacheError as problem:
            raise EnvironmentProblem(
                f"the remote cache {self._connection.address}: {problem}",
                fix="--executor dask needs a remote cache that this machine and every worker can reach and may write to",
            ) from problem
