"""A remote cache in a repository of an OCI registry.

An action is a manifest whose tag is the key, with the action as an annotation. It lists the action's
blobs, so that the registry keeps them as long as the manifest.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import IO, Final

from tvmflow.core.documents import Unreadable, get_field, read_json
from tvmflow.core.errors import UsageError
from tvmflow.store.addresses import InvalidAddress, parse_oci_reference
from tvmflow.store.http_client import ACCESS_DENIED, BROKEN_ANSWER, NOT_TAKEN, RETRYABLE, Answer
from tvmflow.store.oci import EMPTY, MANIFEST, Descriptor, OciError, Repository, make_manifest
from tvmflow.store.remote.base import (
    Corrupt,
    Declined,
    Forbidden,
    RemoteCacheError,
    Sink,
    Unreachable,
)
from tvmflow.store.remote.http import MAX_IDLE_CONNECTIONS, HttpCache, without_credentials
from tvmflow.store.remote.signed_actions import decode

_KIND: Final = "application/vnd.tvmflow.action.v1+json"
_CONTENT: Final = "application/vnd.tvmflow.content.v1"
_ACTION: Final = "vnd.tvmflow.action"
_MAX_MANIFEST_BYTES: Final = 4 << 20


class RegistryCache(HttpCache):
    """See `_base.RemoteCache`. Credentials are those that `docker login` keeps."""

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            reference = parse_oci_reference(url.rstrip("/"))
            if reference.version or reference.path:
                raise InvalidAddress("it names one artifact: write it as oci://HOST/NAME")
        except InvalidAddress as error:
            raise UsageError(f"--remote {without_credentials(url)}: {error}") from None
        self.address, self._host, self._timeout_s = reference.address, reference.host, timeout_s
        self._repository = Repository(
            reference, timeout_s, max_idle=MAX_IDLE_CONNECTIONS, uses_proxies=False
        )

    def get(self, path: str, max_bytes: int, sink: Sink) -> bool:
        """See `_base.RemoteCache`."""
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
        """See `_base.RemoteCache`."""
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
            # no other blob would be taken, either; a manifest may name a blob that has disappeared
            if is_blob and error.status in NOT_TAKEN:
                raise Forbidden(self._shorten(error)) from None
            raise self._translate(error) from None

    def close(self) -> None:
        """Close all idle connections."""
        self._repository.close()

    def _request(self, method: str, path: str, body: IO[bytes] | None = None) -> Answer:
        is_action, name = path.startswith("ac/"), path.partition("/")[2]
        place = f"manifests/{name}" if is_action else f"blobs/sha256:{name}"
        headers = {"Accept": MANIFEST} if is_action else {}
        try:
            url = f"{self._repository.url}/{place}"
            return self._repository.request(method, url, headers, body)
        except OciError as error:
            raise self._translate(error) from None
        except BROKEN_ANSWER as error:
            raise self._unreachable(error) from error

    def _translate(self, error: OciError) -> RemoteCacheError:
        """Return the error of a remote cache for one of a registry."""
        reason = self._shorten(error)
        if error.status in ACCESS_DENIED:
            return Forbidden(reason)
        if 400 <= error.status < 500 and error.status not in RETRYABLE:
            return Declined(reason)
        return Unreachable(reason, retryable=error.status in RETRYABLE)

    def _shorten(self, error: OciError) -> str:
        return error.message.removeprefix(f"{self.address}: ")
