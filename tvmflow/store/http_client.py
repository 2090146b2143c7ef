"""The client for web servers: one rule for connections, redirects, secrets, errors, sizes and times.

Credentials are sent to the host alone that they are for. Whatever a server answers, its header ends
within the client's time limit, and its body within the limits of `read_pieces`.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import netrc
import os
import ssl
import string
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import IO, Final, NamedTuple, Protocol, TypeVar
from urllib.request import getproxies, proxy_bypass

from tvmflow.core import termination
from tvmflow.core.errors import DownloadError, EnvironmentProblem, Interrupted
from tvmflow.core.formatting import count_text
from tvmflow.core.version import VERSION
from tvmflow.store.addresses import (
    InvalidAddress,
    check_address,
    scheme_of,
    token_variable,
    without_secrets,
)

T = TypeVar("T")

_POLL_S: Final = 0.1
# A longer step means that the process was stopped (SIGTSTP), and then nothing could be waited for.
_LONGEST_STEP_S: Final = 1.0


def call_within(
    limit_s: float, function: Callable[[], T], is_cancelled: Callable[[], bool] = lambda: False
) -> T:
    """Return what a function returns, which runs in a thread of its own, and raise what it raises.

    After `limit_s`, whatever it waits for itself, its thread is abandoned: what it does from then on must do no
    harm.

    Raises:
        TimeoutError: when it takes longer.
        Interrupted: when it is cancelled, or a signal ends this process.
    """
    values: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            values.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="bounded-call", daemon=True).start()
    elapsed_s, now = 0.0, time.monotonic()
    while not done.wait(min(_POLL_S, max(limit_s - elapsed_s, 0.0))):
        before, now = now, time.monotonic()
        elapsed_s += min(now - before, _LONGEST_STEP_S)
        if is_cancelled() or termination.signal_number():
            raise Interrupted("stopped while waiting for an answer")
        if elapsed_s >= limit_s:
            raise TimeoutError(f"timed out after {limit_s:g} s")
    if errors:
        raise errors[0]
    return values[0]


RETRYABLE: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which another attempt may succeed."""

NOT_TAKEN: Final = frozenset({404, 405, 410, 501})
"""Statuses of an address that takes no such request, whatever is sent with it."""

ACCESS_DENIED: Final = (401, 403)
_SERVER_ERROR: Final = 500


def advise(status: int, host: str) -> str:
    """Return what to do about a status that is no denial: whether another attempt may succeed."""
    if status in NOT_TAKEN:
        return f"check the address: {host} has nothing there, or takes no such requests"
    if status in RETRYABLE or status >= _SERVER_ERROR:
        return "run again later"
    return f"see what {host} allows: another attempt gets the same answer"


BROKEN_ANSWER: Final = (OSError, HTTPException, ValueError)
"""What requests and reading their answers raise: of what is no HTTP, `http.client` raises a ValueError at times."""

CHUNK: Final = 1 << 18
"""The most bytes of an answer that are read at once."""

_HEADERS: Final = {"User-Agent": f"tvmflow/{VERSION}", "Accept-Encoding": "identity"}
_CREDENTIAL: Final = "Authorization"
_PARTIAL_CONTENT: Final = 206
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS: Final = 10
_MAX_DIGITS: Final = 19
_MAX_DISCARDED_BYTES: Final = 4096
_HTTP_PORT: Final = 80
_HTTPS_PORT: Final = 443


# ---------------------------------------------------------------- bytes as they arrive


class ByteSource(Protocol):
    """The bytes of a file from a position on, as they arrive from a server, a bucket or the disk."""

    @property
    def start(self) -> int:
        """The position of the first byte in the file; -1 when it is not known."""

    @property
    def total(self) -> int:
        """The size of the whole file; 0 when it is not known."""

    @property
    def validator(self) -> str:
        """The version of the file, as `If-Range` takes it; empty when it is not known."""

    def read(self) -> bytes:
        """Return the next bytes, soon after they have arrived; none at the end."""
        ...

    def close(self) -> None:
        """Read no more."""
        ...


class TransferError(Exception):
    """The bytes of a source did not arrive as they must."""


class TooLong(TransferError):
    """There are more bytes than allowed."""


class TooSlow(TransferError):
    """They take longer than allowed."""


class Incomplete(TransferError):
    """The connection ended, or what arrives is no HTTP; the cause is the error that says so."""


