"""The client for OCI registries (OCI Distribution Specification 1.1).

Credentials belong to the registry that the user named. They are sent only to it and to its token server, which must
have the same origin, or be listed for this registry in `$TVMFLOW_AUTH_SERVERS`. A server cannot choose the scope of the
requested token. A token is sent only to its registry, and redirects to other hosts get no credentials.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import re
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Final, NamedTuple, TypeVar

from tvmflow.core.canonical_json import canonical
from tvmflow.core.documents import Unreadable, get_field, read_file, read_json
from tvmflow.core.errors import DownloadError, EnvironmentProblem
from tvmflow.core.formatting import count_text, excerpt, quoted
from tvmflow.core.named_files import find_invalid_name
from tvmflow.core.types import Json
from tvmflow.store.addresses import (
    InvalidAddress,
    OciReference,
    check_address,
    token_variable,
    without_secrets,
)
from tvmflow.store.http_client import (
    ACCESS_DENIED,
    NO_ANSWER,
    RETRYABLE,
    Answer,
    Corrupt,
    Credential,
    HttpClient,
    TransferError,
    advise,
    basic,
    bearer,
    call_within,
    find_in_netrc,
    may_send_to,
    origin_of,
    read_pieces,
    redirect_target,
)

# ---------------------------------------------------------------- logins: challenges

DOCKER_HUB: Final = ("docker.io", "index.docker.io")
AUTH_SERVERS_VARIABLE: Final = "TVMFLOW_AUTH_SERVERS"

# Public registries whose token server is on a different host.
_AUTH_SERVERS: Final = {
    "docker.io": "auth.docker.io",
    "index.docker.io": "auth.docker.io",
    "registry-1.docker.io": "auth.docker.io",
    "registry.gitlab.com": "gitlab.com",
}
_HELPER_TIMEOUT_S: Final = 30.0
_MAX_HEADER: Final = 8192
_MAX_SHORT_ANSWER: Final = 1 << 16
_WORD: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_SCHEME: Final = re.compile(rf"({_WORD})(?:[ \t]|$)")
_PARAMETER: Final = re.compile(rf'(?:({_WORD})[ \t]+)?({_WORD})[ \t]*=[ \t]*(?:"(.*)"|({_WORD}))')


class LoginError(Exception):
    """A login that fails or is not tried; the status is the token server's, or 0."""

    def __init__(self, reason: str, fix: str = "", status: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix
        self.status = status


class Challenge(NamedTuple):
    """A server's challenge: authentication scheme in lowercase, and parameters."""

    scheme: str
    values: dict[str, str]


def parse_challenges(headers: Sequence[str]) -> list[Challenge]:
    """Return the challenges in an answer's `WWW-Authenticate` headers, up to the first invalid one.

    Takes linear time; LoginError if the headers are too long.

    >>> parse_challenges(['Basic realm="a, b", Bearer realm=c'])
    [Challenge(scheme='basic', values={'realm': 'a, b'}), Challenge(scheme='bearer', values={'realm': 'c'})]
    """
    if (length := sum(map(len, headers))) > _MAX_HEADER:
        text = f"its header WWW-Authenticate has {length:,} characters, more than {_MAX_HEADER:,}"
        raise LoginError(text, "check the address of the registry")
    return [challenge for text in headers for challenge in _parse_header(text)]


def _parse_header(text: str) -> list[Challenge]:
    from urllib.request import parse_http_list

    challenges: list[Challenge] = []
    for part in parse_http_list(text):
        parameter = _PARAMETER.fullmatch(part)
        # A scheme may be followed by credentials instead of parameters, such as `Negotiate YII=`.
        start = parameter or _SCHEME.match(part)
        if start and start[1]:
            challenges.append(Challenge(start[1].lower(), {}))
        elif not (parameter and challenges):
            break
        if parameter:
            challenges[-1].values.setdefault(
                parameter[2].lower(), parameter[3] or parameter[4] or ""
            )
    return challenges


def log_in(
    host: str, url: str, headers: Sequence[str], scopes: Sequence[str], client: HttpClient
) -> Credential | None:
    """Return the credential that a registry requests: a token, or user and password; None if neither.

    `host` is the registry that the user named. `headers` are the `WWW-Authenticate` headers of its answer. Scopes name
    what the token is for, such as `repository:a/b:pull`.

    Raises:
        LoginError: when the headers are unusable, or the token server gives no token.
        Unreachable: when there is no answer.
    """
    own = find_credential(host, url)
    challenges = parse_challenges(headers)
    wants_token = next((one.values for one in challenges if one.scheme == "bearer"), {})
    wants_password = any(one.scheme == "basic" for one in challenges)
    if own and challenges and own.header.startswith("Bearer "):
        return own
    realm = wants_token.get("realm")
    if realm is None:
        return own if wants_password else None
    try:
        server = _check_realm(host, url, realm, own)
    except LoginError:
        if own and wants_password:
            return own
        raise
    return _fetch_token(server, wants_token.get("service"), scopes, own, client)


def _check_realm(
    host: str, url: str, realm: str, own: Credential | None
) -> urllib.parse.SplitResult:
    """Return the URL of the registry's token server, after checking that it may get these credentials."""
    shown = excerpt(without_secrets(realm))
    try:
        target = urllib.parse.urljoin(url, realm)
        check_address(target)
        parts = urllib.parse.urlsplit(target)
    except ValueError as error:
        reason = f": {error}" if isinstance(error, InvalidAddress) else ""
        text = f"it names {shown} as its token server, which is not a valid address{reason}"
        raise LoginError(text, "check the address of the registry") from None
    server = parts.netloc.lower()
    if origin_of(target) == origin_of(url):
        return parts
    text = f"it names {shown} as its token server, which is a different host than {host}"
    fix = (
        f"if it is the token server of this registry, set ${AUTH_SERVERS_VARIABLE}={host}={server}"
    )
    if not may_send_to(target):
        if own or not _is_listed(host, server):
            raise LoginError(f"{text}, and not encrypted", "use another registry")
    elif _is_listed(host, server):
        return parts
    elif own:
        raise LoginError(f"{text}: the credentials in {own.origin} are not sent there", fix)
    elif parts.scheme != "https" or not _is_domain_name(parts.hostname or ""):
        raise LoginError(f"{text}, and not public", fix)
    return parts


def _is_listed(host: str, server: str) -> bool:
    if _AUTH_SERVERS.get(host.lower()) == server:
        return True
    for entry in os.environ.get(AUTH_SERVERS_VARIABLE, "").replace(",", " ").split():
        registry, is_, named = entry.partition("=")
        if not (registry and is_ and named) or "/" in entry:
            text = f"{quoted(entry)} in ${AUTH_SERVERS_VARIABLE} is not REGISTRY=HOST"
            raise EnvironmentProblem(text, fix="write it as registry.example.org=auth.example.org")
        if (registry.lower(), named.lower()) == (host.lower(), server):
            return True
    return False


def _is_domain_name(host: str) -> bool:
    """Return whether a host is a DNS name; an IP address is not, even in a form such as 127.1."""
    last = host.rstrip(".").rpartition(".")[2]
    return bool(re.fullmatch(r"[a-z][a-z0-9-]*", last)) and last != "localhost" and "." in host


def _fetch_token(
    server: urllib.parse.SplitResult,
    service: str | None,
    scopes: Sequence[str],
    own: Credential | None,
    client: HttpClient,
) -> Credential | None:
    query = [
        (name, value)
        for name, value in urllib.parse.parse_qsl(server.query, keep_blank_values=True)
        if name.lower() not in ("scope", "service")
    ]
    query += [("service", service)] if service else []
    query += [("scope", scope) for scope in scopes]
    url = server._replace(query=urllib.parse.urlencode(query), fragment="").geturl()
    secret = {"Authorization": own.header} if own else {}
    # No redirect is followed, because it could lead to a host that was not checked.
    with client.request("GET", url, secret) as answer:
        content = answer.read_all(_MAX_SHORT_ANSWER) if answer.is_success else b"{}"
    with contextlib.suppress(Unreadable, EnvironmentProblem):
        value = read_json(content)
        if token := get_field(value, "token", of=str) or get_field(value, "access_token", of=str):
            return bearer(token, own.origin if own else f"the token of {server.netloc}")
    if own is None:
        return None
    text = f"the token server {server.netloc} gives no token for the credentials in {own.origin}"
    raise LoginError(text, "log in again with `docker login`", answer.status)


def hostname(host: str) -> str:
    """Return the host of `HOST:PORT`."""
    return urllib.parse.urlsplit(f"//{host}").hostname or ""


def find_credential(host: str, url: str) -> Credential | None:
    """Return a registry's credential: from the environment, docker's configuration, or ~/.netrc."""
    if not may_send_to(url):
        return None
    variable = token_variable(hostname(host))
    if text := os.environ.get(variable, "").strip():
        user, colon, password = text.partition(":")
        origin = f"${variable}"
        return Credential(basic(user, password), origin) if colon else bearer(text, origin)
    folder = Path(os.environ.get("DOCKER_CONFIG", "~/.docker")).expanduser()
    for path in (folder / "config.json", Path(os.environ.get("REGISTRY_AUTH_FILE", os.devnull))):
        if path.is_file() and (found := _find_in_config(host, path)):
            return Credential(basic(*found), str(path))
    return find_in_netrc(hostname(host), with_default=False)


def _find_in_config(host: str, path: Path) -> tuple[str, str] | None:
    name = DOCKER_HUB[-1] if host in DOCKER_HUB else host.lower()
    try:
        config = read_json(read_file(path))
    except Unreadable as error:
        raise LoginError(f"{path} has no credentials: {error}", "log in again") from None
    for entry, value in get_field(config, "auths", of=dict).items():
        # Docker Hub's own entry is https://index.docker.io/v1/.
        if name in (entry, entry.partition("://")[2].partition("/")[0]):
            with contextlib.suppress(ValueError):
                text = base64.b64decode(get_field(value, "auth", of=str), validate=True).decode()
                user, colon, password = text.partition(":")
                if colon:
                    return user, password
    helper = get_field(config, "credHelpers", name, of=str)
    helper = helper or get_field(config, "credsStore", of=str)
    return _ask_helper(f"docker-credential-{helper}", name) if helper else None


def _ask_helper(program: str, host: str) -> tuple[str, str] | None:
    server = f"https://{host}/v1/" if host in DOCKER_HUB else host
    try:
        done = subprocess.run(
            [program, "get"], input=server.encode(), capture_output=True, timeout=_HELPER_TIMEOUT_S
        )
        value = read_json(done.stdout) if done.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired, Unreadable) as error:
        text = f"{excerpt(program)}, which docker's configuration names, does not work"
        raise LoginError(f"{text}: {type(error).__name__}", "install it, or log in again") from None
    user, secret = get_field(value, "Username", of=str), get_field(value, "Secret", of=str)
    # With the user `<token>`, the secret is a token for another protocol, which is not supported.
    return (user, secret) if user and user != "<token>" else None


