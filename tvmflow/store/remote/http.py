"""Remote caches over HTTP: on a web server, or in an OCI registry.

A web server, such as bazel-remote or nginx with WebDAV, gets `GET`, `PUT` and `HEAD` requests for `/ac/<key>` and
`/cas/<sha256>`. Redirects are not followed, so that no other server gets credentials. In a registry, an action is an
annotation of a manifest whose tag is the key. The manifest lists the action's blobs, so that the registry keeps them.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import urllib.parse
from pathlib import Path
from typing import IO, Final

from tvmflow.core.documents import Unreadable, get_field, read_json
from tvmflow.core.errors import EnvironmentProblem, UsageError
from tvmflow.core.formatting import excerpt
from tvmflow.store.addresses import InvalidAddress, parse_oci_reference
from tvmflow.store.http_client import (
    NOT_TAKEN,
    RETRYABLE,
    Answer,
    Corrupt,
    HttpClient,
    TransferError,
    Unreachable,
    basic,
    bearer,
    find_in_netrc,
    header_count,
    read_pieces,
)
from tvmflow.store.oci import EMPTY, MANIFEST, Descriptor, OciError, Repository, make_manifest
from tvmflow.store.remote.connection import MIN_BYTES_PER_S, Declined, Forbidden, Sink, open_content
from tvmflow.store.remote.signed_actions import decode

TOKEN_VARIABLE: Final = "TVMFLOW_REMOTE_TOKEN"

_MAX_REASON: Final = 80
# The blob is missing, or the server lacks HEAD; uploading it again does no harm.
_NOT_FOUND: Final = frozenset({404, 405, 501})
_ACCESS_DENIED: Final = frozenset({401, 403, 407})


class HttpCache:
    """See `RemoteCache`. The URL may contain user and password, which are never shown."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        try:
            _ = parts.port
        except ValueError:
            raise _invalid_url(url, "the port is not a number up to 65535") from None
        if not parts.hostname:
            raise _invalid_url(url, "the URL has no host")
        if parts.query or parts.fragment:
            raise _invalid_url(url, "the URL has a query or a fragment (a part after ? or #)")
        path = urllib.parse.quote(parts.path.rstrip("/"), safe="/%~")
        host = parts.netloc.rpartition("@")[2]
        self._url = urllib.parse.urlunsplit((parts.scheme, host, path, "", ""))
        self._timeout_s = timeout_s
        self._client = HttpClient(timeout_s, uses_proxies=False)
        self._headers = _authorization(parts)
        self.address = without_credentials(url).rstrip("/")

    def get(self, path: str, max_bytes: int, sink: Sink) -> bool:
        """See `RemoteCache`."""
        limit_s = self._timeout_s + max_bytes / MIN_BYTES_PER_S
        with self._request("GET", path) as answer:
            if answer.status == 404:
                return False
            _check_status(answer, 200)
            for piece in read_pieces(answer, max_bytes, limit_s):
                sink(piece)
        return True

    def has(self, path: str, size: int) -> bool:
        """See `RemoteCache`."""
        with self._request("HEAD", path) as answer:
            if answer.status in _NOT_FOUND:
                return False
            _check_status(answer, 200)
            length = header_count(answer.headers.get("Content-Length", ""))
            return length is None or length == size

    def put(self, path: str, content: bytes | Path) -> None:
        """See `RemoteCache`."""
        with open_content(content) as body, self._request("PUT", path, body) as answer:
            # The server refuses files of this kind, so it would refuse all others, too.
            if answer.status in NOT_TAKEN:
                raise Forbidden(_answer_text(answer))
            _check_status(answer, 200, 201, 204)

    def close(self) -> None:
        """Close idle connections, and keep none open from now on."""
        self._client.close()

    def _request(self, method: str, path: str, body: IO[bytes] | None = None) -> Answer:
        return self._client.request(method, f"{self._url}/{path}", self._headers, body)


def _check_status(answer: Answer, *expected: int) -> None:
    if answer.status not in expected:
        raise _refusal(answer.status, _answer_text(answer))


def _refusal(status: int, reason: str) -> TransferError:
    if status in _ACCESS_DENIED:
        return Forbidden(reason)
    if 400 <= status < 500 and status not in RETRYABLE:
        return Declined(reason)
    return Unreachable(reason, retryable=status in RETRYABLE)