def read_pieces(
    source: ByteSource, max_bytes: float, limit_s: float = float("inf")
) -> Iterator[bytes]:
    """Yield the bytes of a source in pieces.

    At most `max_bytes` are accepted; `limit_s` is checked after each piece.

    Raises:
        TransferError: when they end too early, or one of the limits is exceeded.
    """
    deadline, received = time.monotonic() + limit_s, 0
    while True:
        try:
            piece = source.read()
        except BROKEN_ANSWER as error:
            raise Incomplete(str(error)) from error
        if not piece:
            break
        received += len(piece)
        if received > max_bytes:
            raise TooLong(f"longer than {max_bytes} bytes")
        yield piece
        if time.monotonic() > deadline:
            raise TooSlow(f"only {received} bytes arrived within {limit_s:.0f} s")
    if source.total and source.start + received != source.total:
        raise Incomplete(f"the connection ended after {received} bytes")


# ---------------------------------------------------------------- answers


class Answer:
    """The answer to a request: its status and header, and a source of its bytes."""

    def __init__(
        self, url: str, response: HTTPResponse, connection: HTTPConnection, client: HttpClient
    ) -> None:
        self.url = url
        self.status: int = response.status
        self.reason: str = response.reason
        self.headers: Message = response.headers
        self._response = response
        self._connection = connection
        self._client = client

    @property
    def is_success(self) -> bool:
        """True if the server gave what was requested."""
        return 200 <= self.status < 300

    @property
    def start(self) -> int:
        """The first position in `Content-Range: bytes 100-199/200`; -1 where one is missing."""
        if self.status != _PARTIAL_CONTENT:
            return 0
        text = self.headers.get("Content-Range", "").removeprefix("bytes").strip()
        start = header_count(text.partition("-")[0])
        return -1 if start is None else start

    @property
    def total(self) -> int:
        """The size of the whole file; 0 when the server does not say."""
        total = header_count(self.headers.get("Content-Range", "").rpartition("/")[2])
        if total is not None:
            return total
        length = header_count(self.headers.get("Content-Length", ""))
        return 0 if length is None else self.start + length

    @property
    def validator(self) -> str:
        """The version for `If-Range`: a strong ETag, or else a date."""
        tag: str = self.headers.get("ETag", "")
        return tag if tag and not tag.startswith("W/") else self.headers.get("Last-Modified", "")

    def read(self) -> bytes:
        """Return what has arrived, so that a slow server keeps nobody waiting; nothing at the end."""
        return self._response.read1(CHUNK)

    def read_all(self, max_bytes: int) -> bytes:
        """Return the body, which is cut where it is longer than `max_bytes`."""
        return self._response.read(max_bytes)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        is_read = False
        if error is None and self._client.keeps_connections:
            with contextlib.suppress(*BROKEN_ANSWER):
                is_read = self._read_rest()
        if is_read:
            self._client.release(self._connection, is_reusable=True)
        else:
            self.close()

    def _read_rest(self) -> bool:
        """Read a short rest; return whether the connection can take another request."""
        response = self._response
        if response.length and response.length <= _MAX_DISCARDED_BYTES:
            response.read()
        if response.length == 0:
            response.close()
        return response.isclosed()

    def close(self) -> None:
        """Close the connection. The body is not read: it may have no end."""
        self._response.close()
        self._client.release(self._connection, is_reusable=False)


