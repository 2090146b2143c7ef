"""Remote caches: stores that several machines share, and the client for them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from tvmflow.core.errors import UsageError
from tvmflow.core.files import flush_file, temporary_name
from tvmflow.core.text import did_you_mean
from tvmflow.store.http_client import Corrupt, Unreachable
from tvmflow.store.remote.bucket import BucketCache
from tvmflow.store.remote.connection import Forbidden, RemoteCache, Sink, open_content
from tvmflow.store.remote.http import HttpCache, RegistryCache, without_credentials

_CHUNK: Final = 1 << 20


class FolderCache:
    """A remote cache in a folder that several machines share, for instance over NFS.

    The folder must exist, so that nothing is written while its disk is not mounted. Its layout is `ac/ab/<key>` and
    `cas/ab/<sha256>`. A file appears when it is complete, by renaming; no locks are used.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.address = str(root)

    def get(self, path: str, max_bytes: int, sink: Sink) -> bool:
        """See `RemoteCache`."""
        with _disk_errors():
            try:
                stream = self._find(path).open("rb")
            except FileNotFoundError:
                self._require_root()
                return False
        with stream:
            if os.fstat(stream.fileno()).st_size > max_bytes:
                raise Corrupt(f"it is longer than {max_bytes} bytes")
            while chunk := _read_chunk(stream):
                sink(chunk)
        return True

    def has(self, path: str, size: int) -> bool:
        """See `RemoteCache`."""
        with _disk_errors():
            try:
                return self._find(path).stat().st_size == size
            except FileNotFoundError:
                self._require_root()
                return False

    def put(self, path: str, content: bytes | Path) -> None:
        """See `RemoteCache`."""
        with (
            open_content(content) as source,
            _disk_errors(),
            self._replacing(self._find(path)) as stream,
        ):
            shutil.copyfileobj(source, stream, _CHUNK)

    def close(self) -> None:
        """Do nothing, because there is no connection."""

    def _find(self, path: str) -> Path:
        kind, name = path.split("/")
        return self._root / kind / name[:2] / name

    def _require_root(self) -> None:
        if not self._root.is_dir():
            raise Unreachable("the folder does not exist")

    @contextlib.contextmanager
    def _replacing(self, target: Path) -> Iterator[IO[bytes]]:
        """Yield a new file that replaces `target` when it is complete.

        Temporary files are outside `ac/` and `cas/`. Their names contain the host's, because machines share the folder.
        """
        self._require_root()
        name = f"{socket.gethostname()}-{temporary_name()}".replace("/", "+")
        temporary = self._root / "tmp" / name
        temporary.parent.mkdir(exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as stream:
                yield stream
                stream.flush()
                flush_file(stream.fileno())
            temporary.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _read_chunk(stream: IO[bytes]) -> bytes:
    with _disk_errors():
        return stream.read(_CHUNK)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise Forbidden(f"{error.strerror}") from error
        raise Unreachable(
            error.strerror or type(error).__name__, retryable=error.errno == errno.ESTALE
        ) from error


# Takes the URL, and the time limit in seconds for each answer.
Opener = Callable[[str, float], RemoteCache]


def _open_file_url(url: str, timeout_s: float) -> RemoteCache:
    parts = urllib.parse.urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        text = f"--remote {without_credentials(url)}: a file: URL names a folder of this machine"
        raise UsageError(text, fix="write it as file:///FOLDER, with three slashes")
    return FolderCache(Path(urllib.parse.unquote(parts.path)).absolute())


REMOTE_CACHES: Final[dict[str, Opener]] = {
    "az": BucketCache,
    "file": _open_file_url,
    "gs": BucketCache,
    "http": HttpCache,
    "https": HttpCache,
    "oci": RegistryCache,
    "s3": BucketCache,
}


def open_remote_cache(url: str, *, timeout_s: float = 10.0) -> RemoteCache:
    """Return the remote cache at a URL of `REMOTE_CACHES`, or in a folder. Sends no request yet."""
    schemes = [f"{scheme}://" for scheme in REMOTE_CACHES]
    scheme, separator, _ = url.partition("://")
    if not separator:
        if "@" in url.partition("/")[0]:
            # The value is not shown, because it may contain a password.
            fix = f"a URL starts with {' or '.join(schemes)}"
            raise UsageError("--remote: the value is neither a folder nor a URL", fix=fix)
        return FolderCache(Path(url).expanduser().absolute())
    fix = f"give a folder, or a URL that starts with {', '.join(schemes)}"
    opener, shown = REMOTE_CACHES.get(scheme.lower()), f"--remote {without_credentials(url)}"
    if opener is None:
        hint = did_you_mean(scheme, REMOTE_CACHES)
        text = f"{shown}: there is no remote cache of the kind '{scheme}'{hint}"
        raise UsageError(text, fix=fix)
    try:
        urllib.parse.urlsplit(url)
    except ValueError as error:
        raise UsageError(f"{shown}: this is not a valid URL ({error})", fix=fix) from None
    return opener(url, timeout_s)
