"""Action records: what the store keeps of a finished stage, and how that is written.

A record is a file: the sha256 of its body, a newline, and the body as JSON. Its name is the key
of the stage, which is the digest of the pre-image in the body; both are checked on every read.
"""

import hashlib
import json
import re
from typing import NamedTuple

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.types import Json, StoredFile

_SHOWN_SIGNATURES = 3
SHOWN_DIGITS = 12
"""How many digits of a key id are shown to people."""


class Origin(NamedTuple):
    """The origin of a fetched result.

    Attributes:
        address: The remote cache, without credentials.
        signatures: All signatures of its envelope, as they were received.
        signers: For each trusted key whose signature was verified: `name (first digits of the key)`.
    """

    address: str
    signatures: tuple[Json, ...] = ()
    signers: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The origin of the result and its signers, in one phrase."""
        if self.signers:
            return f"{self.address}, signed by {' and '.join(self.signers)}"
        if unverified := self._key_ids():
            return f"{self.address}, signed by key {' and '.join(unverified)} (not verified)"
        return f"{self.address}, not signed"

    @property
    def signature_lines(self) -> tuple[str, ...]:
        """One line for each key that signed it: the first digits, and whether that was verified."""
        verified = " ".join(self.signers)
        return tuple(
            key_id if f"({key_id})" in verified else f"{key_id} (not verified)"
            for key_id in dict.fromkeys(self._key_ids())
        )

    def _key_ids(self) -> list[str]:
        # the ids are another machine's text
        ids = [str(signature.get("keyid")) for signature in self.signatures[:_SHOWN_SIGNATURES]]
        return [re.sub("[^0-9a-f]", "", key_id)[:SHOWN_DIGITS] for key_id in ids]


class ActionRecord(NamedTuple):
    """A finished stage.

    Attributes:
        files: Its output files.
        facts: Small values for people; never part of a key.
        preimage: The document that its key is the digest of.
        seconds: How long the stage ran.
        made: When it ended: UTC, `2024-01-01T00:00:00Z`.
        stage_id: The stage that first needed it, for people; empty for one that was fetched.
        origin: Where it came from; None when it was made with this store.
    """

    files: tuple[StoredFile, ...]
    facts: dict[str, Json]
    preimage: dict[str, Json]
    seconds: float
    made: str
    stage_id: str = ""
    origin: Origin | None = None


def encode(record: ActionRecord) -> bytes:
    """Return the content of the record's file."""
    value = record._asdict()
    value["for"], origin = value.pop("stage_id"), value.pop("origin")
    if origin is not None:
        address, signatures, signers = origin
        value["origin"] = {"place": address, "signatures": signatures, "signers": signers}
    body = json.dumps(value).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode(key: str, content: bytes) -> ActionRecord | None:
    """Return the record in the file of `key`; None when it is damaged or the record of another key."""
    checksum, _, body = content.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        return None
    try:
        value = json.loads(body)
        if digest_of(value["preimage"]) != key:
            return None
        origin = value.get("origin")
        return ActionRecord(
            files=tuple(StoredFile(*entry) for entry in value["files"]),
            facts=value["facts"],
            preimage=value["preimage"],
            seconds=value["seconds"],
            made=value["made"],
            stage_id=value.get("for", ""),
            origin=origin and _origin(origin),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _origin(value: dict[str, Json]) -> Origin:
    signatures, signers = value.get("signatures") or (), value.get("signers") or ()
    return Origin(value["place"], tuple(signatures), tuple(signers))
