"""The client for OCI registries, by OCI's distribution specification 1.1: manifests, blobs, referrers.

Credentials are those that `docker login` keeps. They are sent to the registry and to its own token
server alone, encrypted or within this machine, and after a redirect to no other host.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import re
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from pathlib import Path
from typing import IO, Final, NamedTuple, TypeVar

from tvmflow.core.canonical_json import canonical
from tvmflow.core.documents import Unreadable, get_field, read_file, read_json
from tvmflow.core.errors import DownloadError
from tvmflow.core.formatting import count_text, excerpt, quoted
from tvmflow.core.named_files import find_invalid_name
from tvmflow.core.types import Json
from tvmflow.store.addresses import OciReference, token_variable, without_secrets
from tvmflow.store.http_client import (
    ACCESS_DENIED,
    BROKEN_ANSWER,
    RETRYABLE,
    Answer,
    Credential,
    HttpClient,
    Incomplete,
    TooLong,
    TooSlow,
    basic,
    bearer,
    call_within,
    find_in_netrc,
    may_send_to,
    origin_of,
    read_pieces,
    redirect_target,
)

T = TypeVar("T")

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
_DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
_TITLE: Final = "org.opencontainers.image.title"
_FILE_PATH: Final = "org.cncf.model.filepath"

PLAIN_HTTP_VARIABLE: Final = "TVMFLOW_PLAIN_HTTP"
_DOCKER_HUB: Final = ("docker.io", "index.docker.io")

_TIMEOUT_S: Final = 30.0
_MIN_BYTES_PER_S: Final = 64 << 10
_ATTEMPTS: Final = 3
_PAUSE_S: Final = 0.25
# 504 is what a proxy answers that gets no answer.
_NO_ANSWER: Final = 504
_MAX_MANIFEST_BYTES: Final = 4 << 20
_MAX_LAYERS: Final = 10_000
_MAX_BLOB_BYTES: Final = 64 << 30
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_PARAMETER: Final = re.compile(r'([A-Za-z]+)="([^"]*)"')
_ARCHIVE: Final = re.compile(r".*\.tar([.+](gzip|zstd))?")


class OciError(DownloadError):
    """A registry did not give, or not take, what was requested.

    The status is that of its answer, or what stands for no answer; 0 where it is not to blame.
    """

    def __init__(self, message: str, *, fix: str = "", status: int = 0) -> None:
        super().__init__(message, fix=fix)
        self.status = status


# ---------------------------------------------------------------- manifests


class Descriptor(NamedTuple):
    """A blob in a manifest, or a manifest in an index."""

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
        """The path of the file in the artifact; empty for none."""
        return self.annotations.get(_TITLE) or self.annotations.get(_FILE_PATH, "")

    def to_json(self) -> Json:
        """Return the descriptor as manifests have it."""
        fields = zip(
            ("mediaType", "digest", "size", "annotations", "artifactType"), self, strict=True
        )
        return {name: value for name, value in fields if value not in ("", {})}


EMPTY: Final = Descriptor(
    "application/vnd.oci.empty.v1+json", f"sha256:{hashlib.sha256(b'{}').hexdigest()}", 2
)
"""The configuration of a manifest that needs none: `{}`."""


class Manifest(NamedTuple):
    """An artifact: its text, its files, and the digest of the artifact that it refers to."""

    content: bytes
    layers: tuple[Descriptor, ...]
    subject: str

    @property
    def digest(self) -> str:
        """Its digest, by which it is pinned."""
        return describe(self.content, MANIFEST).digest

    def select(self, path: str) -> Descriptor:
        """Return the file at a path, or the only one without a path.

        Raises:
            Unreadable: when there is none, or it is not certain which one.
        """
        files = {layer.title: layer for layer in self.layers}
        names = ", ".join(f"#{excerpt(name)}" for name in list(files)[:10])
        if path and path not in files:
            raise Unreadable(f"it has no file {quoted(path)}, but {names}")
        if not path and len(self.layers) != 1:
            count = count_text(len(self.layers), "file")
            raise Unreadable(f"it has {count}: write one of {names} behind the address")
        return files[path] if path else self.layers[0]


def describe(content: bytes, media_type: str, annotations: Mapping[str, str] = {}) -> Descriptor:
    """Return the descriptor of a content."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return Descriptor(media_type, digest, len(content), annotations)