# ---------------------------------------------------------------- artifacts

T = TypeVar("T")
Headers = Mapping[str, str]

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
_DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
_TITLE: Final = "org.opencontainers.image.title"
_FILE_PATH: Final = "org.cncf.model.filepath"

PLAIN_HTTP_VARIABLE: Final = "TVMFLOW_PLAIN_HTTP"

_TIMEOUT_S: Final = 30.0
_MIN_BYTES_PER_S: Final = 64 << 10
_ATTEMPTS: Final = 3
_PAUSE_S: Final = 0.25
# A proxy answers 504 if the server behind it does not answer.
_NO_ANSWER: Final = 504
# Docker's registry can reject a manifest while another client is still linking one of its blobs.
_BAD_REQUEST: Final = 400
# A redirect that must not be followed is final, like a misdirected request.
_WRONG_REDIRECT: Final = 421
_MAX_MANIFEST_BYTES: Final = 4 << 20
_MAX_LAYERS: Final = 10_000
_MAX_BLOB_BYTES: Final = 64 << 30
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_ARCHIVE: Final = re.compile(r".*\.tar([.+](gzip|zstd))?")


class OciError(DownloadError):
    """A registry refused a request; `status` is the HTTP status, or 504 without an answer, else 0."""

    def __init__(self, message: str, *, fix: str = "", status: int = 0) -> None:
        super().__init__(message, fix=fix)
        self.status = status