def header_count(text: str) -> int | None:
    """Return the number in a header such as `Content-Length`; None where it is no number of bytes."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


# ---------------------------------------------------------------- requests


class HttpClient:
    """Sends requests. Safe to use from several threads.

    At most `max_idle` connections are kept for further requests; `uses_proxies` means those of the environment.
    """

    def __init__(self, timeout_s: float, *, max_idle: int = 0, uses_proxies: bool = True) -> None:
        self._timeout_s = timeout_s
        self._max_idle = max_idle
        self._uses_proxies = uses_proxies
        self._idle: dict[tuple[str, str], list[HTTPConnection]] = {}
        self._places: dict[HTTPConnection, tuple[str, str]] = {}
        self._context: ssl.SSLContext | None = None

    @property
    def keeps_connections(self) -> bool:
        """True if connections take further requests."""
        return self._max_idle > 0

    def get(
        self,
        url: str,
        headers: Mapping[str, str],
        credential: Credential | None = None,
        method: str = "GET",
        visited: list[str] | None = None,
    ) -> Answer:
        """Return the answer to a GET request, after redirects; the credential is sent to its own host alone.

        A request with HEAD is sent in the same way. `visited` gets each URL that is requested.

        Raises:
            DownloadError: when the server redirects to where it must not.
            OSError: when there is no answer. `BROKEN_ANSWER` has what else may be raised.
        """
        for _ in range(1 + _MAX_REDIRECTS):
            if visited is not None:
                visited.append(url)
            secret = {_CREDENTIAL: credential.header} if credential else {}
            answer = self.request(method, url, {**headers, **secret})
            location = answer.headers.get("Location")
            if answer.status not in _REDIRECTS or location is None:
                return answer
            answer.close()
            target = redirect_target(url, location)
            if origin_of(target) != origin_of(url):
                credential = None
            url = target
        raise _refused_redirect(url, f"redirects more than {count_text(_MAX_REDIRECTS, 'time')}")

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: IO[bytes] | None = None
    ) -> Answer:
        """Return the answer to a request, whatever its status; redirects are not followed.

        Raises:
            OSError: when there is no answer. `BROKEN_ANSWER` has what else may be raised.
        """
        connection, proxy_headers, target = self._connect(url)
        sent = {**_HEADERS, **proxy_headers, **headers}
        if not self.keeps_connections:
            sent["Connection"] = "close"
        is_new = connection.sock is None
        try:
            try:
                response = _send(connection, method, target, sent, body)
            except (HTTPException, ConnectionError):
                if is_new:
                    raise
                # the server had closed the idle connection, which does not mean that it has a problem
                connection.close()
                response = _send(connection, method, target, sent, body)
        except BaseException:
            self.release(connection, is_reusable=False)
            raise
        return Answer(url, response, connection, self)

    def release(self, connection: HTTPConnection, *, is_reusable: bool) -> None:
        """Take a connection back, and keep it where it can take another request."""
        place = self._places.pop(connection, None)
        if is_reusable and place and len(self._idle.setdefault(place, [])) < self._max_idle:
            self._idle[place].append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close all idle connections, and keep none from now on."""
        self._max_idle = 0
        for idle in list(self._idle.values()):
            with contextlib.suppress(IndexError):
                while True:
                    idle.pop().close()

    def _connect(self, url: str) -> tuple[HTTPConnection, dict[str, str], str]:
        """Return a connection for a URL, the headers for its proxy, and what is requested of it."""
        parts, place = urllib.parse.urlsplit(url), origin_of(url)
        proxy = getproxies().get(parts.scheme) if self._uses_proxies else None
        if proxy and not proxy_bypass(parts.netloc):
            return self._connect_to_proxy(proxy, url)
        try:
            connection = self._idle[place].pop()
        except (IndexError, KeyError):
            connection = self._open(parts, is_secure=parts.scheme == "https")
        self._places[connection] = place
        return connection, {}, _target(parts)

    def _connect_to_proxy(self, proxy: str, url: str) -> tuple[HTTPConnection, dict[str, str], str]:
        via = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        parts = urllib.parse.urlsplit(url)
        headers: dict[str, str] = {}
        if via.username:
            user, password = map(urllib.parse.unquote, (via.username, via.password or ""))
            headers["Proxy-Authorization"] = basic(user, password)
        if parts.scheme != "https":
            connection = self._open(via, is_secure=via.scheme == "https")
            return connection, headers, urllib.parse.urldefrag(url).url
        port = _HTTP_PORT if via.port is None else via.port
        tunnel = self._open(via._replace(netloc=f"{_host(via)}:{port}"), is_secure=True)
        tunnel.set_tunnel(parts.hostname or "", parts.port, headers)
        return tunnel, {}, _target(parts)

    def _open(self, parts: urllib.parse.SplitResult, *, is_secure: bool) -> HTTPConnection:
        host, port = parts.hostname or "", parts.port
        if not is_secure:
            port = _HTTP_PORT if port is None else port
            return HTTPConnection(host, port, timeout=self._timeout_s)
        if self._context is None:
            self._context = ssl.create_default_context()
            self._context.set_alpn_protocols(["http/1.1"])
        port = _HTTPS_PORT if port is None else port
        return HTTPSConnection(host, port, timeout=self._timeout_s, context=self._context)


def _target(parts: urllib.parse.SplitResult) -> str:
    return urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))


def _host(parts: urllib.parse.SplitResult) -> str:
    host = parts.hostname or ""
    return f"[{host}]" if ":" in host else host


def _send(
    connection: HTTPConnection,
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: IO[bytes] | None,
) -> HTTPResponse:
    if body is not None:
        headers = {**headers, "Content-Length": str(body.seek(0, os.SEEK_END))}
        body.seek(0)
    try:
        connection.request(method, target, body, headers)
    except (BrokenPipeError, ConnectionResetError):
        # a server that refuses the body may have answered before it closed the connection
        if connection.sock is None or body is None:
            raise
    return connection.getresponse()


