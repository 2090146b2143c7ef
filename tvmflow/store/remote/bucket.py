"""A remote cache in a bucket: S3 and services with its protocol, Google Cloud Storage, Azure Blob Storage.

Credentials are found where those services' own tools look: their environment variables, and the
identity of the machine. None are in the URL.
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

from tvmflow.core.documentation import page_url
from tvmflow.core.errors import EnvironmentProblem, UsageError
from tvmflow.store.remote._base import Corrupt, Forbidden, Sink, Unreachable
from tvmflow.store.remote.http import without_credentials

_CHUNK: Final = 1 << 20
_ACCESS_DENIED: Final = "access denied (check the environment variables of the service)"
_STATUS: Final = re.compile(r"\b(?:status(?: code)?:? |error: )?([45]\d\d) ([A-Z][A-Za-z ]{2,40})")


class BucketCache:
    """See `_base.RemoteCache`: `ac/<key>` and `cas/<sha256>` below the URL, as in `s3://bucket/prefix`."""

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
            raise EnvironmentProblem(text, fix="pip install 'tvmflow[remote]'") from missing
        self._obstore: Any = obstore
        self._timeout_s = timeout_s
        self._url = url
        # a blob may be large; an action is small and arrives soon or not at all
        self._blobs = self._open(timeout_s * 60)
        self._actions = self._open(timeout_s)

    def _open(self, transfer_timeout_s: float) -> Any:
        """Return obstore's handle of the bucket, with a limit for each transfer."""
        from obstore.store import from_url

        options = {
            # these options replace those that the library reads itself
            "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes"),
            "connect_timeout": timedelta(seconds=self._timeout_s),
            "timeout": timedelta(seconds=transfer_timeout_s),
        }
        retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=self._timeout_s)}
        try:
            return from_url(self._url, client_options=options, retry_config=retries)
        except (self._obstore.exceptions.BaseError, ValueError) as error:
            fix = "correct the URL, or the environment variables of the service"
            raise UsageError(f"--remote {self.address}: {_first_line(error)}", fix=fix) from error

    def get(self, path: str, max_bytes: int, sink: Sink) -> bool:
        """See `_base.RemoteCache`."""
        try:
            with self._library_errors():
                answer = self._obstore.get(self._handle(path), path)
                if answer.meta["size"] > max_bytes:
                    raise Corrupt(f"it is longer than {max_bytes} bytes")
                for chunk in answer.stream(min_chunk_size=_CHUNK):
                    sink(bytes(chunk))
        except _NotFound:
            return False
        return True

    def has(self, path: str, size: int) -> bool:
        """See `_base.RemoteCache`."""
        try:
            with self._library_errors():
                return int(self._obstore.head(self._actions, path)["size"]) == size
        except _NotFound:
            return False

    def put(self, path: str, content: bytes | Path) -> None:
        """See `_base.RemoteCache`."""
        try:
            with self._library_errors():
                self._obstore.put(self._handle(path), path, content)
        except _NotFound:
            raise Unreachable("it does not accept uploads (404)") from None

    def close(self) -> None:
        """Do nothing: the library closes its connections."""

    def _handle(self, path: str) -> Any:
        return self._actions if path.startswith("ac/") else self._blobs

    @contextlib.contextmanager
    def _library_errors(self) -> Iterator[None]:
        """Translate the library's errors: its messages may show parts of a signed request."""
        exceptions = self._obstore.exceptions
        try:
            yield
        except (exceptions.NotFoundError, FileNotFoundError) as error:
            if "NoSuchBucket" in str(error):
                raise Unreachable("the bucket does not exist") from None
            raise _NotFound from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError):
            raise Forbidden(_ACCESS_DENIED) from None
        except (exceptions.BaseError, OSError) as error:
            text = str(error)
            status = _STATUS.search(text)
            if status and status[1] in ("401", "403"):
                raise Forbidden(_ACCESS_DENIED) from None
            if status:
                raise Unreachable(f"it answers {status[1]} {status[2].strip()}") from None
            if "timed out" in text or "timeout" in text.lower().replace("retry_timeout", ""):
                raise Unreachable(f"no answer within {self._timeout_s:g} s") from None
            raise Unreachable("it cannot be connected to") from None


class _NotFound(Exception):
    """There is nothing of that name."""


def _first_line(error: Exception) -> str:
    return re.sub(r"\S+://\S+", "…", str(error)).partition("\n")[0][:200]
