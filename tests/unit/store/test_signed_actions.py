"""Signed actions: the codec agrees with protobuf, and no invalid action is accepted."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cache_server import ActionResult
from tvmflow.core import signing
from tvmflow.core.canonical_json import canonical, digest_of
from tvmflow.core.types import StoredFile
from tvmflow.store.remote import signed_actions
from tvmflow.store.remote.connection import BlobRef
from tvmflow.store.remote.signed_actions import (
    Action,
    InvalidAction,
    make_action_result,
    make_envelope,
    verify_action,
)

ONE = "1" * 64
PREIMAGE = {"stage": "import", "settings": {"x": 1}}
KEY = digest_of(PREIMAGE)
ACTION = Action(KEY, (StoredFile("a/b.so", ONE, 7),), {}, PREIMAGE, 1.5, "2024-01-01T00:00:00Z")


def as_uploaded(action: Action) -> tuple[dict[str, BlobRef], bytes]:
    """Return the list of files and the envelope of an action, as a remote cache returns them."""
    envelope = make_envelope(action, None)
    blob = BlobRef(hashlib.sha256(envelope).hexdigest(), len(envelope))
    return signed_actions.decode(make_action_result(action, blob)), envelope


def verified(**changes: Any) -> Action:
    files, envelope = as_uploaded(ACTION._replace(**changes))
    return verify_action(KEY, files, envelope, ())[0]


digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
paths = st.text("ab/.é漢🙂 \n", min_size=1, max_size=40)


@settings(max_examples=60)
@given(st.dictionaries(paths, st.tuples(digests, st.integers(0, 1 << 35)), max_size=8))
def test_the_codec_agrees_with_protobuf(
    files: dict[str, tuple[str, int]],
) -> None:
    """Both ways, for any paths and sizes."""
    blobs = {path: BlobRef(*fields) for path, fields in files.items()}
    message = ActionResult.FromString(signed_actions.encode(blobs))
    decoded = {
        file.path: (file.digest.hash, file.digest.size_bytes) for file in message.output_files
    }
    assert decoded == files
    message.execution_metadata.worker = "a worker"
    message.stdout_raw = b"some output"
    message.exit_code = -1
    assert signed_actions.decode(message.SerializeToString()) == blobs


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_any_bytes_are_rejected_or_read(content: bytes) -> None:
    """No other exception is raised."""
    with contextlib.suppress(InvalidAction):
        signed_actions.decode(content)


@pytest.mark.parametrize("size", [-1, (64 << 30) + 1, 1 << 62])
def test_implausible_sizes_are_rejected(size: int) -> None:
    """Before anything is downloaded."""
    absurd = ActionResult()
    file = absurd.output_files.add(path="files/a")
    file.digest.hash, file.digest.size_bytes = ONE, size
    with pytest.raises(InvalidAction, match="a size of"):
        signed_actions.decode(absurd.SerializeToString())


def test_two_files_of_one_path_and_too_many_files_are_rejected() -> None:
    """In the list that the server returns."""
    twice = signed_actions.encode({"files/a": BlobRef(ONE, 1)}) * 2
    with pytest.raises(InvalidAction, match="two files"):
        signed_actions.decode(twice)
    many = signed_actions.encode({f"files/{number}": BlobRef(ONE, 1) for number in range(10_001)})
    with pytest.raises(InvalidAction, match="more than 10000 files"):
        signed_actions.decode(many)


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../b", "/x", "a//b", "./a", "a\\b", "C:x", "a\nb", "a\x1b[2J", "", "a/", "x" * 300],
)
def test_names_that_leave_their_folder_are_rejected(name: str) -> None:
    """On any file system; also characters that a terminal would obey."""
    with pytest.raises(InvalidAction, match="a file with the name"):
        verified(files=(StoredFile(name, ONE, 1),))


def test_a_file_below_another_file_is_rejected() -> None:
    """One name cannot be a file and a folder."""
    with pytest.raises(InvalidAction, match="a file with the name 'a/b'"):
        verified(files=(StoredFile("a", ONE, 1), StoredFile("a/b", ONE, 1)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"preimage": {**PREIMAGE, "settings": {"x": 2}}}, "not the digest of its pre-image"),
        ({"key": "2" * 64}, "another key"),
        ({"preimage": {}}, "damaged"),
        ({"facts": []}, "damaged"),
        ({"seconds": "long"}, "damaged"),
        ({"made": "\x1b[2J"}, "damaged"),
        ({"preimage": {"stage": 1}}, "damaged"),
        ({"files": (("a", ONE, 1, 1),)}, "damaged"),
    ],
)
def test_an_envelope_that_contradicts_the_action_is_rejected(
    changes: dict[str, Any], why: str
) -> None:
    """Each for its reason."""
    files, _ = as_uploaded(ACTION)
    envelope = make_envelope(ACTION._replace(**changes), None)
    with pytest.raises(InvalidAction, match=why):
        verify_action(KEY, files, envelope, ())


def test_a_verified_action_is_what_was_uploaded() -> None:
    """All fields; and signatures only with the payload that they sign."""
    assert verified() == ACTION


@pytest.mark.parametrize("envelope", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_bytes_that_are_no_envelope_are_rejected(envelope: bytes) -> None:
    """Whatever they are."""
    files, _ = as_uploaded(ACTION)
    with pytest.raises(InvalidAction):
        verify_action(KEY, files, envelope, ())


def test_numbers_that_json_does_not_have_are_rejected() -> None:
    """Many readers accept NaN, but it could not be written again."""
    sealed = json.loads(make_envelope(ACTION, None))
    text = base64.b64decode(sealed["payload"]).replace(b"1.5", b"NaN")
    envelope = json.dumps({**sealed, "payload": base64.b64encode(text).decode()}).encode()
    with pytest.raises(InvalidAction, match="damaged"):
        verify_action(KEY, as_uploaded(ACTION)[0], envelope, ())


def test_signatures_of_a_newer_version_are_dropped() -> None:
    """They sign fields that this version does not know and would not upload."""
    text = canonical(
        {**{k: v for k, v in ACTION._asdict().items() if k != "signatures"}, "more": 1}
    )
    sealed = signing.sign_envelope(signed_actions.PAYLOAD_TYPE, text, ())
    sealed["signatures"] = [{"keyid": "ab", "sig": "AAAA"}]
    envelope = canonical(sealed)
    blob = BlobRef(hashlib.sha256(envelope).hexdigest(), len(envelope))
    files = signed_actions.decode(make_action_result(ACTION, blob))
    assert verify_action(KEY, files, envelope, ())[0].signatures == ()
