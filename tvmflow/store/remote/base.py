"""The protocol of a remote cache, and the ways in which one can fail."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final, NamedTuple, Protocol

from tvmflow.store.http_client import TransferError

MIN_BYTES_PER_S: Final = 256 << 10
"""A remote cache that transfers fewer bytes per second is treated as unreachable."""

# Takes the next piece of a blob.
Sink = Callable[[bytes], object]


class BlobRef(NamedTuple):
    """A blob by its digest (sha256, hex) and its size in bytes."""

    digest: str
    size: int

    @property
    def path(self) -> str:
        """The path at which a remote cache has it."""
        return f"cas/{self.digest}"


class Forbidden(TransferError):
    """The remote cache answers, and refuses access."""


class Declined(TransferError):
    """The remote cache answers, and refuses this one request; others may succeed."""


class RemoteCache(Protocol):
    """Files by path: actions as `ac/<key>`, blobs as `cas/<sha256>`. Keys and digests have 64 hex digits.

    Safe to use from several threads. Every function may raise `Unreachable` or `Forbidden`.
    """

    @property
    def address(self) -> str:
        """Its address, for people, without credentials."""

    def get(self, path: str, max_bytes: int, sink: Sink) -> bool:
        """Pass a file to `sink` piece by piece, unverified; return whether it exists.

        Raises:
            Corrupt: when it is longer than `max_bytes`.
        """

    def has(self, path: str, size: int) -> bool:
        """Return whether there is a file of that size. Its content is not read."""

    def put(self, path: str, content: bytes | Path) -> None:
        """Store bytes, or a local file, at `path`; the blobs of an action must have been stored before it."""

    def close(self) -> None:
        """Close all connections."""


def open_content(content: bytes | Path) -> IO[bytes]:
    """Return a stream of what `RemoteCache.put` stores."""
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