def _answer_text(answer: Answer) -> str:
    return f"it answers {answer.status} {excerpt(answer.reason, _MAX_REASON)}".rstrip()


def without_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment, even if the password is not escaped."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[?#]', rest.rpartition('@')[2])[0]}"


def _invalid_url(url: str, reason: str) -> UsageError:
    fix = "write it as https://HOST[:PORT][/PATH]"
    return UsageError(f"--remote {without_credentials(url)}: {reason}", fix=fix)


def _authorization(parts: urllib.parse.SplitResult) -> dict[str, str]:
    """Return an authorization header: the environment's token, else the URL's user, else ~/.netrc's."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token:
        try:
            return {"Authorization": bearer(token, f"${TOKEN_VARIABLE}").header}
        except EnvironmentProblem as problem:
            raise UsageError(problem.message, fix=problem.fix) from None
    user, password = (urllib.parse.unquote(p or "") for p in (parts.username, parts.password))
    if user:
        return {"Authorization": basic(user, password)}
    found = find_in_netrc(parts.hostname or "", with_default=True)
    return {"Authorization": found.header} if found else {}


# ---------------------------------------------------------------- OCI registries

_KIND: Final = "application/vnd.tvmflow.action.v1+json"
_CONTENT: Final = "application/vnd.tvmflow.content.v1"
_ACTION: Final = "vnd.tvmflow.action"
_MAX_MANIFEST_BYTES: Final = 4 << 20


class RegistryCache(HttpCache):
    """See `RemoteCache`. Credentials are those of `docker login`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            reference = parse_oci_reference(url.rstrip("/"))
            if reference.version or reference.path:
                raise InvalidAddress("it names one artifact: write it as oci://HOST/NAME")
        except InvalidAddress as error:
            raise UsageError(f"--remote {without_credentials(url)}: {error}") from None
        self.address, self._timeout_s = reference.address, timeout_s
        self._repository = Repository(reference, timeout_s, uses_proxies=False)

    def get(self, path: str, max_bytes: int, sink: Sink) -> bool:
        """See `RemoteCache`."""
        if not path.startswith("ac/"):
            return super().get(path, max_bytes, sink)
        pieces: list[bytes] = []
        if not super().get(path, _MAX_MANIFEST_BYTES, pieces.append):
            return False
        try:
            text = get_field(read_json(b"".join(pieces)), "annotations", _ACTION, of=str)
            action = base64.b64decode(text, validate=True)
        except (Unreadable, binascii.Error):
            raise Corrupt("its manifest is damaged") from None
        if len(action) > max_bytes:
            raise Corrupt(f"it is longer than {max_bytes} bytes")
        sink(action)
        return True

    def put(self, path: str, content: bytes | Path) -> None:
        """See `RemoteCache`."""
        kind, _, name = path.partition("/")
        is_blob = kind == "cas"
        try:
            if is_blob:
                size = len(content) if isinstance(content, bytes) else content.stat().st_size
                self._repository.put_blob(Descriptor(_CONTENT, f"sha256:{name}", size), content)
                return
            data = content if isinstance(content, bytes) else content.read_bytes()
            blobs = set(decode(data).values())
            layers = [Descriptor(_CONTENT, f"sha256:{sha256}", size) for sha256, size in blobs]
            notes = {_ACTION: base64.b64encode(data).decode()}
            self._repository.put_blob(EMPTY, b"{}")
            self._repository.put_manifest(make_manifest(_KIND, layers, notes), name)
        except OciError as error:
            # A refused blob means that all are refused. A refused manifest may only name a blob that has disappeared.
            if is_blob and error.status in NOT_TAKEN:
                raise Forbidden(self._shorten(error)) from None
            raise _refusal(error.status, self._shorten(error)) from None

    def close(self) -> None:
        """Close all idle connections."""
        self._repository.close()

    def _request(self, method: str, path: str, body: IO[bytes] | None = None) -> Answer:
        is_action, name = path.startswith("ac/"), path.partition("/")[2]
        url = f"{self._repository.url}/{'manifests/' if is_action else 'blobs/sha256:'}{name}"
        headers = {"Accept": MANIFEST} if is_action else {}
        try:
            return self._repository.request(method, url, headers, body)
        except OciError as error:
            raise _refusal(error.status, self._shorten(error)) from None

    def _shorten(self, error: OciError) -> str:
        return error.message.removeprefix(f"{self.address}: ")
