"""Finished stages in a remote cache, and the verification of fetched ones.

An action is an `ActionResult` of the Remote Execution API. tvmflow's own data (facts, pre-image, signatures) is in
one of its blobs, `tvmflow/action.json`. So a digest covers this data, the remote cache keeps it as long as the
action, and an action stays small. The blob is a DSSE envelope; it has no signatures if no key signed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tvmflow.core import signing
from tvmflow.core.canonical_json import canonical, digest_of
from tvmflow.core.codec import from_json
from tvmflow.core.documents import Unreadable, read_json
from tvmflow.core.named_files import find_invalid_name
from tvmflow.core.types import Json, StoredFile
from tvmflow.store.http_client import TransferError
from tvmflow.store.remote.connection import BlobRef, CircuitBreaker, RemoteConnection

MAX_FILE_BYTES: Final = 64 << 30
_MAX_FILES: Final = 10_000
# Paths come from another machine, so only this many characters are shown.
MAX_SHOWN: Final = 255

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
# The parts of the Remote Execution API 2 used here: number, name and type of each field.
_MESSAGES: Final[Mapping[str, tuple[tuple[int, str, str], ...]]] = {
    "Digest": ((1, "hash", "string"), (2, "size_bytes", "int64")),
    "OutputFile": ((1, "path", "string"), (2, "digest", "Digest")),
    "ActionResult": ((2, "output_files", "repeated OutputFile"),),
}


class InvalidAction(TransferError):
    """An action that is rejected; the text gives the reason."""


@functools.cache
def _action_result_class() -> Any:
    # Imported here, because only users of a remote cache need it.
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="cache.proto", package="cache", syntax="proto3")
    for message, fields in _MESSAGES.items():
        declared = file.message_type.add(name=message)
        for number, name, kind in fields:
            field = declared.field.add(name=name, number=number)
            repeated, _, message_name = kind.rpartition(" ")
            field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if message_name in _MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".cache.{message_name}"
            else:
                field.type = getattr(field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("cache.ActionResult"))


def encode(files: Mapping[str, BlobRef]) -> bytes:
    """Return an `ActionResult` with these output files by path."""
    result = _action_result_class()()
    for path, blob in sorted(files.items()):
        digest = result.output_files.add(path=path).digest
        digest.hash, digest.size_bytes = blob
    return bytes(result.SerializeToString())


def decode(content: bytes) -> dict[str, BlobRef]:
    """Return an `ActionResult`'s output files by path; InvalidAction if it is damaged.

    Other fields are ignored; bazel-remote, for example, adds the worker.
    """
    from google.protobuf.message import DecodeError

    try:
        entries = _action_result_class().FromString(content).output_files
    except DecodeError as damage:
        raise InvalidAction(f"it is damaged ({type(damage).__name__})") from None
    if len(entries) > _MAX_FILES:
        raise InvalidAction(f"it lists more than {_MAX_FILES} files")
    files: dict[str, BlobRef] = {}
    for entry in entries:
        path, blob = entry.path, BlobRef(entry.digest.hash, entry.digest.size_bytes)
        if path in files:
            raise InvalidAction(f"it lists two files {path[:MAX_SHOWN]!r}")
        if not _DIGEST.fullmatch(blob.digest):
            raise InvalidAction(f"the file {path[:MAX_SHOWN]!r} has no digest")
        if not 0 <= blob.size <= MAX_FILE_BYTES:
            raise InvalidAction(f"the file {path[:MAX_SHOWN]!r} has a size of {blob.size} bytes")
        files[path] = blob
    return files


# ---------------------------------------------------------------- signed envelopes

PAYLOAD_TYPE: Final = "application/vnd.tvmflow.action+json"
_ENVELOPE_PATH: Final = "tvmflow/action.json"
_FILES: Final = "files/"

_MAX_ENVELOPE_BYTES: Final = 16 << 20

_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


class Untrusted(InvalidAction):
    """An action that no trusted key signed, but that may otherwise be valid."""


class Action(NamedTuple):
    """A finished stage as stores exchange it: an `ActionRecord` with signatures."""

    key: str
    files: tuple[StoredFile, ...]
    facts: dict[str, Json]
    preimage: dict[str, Json]
    seconds: float
    made: str
    signatures: tuple[Json, ...] = ()

    @property
    def stage(self) -> str:
        """The stage that made the result."""
        return str(self.preimage["stage"])

    @property
    def payload(self) -> bytes:
        """The text that is signed: everything except the signatures."""
        fields = self._asdict()
        del fields["signatures"]
        return canonical(fields)


class VerifiedAction(NamedTuple):
    """A verified action, the trusted keys that signed it, and all its blobs by path."""

    action: Action
    signers: tuple[signing.PublicKey, ...]
    blobs: Mapping[str, BlobRef]


def make_envelope(action: Action, signer: signing.PrivateKey | None) -> bytes:
    """Return an action's envelope with the action's signatures, or else a signature by `signer`."""
    signers = [signer] if signer is not None and not action.signatures else []
    envelope = signing.sign_envelope(PAYLOAD_TYPE, action.payload, signers)
    if action.signatures:
        envelope["signatures"] = list(action.signatures)
    return canonical(envelope)


def make_action_result(action: Action, envelope: BlobRef) -> bytes:
    """Return the `ActionResult` of an action whose envelope is the given blob."""
    return encode({**_listed_files(action), _ENVELOPE_PATH: envelope})


def _listed_files(action: Action) -> dict[str, BlobRef]:
    return {_FILES + file.name: BlobRef(file.digest, file.size) for file in action.files}


def find_action(
    connection: RemoteConnection,
    key: str,
    circuit_breaker: CircuitBreaker,
    on_files: Callable[[Collection[BlobRef]], None] = lambda _: None,
) -> VerifiedAction | None:
    """Return a key's verified action, or None; before verification, `on_files` gets its files."""
    content = connection.get_action(key, circuit_breaker)
    if content is None:
        return None
    files = decode(content)
    blob = files.get(_ENVELOPE_PATH)
    if blob is None:
        raise InvalidAction(f"it has no {_ENVELOPE_PATH}: another tool wrote it")
    if blob.size > _MAX_ENVELOPE_BYTES:
        raise InvalidAction(f"its {_ENVELOPE_PATH} has a size of {blob.size} bytes")
    on_files([file for path, file in files.items() if path != _ENVELOPE_PATH])
    envelope = connection.read_blob(blob, circuit_breaker)
    if envelope is None:
        return None
    return verify_action(key, files, envelope, connection.access.trusted)


