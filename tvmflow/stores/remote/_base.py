"""What a remote offers, and the ways in which it can fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

Sink = Callable[[bytes], object]
"""Takes the next piece of a content."""

# An action names files; one that is larger than this is none of ours.
LONGEST_ACTION: Final = 4 << 20


class RemoteProblem(Exception):
    """A remote did not do what it was asked. Its text is a phrase for people, free of credentials."""


class Unreachable(RemoteProblem):
    """No answer, or one that says that the remote is in trouble. `again`: it may be better in a moment."""

    def __init__(self, why: str, *, again: bool = False) -> None:
        super().__init__(why)
        self.again = again


class Forbidden(RemoteProblem):
    """The remote is well, and does not let us."""


class Declined(RemoteProblem):
    """The remote is well, and does not do this one thing; another it may."""


class Wrong(RemoteProblem):
    """What came is not what it is called: another digest, another size."""


class Remote(Protocol):
    """Two shelves: actions by key, contents by sha256. All keys and digests are 64 hex digits.

    Safe to use from several threads. Every function may raise `Unreachable` or `Forbidden`.
    """

    @property
    def place(self) -> str:
        """Where it is, for people, without any credentials."""

    def action(self, key: str) -> bytes | None:
        """The action of that key, not yet checked in any way; None where there is none."""

    def put_action(self, key: str, content: bytes) -> None:
        """Keep an action, in place of another one. Its contents must be there before."""

    def has(self, digest: str, size: int) -> bool:
        """Whether there is a content of that name and size; its bytes are not looked at."""

    def fetch(self, digest: str, size: int, sink: Sink) -> bool:
        """Pass on a content piece by piece, not yet checked; whether it is there. `size` is what is expected."""

    def put(self, digest: str, path: Path) -> None:
        """Keep a content, in place of one of that name."""

    def close(self) -> None:
        """Let go of connections."""
