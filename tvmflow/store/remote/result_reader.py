"""Fetching results from a remote cache into the local store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.disk_errors import check_free_space
from tvmflow.core.errors import Interrupted, StoreError
from tvmflow.core.types import Artifact, Json, StageKey
from tvmflow.store.action_records import SHOWN_DIGITS, ActionRecord, Origin
from tvmflow.store.remote.base import BlobRef, Corrupt, Declined, RemoteCacheError
from tvmflow.store.remote.connection import RemoteConnection
from tvmflow.store.remote.signed_actions import InvalidAction, Untrusted, find_action

_log = logging.getLogger(__name__)

# Returns whether facts are such as a stage reports: the stage and its facts.
FactsCheck = Callable[[str, Mapping[str, Json]], bool]

_PARALLEL_DOWNLOADS: Final = 8
# How many bytes are downloaded before it is known whether the result is valid.
_MAX_UNVERIFIED_BYTES: Final = 1 << 20


class MissingBlob(Corrupt):
    """An action exists without all of its blobs."""


class Fetched(NamedTuple):
    """A fetched result, how many bytes that took, and where it came from, for people."""

    artifact: Artifact
    bytes: int
    origin: str


class ResultReader:
    """Fetches results.

    Attributes:
        fetched: The keys of the results that were fetched.
        fetched_bytes: How many bytes that took.
        needs_repair: Results whose upload must replace what the remote cache has.
        disk_problem: Why a result could not be written into the local store, if one could not.
    """

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
        """Fetch a result into the local store; None when the remote cache has no valid one."""
        connection = self._connection
        if not connection.access.reads or connection.reads.open or key.digest in self._misses:
            return None
        title = f"the result {key.digest[:12]} of {key.preimage['stage']}"
        try:
            fetched = self._fetch(key.digest)
        except InvalidAction as reason:
            self._reject(key.digest, f"{title} is rejected: {reason}", reason)
        except MissingBlob:
            # where blobs expire by their age, this happens every day
            self.needs_repair.add(key.digest)
        except Corrupt as reason:
            self._reject(key.digest, f"{title} is corrupt in the remote cache: {reason}", reason)
        except StoreError as reason:
            self.disk_problem = reason
            connection.report(f"{title} is not fetched: {reason.message}")
        except Declined as reason:
            connection.report(f"{title} is not fetched: {reason}")
        except (RemoteCacheError, Interrupted):
            # the circuit breaker reports a remote cache that does not answer
            pass
        else:
            if fetched is not None:
                return fetched
        _log.debug("%s is not fetched", title)
        self._misses.add(key.digest)
        return None

    def _reject(self, key: str, text: str, reason: RemoteCacheError) -> None:
        # without a signing key, one untrusted result would only replace another
        if not isinstance(reason, Untrusted) or self._connection.access.signer is not None:
            self.needs_repair.add(key)
        self._connection.report(text)

    def _fetch(self, key: str) -> Fetched | None:
        tasks: dict[BlobRef, Future[None]] = {}

        def start_small(blobs: Collection[BlobRef]) -> None:
            # side by side with the envelope, unless nothing may be fetched that is not signed
            size = sum(blob.size for blob in blobs)
            if size <= _MAX_UNVERIFIED_BYTES and not self._connection.access.trusted:
                self._start_downloads(blobs, tasks)

        try:
            result = find_action(self._connection, key, self._connection.reads, start_small)
            if result is None:
                return None
            action = result.action
            if not self._are_valid_facts(action.stage, action.facts):
                raise InvalidAction("its facts are not those of such a stage")
            self._connection.reads.budget.add_saved(action.seconds)
            self._start_downloads([BlobRef(file.digest, file.size) for file in action.files], tasks)
        finally:
            # all of them are waited for: after a failure none may go on writing
            problems = [error for task in tasks.values() if (error := task.exception())]
        if problems:
            raise min(problems, key=lambda problem: not isinstance(problem, Corrupt))
        signers = [
            f"{Path(signer.name).name.removesuffix('.pub')} ({signer.id[:SHOWN_DIGITS]})"
            for signer in result.signers
        ]
        origin = Origin(self._connection.address, action.signatures, tuple(signers))
        record = ActionRecord(
            files=action.files,
            facts=action.facts,
            preimage=action.preimage,
            seconds=action.seconds,
            made=action.made,
            origin=origin,
        )
        self._store.adopt(key, record)
        size = sum(blob.size for blob in tasks)
        with self._lock:
            self.fetched.add(key)
            self.fetched_bytes += size
        return Fetched(Artifact(key, action.files, action.facts), size, origin.text)

    def _start_downloads(
        self, blobs: Collection[BlobRef], tasks: dict[BlobRef, Future[None]]
    ) -> None:
        """Start the downloads of those blobs that are not stored and have no task yet."""
        missing = {blob for blob in blobs if blob not in tasks and not self._is_stored(blob)}
        if missing:
            check_free_space(self._store.root, sum(blob.size for blob in missing))
        tasks |= {blob: self._pool.submit(self._download, blob) for blob in missing}

    def _is_stored(self, blob: BlobRef) -> bool:
        try:
            exists = Path(self._store.blobs.path(blob.digest)).stat().st_size == blob.size
        except FileNotFoundError:
            return False
        # marked as used, so that no garbage collection removes it before the record refers to it
        return exists and self._store.blobs.mark_used(blob.digest)

    def _download(self, blob: BlobRef) -> None:
        path = Path(self._store.blobs.temporary_path())
        try:
            if not self._connection.download_blob(blob, path):
                raise MissingBlob(f"the blob {blob.digest[:12]} is missing")
            self._store.blobs.add(str(path))
        finally:
            path.unlink(missing_ok=True)