class Descriptor(NamedTuple):
    """A blob listed in a manifest, or a manifest listed in an index."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = {}
    artifact_type: str = ""

    @property
    def sha256(self) -> str:
        """The digest as 64 hexadecimal digits."""
        return self.digest.partition(":")[2]

    @property
    def title(self) -> str:
        """The file's path in the artifact; empty if it has none."""
        return self.annotations.get(_TITLE) or self.annotations.get(_FILE_PATH, "")

    def to_json(self) -> Json:
        """Return the descriptor as JSON for a manifest."""
        names = ("mediaType", "digest", "size", "annotations", "artifactType")
        fields = zip(names, self, strict=True)
        return {name: value for name, value in fields if value not in ("", {})}


EMPTY: Final = Descriptor(
    "application/vnd.oci.empty.v1+json", f"sha256:{hashlib.sha256(b'{}').hexdigest()}", 2
)
"""The configuration `{}`, for manifests that need none."""


class Manifest(NamedTuple):
    """An artifact: its manifest's text, its files, and the digest of the artifact that it refers to."""

    content: bytes
    layers: tuple[Descriptor, ...]
    subject: str

    @property
    def digest(self) -> str:
        """The digest by which the artifact can be pinned."""
        return describe(self.content, MANIFEST).digest

    def select(self, path: str) -> Descriptor:
        """Return the file at a path; without a path, the artifact's only file."""
        files = {layer.title: layer for layer in self.layers}
        names = ", ".join(f"#{excerpt(name)}" for name in list(files)[:10])
        if path and path not in files:
            raise Unreadable(f"it has no file {quoted(path)}, but {names}")
        if not path and len(self.layers) != 1:
            count = count_text(len(self.layers), "file")
            raise Unreadable(f"it has {count}: write one of {names} behind the address")
        return files[path] if path else self.layers[0]


