"""A remote cache on a web server, as bazel-remote, Bazel's other caches and nginx with WebDAV offer it.

`GET`, `PUT` and `HEAD` of `/ac/<key>` and `/cas/<sha256>`. Redirects are not followed, so that
credentials are never sent to another server.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import IO, Final

from tvmflow.core.errors import EnvironmentProblem, UsageError
from tvmflow.core.formatting import excerpt
from tvmflow.core.version import VERSION
from tvmflow.store.credentials import basic, bearer, find_in_netrc
from tvmflow.store.remote.base import (
    MIN_BYTES_PER_S,
    Corrupt,
    Declined,
    Forbidden,
    Sink,
    Unreachable,
    open_content,
)
from tvmflow.store.web_requests import BROKEN_ANSWER, RETRYABLE, header_count

TOKEN_VARIABLE: Final = "TVMFLOW_REMOTE_TOKEN"

_CHUNK: Final = 1 << 18
_MAX_DISCARDED_BYTES: Final = 4096
_MAX_REASON: Final = 80
_MAX_IDLE_CONNECTIONS: Final = 16
# Missing, or a server without HEAD: then the blob is uploaded, which does no harm.
_NOT_FOUND: Final = frozenset({404, 405, 501})
_ACCESS_DENIED: Final = frozenset({401, 403, 407})


class HttpCache:
    """See `_base.RemoteCache`. The URL may contain user and password, which are never shown."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise _invalid_url(url, "the port is not a number up to 65535") from None
        if not parts.hostname:
            raise _invalid_url(url, "the URL has no host")
        if parts.query or parts.fragment:
            raise _invalid_url(url, "the URL has a query or a fragment (a part after ? or #)")
        self._host, self._port = parts.hostname, port
        self._path = urllib.parse.quote(parts.path.rstrip("/"), safe="/%~")
        self._timeout_s = timeout_s
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {
            "User-Agent": f"tvmflow/{VERSION}",
            "Accept-Encoding": "identity",
            **_authorization(parts),
        }
        self._idle: list[HTTPConnection] = []
        self._closed = False
        self.address = without_credentials(url).rstrip("/")

    def get(self, path: str, max_bytes: int, sink: Sink) -> bool:
        """See `_base.RemoteCache`."""
        limit_s = self._timeout_s + max_bytes / MIN_BYTES_PER_S
        deadline = time.monotonic() + limit_s
        with self._request("GET", path) as response:
            if response.status == 404:
                return False
            _check_status(response, 200)
            received = 0
            # read1 returns what has arrived, so that the deadline is checked with a very slow server, too
            while chunk := response.read1(_CHUNK):
                received += len(chunk)
                if received > max_bytes:
                    raise Corrupt(f"it is longer than {max_bytes} bytes")
                sink(chunk)
                if time.monotonic() > deadline:
                    raise Unreachable(f"only {received} bytes arrived within {limit_s:.0f} s")
            if response.length:
                raise Unreachable(f"the connection ended after {received} bytes", retryable=True)
        return True

    def has(self, path: str, size: int) -> bool:
        """See `_base.RemoteCache`."""
        with self._request("HEAD", path) as response:
            if response.status in _NOT_FOUND:
                return False
            _check_status(response, 200)
            length = header_count(response.getheader("Content-Length", ""))
            return length is None or length == size

    def put(self, path: str, content: bytes | Path) -> None:
        """See `_base.RemoteCache`."""
        with open_content(content) as body, self._request("PUT", path, body) as response:
            _check_status(response, 200, 201, 204)

    def close(self) -> None:
        """Close all idle connections, and keep none from now on."""
        self._closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    # ------------------------------------------------------------ requests

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: IO[bytes] | None = None
    ) -> Iterator[HTTPResponse]:
        """Give the response to a request, over an idle connection where there is one."""
        connection, is_new = self._connect()
        reusable = False
        try:
            try:
                response = self._send(connection, method, path, body)
            except (HTTPException, ConnectionError):
                if is_new:
                    raise
                # the server had closed the idle connection, which does not mean that it has a problem
                connection.close()
                response = self._send(connection, method, path, body)
            yield response
            reusable = _is_reusable(response)
        except BROKEN_ANSWER as error:
            raise self._unreachable(error) from error
        finally:
            if reusable and not self._closed and len(self._idle) < _MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
            else:
                connection.close()

    def _send(
        self, connection: HTTPConnection, method: str, path: str, body: IO[bytes] | None
    ) -> HTTPResponse:
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Length"] = str(body.seek(0, os.SEEK_END))
            body.seek(0)
        try:
            connection.request(method, f"{self._path}/{path}", body, headers)
        except (BrokenPipeError, ConnectionResetError):
            # a server that refuses the body may have answered before it closed the connection
            if connection.sock is None or body is None:
                raise
        return connection.getresponse()

    def _connect(self) -> tuple[HTTPConnection, bool]:
        with contextlib.suppress(IndexError):
            return self._idle.pop(), False
        if self._context is None:
            return HTTPConnection(self._host, self._port, timeout=self._timeout_s), True
        return HTTPSConnection(
            self._host, self._port, timeout=self._timeout_s, context=self._context
        ), True

    def _unreachable(self, error: Exception) -> Unreachable:
        """Return the error of a remote cache for one of the connection."""
        if isinstance(error, TimeoutError):
            return Unreachable(f"no answer within {self._timeout_s:g} s")
        if isinstance(error, socket.gaierror):
            return Unreachable(f"the host name {self._host} cannot be resolved")
        if isinstance(error, ssl.SSLError):
            return Unreachable(
                f"no secure connection ({excerpt(error.reason or str(error), _MAX_REASON)})"
            )
        if isinstance(error, ConnectionRefusedError):
            return Unreachable("connection refused")
        if isinstance(error, UnicodeError):
            return Unreachable(f"{self._host} is not a valid host name")
        if isinstance(error, OSError):
            return Unreachable(
                error.strerror or type(error).__name__, retryable=isinstance(error, ConnectionError)
            )
        return Unreachable(f"it is not an HTTP server ({type(error).__name__})", retryable=True)


