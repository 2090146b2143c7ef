"""The remote cache client: results that the remote cache has are fetched, results that are made here are uploaded.

No failure of a remote cache fails a run. What cannot be fetched is made here; what cannot be
uploaded is noted in the local store, and uploaded by a later run.
"""

from __future__ import annotations

from typing import NamedTuple

from tvmflow.core.types import StageKey
from tvmflow.store.remote.connection import RemoteConnection
from tvmflow.store.remote.result_reader import FactsCheck, Fetched, ResultReader
from tvmflow.store.remote.uploader import Uploader


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

    def finish(self, wait_s: float | None = None) -> None:
        """Wait a limited time for uploads, then close the connection.

        Args:
            wait_s: How long; as the access says when None.
        """
        self.uploader.finish(self.connection.access.wait_s if wait_s is None else wait_s)
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