def title_annotations(path: str) -> dict[str, str]:
    """Return the annotations with the path of a file, as oras and as ModelPack have it."""
    return {_TITLE: path, _FILE_PATH: path}


def make_manifest(
    artifact_type: str,
    layers: Sequence[Descriptor],
    annotations: Mapping[str, str],
    config: Descriptor = EMPTY,
    subject: Descriptor | None = None,
) -> bytes:
    """Return the text of a manifest, which is the same whenever it is made of the same."""
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
    """Return an artifact from its text.

    Raises:
        Unreadable: when it is none, or not one whose files can be in a folder.
    """
    value = read_json(content)
    layers = [_parse_descriptor(entry) for entry in get_field(value, "layers", of=list)]
    if get_field(value, "manifests", of=list) or not layers:
        raise Unreadable(
            "it is no artifact with files, but an index perhaps: name one by its digest"
        )
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
        raise Unreadable(f"it names content by {quoted(descriptor.digest)}, which is no sha256")
    if not 0 <= descriptor.size <= _MAX_BLOB_BYTES:
        raise Unreadable(f"it has a file of {descriptor.size} bytes")
    return descriptor


# ---------------------------------------------------------------- requests

# The tokens that servers gave to this process, by the URL of the repository.
_TOKENS: Final = dict[str, Credential]()