def _check_status(response: HTTPResponse, *expected: int) -> None:
    """Raise the error that a response means, unless its status is an expected one."""
    if response.status in expected:
        return
    reason = f"it answers {response.status} {excerpt(response.reason, _MAX_REASON)}".rstrip()
    if response.status in _ACCESS_DENIED:
        raise Forbidden(reason)
    if 400 <= response.status < 500 and response.status not in RETRYABLE:
        raise Declined(reason)
    raise Unreachable(reason, retryable=response.status in RETRYABLE)


def _is_reusable(response: HTTPResponse) -> bool:
    """Read a short rest of a response; return whether its connection can take another request."""
    if response.length and response.length <= _MAX_DISCARDED_BYTES:
        response.read()
    if response.length == 0:
        response.close()
    return response.isclosed()


# ---------------------------------------------------------------- URLs and credentials


def without_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment, so that it may be shown.

    A password that contains a character which should have been escaped is removed, too.
    """
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[?#]', rest.rpartition('@')[2])[0]}"


def _invalid_url(url: str, reason: str) -> UsageError:
    fix = "write it as https://HOST[:PORT][/PATH]"
    return UsageError(f"--remote {without_credentials(url)}: {reason}", fix=fix)


def _authorization(parts: urllib.parse.SplitResult) -> dict[str, str]:
    """Return the header with the token of the environment, else the user of the URL, else of ~/.netrc."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        try:
            return {"Authorization": bearer(token, f"${TOKEN_VARIABLE}").header}
        except EnvironmentProblem as problem:
            raise UsageError(problem.message, fix=problem.fix) from None
    user = urllib.parse.unquote(parts.username or "")
    password = urllib.parse.unquote(parts.password or "")
    if not user:
        user, password = find_in_netrc(parts.hostname or "", with_default=True)
    return {"Authorization": basic(user, password)} if user else {}
