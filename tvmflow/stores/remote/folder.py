"""A remote in a folder that several machines share, over NFS for instance.

The layout is that of the other remotes, `ac/ab/<key>` and `cas/ab/<sha256>`. What is there is
whole: it is written aside, flushed and renamed, and nothing relies on locks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from tvmflow.stores.remote._base import LONGEST_ACTION, Forbidden, Sink, Unreachable, Wrong

_CHUNK: Final = 1 << 20


class FolderRemote:
    """See `_base.Remote`. The folder must be there: where a disk is not mounted, nothing is written."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.place = str(root)

    def action(self, key: str) -> bytes | None:
        with self._said():
            path = self._path("ac", key)
            if not path.exists():
                self._is_there()
                return None
            with path.open("rb") as stream:
                content = stream.read(LONGEST_ACTION + 1)
        if len(content) > LONGEST_ACTION:
            raise Wrong(f"it is longer than {LONGEST_ACTION} bytes")
        return content

    def put_action(self, key: str, content: bytes) -> None:
        with self._said(), self._aside(self._path("ac", key)) as stream:
            stream.write(content)

    def has(self, digest: str, size: int) -> bool:
        with self._said():
            try:
                return self._path("cas", digest).stat().st_size == size
            except FileNotFoundError:
                self._is_there()
                return False

    def fetch(self, digest: str, size: int, sink: Sink) -> bool:
        with self._said():
            try:
                stream = self._path("cas", digest).open("rb")
            except FileNotFoundError:
                self._is_there()
                return False
        with stream:
            if os.fstat(stream.fileno()).st_size > size:
                raise Wrong(f"it is longer than {size} bytes")
            while chunk := self._read(stream):
                sink(chunk)
        return True

    def _read(self, stream: IO[bytes]) -> bytes:
        with self._said():
            return stream.read(_CHUNK)

    def put(self, digest: str, path: Path) -> None:
        with (
            path.open("rb") as stream,
            self._said(),
            self._aside(self._path("cas", digest)) as aside,
        ):
            while chunk := stream.read(_CHUNK):
                aside.write(chunk)

    def close(self) -> None:
        """Nothing is held."""

    # ------------------------------------------------------------ files

    def _path(self, shelf: str, name: str) -> Path:
        return self._root / shelf / name[:2] / name

    def _is_there(self) -> None:
        if not self._root.is_dir():
            raise Unreachable("there is no such folder")

    @contextlib.contextmanager
    def _aside(self, target: Path) -> Iterator[IO[bytes]]:
        """A new file that takes its place when it is whole; its name is no other machine's."""
        self._is_there()
        name = f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}-{os.urandom(4).hex()}"
        aside = self._root / "tmp" / name.replace("/", "+")
        aside.parent.mkdir(exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            aside.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        """What a disk can do, as a phrase."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise Forbidden(f"{error.strerror}") from error
            raise Unreachable(
                error.strerror or type(error).__name__, again=error.errno == errno.ESTALE
            ) from error