class Repository:
    """One repository of a registry. Safe to use from several threads.

    Plain http is used for this machine alone, and for the hosts that `$TVMFLOW_PLAIN_HTTP` names.
    Every function raises `OciError` where the registry does not do what is requested.
    """

    def __init__(
        self,
        reference: OciReference,
        timeout_s: float = _TIMEOUT_S,
        *,
        max_idle: int = 0,
        uses_proxies: bool = True,
    ) -> None:
        host = "registry-1.docker.io" if reference.host in _DOCKER_HUB else reference.host
        plain = os.environ.get(PLAIN_HTTP_VARIABLE, "").replace(",", " ").split()
        is_plain = reference.host in plain or may_send_to(f"http://{host}")
        self.reference = reference
        self.url = f"{'http' if is_plain else 'https'}://{host}/v2/{reference.name}"
        self._client = HttpClient(timeout_s, max_idle=max_idle, uses_proxies=uses_proxies)
        self._timeout_s = timeout_s

    def close(self) -> None:
        """Close all idle connections."""
        self._client.close()

    def find_manifest(self, version: str) -> Manifest:
        """Return an artifact by its tag or digest; it has that digest, and can be trusted to have files."""
        is_digest = bool(_DIGEST.fullmatch(version))
        status, content, headers = self._read(
            f"manifests/{version}", f"{MANIFEST}, {INDEX}, {_DOCKER_MANIFEST}"
        )
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

    def request_blob(self, sha256: str, headers: Mapping[str, str] = {}) -> Answer:
        """Return the answer to a request for a blob, as `request` does."""
        return self.request("GET", f"{self.url}/blobs/sha256:{sha256}", headers)

    def list_referrers(self, digest: str) -> list[Descriptor]:
        """Return the manifests that refer to one.

        A registry without a list of them has an index with a tag that is made of the digest.
        """
        status, content, _ = self._read(f"referrers/{digest}", INDEX)
        return self._parse_index(content) if status == 200 else self._read_tagged_index(digest)

    def _read_tagged_index(self, digest: str) -> list[Descriptor]:
        status, content, _ = self._read(f"manifests/{digest.replace(':', '-')}", INDEX)
        return self._parse_index(content) if status == 200 else []

    def _parse_index(self, content: bytes) -> list[Descriptor]:
        try:
            entries = get_field(read_json(content), "manifests", of=list)
            return [_parse_descriptor(entry) for entry in entries[:_MAX_LAYERS]]
        except Unreadable as error:
            raise self.error(f"its list of referrers is damaged: {error}") from None

    def _read(self, path: str, accepted: str) -> tuple[int, bytes, Message]:
        """Return status, content and header of the answer to a GET request; a refusal is an error."""

        def read() -> tuple[int, bytes, Message]:
            with self.request("GET", f"{self.url}/{path}", {"Accept": accepted}) as answer:
                if answer.status in (*ACCESS_DENIED, *RETRYABLE) or answer.status >= 500:
                    raise self.explain(answer)
                pieces = read_pieces(answer, _MAX_MANIFEST_BYTES) if answer.is_success else ()
                return answer.status, b"".join(pieces), answer.headers

        try:
            return self._repeat(lambda: self._within(self._timeout_s, read))
        except TooLong:
            text = f"its manifest is larger than {_MAX_MANIFEST_BYTES >> 20} MB"
            raise self.error(text, "name another artifact") from None

    def put_blob(self, blob: Descriptor, content: bytes | Path, mount_from: str = "") -> int:
        """Store a blob unless the repository has it, and return how many bytes were sent for it.

        Another repository of the registry may have it, so that it need not be sent.
        """
        mount = {"mount": blob.digest, "from": mount_from} if mount_from else {}

        def put() -> int:
            with self._call("HEAD", f"{self.url}/blobs/{blob.digest}") as answer:
                if answer.is_success:
                    return 0
            uploads = f"{self.url}/blobs/uploads/?{urllib.parse.urlencode(mount)}"
            with self._call("POST", uploads) as answer:
                if answer.status == 201:
                    return 0
                if answer.status != 202 and mount:
                    # the login may not be allowed to read the other repository
                    return self.put_blob(blob, content)
                if answer.status != 202:
                    raise self.explain(answer)
                url = redirect_target(self.url, answer.headers.get("Location", ""))
            if origin_of(url) != origin_of(self.url):
                text = f"files are to be sent to {without_secrets(url)}, which is not on it"
                raise self.error(text, "check the address of the registry, and its proxy")
            url += f"{'&' if '?' in url else '?'}digest={blob.digest}"
            body = io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
            self._put(url, "application/octet-stream", body)
            return blob.size

        return self._repeat(put)

    def put_manifest(self, content: bytes, version: str, media_type: str = MANIFEST) -> Message:
        """Store a manifest under a tag or its digest, and return the header of the answer."""
        url = f"{self.url}/manifests/{version}"
        return self._repeat(lambda: self._put(url, media_type, io.BytesIO(content)))

    def _put(self, url: str, media_type: str, content: IO[bytes]) -> Message:
        with content, self._call("PUT", url, {"Content-Type": media_type}, content) as answer:
            if not answer.is_success:
                raise self.explain(answer)
            return answer.headers

    def put_referrer(self, subject: str, content: bytes, listed: Descriptor) -> None:
        """Store a manifest that refers to another one, so that it is listed there with this descriptor."""
        if self.put_manifest(content, listed.digest).get("OCI-Subject"):
            return
        others = [one for one in self._read_tagged_index(subject) if one.digest != listed.digest]
        entries = [entry.to_json() for entry in (*others, listed)]
        index = canonical({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries})
        self.put_manifest(index, subject.replace(":", "-"), INDEX)

    def request(
        self, method: str, url: str, headers: Mapping[str, str] = {}, body: IO[bytes] | None = None
    ) -> Answer:
        """Return the answer to a request to this registry, after a login if it wants one.

        Raises:
            OciError: when there is nothing to log in with, or it is not accepted by the token server.
            OSError: when there is no answer. `BROKEN_ANSWER` has what else may be raised.
        """
        for is_last in (False, True):
            credential = _TOKENS.get(self.url)
            if method in ("GET", "HEAD"):
                answer = self._client.get(url, headers, credential, method)
            else:
                secret = {"Authorization": credential.header} if credential else {}
                answer = self._client.request(method, url, {**headers, **secret}, body)
            # what another server wants, to which this one redirects, it does not get
            if answer.status != 401 or is_last or origin_of(answer.url) != origin_of(self.url):
                break
            with answer:
                found = self._log_in(answer.headers.get_all("WWW-Authenticate") or [])
                if found is None:
                    raise self.explain(answer)
            _TOKENS[self.url] = found
        return answer

    def _call(
        self, method: str, url: str, headers: Mapping[str, str] = {}, body: IO[bytes] | None = None
    ) -> Answer:
        """Return the answer to a request within the time that its body may take."""
        size = body.seek(0, os.SEEK_END) if body else 0
        limit_s = self._timeout_s + size / _MIN_BYTES_PER_S
        return self._within(limit_s, lambda: self.request(method, url, headers, body))

    def _within(self, limit_s: float, function: Callable[[], T]) -> T:
        try:
            return call_within(limit_s, function)
        except (*BROKEN_ANSWER, Incomplete, TooSlow) as error:
            reason = excerpt(str(error)) or type(error).__name__
            text = f"no answer from {self.reference.host}: {reason}"
            fix = "check the address and the network, and run again"
            raise self.error(text, fix, _NO_ANSWER) from error

    def _repeat(self, function: Callable[[], T]) -> T:
        """Return what a function returns, called again after errors that may not last."""
        for attempt in range(1, _ATTEMPTS):
            try:
                return function()
            except OciError as error:
                if error.status not in RETRYABLE:
                    raise
            time.sleep(attempt * _PAUSE_S)
        return function()

    def error(self, reason: str, fix: str = "", status: int = 0) -> OciError:
        """Return an error that names the artifact."""
        return OciError(f"{self.reference.address}: {reason}", fix=fix, status=status)

    def explain(self, answer: Answer) -> OciError:
        """Return the error that a status means."""
        host, credential = self.reference.host, _TOKENS.get(self.url)
        said = f"{answer.status} {excerpt(answer.reason)}"
        with contextlib.suppress(*BROKEN_ANSWER, Unreadable, IndexError):
            first = get_field(read_json(answer.read_all(1 << 16)), "errors", of=list)[0]
            said = f"{said} ({excerpt(get_field(first, 'message', of=str))})"
        if answer.status not in ACCESS_DENIED:
            return self.error(f"{host} answers {said}", "run again later", answer.status)
        fix = f"log in with `docker login {host}`, or set ${token_variable(_hostname(host))}"
        if credential:
            fix = f"check that the credentials in {credential.origin} are valid and allow it"
        elif not may_send_to(self.url):
            fix = "use https: credentials are not sent over http"
        return self.error(f"{host} denies access: {said}", fix, answer.status)

    def _log_in(self, challenges: Sequence[str]) -> Credential | None:
        """Return what a registry wants: a token of its server, or user and password; None for neither."""
        own = find_credential(self.reference.host, self.url)
        for challenge in challenges:
            scheme, _, rest = challenge.partition(" ")
            values = {name.lower(): value for name, value in _PARAMETER.findall(rest)}
            if own and (scheme.lower() == "basic" or own.header.startswith("Bearer ")):
                return own
            if scheme.lower() == "bearer" and "realm" in values:
                return self._fetch_token(values, own)
        return None

    def _fetch_token(self, values: Mapping[str, str], own: Credential | None) -> Credential | None:
        """Return the token that the server named in a challenge gives, with or without credentials."""
        realm = redirect_target(self.url, values["realm"])
        server = urllib.parse.urlsplit(realm).netloc
        if not (may_send_to(realm) and _is_of_one_owner(self.reference.host, server)):
            # user and password of one host are not sent to another one
            own = find_credential(server, realm)
        query = {name: values[name] for name in ("service", "scope") if name in values}
        url = f"{realm}{'&' if '?' in realm else '?'}{urllib.parse.urlencode(query)}"
        with self._client.get(url, {}, own) as answer:
            content = answer.read_all(1 << 20) if answer.is_success else b"{}"
        with contextlib.suppress(Unreadable):
            value = read_json(content)
            token = get_field(value, "token", of=str) or get_field(value, "access_token", of=str)
            if token:
                return bearer(token, own.origin if own else f"the token of {server}")
        if own is None:
            return None
        text = f"the token server {server} gives no token for the credentials in {own.origin}"
        raise self.error(text, f"log in again: `docker login {self.reference.host}`", answer.status)


