"""Action records: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.support.stored_results import stage_key
from tvmflow.core.types import Json, StoredFile
from tvmflow.store.local import ActionRecord, Origin, decode, encode

KEY = stage_key("a")
RECORD = ActionRecord(
    files=(StoredFile("deep/lib0.o", "1" * 64, 7),),
    facts={"kernels": 3},
    preimage=KEY.preimage,
    seconds=1.5,
    made="2024-01-01T00:00:00Z",
    stage_id="net:build/host",
    origin=Origin("https://cache.example.org", ({"keyid": "ab", "sig": "AAAA"},), ("ci (ab)",)),
)


def sealed(value: Json) -> bytes:
    """Return the file of a record with a valid checksum, whatever its body is."""
    body = json.dumps(value).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@pytest.mark.parametrize("record", [RECORD, RECORD._replace(origin=None, stage_id="")])
def test_a_record_is_read_as_it_was_written(record: ActionRecord) -> None:
    assert decode(KEY.digest, encode(record)) == record


def test_a_record_is_only_valid_under_its_own_key() -> None:
    """Its key is the digest of its pre-image, so a copy under another key is not accepted."""
    assert decode(stage_key("b").digest, encode(RECORD)) is None


def test_a_record_is_compared_with_the_pre_image_of_the_key() -> None:
    """Whoever has computed the key has it, and finds the record of no other key either."""
    other = stage_key("b")
    assert decode(KEY.digest, encode(RECORD), KEY.preimage) == RECORD
    assert decode(other.digest, encode(RECORD), other.preimage) is None


@pytest.mark.parametrize("position", [0, 70, -2])
def test_a_changed_byte_is_noticed(position: int) -> None:
    content = bytearray(encode(RECORD))
    content[position] ^= 1
    assert decode(KEY.digest, bytes(content)) is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"preimage": KEY.preimage},
        {"preimage": KEY.preimage, "files": [["a"]], "facts": {}, "seconds": 0, "made": ""},
        {"preimage": {"x": float("nan")}},
    ],
)
def test_a_body_of_another_shape_is_not_a_record(value: Json) -> None:
    """Even with a valid checksum."""
    assert decode(KEY.digest, sealed(value)) is None


def test_a_file_without_a_body_is_not_a_record() -> None:
    assert decode(KEY.digest, b"") is None
