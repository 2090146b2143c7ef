"""Keys and envelopes: what is accepted, and what is refused with which message."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tvmflow.core import signing
from tvmflow.core.errors import EnvironmentProblem, UsageError

KIND = "application/vnd.in-toto+json"


@pytest.fixture
def key(tmp_path: Path) -> signing.PrivateKey:
    signing.generate_key(tmp_path / "mine")
    return signing.load_private_key(tmp_path / "mine")


def test_both_halves_of_a_key_have_the_same_id(tmp_path: Path, key: signing.PrivateKey) -> None:
    (public,) = signing.load_public_keys(tmp_path / "mine.pub")
    assert public.id == key.public.id
    assert public.verifies(key.sign(b"text"), b"text")
    assert not public.verifies(key.sign(b"text"), b"another")


def test_only_its_owner_reads_a_private_key(tmp_path: Path, key: signing.PrivateKey) -> None:
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600


def test_no_key_is_overwritten(tmp_path: Path, key: signing.PrivateKey) -> None:
    before = (tmp_path / "mine").read_bytes()
    with pytest.raises(UsageError, match="already exists"):
        signing.generate_key(tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == before


def test_a_key_that_cannot_be_read_need_not_be_made_writable(tmp_path: Path) -> None:
    """A folder in place of a file is named; one that cannot be made has no missing key."""
    with pytest.raises(EnvironmentProblem, match=r"cannot read .*: Is a directory") as caught:
        signing.load_private_key(tmp_path)
    assert caught.value.fix == "name the file of a key, which this user may read"
    with pytest.raises(EnvironmentProblem, match="/proc/keys-of-mine cannot be created"):
        signing.generate_key(Path("/proc/keys-of-mine/mine"))


def test_a_folder_of_keys_holds_those_that_end_in_pub(tmp_path: Path) -> None:
    ids = {signing.generate_key(tmp_path / name).id for name in ("a", "b")}
    assert {key.id for key in signing.load_public_keys(tmp_path)} == ids


def test_several_keys_may_stand_in_one_file(tmp_path: Path) -> None:
    ids = [signing.generate_key(tmp_path / name).id for name in ("a", "b")]
    both = tmp_path / "both"
    both.write_bytes((tmp_path / "a.pub").read_bytes() + b"\n" + (tmp_path / "b.pub").read_bytes())
    assert [key.id for key in signing.load_public_keys(both)] == ids


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs the program openssl")
def test_openssl_makes_keys_that_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "made.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", path], check=True)
    key = signing.load_private_key(path)
    assert key.public.verifies(key.sign(b"x"), b"x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no private key"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "no private key"),
    ],
)
def test_a_file_without_a_key_is_reported(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "strange"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        signing.load_private_key(path)
    with pytest.raises(UsageError, match="holds no public key"):
        signing.load_public_keys(path)


def test_a_missing_key_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no key"):
        signing.load_private_key(tmp_path / "nobody")


def test_an_envelope_gives_back_text_and_signers(key: signing.PrivateKey) -> None:
    envelope = signing.sign_envelope(KIND, b'{"a": 1}', [key])
    text, by = signing.verify_envelope(envelope, KIND, [key.public])
    assert text == b'{"a": 1}'
    assert [key.id for key in by] == [key.public.id]


def test_the_pre_authentication_encoding_follows_the_specification() -> None:
    # the example in DSSE's own document
    assert signing.pre_authentication_encoding("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_an_invalid_envelope_is_refused_with_the_reason(
    tmp_path: Path, key: signing.PrivateKey
) -> None:
    signing.generate_key(tmp_path / "other")
    other = signing.load_private_key(tmp_path / "other")
    good = signing.sign_envelope(KIND, b"text", [key])
    altered = {**good, "payload": signing.sign_envelope(KIND, b"toxt", [])["payload"]}
    cases = {
        "not signed": signing.sign_envelope(KIND, b"text", []),
        "none of them is trusted": signing.sign_envelope(KIND, b"text", [other]),
        "does not match this text": altered,
        "and not": signing.sign_envelope("text/plain", b"text", [key]),
        "not an envelope": {"payloadType": KIND, "payload": "?", "signatures": []},
    }
    for message, envelope in cases.items():
        with pytest.raises(signing.InvalidEnvelope, match=message):
            signing.verify_envelope(envelope, KIND, [key.public])
    nothings: list[object] = [None, [], "text", {"payloadType": KIND}]
    for nothing in nothings:
        with pytest.raises(signing.InvalidEnvelope):
            signing.open_envelope(nothing, KIND)