def describe(content: bytes, media_type: str, annotations: Mapping[str, str] = {}) -> Descriptor:
    """Return the descriptor of a blob."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return Descriptor(media_type, digest, len(content), annotations)


def title_annotations(path: str) -> dict[str, str]:
    """Return annotations with a file's path, in the forms of oras and of ModelPack."""
    return {_TITLE: path, _FILE_PATH: path}


def make_manifest(
    artifact_type: str,
    layers: Sequence[Descriptor],
    annotations: Mapping[str, str],
    config: Descriptor = EMPTY,
    subject: Descriptor | None = None,
) -> bytes:
    """Return the text of a manifest; equal arguments always give the same text."""
    value = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": artifact_type,
        "config": config.to_json(),
        "layers": [layer.to_json() for layer in layers],
        "annotations": dict(annotations),
    }
    return canonical(value | ({"subject": subject.to_json()} if subject else {}))


def parse_manifest(content: bytes) -> Manifest:
    """Return the artifact in a manifest; Unreadable if its files cannot be stored in a folder."""
    value = read_json(content)
    layers = [_parse_descriptor(entry) for entry in get_field(value, "layers", of=list)]
    if get_field(value, "manifests", of=list) or not layers:
        text = "it is not an artifact with files, but an index perhaps: name one by its digest"
        raise Unreadable(text)
    if len(layers) > _MAX_LAYERS:
        raise Unreadable(f"it has more than {_MAX_LAYERS} files")
    for layer in layers:
        if _ARCHIVE.fullmatch(layer.media_type):
            raise Unreadable(f"{quoted(layer.title)} is an archive: {excerpt(layer.media_type)}")
    if (name := find_invalid_name(layer.title for layer in layers if layer.title)) is not None:
        raise Unreadable(f"it has a file with the name {quoted(name)}")
    return Manifest(content, tuple(layers), get_field(value, "subject", "digest", of=str))


