"""The protocol of remote caches, and a run's connection: verified, and behind circuit breakers."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Final, NamedTuple, Protocol, TypeVar

from tvmflow.core.disk_errors import explain
from tvmflow.core.errors import Interrupted, StoreError
from tvmflow.core.file_locks import WaitingTime
from tvmflow.core.formatting import count_text, printable
from tvmflow.core.signing import PrivateKey, PublicKey
from tvmflow.store.http_client import Corrupt, TransferError, Unreachable, call_within
from tvmflow.store.local import LocalStore

_log = logging.getLogger(__name__)

MIN_BYTES_PER_S: Final = 256 << 10
"""A remote cache with a slower transfer rate (bytes per second) is treated as unreachable."""

# Receives a blob piece by piece.
Sink = Callable[[bytes], object]


class BlobRef(NamedTuple):
    """A blob's digest (sha256, hex) and size in bytes."""

    digest: str
    size: int

    @property
    def path(self) -> str:
        """The blob's path in a remote cache."""
        return f"cas/{self.digest}"


class Forbidden(TransferError):
    """The remote cache answers, but denies access."""


class Declined(TransferError):
    """The remote cache answers, but refuses this request; others may succeed."""


class RemoteCache(Protocol):
    """Files by path: actions as `ac/<key>`, blobs as `cas/<sha256>`. Keys and digests have 64 hex digits.

    Thread-safe. Every method may raise Unreachable or Forbidden.
    """

    @property
    def address(self) -> str:
        """The address for people, without credentials."""

    def get(self, path: str, max_bytes: int, sink: Sink) -> bool:
        """Pass a file to `sink` in pieces, unverified; return whether it exists. Corrupt if it is too long."""

    def has(self, path: str, size: int) -> bool:
        """Return whether there is a file of this size, without reading it."""

    def put(self, path: str, content: bytes | Path) -> None:
        """Store bytes, or a local file's content, at `path`; an action's blobs must be stored before it."""

    def close(self) -> None:
        """Close all connections."""


def open_content(content: bytes | Path) -> IO[bytes]:
    """Return a stream of the content for `RemoteCache.put`."""
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")


T = TypeVar("T")

_ATTEMPTS: Final = 3
_FIRST_PAUSE_S: Final = 0.2
_MAX_FAILURES: Final = 3

Report = Callable[[str], None]

# An action only lists files, so tvmflow never writes a larger one.
_MAX_ACTION_BYTES: Final = 4 << 20


class Access(NamedTuple):
    """A run's access to its remote cache, and whose results it accepts.

    A result must be signed by one of the trusted keys; without such keys, all results are accepted. `wait_s` limits the
    wait for uploads after the run (None: a share of the run's duration). `patience_s` limits each answer, and the total
    time lost to failures.
    """

    reads: bool = True
    writes: bool = False
    signer: PrivateKey | None = None
    trusted: tuple[PublicKey, ...] = ()
    wait_s: float | None = None
    patience_s: float = 10.0