def origin_of(url: str) -> tuple[str, str]:
    """Return scheme and host with port of a URL, which credentials are for.

    Hosts are compared whole: who owns a part of a name, or another port, is not known.
    """
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (_HTTPS_PORT if parts.scheme == "https" else _HTTP_PORT)
    return parts.scheme, f"{parts.hostname or ''}:{port}"


# ---------------------------------------------------------------- redirects and refusals


def redirect_target(url: str, location: str) -> str:
    """Return the URL that a server redirects to.

    The header `location` of the answer may be anything.

    Raises:
        DownloadError: when it is not a URL, or must not be followed.
    """
    try:
        quoted_location = urllib.parse.quote(
            location, encoding="iso-8859-1", safe=string.punctuation
        )
        target = urllib.parse.urljoin(url, quoted_location)
        before, after = scheme_of(url), scheme_of(target)
        if after not in ("http", "https") or (before == "https" and after == "http"):
            raise _refused_redirect(
                url, f"redirects to {without_secrets(target)}, which is not allowed"
            )
        check_address(target)
    except InvalidAddress as error:
        raise _refused_redirect(
            url, f"redirects to {without_secrets(target)}, which is not an address: {error}"
        ) from None
    except ValueError:
        raise _refused_redirect(url, "redirects to something that is not an address") from None
    return target


def denial_fix(url: str, credential: Credential | None) -> str:
    """Return what to do when a server denies access to a URL."""
    if credential:
        return f"check that the credentials in {credential.origin} are valid and may read the file"
    if not may_send_to(url):
        return "use an https URL: credentials are not sent over http"
    variable = token_variable(urllib.parse.urlsplit(url).hostname or "")
    netrc = "add its host to ~/.netrc"
    return f"set ${variable} to a token, or {netrc}" if variable else netrc


def _refused_redirect(url: str, reason: str) -> DownloadError:
    return DownloadError(
        f"{without_secrets(url)} {reason}",
        fix="use a URL that is served over http or https, and is not redirected from https to http",
    )


# ---------------------------------------------------------------- credentials

_HUB_VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class Credential(NamedTuple):
    """The value of an `Authorization` header, and where it comes from, for messages."""

    header: str
    origin: str

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets that no message may contain: the header's value without its scheme, and its password."""
        scheme, _, value = self.header.partition(" ")
        if scheme != "Basic":
            return (value,)
        password = base64.b64decode(value).decode(errors="replace").partition(":")[2]
        return (value, password) if password else (value,)


def find_credential(url: str) -> Credential | None:
    """Return the credential of the environment, or else of ~/.netrc, for the host of a URL."""
    if not may_send_to(url):
        return None
    host = urllib.parse.urlsplit(url).hostname or ""
    variable = token_variable(host)
    if token := os.environ.get(variable, ""):
        return bearer(token, f"${variable}")
    # Its entry `default` is for any host, also for one that a recipe of somebody else names.
    user, password = find_in_netrc(host, with_default=False)
    return Credential(basic(user, password), "~/.netrc") if user else None


def find_hub_credential(endpoint: str) -> Credential | None:
    """Return the token of the Hub where its own tools look for it."""
    if not may_send_to(endpoint):
        return None
    for variable in _HUB_VARIABLES:
        if token := os.environ.get(variable, "").strip():
            return bearer(token, f"${variable}")
    path = _hub_token_path()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if token := path.read_text().strip():
            return bearer(token, str(path))
    return None


def _hub_token_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{cache}/huggingface")
    return Path(os.path.expandvars(os.environ.get("HF_TOKEN_PATH", f"{home}/token"))).expanduser()


def may_send_to(url: str) -> bool:
    """Return whether credentials may be sent to a URL: it is encrypted, or stays on this machine."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    return parts.hostname == "localhost"


def bearer(token: str, origin: str) -> Credential:
    """Return a token as a credential."""
    if not token.isascii() or not token.isprintable():
        text = f"{origin} contains characters that cannot be sent"
        raise EnvironmentProblem(text, fix="set it to the token alone, without a line break")
    return Credential(f"Bearer {token}", origin)


def basic(user: str, password: str) -> str:
    """Return the value of an `Authorization` header with user and password."""
    credentials = base64.b64encode(f"{user}:{password}".encode()).decode()
    return f"Basic {credentials}"


def find_in_netrc(host: str, *, with_default: bool) -> tuple[str, str]:
    """Return user and password for a host in $NETRC or ~/.netrc; empty strings for none."""
    # a file that is missing, not readable or not valid has no credentials
    with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
        entries = netrc.netrc(os.environ.get("NETRC"))
        entry = entries.authenticators(host) if with_default else entries.hosts.get(host)
        if entry:
            return entry[0], entry[2] or ""
    return "", ""
