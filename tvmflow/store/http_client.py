"""The HTTP client: one place for connections, redirects, secrets, errors, sizes and time limits.

Credentials are sent only to the host that they belong to. Whatever a server sends, its headers end within the client's
time limit, and its body within the limits of `read_pieces`.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import netrc
import os
import string
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from tvmflow.core import termination
from tvmflow.core.errors import DownloadError, EnvironmentProblem, Interrupted
from tvmflow.core.formatting import count_text, excerpt
from tvmflow.core.version import VERSION
from tvmflow.store.addresses import (
    InvalidAddress,
    check_address,
    scheme_of,
    token_variable,
    without_secrets,
)

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

T = TypeVar("T")

_POLL_S: Final = 0.1
# A longer step means that this process was stopped (SIGTSTP), so the step does not count as waiting.
_LONGEST_STEP_S: Final = 1.0


def call_within(
    limit_s: float, function: Callable[[], T], is_cancelled: Callable[[], bool] = lambda: False
) -> T:
    """Run a function in a thread; return its result or raise its error.

    After `limit_s` the thread is abandoned, so whatever it does from then on must be harmless.

    Raises:
        TimeoutError: when it takes longer than `limit_s`.
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
"""Statuses after which a retry may succeed."""

NOT_TAKEN: Final = frozenset({404, 405, 410, 501})
"""Statuses that mean: this address does not accept such requests, whatever their content."""

ACCESS_DENIED: Final = (401, 403)
_SERVER_ERROR: Final = 500


def advise(status: int, host: str) -> str:
    """Return advice about a status that is not a denial: whether a retry may succeed."""
    if status in NOT_TAKEN:
        return f"check the address: {host} has nothing there, or takes no such requests"
    if status in RETRYABLE or status >= _SERVER_ERROR:
        return "run again later"
    return f"see what {host} allows: another attempt gets the same answer"


CHUNK: Final = 1 << 18
"""The maximum number of bytes of an answer to read at once."""

_HEADERS: Final = {"User-Agent": f"tvmflow/{VERSION}", "Accept-Encoding": "identity"}
_CREDENTIAL: Final = "Authorization"
_PARTIAL_CONTENT: Final = 206
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS: Final = 10
_MAX_DIGITS: Final = 19
_MAX_IDLE: Final = 16
_MAX_DISCARDED_BYTES: Final = 4096
_PORTS: Final = {"http": 80, "https": 443}


class ByteSource(Protocol):
    """A file's bytes from a position on, as they arrive from a server, bucket or disk."""

    @property
    def start(self) -> int:
        """The offset of the first byte in the file; -1 if unknown."""

    @property
    def total(self) -> int:
        """The size of the whole file; 0 if unknown."""

    @property
    def validator(self) -> str:
        """The version of the file for `If-Range`; empty if unknown."""

    def read(self) -> bytes:
        """Return the next bytes soon after they arrive; empty at the end."""
        ...

    def close(self) -> None:
        """Stop reading."""
        ...


class TransferError(Exception):
    """The transfer of a file or answer failed. The text is a phrase for people, without credentials."""


class Corrupt(TransferError):
    """The received content's digest or size differs from the requested one."""


class Unreachable(TransferError):
    """No valid response, or a server error. A retry may help if `retryable`, or after the `fix`."""

    def __init__(self, reason: str, fix: str = "", *, retryable: bool = False) -> None:
        super().__init__(reason)
        self.fix = fix
        self.retryable = retryable


NO_ANSWER: Final = (Unreachable, TimeoutError)
"""What a request with a time limit raises if there is no answer."""


def read_pieces(
    source: ByteSource, max_bytes: float, limit_s: float = float("inf")
) -> Iterator[bytes]:
    """Yield the bytes of a source in pieces; the time limit is checked after each piece.

    Raises:
        Corrupt: when there are more than `max_bytes`.
        Unreachable: when they end too early, or too late.
    """
    deadline, received = time.monotonic() + limit_s, 0
    while True:
        try:
            piece = source.read()
        except OSError as error:
            raise Unreachable(error.strerror or str(error)) from error
        if not piece:
            break
        received += len(piece)
        if received > max_bytes:
            raise Corrupt(f"it is longer than {max_bytes} bytes")
        yield piece
        if time.monotonic() > deadline:
            raise Unreachable(f"only {received} bytes arrived within {limit_s:.0f} s")
    if source.total and source.start + received != source.total:
        raise Unreachable(f"the connection ended after {received} bytes", retryable=True)