def verify_action(
    key: str, files: Mapping[str, BlobRef], envelope: bytes, trusted: Sequence[signing.PublicKey]
) -> VerifiedAction:
    """Return a key's action after verifying its envelope, the content of `tvmflow/action.json`.

    One of the trusted keys must have signed it; without trusted keys, any action is accepted.

    Raises:
        Untrusted: when only a trusted signature is missing.
        InvalidAction: when it is damaged, is another key's, or contradicts itself.
    """
    sealed = _parse_json(envelope)
    payload, signers = open_trusted(sealed, PAYLOAD_TYPE, trusted)
    action = _parse_action(_parse_json(payload))
    if action.key != key:
        raise InvalidAction(f"it is the action of another key, {action.key[:12]!r}")
    if digest_of(action.preimage) != key:
        raise InvalidAction("its key is not the digest of its pre-image")
    if {**_listed_files(action), _ENVELOPE_PATH: files[_ENVELOPE_PATH]} != files:
        raise InvalidAction("its two lists of files differ")
    if (name := find_invalid_name([file.name for file in action.files])) is not None:
        raise InvalidAction(f"it has a file with the name {name[:MAX_SHOWN]!r}")
    if action.payload == payload:
        # A different payload is a newer version's; uploading it from here would not match its signatures.
        action = action._replace(signatures=tuple(sealed["signatures"]))
    return VerifiedAction(action, signers, files)


def open_trusted(
    envelope: Json, payload_type: str, trusted: Sequence[signing.PublicKey]
) -> tuple[bytes, tuple[signing.PublicKey, ...]]:
    """Return the text in an envelope, and the trusted keys that signed it; Untrusted if there are none.

    Without trusted keys, any envelope is accepted.
    """
    try:
        if trusted:
            return signing.verify_envelope(envelope, payload_type, trusted)
        return signing.open_envelope(envelope, payload_type), ()
    except signing.InvalidEnvelope as reason:
        raise Untrusted(str(reason)) from None


def _parse_json(text: bytes) -> Json:
    try:
        value = read_json(text)
        # A number such as 1e999 can be parsed, but not written again.
        canonical(value)
    except (ValueError, Unreadable):
        raise InvalidAction(f"its {_ENVELOPE_PATH} is damaged") from None
    return value


def _parse_action(value: Json) -> Action:
    try:
        action = from_json(Action, value)._replace(signatures=())
        if not isinstance(action.preimage["stage"], str) or not _TIME.fullmatch(action.made):
            raise ValueError("the stage or the time is missing")
    except (KeyError, ValueError) as reason:
        raise InvalidAction(f"its {_ENVELOPE_PATH} is damaged ({reason})") from None
    return action
