"""A remote on a web server, as bazel-remote, Bazel's other caches and nginx with WebDAV offer it.

`GET`, `PUT` and `HEAD` of `/ac/<key>` and `/cas/<sha256>`. Redirects are not followed, so that
what proves who we are never goes elsewhere.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import netrc
import os
import queue
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final

from tvmflow import __version__
from tvmflow.errors import UsageError
from tvmflow.stores.remote._base import (
    LONGEST_ACTION,
    Declined,
    Forbidden,
    Sink,
    Unreachable,
    Wrong,
)

TOKEN_VARIABLE: Final = "TVMFLOW_REMOTE_TOKEN"

_CHUNK: Final = 1 << 18
_SHORT_PAGE: Final = 4096
_KEPT_CONNECTIONS: Final = 16
# A server that gives less than this a second is as good as dead.
_SLOWEST: Final = 256 << 10
_IN_TROUBLE: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
# Not there, or a server that does not answer HEAD: then it is sent, which does no harm.
_NO_HEAD: Final = frozenset({404, 405, 501})
_NOT_US: Final = frozenset({401, 403, 407})


class HttpRemote:
    """See `_base.Remote`. `url` may name a user, whose password is then not shown anywhere."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise _no_address(url, "its port is no number up to 65535") from None
        if not parts.hostname:
            raise _no_address(url, "it names no host")
        if parts.query or parts.fragment:
            raise _no_address(url, "it has a part after ? or #")
        self._host, self._port = parts.hostname, port
        self._path = urllib.parse.quote(parts.path.rstrip("/"), safe="/%~")
        self._timeout_s = timeout_s
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {
            "User-Agent": f"tvmflow/{__version__}",
            "Accept-Encoding": "identity",
            **_authorization(parts),
        }
        self._idle: queue.LifoQueue[http.client.HTTPConnection] = queue.LifoQueue(_KEPT_CONNECTIONS)
        self._closed = False
        self.place = without_credentials(url).rstrip("/")

    # ------------------------------------------------------------ the shelves

    def action(self, key: str) -> bytes | None:
        content = io.BytesIO()
        found = self._get(f"/ac/{key}", LONGEST_ACTION, content.write)
        return content.getvalue() if found else None

    def put_action(self, key: str, content: bytes) -> None:
        self._put(f"/ac/{key}", io.BytesIO(content), len(content))

    def has(self, digest: str, size: int) -> bool:
        with self._answer("HEAD", f"/cas/{digest}") as answer:
            if answer.status in _NO_HEAD:
                return False
            self._expect(answer, 200)
            told = answer.getheader("Content-Length", "")
            return not told.isdecimal() or int(told) == size

    def fetch(self, digest: str, size: int, sink: Sink) -> bool:
        return self._get(f"/cas/{digest}", size, sink)

    def put(self, digest: str, path: Path) -> None:
        with path.open("rb") as stream:
            self._put(f"/cas/{digest}", stream, os.fstat(stream.fileno()).st_size)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()

    # ------------------------------------------------------------ questions

    def _get(self, path: str, most: int, sink: Sink) -> bool:
        deadline = time.monotonic() + self._timeout_s + most / _SLOWEST
        with self._answer("GET", path) as answer:
            if answer.status == 404:
                return False
            self._expect(answer, 200)
            done = 0
            # read1 comes back with what is there: a server that drips is found out
            while chunk := answer.read1(_CHUNK):
                done += len(chunk)
                if done > most:
                    raise Wrong(f"it is longer than {most} bytes")
                sink(chunk)
                if time.monotonic() > deadline:
                    raise Unreachable(f"only {done} bytes came in {self._timeout_s:.0f} s and more")
            if answer.length:
                raise Unreachable(f"the connection ended after {done} bytes", again=True)
        return True

    def _put(self, path: str, stream: IO[bytes], size: int) -> None:
        with self._answer("PUT", path, stream, {"Content-Length": str(size)}) as answer:
            self._expect(answer, 200, 201, 204)

    def _expect(self, answer: http.client.HTTPResponse, *statuses: int) -> None:
        if answer.status in statuses:
            return
        said = f"it answers {answer.status} {_printable(answer.reason)}".rstrip()
        if answer.status in _NOT_US:
            raise Forbidden(said)
        if 400 <= answer.status < 500 and answer.status not in _IN_TROUBLE:
            raise Declined(said)
        raise Unreachable(said, again=answer.status in _IN_TROUBLE)

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        body: IO[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to one question, over a connection that was kept where there is one."""
        connection, fresh = self._connection()
        done = False
        try:
            try:
                answer = self._ask(connection, method, path, body, headers or {})
            except (http.client.HTTPException, ConnectionError):
                if fresh:
                    raise
                # the server had closed what we kept: that says nothing about how it is
                connection.close()
                if body is not None:
                    body.seek(0)
                answer = self._ask(connection, method, path, body, headers or {})
            yield answer
            done = _to_its_end(answer)
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            if not done or not self._keep(connection):
                connection.close()

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: IO[bytes] | None,
        headers: Mapping[str, str],
    ) -> http.client.HTTPResponse:
        try:
            connection.request(method, self._path + path, body, {**self._headers, **headers})
        except (BrokenPipeError, ConnectionResetError):
            # a server that does not want all of it may have said why before it hung up
            if connection.sock is None or body is None:
                raise
        return connection.getresponse()

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        with contextlib.suppress(queue.Empty):
            return self._idle.get_nowait(), False
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s), True
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeout_s, context=self._context
        ), True

    def _keep(self, connection: http.client.HTTPConnection) -> bool:
        if self._closed:
            return False
        try:
            self._idle.put_nowait(connection)
        except queue.Full:
            return False
        return True

    def _unreachable(self, error: Exception) -> Unreachable:
        if isinstance(error, TimeoutError):
            return Unreachable(f"no answer within {self._timeout_s:g} s")
        if isinstance(error, socket.gaierror):
            return Unreachable(f"the name {self._host} cannot be looked up")
        if isinstance(error, ssl.SSLError):
            return Unreachable(f"no safe connection ({_printable(error.reason or str(error))})")
        if isinstance(error, ConnectionRefusedError):
            return Unreachable("nothing listens there")
        if isinstance(error, UnicodeError):
            return Unreachable(f"{self._host} is no name of a host")
        if isinstance(error, OSError):
            return Unreachable(
                error.strerror or type(error).__name__, again=isinstance(error, ConnectionError)
            )
        return Unreachable(f"it does not speak HTTP ({type(error).__name__})", again=True)


def _to_its_end(answer: http.client.HTTPResponse) -> bool:
    """Read what little is left of an answer; whether its connection can be asked again."""
    if answer.length and answer.length <= _SHORT_PAGE:
        answer.read()
    if answer.length == 0:
        answer.close()
    return answer.isclosed()


# ---------------------------------------------------------------- addresses and credentials


def without_credentials(url: str) -> str:
    """An address as it may be shown: no user, no password, nothing after ? or #.

    A password with a sign that should have been escaped in it must not be shown either.
    """
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[?#]', rest.rpartition('@')[2])[0]}"


def _no_address(url: str, why: str) -> UsageError:
    return UsageError(
        f"--remote {without_credentials(url)}: {why}",
        fix="give it as https://HOST[:PORT][/PATH]",
    )


def _authorization(parts: urllib.parse.SplitResult) -> dict[str, str]:
    """Who we are: the token of the environment, else the user in the address, else in ~/.netrc."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        if not token.isascii() or not token.isprintable():
            raise UsageError(
                f"${TOKEN_VARIABLE} holds what cannot be sent",
                fix="set it to the token alone, without a line end",
            )
        return {"Authorization": f"Bearer {token}"}
    user = urllib.parse.unquote(parts.username or "")
    password = urllib.parse.unquote(parts.password or "")
    if not user:
        user, password = _from_netrc(parts.hostname or "")
    if not user:
        return {}
    proof = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {proof}"}


def _from_netrc(host: str) -> tuple[str, str]:
    # a file that is not there, not ours to read or not well written names nobody
    with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
        if found:
            return found[0], found[2] or ""
    return "", ""


def _printable(text: str) -> str:
    return "".join(sign for sign in text if sign.isprintable())[:80]