class Answer:
    """The answer to a request: status, headers, and a source of the body's bytes."""

    def __init__(self, url: str, response: BaseHTTPResponse) -> None:
        self.url = url
        self.status = response.status
        self.reason = response.reason or ""
        self.headers = response.headers
        self._response = response

    @property
    def is_success(self) -> bool:
        """True if the server gave what was requested."""
        return 200 <= self.status < 300

    @property
    def start(self) -> int:
        """The first offset in `Content-Range: bytes 100-199/200`; -1 if missing."""
        if self.status != _PARTIAL_CONTENT:
            return 0
        text = self.headers.get("Content-Range", "").removeprefix("bytes").strip()
        start = header_count(text.partition("-")[0])
        return -1 if start is None else start

    @property
    def total(self) -> int:
        """The size of the whole file; 0 if the server does not say."""
        total = header_count(self.headers.get("Content-Range", "").rpartition("/")[2])
        if total is not None:
            return total
        length = header_count(self.headers.get("Content-Length", ""))
        return 0 if length is None else self.start + length

    @property
    def validator(self) -> str:
        """The version for `If-Range`: a strong ETag, otherwise a date."""
        tag: str = self.headers.get("ETag", "")
        return tag if tag and not tag.startswith("W/") else self.headers.get("Last-Modified", "")

    def read(self) -> bytes:
        """Return the bytes received so far, without waiting for a slow server's rest; empty at the end."""
        with _connection_errors():
            return self._response.read1(CHUNK)

    def read_all(self, max_bytes: int) -> bytes:
        """Return the body, truncated to `max_bytes`."""
        with _connection_errors():
            return self._response.read(max_bytes)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        rest = self._response.length_remaining
        if error is None and rest is not None and rest <= _MAX_DISCARDED_BYTES:
            # After the end of the body, the connection returns to its pool.
            self._response.drain_conn()
        self.close()

    def close(self) -> None:
        """Close the connection unless it is in its pool. The rest of the body, perhaps endless, is not read."""
        self._response.close()


def header_count(text: str) -> int | None:
    """Return the integer in a header such as `Content-Length`; None if it is not a number of bytes."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


class HttpClient:
    """Sends requests over reused connections, optionally through the environment's proxies. Thread-safe."""

    def __init__(self, timeout_s: float, *, uses_proxies: bool = True) -> None:
        self._timeout_s = timeout_s
        self._uses_proxies = uses_proxies
        # Keyed by a URL's scheme and its proxy.
        self._pools: dict[tuple[str, str], PoolManager] = {}

    def get(
        self,
        url: str,
        headers: Mapping[str, str],
        credential: Credential | None = None,
        method: str = "GET",
        visited: list[str] | None = None,
    ) -> Answer:
        """Return the answer to a GET or HEAD request after redirects; `visited` gets each requested URL.

        The credential is sent only to the host that it belongs to.

        Raises:
            DownloadError: for a redirect that must not be followed.
            Unreachable: when there is no answer.
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
        """Return the answer to a request with any status, following no redirects; Unreachable without answer."""
        sent = {**_HEADERS, **headers}
        if body is not None:
            sent["Content-Length"] = str(body.seek(0, os.SEEK_END))
            body.seek(0)
        with _connection_errors():
            parts = urllib.parse.urlsplit(url)
            if not parts.netloc.isascii():
                parts = parts._replace(netloc=parts.netloc.encode("idna").decode())
            response = self._pool(parts).urlopen(
                method,
                parts.geturl(),
                headers=sent,
                body=body,
                redirect=False,
                preload_content=False,
                decode_content=False,
                # `read_pieces` checks the length itself, to say how many bytes arrived.
                enforce_content_length=False,
            )
        return Answer(url, response)

    def close(self) -> None:
        """Close all idle connections."""
        for pool in list(self._pools.values()):
            pool.clear()

    def _pool(self, parts: urllib.parse.SplitResult) -> PoolManager:
        """Return the connection pool for a URL's scheme and proxy."""
        # These imports take longer than the rest of a command that sends no request.
        import ssl
        from urllib.request import getproxies, proxy_bypass

        import urllib3

        is_direct = not self._uses_proxies or proxy_bypass(parts.netloc)
        proxy = "" if is_direct else getproxies().get(parts.scheme, "")
        key = parts.scheme, proxy
        if key in self._pools:
            return self._pools[key]
        options: dict[str, Any] = {
            "maxsize": _MAX_IDLE,
            "retries": False,
            "timeout": self._timeout_s,
            # Shared by all connections, because reading this machine's certificates is slow.
            "ssl_context": ssl.create_default_context() if parts.scheme == "https" else None,
        }
        if proxy:
            via = urllib3.util.parse_url(proxy if "://" in proxy else f"http://{proxy}")
            login = urllib.parse.unquote(via.auth or "")
            proxy_headers = urllib3.make_headers(proxy_basic_auth=login) if login else {}
            pool: PoolManager = urllib3.ProxyManager(
                via._replace(auth=None).url, proxy_headers=proxy_headers, **options
            )
        else:
            pool = urllib3.PoolManager(**options)
        return self._pools.setdefault(key, pool)


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    """Turn connection errors into Unreachable, without urllib3's texts, which contain URLs."""
    from http.client import HTTPException

    from urllib3.exceptions import HTTPError

    try:
        yield
    except (HTTPError, HTTPException, OSError, ValueError) as error:
        raise _explain(error) from None


