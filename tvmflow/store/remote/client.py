"""The client of a remote cache: fetches results, and uploads those made here.

A failing remote cache never fails a run. Results that cannot be fetched are made here. Results that cannot be uploaded
are noted in the local store, and a later run uploads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core import spans
from tvmflow.core.disk_errors import check_free_space
from tvmflow.core.errors import Interrupted, StoreError
from tvmflow.core.types import Artifact, Json, StageKey
from tvmflow.store.http_client import Corrupt, TransferError, Unreachable
from tvmflow.store.local import SHOWN_DIGITS, ActionRecord, DamagedBlob, Origin
from tvmflow.store.remote import signed_actions
from tvmflow.store.remote.connection import BlobRef, Declined, RemoteConnection
from tvmflow.store.remote.signed_actions import Action, InvalidAction, Untrusted, find_action

# Returns whether facts have the type that a stage reports; gets the stage's name and the facts.
FactsCheck = Callable[[str, Mapping[str, Json]], bool]

# The fields that a local record and one in a remote cache have in common.
_SHARED_FIELDS: Final = ("files", "facts", "preimage", "seconds", "made")
_PARALLEL_DOWNLOADS: Final = 8
# How many bytes may be downloaded before the result is known to be valid.
_MAX_UNVERIFIED_BYTES: Final = 1 << 20


class MissingBlob(Corrupt):
    """An action exists, but not all of its blobs do."""


class Fetched(NamedTuple):
    """A fetched result, how many bytes were downloaded, and its origin, for people."""

    artifact: Artifact
    bytes: int
    origin: str


class ResultReader:
    """Fetches results. Uploads must replace the remote results in `needs_repair`; `disk_problem` is local."""

    def __init__(self, connection: RemoteConnection, are_valid_facts: FactsCheck) -> None:
        self.fetched: set[str] = set()
        self.fetched_bytes = 0
        self.needs_repair: set[str] = set()
        self.disk_problem: StoreError | None = None
        self._connection = connection
        self._store = connection.store
        self._are_valid_facts = are_valid_facts
        self._pool = ThreadPoolExecutor(_PARALLEL_DOWNLOADS, "remote-downloads")
        self._misses: set[str] = set()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Start no further download."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def fetch(self, key: StageKey) -> Fetched | None:
        """Fetch a result into the local store; None if the remote cache has no valid one."""
        connection = self._connection
        if not connection.access.reads or connection.reads.open or key.digest in self._misses:
            return None
        title = f"the result {key.digest[:12]} of {key.preimage['stage']}"
        try:
            with spans.span(f"fetch {key.preimage['stage']}", key=key.digest) as arguments:
                fetched = self._fetch(key.digest)
                arguments["bytes"] = fetched.bytes if fetched else None
        except InvalidAction as reason:
            self._reject(key.digest, f"{title} is rejected: {reason}", reason)
        except MissingBlob:
            # If blobs expire by age, this is normal, and happens every day.
            self.needs_repair.add(key.digest)
        except Corrupt as reason:
            self._reject(key.digest, f"{title} is corrupt in the remote cache: {reason}", reason)
        except StoreError as reason:
            self.disk_problem = reason
            connection.report(f"{title} is not fetched: {reason.message}")
        except Declined as reason:
            connection.report(f"{title} is not fetched: {reason}")
        except (TransferError, Interrupted):
            # The circuit breaker reports an unreachable remote cache.
            pass
        else:
            if fetched is not None:
                return fetched
        _log.debug("%s is not fetched", title)
        self._misses.add(key.digest)
        return None

    def _reject(self, key: str, text: str, reason: TransferError) -> None:
        # Without a signing key, the replacement would be just as untrusted.
        if not isinstance(reason, Untrusted) or self._connection.access.signer is not None:
            self.needs_repair.add(key)
        self._connection.report(text)

    def _fetch(self, key: str) -> Fetched | None:
        tasks: dict[BlobRef, Future[None]] = {}

        def start_small(blobs: Collection[BlobRef]) -> None:
            # Files are downloaded along with the envelope, unless only signed results may be fetched.
            size = sum(blob.size for blob in blobs)
            if size <= _MAX_UNVERIFIED_BYTES and not self._connection.access.trusted:
                self._start_downloads(blobs, tasks)

        try:
            result = find_action(self._connection, key, self._connection.reads, start_small)
            if result is None:
                return None
            action = result.action
            if not self._are_valid_facts(action.stage, action.facts):
                raise InvalidAction("its facts do not have the types of this stage")
            self._connection.reads.budget.add_saved(action.seconds)
            self._start_downloads([BlobRef(file.digest, file.size) for file in action.files], tasks)
        finally:
            # All downloads are awaited, so that after a failure none is still writing.
            problems = [error for task in tasks.values() if (error := task.exception())]
        if problems:
            raise min(problems, key=lambda problem: not isinstance(problem, Corrupt))
        signers = [
            f"{Path(signer.name).name.removesuffix('.pub')} ({signer.id[:SHOWN_DIGITS]})"
            for signer in result.signers
        ]
        origin = Origin(self._connection.address, action.signatures, tuple(signers))
        fields = {name: getattr(action, name) for name in _SHARED_FIELDS}
        self._store.adopt(key, ActionRecord(**fields, origin=origin))
        size = sum(blob.size for blob in tasks)
        with self._lock:
            self.fetched.add(key)
            self.fetched_bytes += size
        return Fetched(Artifact(key, action.files, action.facts), size, origin.text)

    def _start_downloads(
        self, blobs: Collection[BlobRef], tasks: dict[BlobRef, Future[None]]
    ) -> None:
        missing = {blob for blob in blobs if blob not in tasks and not self._is_stored(blob)}
        if missing:
            check_free_space(self._store.root, sum(blob.size for blob in missing))
        tasks |= {blob: self._pool.submit(self._download, blob) for blob in missing}

    def _is_stored(self, blob: BlobRef) -> bool:
        try:
            exists = Path(self._store.blobs.path(blob.digest)).stat().st_size == blob.size
        except FileNotFoundError:
            return False
        # Marked as used, so that garbage collection keeps it until the record refers to it.
        return exists and self._store.blobs.mark_used(blob.digest)

    def _download(self, blob: BlobRef) -> None:
        path = Path(self._store.blobs.temporary_path())
        try:
            if not self._connection.download_blob(blob, path):
                raise MissingBlob(f"the blob {blob.digest[:12]} is missing")
            self._store.blobs.add(str(path))
        finally:
            path.unlink(missing_ok=True)


# How long a finished run waits for its uploads: a share of its duration, within these limits.
_SHARE_OF_RUN: Final = 0.5
_SHORTEST_WAIT_S: Final = 3.0
_LONGEST_WAIT_S: Final = 30.0


class Traffic(NamedTuple):
    """What was transferred between a store and its remote cache in a run, and reported to the user."""

    address: str
    fetched: int
    fetched_bytes: int
    uploaded: int
    uploaded_bytes: int
    waiting: int
    problems: tuple[str, ...]


class RemoteCacheClient:
    """The client of one remote cache for one run. Thread-safe."""

    def __init__(self, connection: RemoteConnection, are_valid_facts: FactsCheck) -> None:
        self.connection = connection
        self.reader = ResultReader(connection, are_valid_facts)
        self.uploader = Uploader(connection, self.reader.needs_repair)

    def limit_time(self, work_s: float | None) -> None:
        """Limit how long the run waits for results (see `TimeBudget.limit`)."""
        unknown_s = self.connection.access.patience_s / 2
        self.connection.reads.budget.limit(work_s, unknown_s)

    def finish(self, run_s: float = 0.0, *, is_cancelled: bool = False) -> None:
        """Wait for uploads, then close the connection.

        The wait is limited to the access's `wait_s`; if that is None, to a share of the run's duration `run_s`.
        """
        wait_s = self.connection.access.wait_s
        if wait_s is None:
            wait_s = min(max(_SHARE_OF_RUN * run_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
        self.uploader.finish(0.0 if is_cancelled else wait_s)
        self.reader.close()
        self.connection.cache.close()

    def traffic(self) -> Traffic:
        """Return what has been transferred so far."""
        return Traffic(
            address=self.connection.address,
            fetched=len(self.reader.fetched),
            fetched_bytes=self.reader.fetched_bytes,
            uploaded=len(self.uploader.sender.uploaded),
            uploaded_bytes=self.uploader.sender.uploaded_bytes,
            waiting=len(self.uploader.spool.list()),
            problems=tuple(self.connection.problems),
        )


# ---------------------------------------------------------------- uploads

_log = logging.getLogger(__name__)

# Uploads a spooled item that is not a result; takes the text that the spool has for it.
ItemHandler = Callable[[str], object]

_PARALLEL_UPLOADS: Final = 4
# After this many refused items in a row, no more are sent.
_MAX_DECLINED: Final = 3
_MAX_QUEUE: Final = 256
_POLL_S: Final = 0.1


class NotInStore(TransferError):
    """A result to upload is missing or damaged in the local store."""


class ResultSender:
    """Uploads results and counts the bytes sent; once `stopped` is set, it stops before the next one."""

    def __init__(self, connection: RemoteConnection, needs_repair: set[str]) -> None:
        self.uploaded: set[str] = set()
        self.uploaded_bytes = 0
        self.stopped = threading.Event()
        self._connection = connection
        self._store = connection.store
        self._needs_repair = needs_repair
        self._lock = threading.Lock()

    def upload(self, key: str) -> int:
        """Upload a result, its blobs first; return how many bytes were sent, 0 if it was there already."""
        record, artifact = self._store.record(key), self._store.find(key)
        if record is None or artifact is None:
            raise NotInStore("it is no longer in the store")
        action = _make_action(key, record)
        repair = key in self._needs_repair
        if not repair and self._has_result(action):
            return 0
        text = signed_actions.make_envelope(action, self._connection.access.signer)
        envelope = BlobRef(hashlib.sha256(text).hexdigest(), len(text))
        blobs = {BlobRef(file.digest, file.size) for file in action.files}
        # One blob after the other, because several threads already upload results; these end with the process.
        size = sum(self._upload_blob(blob, repair=repair) for blob in sorted(blobs))
        self._connection.upload_blob(envelope, text)
        self._connection.put_action(key, signed_actions.make_action_result(action, envelope))
        with self._lock:
            self._needs_repair.discard(key)
            self.uploaded.add(key)
            self.uploaded_bytes += size + envelope.size
        return size + envelope.size

    def _has_result(self, action: Action) -> bool:
        """Return whether the remote cache has the result with all its blobs, signed if this client signs."""
        signer = self._connection.access.signer
        try:
            result = find_action(self._connection, action.key, self._connection.writes)
        except Untrusted:
            return signer is None
        except (InvalidAction, Corrupt):
            return False
        if result is None or (signer is not None and not result.action.signatures):
            return False
        return all(map(self._connection.has_blob, result.blobs.values()))

    def _upload_blob(self, blob: BlobRef, *, repair: bool) -> int:
        """Upload a blob if it is missing, or with `repair` in any case; return how many bytes were sent."""
        if self.stopped.is_set():
            raise Unreachable("the run has ended")
        if not repair and self._connection.has_blob(blob):
            return 0
        try:
            path = Path(self._store.blobs.verified_path(blob.digest))
        except DamagedBlob as damage:
            raise NotInStore(str(damage)) from None
        self._connection.upload_blob(blob, path)
        return blob.size


def _make_action(key: str, record: ActionRecord) -> Action:
    fields = {name: getattr(record, name) for name in _SHARED_FIELDS}
    return Action(key, **fields, signatures=record.origin.signatures if record.origin else ())


class Uploader:
    """Threads that upload offered items, and items that earlier runs left in the spool.

    An item is in the spool from when it is offered until it is uploaded.
    """

    def __init__(self, connection: RemoteConnection, needs_repair: set[str]) -> None:
        self._connection = connection
        # The waiting items: results' keys, and other items as `PREFIX-…`.
        remote = hashlib.sha256(connection.address.encode()).hexdigest()[:16]
        self.spool = connection.store.notes.below("spool", remote)
        self.sender = ResultSender(connection, needs_repair)
        self._handlers: dict[str, ItemHandler] = {}
        self._queue: queue.Queue[str] = queue.Queue(_MAX_QUEUE)
        self._attempted: set[str] = set()
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._threads_lock = threading.Lock()
        self._items_lock = threading.Lock()
        self._items = self._iterate_items()
        self._declined: list[str] = []

    def add_handler(self, prefix: str, handler: ItemHandler) -> None:
        """Have items `PREFIX-…` uploaded by `handler`."""
        self._handlers[prefix] = handler

    def waiting_results(self) -> list[str]:
        """Return the keys of results that still have to be uploaded."""
        return [item for item in self.spool.list() if not _prefix(item)]

    def offer(self, item: str, text: str = "") -> None:
        """Upload an item in the background. Returns at once."""
        if not self._connection.access.writes:
            return
        self._attempted.discard(item)
        # Write the note first, so that a later process uploads the result if this one is killed.
        self.spool.keep(text, item)
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(item)
        self._start_threads()

    def start(self) -> None:
        """Start with what earlier runs could not upload."""
        if self._connection.access.writes and self.spool.list():
            self._start_threads()

    def finish(self, wait_s: float) -> None:
        """Wait for a limited time for uploads in progress."""
        self._ending.set()
        deadline = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self.sender.stopped.set()

    def upload_all(self, keys: Sequence[str]) -> Iterator[tuple[str, int | TransferError]]:
        """Upload results now, in parallel; yield for each the bytes sent, or the error."""
        with ThreadPoolExecutor(_PARALLEL_UPLOADS) as pool:
            yield from zip(keys, pool.map(self._try_upload, keys), strict=True)

    def _try_upload(self, key: str) -> int | TransferError:
        try:
            outcome: int | TransferError = self.sender.upload(key)
        except OSError as error:
            return NotInStore(f"it cannot be read: {error.strerror or error}")
        except NotInStore as problem:
            outcome = problem
        except TransferError as problem:
            return problem
        self.spool.remove(key)
        return outcome

    def _start_threads(self) -> None:
        with self._threads_lock:
            if self._threads:
                return
            # Daemon threads: nobody must wait for them, because what they have not uploaded is in the spool.
            for number in range(_PARALLEL_UPLOADS):
                name = f"remote-uploads_{number}"
                thread = threading.Thread(target=self._upload_items, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _upload_items(self) -> None:
        while True:
            with self._items_lock:
                item = next(self._items, None)
            if item is None:
                return
            try:
                self._upload(item)
            except Interrupted:
                return
            except Declined as reason:
                self._report_declined(item, str(reason))
            except (TransferError, StoreError, OSError) as problem:
                # The circuit breaker reports an unreachable remote cache; the item waits in the spool.
                _log.debug("%s waits: %s", item, problem)
            if self._connection.writes.open or self.sender.stopped.is_set():
                return

    def _report_declined(self, item: str, reason: str) -> None:
        """Report a refused item, once per reason; after too many refusals, send no more."""
        with self._items_lock:
            is_new = reason not in self._declined
            self._declined.append(reason)
            count = len(self._declined)
        if is_new:
            self._connection.report(f"{item[:12]} is not uploaded: {reason}")
        if count >= _MAX_DECLINED:
            self._connection.writes.trip(reason)

    def _upload(self, item: str) -> None:
        prefix = _prefix(item)
        if not prefix:
            with contextlib.suppress(NotInStore), spans.span("upload", key=item) as arguments:
                arguments["bytes"] = self.sender.upload(item)
        elif prefix in self._handlers:
            if text := self.spool.read(item):
                self._handlers[prefix](text)
        else:
            # A newer version of tvmflow noted this item, and will upload it.
            return
        with self._items_lock:
            self._declined.clear()
        self.spool.remove(item)

    def _iterate_items(self) -> Iterator[str]:
        """Yield offered items; while there are none, yield the spool's. Ends with the run."""
        spooled = self.spool.list()
        while True:
            try:
                # While the spool has items, there is no need to wait for an offer.
                item = self._queue.get(timeout=0.0 if spooled else _POLL_S)
            except queue.Empty:
                if not spooled and self._ending.is_set():
                    spooled = [item for item in self.spool.list() if item not in self._attempted]
                    if not spooled and self._queue.empty():
                        return
                if not spooled:
                    continue
                item = spooled.pop(0)
            if item not in self._attempted:
                self._attempted.add(item)
                yield item


def _prefix(item: str) -> str:
    return item.rpartition("-")[0]
