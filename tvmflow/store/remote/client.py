"""The remote cache client: results that the remote cache has are fetched, results that are made here are uploaded.

No failure of a remote cache fails a run. What cannot be fetched is made here; what cannot be
uploaded is noted in the local store, and uploaded by a later run.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tvmflow.core.types import StageKey
from tvmflow.store.remote.connection import RemoteConnection
from tvmflow.store.remote.result_reader import FactsCheck, Fetched, ResultReader
from tvmflow.store.remote.uploader import Uploader

# How long a run that has ended waits for its uploads: a part of its time, within limits.
_SHARE_OF_RUN: Final = 0.5
_SHORTEST_WAIT_S: Final = 3.0
_LONGEST_WAIT_S: Final = 30.0


class Traffic(NamedTuple):
    """The transfers between a store and its remote cache in one run.

    Attributes:
        address: The remote cache.
        fetched: How many results were fetched.
        fetched_bytes: How many bytes that took.
        uploaded: How many results were uploaded.
        uploaded_bytes: How many bytes that took.
        waiting: How many items have yet to be uploaded.
        problems: What was reported to the user.
    """

    address: str
    fetched: int
    fetched_bytes: int
    uploaded: int
    uploaded_bytes: int
    waiting: int
    problems: tuple[str, ...]


class RemoteCacheClient:
    """Fetches from and uploads to one remote cache for the length of a run. Safe to use from several threads.

    Attributes:
        connection: The remote cache.
        uploader: Uploads results, by default in the background.
        reader: Fetches results.
    """

    def __init__(self, connection: RemoteConnection, are_valid_facts: FactsCheck) -> None:
        """Create a client.

        Args:
            connection: The remote cache; it is closed when the client finishes.
            are_valid_facts: Returns whether the facts of a fetched result may be shown.
        """
        self.connection = connection
        self.reader = ResultReader(connection, are_valid_facts)
        self.uploader = Uploader(connection, self.reader.needs_repair)

    def fetch(self, key: StageKey) -> Fetched | None:
        """Fetch a result into the local store; None when the remote cache has no valid one."""
        return self.reader.fetch(key)

    def offer(self, key: str) -> None:
        """Upload a result that was made here while the run goes on. Returns at once."""
        self.uploader.offer(key)

    def start(self) -> None:
        """Begin with what earlier runs could not upload."""
        self.uploader.start()

    def limit_time(self, work_s: float | None) -> None:
        """Limit how long the run waits for results.

        Args:
            work_s: How long the stages take that are not up to date; None when that is not known.
        """
        unknown_s = self.connection.access.patience_s / 2
        self.connection.reads.budget.limit(work_s, unknown_s)

    def finish(self, run_s: float = 0.0, *, is_cancelled: bool = False) -> None:
        """Wait a limited time for uploads, then close the connection.

        Args:
            run_s: How long the run took, of which the wait is a part if the access does not limit it.
            is_cancelled: Do not wait.
        """
        wait_s = self.connection.access.wait_s
        if wait_s is None:
            wait_s = min(max(_SHARE_OF_RUN * run_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
        self.uploader.finish(0.0 if is_cancelled else wait_s)
        self.reader.close()
        self.connection.close()

    def traffic(self) -> Traffic:
        """Return what was transferred so far."""
        return Traffic(
            address=self.connection.address,
            fetched=len(self.reader.fetched),
            fetched_bytes=self.reader.fetched_bytes,
            uploaded=len(self.uploader.sender.uploaded),
            uploaded_bytes=self.uploader.sender.uploaded_bytes,
            waiting=len(self.uploader.waiting()),
            problems=self.connection.problems,
        )