def _hostname(host: str) -> str:
    return urllib.parse.urlsplit(f"//{host}").hostname or ""


def _is_of_one_owner(host: str, other: str) -> bool:
    """Return whether two hosts are the same, or of one domain: registry.example.org and example.org."""
    first, second = _hostname(host), _hostname(other)
    domain = first.split(".")[-2:]
    is_name = len(domain) == 2 and domain[-1].isalpha()
    return first == second or (is_name and second.split(".")[-2:] == domain)


# ---------------------------------------------------------------- credentials


def find_credential(host: str, url: str) -> Credential | None:
    """Return the credential of the environment, of docker's configuration or of ~/.netrc for a registry.

    Raises:
        EnvironmentProblem: when it cannot be read or sent.
    """
    if not may_send_to(url):
        return None
    variable = token_variable(_hostname(host))
    if text := os.environ.get(variable, "").strip():
        user, colon, password = text.partition(":")
        origin = f"${variable}"
        return Credential(basic(user, password), origin) if colon else bearer(text, origin)
    folder = Path(os.environ.get("DOCKER_CONFIG", "~/.docker")).expanduser()
    for path in (folder / "config.json", Path(os.environ.get("REGISTRY_AUTH_FILE", os.devnull))):
        if path.is_file() and (found := _find_in_config(host, path)):
            return Credential(basic(*found), str(path))
    user, password = find_in_netrc(_hostname(host), with_default=False)
    return Credential(basic(user, password), "~/.netrc") if user else None