def _parse_descriptor(value: Json) -> Descriptor:
    notes = get_field(value, "annotations", of=dict)
    descriptor = Descriptor(
        media_type=get_field(value, "mediaType", of=str),
        digest=get_field(value, "digest", of=str),
        size=get_field(value, "size", of=int),
        annotations={name: text for name, text in notes.items() if isinstance(text, str)},
        artifact_type=get_field(value, "artifactType", of=str),
    )
    if not _DIGEST.fullmatch(descriptor.digest):
        raise Unreadable(f"it names content by {quoted(descriptor.digest)}, which is not a sha256")
    if not 0 <= descriptor.size <= _MAX_BLOB_BYTES:
        raise Unreadable(f"it has a file of {descriptor.size} bytes")
    return descriptor


# This process's logins, by repository URL and scopes. The last one is the newest.
_LOGINS: Final = dict[tuple[str, tuple[str, ...]], Credential]()


class Repository:
    """A repository in a registry. Thread-safe. Methods raise OciError if the registry refuses.

    Unencrypted http is used only for this machine, and for hosts in `$TVMFLOW_PLAIN_HTTP`.
    """

    def __init__(
        self, reference: OciReference, timeout_s: float = _TIMEOUT_S, *, uses_proxies: bool = True
    ) -> None:
        host = "registry-1.docker.io" if reference.host in DOCKER_HUB else reference.host
        plain = os.environ.get(PLAIN_HTTP_VARIABLE, "").replace(",", " ").split()
        is_plain = reference.host in plain or may_send_to(f"http://{host}")
        self.reference = reference
        self.url = f"{'http' if is_plain else 'https'}://{host}/v2/{reference.name}"
        self._client = HttpClient(timeout_s, uses_proxies=uses_proxies)
        self._timeout_s = timeout_s
        self._locks: dict[str, threading.Lock] = {}

    def close(self) -> None:
        """Close all idle connections."""
        self._client.close()

    def find_manifest(self, version: str) -> Manifest:
        """Return an artifact by its tag or digest, after verifying the digest and the list of files."""
        is_digest = bool(_DIGEST.fullmatch(version))
        accepted = f"{MANIFEST}, {INDEX}, {_DOCKER_MANIFEST}"
        status, content, headers = self._read(f"manifests/{version}", accepted)
        if status != 200:
            kind = "digest" if is_digest else "tag"
            raise self.error(f"there is no artifact with the {kind} {version}", "check the address")
        actual = describe(content, MANIFEST).digest
        stated = version if is_digest else headers.get("Docker-Content-Digest", actual)
        if stated != actual:
            text = f"its manifest has the digest {actual}, and not {excerpt(stated)}"
            raise self.error(text, "run again; if it stays so, the registry is damaged")
        try:
            return parse_manifest(content)
        except Unreadable as error:
            raise self.error(str(error), "name another artifact, or ask its publisher") from None

    def list_referrers(self, digest: str) -> list[Descriptor]:
        """Return the manifests that refer to a digest: the registry's list, or an index with a fallback tag."""
        listed = self._read_index(f"referrers/{digest}")
        return self._read_tagged_index(digest) if listed is None else listed

    def _read_tagged_index(self, digest: str) -> list[Descriptor]:
        return self._read_index(f"manifests/{digest.replace(':', '-')}") or []

    def _read_index(self, path: str) -> list[Descriptor] | None:
        status, content, _ = self._read(path, INDEX)
        if status != 200:
            return None
        try:
            entries = get_field(read_json(content), "manifests", of=list)
            return [_parse_descriptor(entry) for entry in entries[:_MAX_LAYERS]]
        except Unreadable as error:
            raise self.error(f"its list of referrers is damaged: {error}") from None

    def _read(self, path: str, accepted: str) -> tuple[int, bytes, Headers]:
        """Return a GET request's status, content and headers; a refusal raises an error."""

        def read() -> tuple[int, bytes, Headers]:
            with self.request("GET", f"{self.url}/{path}", {"Accept": accepted}) as answer:
                if answer.status in (*ACCESS_DENIED, *RETRYABLE) or answer.status >= 500:
                    raise self.explain(answer)
                pieces = read_pieces(answer, _MAX_MANIFEST_BYTES) if answer.is_success else ()
                return answer.status, b"".join(pieces), answer.headers

        try:
            return self._repeat(read)
        except Corrupt:
            text = f"its manifest is larger than {_MAX_MANIFEST_BYTES >> 20} MB"
            raise self.error(text, "name another artifact") from None

    def put_blob(self, blob: Descriptor, content: bytes | Path, mount_from: str = "") -> int:
        """Send a blob unless this repository, or another one to mount it from, has it; return the bytes sent."""

        def put(mount: Mapping[str, str]) -> int:
            with self.request("HEAD", f"{self.url}/blobs/{blob.digest}") as answer:
                if answer.is_success:
                    return 0
            uploads = f"{self.url}/blobs/uploads/?{urllib.parse.urlencode(mount)}"
            try:
                with self.request("POST", uploads) as answer:
                    if answer.status == 201:
                        return 0
                    if answer.status != 202:
                        raise self.explain(answer)
                    location = answer.headers.get("Location", "")
            except OciError:
                # The login may not be allowed to read the other repository.
                if mount:
                    return put({})
                raise
            try:
                url = redirect_target(self.url, location)
            except DownloadError as error:
                raise self.error(error.message, error.fix, _WRONG_REDIRECT) from None
            if origin_of(url) != origin_of(self.url):
                text = f"files are to be sent to {without_secrets(url)}, which is not on it"
                raise self.error(text, "check the address of the registry, and its proxy")
            url += f"{'&' if '?' in url else '?'}digest={blob.digest}"
            body = io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
            self._put(url, "application/octet-stream", body)
            return blob.size

        mount = {"mount": blob.digest, "from": mount_from} if mount_from else {}
        # Each blob is sent once, because a parallel second upload would be wasted.
        with self._locks.setdefault(blob.digest, threading.Lock()):
            return self._repeat(lambda: put(mount), blob.size)

    def put_manifest(self, content: bytes, version: str, media_type: str = MANIFEST) -> Headers:
        """Store a manifest under a tag or its digest; return the answer's headers."""
        url = f"{self.url}/manifests/{version}"
        statuses = {*RETRYABLE, _BAD_REQUEST}
        put = partial(self._put, url, media_type)
        return self._repeat(lambda: put(io.BytesIO(content)), len(content), statuses)

    def _put(self, url: str, media_type: str, content: IO[bytes]) -> Headers:
        headers = {"Content-Type": media_type}
        with content, self.request("PUT", url, headers, content) as answer:
            if not answer.is_success:
                raise self.explain(answer)
            return answer.headers

    def put_referrer(self, subject: str, content: bytes, listed: Descriptor) -> None:
        """Store a manifest that has a subject, and list its descriptor among the subject's referrers."""
        if self.put_manifest(content, listed.digest).get("OCI-Subject"):
            return
        others = [one for one in self._read_tagged_index(subject) if one.digest != listed.digest]
        entries = [entry.to_json() for entry in (*others, listed)]
        index = canonical({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})
        self.put_manifest(index, subject.replace(":", "-"), INDEX)

    def request(
        self, method: str, url: str, headers: Mapping[str, str] = {}, body: IO[bytes] | None = None
    ) -> Answer:
        """Return a request's answer, after a login if the registry asks for one.

        Raises:
            OciError: when there are no credentials, or the token server rejects them.
            Unreachable: when there is no answer.
        """
        login = self.url, self._scopes(method, url)
        for is_last in (False, True):
            credential = _LOGINS.get(login)
            if method in ("GET", "HEAD"):
                try:
                    answer = self._client.get(url, headers, credential, method)
                except DownloadError as error:
                    raise self.error(error.message, error.fix, _WRONG_REDIRECT) from None
            else:
                secret = {"Authorization": credential.header} if credential else {}
                answer = self._client.request(method, url, {**headers, **secret}, body)
            # If this server redirects to another one, that server's challenge gets no login.
            if answer.status != 401 or is_last or origin_of(answer.url) != origin_of(self.url):
                break
            with answer:
                found = self._log_in(answer, login[1])
                if found is None:
                    raise self.explain(answer)
            _LOGINS.pop(login, None)
            _LOGINS[login] = found
        return answer

    def _scopes(self, method: str, url: str) -> tuple[str, ...]:
        """Return the scopes that a request needs; what the registry asks for is ignored."""
        actions = "pull" if method in ("GET", "HEAD") else "pull,push"
        others = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query).get("from", [])
        return (
            f"repository:{self.reference.name}:{actions}",
            *(f"repository:{other}:pull" for other in others if method == "POST"),
        )

    def _log_in(self, answer: Answer, scopes: tuple[str, ...]) -> Credential | None:
        headers = answer.headers.getlist("WWW-Authenticate")
        try:
            return log_in(self.reference.host, self.url, headers, scopes, self._client)
        except LoginError as error:
            raise self.error(error.reason, error.fix, error.status or answer.status) from None

    def _repeat(
        self, function: Callable[[], T], size: int = 0, statuses: Collection[int] = RETRYABLE
    ) -> T:
        """Return a function's result; retry on `statuses`. Timeouts allow for transferring `size` bytes."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return call_within(self._timeout_s + size / _MIN_BYTES_PER_S, function)
            except NO_ANSWER as error:
                text = f"no answer from {self.reference.host}: {error}"
                fix = "check the address and the network, and run again"
                problem = self.error(text, fix, _NO_ANSWER)
            except OciError as error:
                problem = error
            if problem.status not in statuses or attempt == _ATTEMPTS:
                raise problem
            time.sleep(attempt * _PAUSE_S)

    def error(self, reason: str, fix: str = "", status: int = 0) -> OciError:
        """Return an error that names the artifact."""
        return OciError(f"{self.reference.address}: {reason}", fix=fix, status=status)

    def explain(self, answer: Answer) -> OciError:
        """Return the error for an answer's status."""
        host = self.reference.host
        logins = [login for (url, _), login in list(_LOGINS.items()) if url == self.url]
        secrets = [secret for login in logins for secret in login.secrets]
        said = f"{answer.status} {_shown(answer.reason, secrets)}"
        with contextlib.suppress(TransferError, Unreadable, IndexError):
            content = b"".join(read_pieces(answer, _MAX_SHORT_ANSWER, self._timeout_s / 2))
            first = get_field(read_json(content), "errors", of=list)[0]
            said = f"{said} ({_shown(get_field(first, 'message', of=str), secrets)})"
        if answer.status not in ACCESS_DENIED:
            return self.error(f"{host} answers {said}", advise(answer.status, host), answer.status)
        fix = f"log in with `docker login {host}`, or set ${token_variable(hostname(host))}"
        if logins:
            fix = f"check that the credentials in {logins[-1].origin} are valid and allow it"
        elif not may_send_to(self.url):
            fix = "use https: credentials are not sent over http"
        return self.error(f"{host} denies access: {said}", fix, answer.status)


def _shown(text: str, secrets: Iterable[str]) -> str:
    """Return a registry's message without the secrets that were sent to it."""
    for secret in secrets:
        text = text.replace(secret, "…")
    return excerpt(text)
