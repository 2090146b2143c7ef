"""A remote in a bucket: S3 and what speaks like it, Google Cloud Storage, Azure Blob Storage.

Who we are is found where those services' own tools look: their environment variables, and the
identity of the machine. Nothing of it is in the address.
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

from tvmflow.errors import EnvironmentProblem, UsageError
from tvmflow.stores.remote._base import LONGEST_ACTION, Forbidden, Sink, Unreachable, Wrong
from tvmflow.stores.remote.http import without_credentials

_CHUNK: Final = 1 << 20
_NOT_US: Final = "it does not let us (check the variables of the service)"
_STATUS: Final = re.compile(r"\b(?:status(?: code)?:? |error: )?([45]\d\d) ([A-Z][A-Za-z ]{2,40})")


class ObjectsRemote:
    """See `_base.Remote`: `ac/<key>` and `cas/<sha256>` below the address, as in `s3://bucket/prefix`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self.place = without_credentials(url).rstrip("/")
        if "@" in url or parts.query or parts.fragment:
            raise UsageError(
                f"--remote {self.place}: an address of a bucket is that alone",
                fix="give keys and tokens in the environment, as docs/remote.md shows",
            )
        if not parts.netloc:
            raise UsageError(
                f"--remote {self.place}: it names no bucket",
                fix=f"give it as {parts.scheme}://BUCKET[/PREFIX]",
            )
        try:
            import obstore
        except ImportError as missing:
            raise EnvironmentProblem(
                f"{self.place} needs the package obstore ({missing})",
                fix="pip install 'tvmflow[remote]'",
            ) from missing
        self._obstore: Any = obstore
        self._timeout_s = timeout_s
        self._url = url
        # a content may be large; what is small comes soon or not at all
        self._store = self._opened(timeout_s * 60)
        self._brief = self._opened(timeout_s)

    def _opened(self, whole_s: float) -> Any:
        """The bucket, with a limit for each whole transfer."""
        from obstore.store import from_url

        options = {
            # these options take the place of those that the library reads itself
            "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes"),
            "connect_timeout": timedelta(seconds=self._timeout_s),
            "timeout": timedelta(seconds=whole_s),
        }
        retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=self._timeout_s)}
        try:
            return from_url(self._url, client_options=options, retry_config=retries)
        except (self._obstore.exceptions.BaseError, ValueError) as error:
            raise UsageError(
                f"--remote {self.place}: {_first_line(error)}",
                fix="correct the address, or the variables of the service",
            ) from error

    def action(self, key: str) -> bytes | None:
        content = bytearray()
        found = self._get(self._brief, f"ac/{key}", LONGEST_ACTION, content.extend)
        return bytes(content) if found else None

    def put_action(self, key: str, content: bytes) -> None:
        self._put(self._brief, f"ac/{key}", content)

    def has(self, digest: str, size: int) -> bool:
        try:
            with self._said():
                return int(self._obstore.head(self._brief, f"cas/{digest}")["size"]) == size
        except _Missing:
            return False

    def fetch(self, digest: str, size: int, sink: Sink) -> bool:
        return self._get(self._store, f"cas/{digest}", size, sink)

    def put(self, digest: str, path: Path) -> None:
        self._put(self._store, f"cas/{digest}", path)

    def close(self) -> None:
        """The library closes what it holds."""

    def _put(self, store: Any, path: str, content: bytes | Path) -> None:
        try:
            with self._said():
                self._obstore.put(store, path, content)
        except _Missing:
            raise Unreachable("it does not take what is sent (404)") from None

    def _get(self, store: Any, path: str, most: int, sink: Sink) -> bool:
        try:
            with self._said():
                found = self._obstore.get(store, path)
                if found.meta["size"] > most:
                    raise Wrong(f"it is longer than {most} bytes")
                for chunk in found.stream(min_chunk_size=_CHUNK):
                    sink(bytes(chunk))
        except _Missing:
            return False
        return True

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        """What the library raises, as a phrase of ours: its own may show parts of a signed request."""
        raised = self._obstore.exceptions
        try:
            yield
        except (raised.NotFoundError, FileNotFoundError) as error:
            if "NoSuchBucket" in str(error):
                raise Unreachable("there is no such bucket") from None
            raise _Missing from None
        except (raised.PermissionDeniedError, raised.UnauthenticatedError, PermissionError):
            raise Forbidden(_NOT_US) from None
        except (raised.BaseError, OSError) as error:
            text = str(error)
            status = _STATUS.search(text)
            if status and status[1] in ("401", "403"):
                raise Forbidden(_NOT_US) from None
            if status:
                raise Unreachable(f"it answers {status[1]} {status[2].strip()}") from None
            if "timed out" in text or "timeout" in text.lower().replace("retry_timeout", ""):
                raise Unreachable(f"no answer within {self._timeout_s:g} s") from None
            raise Unreachable("no connection to it") from None


class _Missing(Exception):
    """There is nothing of that name."""


def _first_line(error: Exception) -> str:
    return re.sub(r"\S+://\S+", "…", str(error)).partition("\n")[0][:200]