def _find_in_config(host: str, path: Path) -> tuple[str, str] | None:
    """Return user and password of a registry in a file as `docker login` writes it."""
    name = _DOCKER_HUB[-1] if host in _DOCKER_HUB else host
    try:
        config = read_json(read_file(path))
    except Unreadable as error:
        raise OciError(f"{path} has no credentials: {error}", fix="log in again") from None
    for entry, value in get_field(config, "auths", of=dict).items():
        # docker's own is https://index.docker.io/v1/
        if name in (entry, entry.partition("://")[2].partition("/")[0]):
            with contextlib.suppress(ValueError):
                text = base64.b64decode(get_field(value, "auth", of=str), validate=True).decode()
                user, colon, password = text.partition(":")
                if colon:
                    return user, password
    helper = get_field(config, "credHelpers", name, of=str) or get_field(
        config, "credsStore", of=str
    )
    return _ask_helper(f"docker-credential-{helper}", name) if helper else None


def _ask_helper(program: str, host: str) -> tuple[str, str] | None:
    """Return user and password from a program that keeps them for docker."""
    server = f"https://{host}/v1/" if host in _DOCKER_HUB else host
    try:
        done = subprocess.run(
            [program, "get"], input=server.encode(), capture_output=True, timeout=_TIMEOUT_S
        )
        value = read_json(done.stdout) if done.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired, Unreadable) as error:
        text = f"{excerpt(program)}, which docker's configuration names, does not work"
        raise OciError(
            f"{text}: {type(error).__name__}", fix="install it, or log in again"
        ) from None
    user, secret = get_field(value, "Username", of=str), get_field(value, "Secret", of=str)
    # `<token>` comes with a token for a protocol of its own
    return (user, secret) if user and user != "<token>" else None