def _explain(error: Exception) -> Unreachable:
    import socket
    import ssl
    from http.client import IncompleteRead

    from urllib3.exceptions import LocationValueError, ProxyError

    via, fix = "the proxy: " if isinstance(error, ProxyError) else "", ""
    while causes := [one for one in (error.__cause__, *error.args) if isinstance(one, Exception)]:
        error = causes[0]
    if isinstance(error, TimeoutError):
        reason = "timed out"
    elif isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME:
        reason, fix = "the host is not known", "check the address and the network"
    elif isinstance(error, ssl.SSLCertVerificationError):
        reason = f"no secure connection ({error.verify_message})"
        fix = "check the address, and this machine's clock and certificates"
    elif isinstance(error, ssl.SSLError):
        reason = f"no secure connection ({error.reason})"
    elif isinstance(error, OSError):
        reason = error.strerror.lower() if error.strerror else str(error)
    elif isinstance(error, (UnicodeError, LocationValueError)):
        reason, fix = "the host has no valid name", "check the address, and $HTTPS_PROXY"
    elif isinstance(error, IncompleteRead):
        reason = "the connection ended too early"
    else:
        reason = f"it is not an HTTP server ({type(error).__name__})"
    is_final = isinstance(error, OSError) and not isinstance(error, ConnectionError)
    is_final |= bool(fix) or isinstance(error, ConnectionRefusedError)
    return Unreachable(via + (excerpt(reason) or type(error).__name__), fix, retryable=not is_final)


def origin_of(url: str) -> tuple[str, str]:
    """Return a URL's scheme, and its host and port: a credential belongs to exactly this origin."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, f"{parts.hostname or ''}:{parts.port or _PORTS.get(parts.scheme)}"


# ---------------------------------------------------------------- redirects and refusals


def redirect_target(url: str, location: str) -> str:
    """Return the URL that a server redirects to; DownloadError if it must not be followed."""
    try:
        quoted_location = urllib.parse.quote(
            location, encoding="iso-8859-1", safe=string.punctuation
        )
        target = urllib.parse.urljoin(url, quoted_location)
        reason, schemes = f"redirects to {without_secrets(target)}, which is not", ("http", "https")
        if scheme_of(target) not in (schemes if scheme_of(url) != "https" else ("https",)):
            raise _refused_redirect(url, f"{reason} allowed")
        check_address(target)
    except InvalidAddress as error:
        raise _refused_redirect(url, f"{reason} an address: {error}") from None
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
    """The value of an `Authorization` header, and its origin for messages."""

    header: str
    origin: str

    @property
    def secrets(self) -> tuple[str, ...]:
        """Texts to remove from messages: the header's value without its scheme, and its password."""
        scheme, _, value = self.header.partition(" ")
        if scheme != "Basic":
            return (value,)
        password = base64.b64decode(value).decode(errors="replace").partition(":")[2]
        return (value, password) if password else (value,)


def find_credential(url: str) -> Credential | None:
    """Return the credential for a URL's host: from the environment, or from ~/.netrc."""
    if not may_send_to(url):
        return None
    host = urllib.parse.urlsplit(url).hostname or ""
    variable = token_variable(host)
    if token := os.environ.get(variable, ""):
        return bearer(token, f"${variable}")
    # The entry `default` matches every host, even one in somebody else's recipe, so it is not used.
    return find_in_netrc(host, with_default=False)


def find_hub_credential(endpoint: str) -> Credential | None:
    """Return the Hub's token, from the places where the Hub's own tools look for it."""
    if not may_send_to(endpoint):
        return None
    for variable in _HUB_VARIABLES:
        if token := os.environ.get(variable, "").strip():
            return bearer(token, f"${variable}")
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{cache}/huggingface")
    named = os.environ.get("HF_TOKEN_PATH", f"{home}/token")
    path = Path(os.path.expandvars(named)).expanduser()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if token := path.read_text().strip():
            return bearer(token, str(path))
    return None


def may_send_to(url: str) -> bool:
    """Return whether credentials may be sent to a URL: it must be encrypted, or on this machine."""
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
        raise EnvironmentProblem(text, fix="set it to only the token, without a line break")
    return Credential(f"Bearer {token}", origin)


def basic(user: str, password: str) -> str:
    """Return the value of an `Authorization` header with user and password."""
    credentials = base64.b64encode(f"{user}:{password}".encode()).decode()
    return f"Basic {credentials}"


def find_in_netrc(host: str, *, with_default: bool) -> Credential | None:
    """Return a host's credential in $NETRC or ~/.netrc."""
    # A missing, unreadable or invalid file counts as one without credentials.
    with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
        entries = netrc.netrc(os.environ.get("NETRC"))
        entry = entries.authenticators(host) if with_default else entries.hosts.get(host)
        if entry and entry[0]:
            return Credential(basic(entry[0], entry[2] or ""), "~/.netrc")
    return None