class RemoteConnection:
    """A connection to a remote cache for a run or command. Thread-safe.

    Fetches and uploads have separate circuit breakers. Methods raise the errors of `RemoteCache`, and Corrupt if a
    fetched blob has a wrong digest or size.
    """

    def __init__(
        self,
        cache: RemoteCache,
        store: LocalStore,
        access: Access,
        report: Report = lambda text: None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.cache = cache
        self.store = store
        self.access = access
        patience_s = access.patience_s
        self.reads = CircuitBreaker(self._report_read_failure, patience_s, is_cancelled)
        self.writes = CircuitBreaker(self._report_write_failure, patience_s, is_cancelled)
        self._report_to_user = report
        self._is_cancelled = is_cancelled
        self.problems: list[str] = []
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """The remote cache's address for people, without credentials."""
        return self.cache.address

    def report(self, problem: str) -> str:
        """Report a problem to the user once, with the address; return the text that the user sees."""
        # Parts of the text may come from another machine, and contain control characters.
        text = printable(f"{self.address}: {problem}")
        with self._lock:
            if text in self.problems:
                return text
            self.problems.append(text)
        self._report_to_user(text)
        return text

    def _report_read_failure(self, reason: str) -> None:
        self.report(f"{reason}; this run continues without it")

    def _report_write_failure(self, reason: str) -> None:
        # If fetching fails, too, one message is enough.
        if not self.reads.open:
            self.report(f"{reason}; results wait in the store to be uploaded")

    def _limit_s(self, size: int) -> float:
        return self.access.patience_s + size / MIN_BYTES_PER_S

    def read_blob(self, blob: BlobRef, circuit_breaker: CircuitBreaker) -> bytes | None:
        """Return a small blob's verified content; None if it does not exist."""
        return circuit_breaker.call(
            lambda: _collect(partial(self._copy, blob)), self._limit_s(blob.size)
        )

    def download_blob(self, blob: BlobRef, path: Path) -> bool:
        """Write a blob to a new file and verify it as it arrives; return whether it exists.

        Raises:
            Corrupt: when the content's digest or size is wrong.
            TransferError: when the remote cache does not answer.
            StoreError: when the file cannot be written.
            Interrupted: when the run was cancelled.
        """

        def request() -> bool:
            with path.open("wb") as stream:
                return self._copy(blob, stream.write)

        try:
            return self.reads.call(request, self._limit_s(blob.size))
        except OSError as error:
            raise explain(error, path) or StoreError(f"{error.strerror or error}") from error

    def _copy(self, blob: BlobRef, write: Sink) -> bool:
        digest, size = hashlib.sha256(), 0

        def sink(piece: bytes) -> None:
            nonlocal size
            if self._is_cancelled():
                raise Interrupted("stopped while fetching")
            size += len(piece)
            if size > blob.size:
                raise Corrupt(f"{blob.digest[:12]} is longer than its {blob.size} bytes")
            digest.update(piece)
            try:
                write(piece)
            except OSError as error:
                # A local disk error must not count as a failure of the remote cache.
                problem = explain(error, self.store.root)
                raise problem or StoreError(error.strerror or type(error).__name__) from error

        if not self.cache.get(blob.path, blob.size, sink):
            return False
        if size != blob.size or digest.hexdigest() != blob.digest:
            actual = digest.hexdigest()[:12]
            raise Corrupt(f"the blob {blob.digest[:12]} has {size} bytes with the digest {actual}")
        return True

    def has_blob(self, blob: BlobRef) -> bool:
        """Return whether the remote cache has a blob. Called before uploads."""
        return self.writes.call(
            lambda: self.cache.has(blob.path, blob.size), self.access.patience_s
        )

    def upload_blob(self, blob: BlobRef, content: bytes | Path) -> None:
        """Upload bytes or a file's content, replacing the blob with this digest."""
        self.writes.call(lambda: self.cache.put(blob.path, content), self._limit_s(blob.size))

    def upload_missing_blob(self, blob: BlobRef, path: Path) -> None:
        """Upload a file's content unless the remote cache has it."""
        if not self.has_blob(blob):
            self.upload_blob(blob, path)

    def put_action(self, key: str, content: bytes) -> None:
        """Write an action, after all of its blobs were uploaded."""
        self.writes.call(lambda: self.cache.put(f"ac/{key}", content), self._limit_s(len(content)))

    def get_action(self, key: str, circuit_breaker: CircuitBreaker) -> bytes | None:
        """Return a key's action, unverified; None if there is none."""
        get = partial(self.cache.get, f"ac/{key}", _MAX_ACTION_BYTES)
        return circuit_breaker.call(lambda: _collect(get), self.access.patience_s)


def _collect(get: Callable[[Sink], bool]) -> bytes | None:
    content = io.BytesIO()
    return content.getvalue() if get(content.write) else None


class CircuitBreaker:
    """Stops all requests to a remote cache after too many failures.

    It opens after a non-retryable failure, after `_MAX_FAILURES` failures in a row, after `patience_s` seconds
    of failures, and when the run's time budget is used up.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        patience_s: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a closed breaker; `report` gets the reason when it opens."""
        self.open = False
        self.budget = TimeBudget()
        self._report = report
        self._patience_s = patience_s
        self._is_cancelled = is_cancelled
        self._lock = threading.Lock()
        self._failures = 0
        self._lost_s = 0.0

    def call(self, request: Callable[[], T], limit_s: float = math.inf) -> T:
        """Return a request's result within a few attempts; `limit_s` limits each one, including DNS.

        Raises:
            Unreachable: when all attempts fail, or the breaker is open.
            Forbidden: when access is refused.
            Interrupted: when the run was cancelled.
        """
        for attempt in range(_ATTEMPTS):
            if self.open:
                break
            started = time.monotonic()
            try:
                answer = self._call_within(limit_s, request)
            except Unreachable as problem:
                self._count_failure(problem, time.monotonic() - started)
                if attempt == _ATTEMPTS - 1 or not problem.retryable:
                    raise
                time.sleep(_FIRST_PAUSE_S * 4**attempt)
            except Forbidden as problem:
                self.trip(str(problem))
                raise
            else:
                with self._lock:
                    self._failures = 0
                return answer
        raise Unreachable("it is not used any more in this run")

    def _call_within(self, limit_s: float, request: Callable[[], T]) -> T:
        with self.budget.waiting():
            limit_s = min(limit_s, remaining_s := self.budget.remaining_s)
            try:
                answer = call_within(limit_s, request, self._is_cancelled)
            except TimeoutError:
                pass
            else:
                self.budget.answers += 1
                return answer
        if limit_s < remaining_s or not self.budget.answers:
            raise Unreachable(f"no answer within {limit_s:.2g} s")
        raise Unreachable(
            f"it is slow: {count_text(self.budget.requests, 'request')} took "
            f"{self.budget.spent_s:.1f} s, and the time that it can save is not worth more waiting"
        )

    def _count_failure(self, problem: Unreachable, seconds: float) -> None:
        with self._lock:
            self._failures += 1
            self._lost_s += seconds
            exhausted = self._failures >= _MAX_FAILURES or self._lost_s >= self._patience_s
            _log.debug("failure %d: %s", self._failures, problem)
        if exhausted or not problem.retryable:
            self.trip(str(problem))

    def trip(self, reason: str) -> None:
        """Open the breaker, and report the reason once."""
        with self._lock:
            first, self.open = not self.open, True
        if first:
            self._report(reason)


# A run's total wait for a remote cache is limited to this share of the work that may be saved …
_SHARE_OF_WORK: Final = 0.5
# … but is at least this long.
_MIN_S: Final = 1.0


class TimeBudget:
    """How long a run may wait for its remote cache; also counts requests and answers.

    Threads that wait at the same time count once.
    """

    def __init__(self) -> None:
        self.allowed_s = math.inf
        self.requests = 0
        self.answers = 0
        self._lock = threading.Lock()
        self._waits = WaitingTime()

    def limit(self, work_s: float | None, unknown_s: float) -> None:
        """Limit the budget to a share of the seconds that the stages to run would take.

        If this time is unknown, the limit is `unknown_s`.
        """
        self.allowed_s = unknown_s if work_s is None else max(_SHARE_OF_WORK * work_s, _MIN_S)

    def add_saved(self, seconds: float) -> None:
        """Let the run wait longer, by the time that a fetched result would have taken to make."""
        with self._lock:
            self.allowed_s += seconds

    @property
    def spent_s(self) -> float:
        """How many seconds the run has waited."""
        return self._waits.read()[1]

    @property
    def remaining_s(self) -> float:
        """How many seconds it may still wait; 0 if the budget is used up."""
        return max(self.allowed_s - self.spent_s, 0.0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for a request."""
        with self._lock:
            self.requests += 1
        with self._waits.waiting():
            yield
