"""A remote cache in a bucket of S3, Google Cloud Storage or Azure Blob Storage.

Credentials come from the services' environment variables and the machine's identity, never from the URL.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from tvmflow.core.errors import EnvironmentProblem, UsageError
from tvmflow.core.version import page_url
from tvmflow.store.http_client import Corrupt, Unreachable, read_pieces
from tvmflow.store.remote.connection import Forbidden, Sink
from tvmflow.store.remote.http import without_credentials

INSTALL: Final = "pip install 'tvmflow[remote]'"
"""The command that installs the package for buckets."""

_CHUNK: Final = 1 << 18
# A transfer that takes longer is continued by another request.
_TRANSFER_TIMEOUT_S: Final = 3600.0
_MAX_ERROR: Final = 10_000
_ACCESS_DENIED: Final = "access denied (check the environment variables of the service)"
_STATUS: Final = re.compile(r"\b(?:status(?: code)?:? |error: )?([45]\d\d) ([A-Z][A-Za-z ]{2,40})")


class BucketCache:
    """See `RemoteCache`: `ac/<key>` and `cas/<sha256>` below the URL, as in `s3://bucket/prefix`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self.address = without_credentials(url).rstrip("/")
        if "@" in url or parts.query or parts.fragment:
            raise UsageError(
                f"--remote {self.address}: the URL of a bucket has no user, query or fragment",
                fix=f"give keys and tokens in the environment: {page_url('remote')}",
            )
        if not parts.netloc:
            fix = f"write it as {parts.scheme}://BUCKET[/PREFIX]"
            raise UsageError(f"--remote {self.address}: the URL has no bucket", fix=fix)
        try:
            import obstore
        except ImportError as missing:
            text = f"{self.address} needs the package obstore ({missing})"
            raise EnvironmentProblem(text, fix=INSTALL) from missing
        self._obstore: Any = obstore
        self._timeout_s = timeout_s
        self._url = url
        # A blob may be large, but an action is small, and arrives soon or not at all.
        self._blobs = self._open(timeout_s * 60)
        self._actions = self._open(timeout_s)

    def _open(self, transfer_timeout_s: float) -> Any:
        try:
            return open_bucket(self._url, self._timeout_s, transfer_timeout_s)
        except ValueError as error:
            fix = "correct the URL, or the environment variables of the service"
            raise UsageError(f"--remote {self.address}: {error}", fix=fix) from error

    def get(self, path: str, max_bytes: int, sink: Sink) -> bool:
        """See `RemoteCache`."""
        try:
            with library_errors(self._timeout_s):
                answer = self._obstore.get(self._handle(path), path)
                stored = ObjectSource(answer, int(answer.meta["size"]), self._timeout_s)
            if stored.total > max_bytes:
                raise Corrupt(f"it is longer than {max_bytes} bytes")
            for piece in read_pieces(stored, max_bytes):
                sink(piece)
        except NoObject:
            return False
        return True

    def has(self, path: str, size: int) -> bool:
        """See `RemoteCache`."""
        try:
            with library_errors(self._timeout_s):
                return int(self._obstore.head(self._actions, path)["size"]) == size
        except NoObject:
            return False

    def put(self, path: str, content: bytes | Path) -> None:
        """See `RemoteCache`."""
        try:
            with library_errors(self._timeout_s):
                self._obstore.put(self._handle(path), path, content)
        except NoObject:
            raise Unreachable("it does not accept uploads (404)") from None

    def close(self) -> None:
        """Do nothing, because obstore closes its connections itself."""

    def _handle(self, path: str) -> Any:
        return self._actions if path.startswith("ac/") else self._blobs


class NoObject(Exception):
    """There is no object with this name."""


class ObjectSource:
    """The bytes of an object from offset `start` on; empty without an `answer`."""

    def __init__(
        self, answer: Any, total: int, timeout_s: float, start: int = 0, validator: str = ""
    ) -> None:
        self.start = start
        self.total = total
        self.validator = validator
        self._pieces = iter(answer.stream(min_chunk_size=_CHUNK) if answer is not None else ())
        self._timeout_s = timeout_s

    def read(self) -> bytes:
        """Return the next bytes, as many as obstore chooses; empty at the end."""
        with library_errors(self._timeout_s):
            return bytes(next(self._pieces, b""))

    def close(self) -> None:
        """Do nothing, because obstore closes its connections itself."""


def open_object(url: str, offset: int, validator: str, timeout_s: float) -> ObjectSource:
    """Return an object from `offset` on; from its beginning if its ETag is not `validator` any more.

    Raises:
        ImportError: when obstore is not installed.
        ValueError: when the URL or the environment variables of the service are wrong.
        NoObject: when there is no such object.
        TransferError: when the bucket does not answer, or denies access.
    """
    import obstore

    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    store = open_bucket(f"{scheme}://{bucket}", timeout_s, _TRANSFER_TIMEOUT_S)
    with library_errors(timeout_s):
        meta = obstore.head(store, path)
        size, tag = int(meta["size"]), meta["e_tag"] or ""
        if offset > size or validator != tag:
            offset = 0
        answer = None
        if offset < size:
            options: Any = {"range": {"offset": offset}, **({"if_match": tag} if tag else {})}
            answer = obstore.get(store, path, options=options)
        return ObjectSource(answer, size, _TRANSFER_TIMEOUT_S, offset, tag)


def open_bucket(url: str, timeout_s: float, transfer_timeout_s: float) -> Any:
    """Return obstore's handle for a bucket or a folder in it; the URL has no credentials.

    `timeout_s` limits connecting and retries, `transfer_timeout_s` each transfer.
    """
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    options = {
        # These options replace obstore's defaults.
        "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes"),
        "connect_timeout": timedelta(seconds=timeout_s),
        "timeout": timedelta(seconds=transfer_timeout_s),
    }
    retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=timeout_s)}
    try:
        return from_url(url, client_options=options, retry_config=retries)
    except (BaseError, ValueError) as error:
        raise ValueError(_first_line(error)) from None


@contextlib.contextmanager
def library_errors(timeout_s: float) -> Iterator[None]:
    """Translate obstore's errors, because their texts may show parts of a signed request.

    Raises NoObject, Unreachable or Forbidden.
    """
    from obstore import exceptions

    try:
        yield
    except (exceptions.NotFoundError, FileNotFoundError) as error:
        if "NoSuchBucket" in str(error):
            raise Unreachable("the bucket does not exist") from None
        raise NoObject from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError):
        raise Forbidden(_ACCESS_DENIED) from None
    except (exceptions.BaseError, OSError) as error:
        text = str(error)
        if status := _STATUS.search(text):
            if status[1] in ("401", "403"):
                raise Forbidden(_ACCESS_DENIED) from None
            raise Unreachable(f"it answers {status[1]} {status[2].strip()}") from None
        if "timed out" in text or "timeout" in text.lower().replace("retry_timeout", ""):
            raise Unreachable(f"no answer within {timeout_s:g} s") from None
        raise Unreachable("it cannot be connected to") from None


def _first_line(error: Exception) -> str:
    line = str(error)[:_MAX_ERROR].partition("\n")[0]
    # The text comes from a server; a regular expression with a wildcard prefix would take quadratic time.
    words = ("…" if "://" in word else word for word in re.split(r"(\s+)", line))
    return "".join(words)[:200]
