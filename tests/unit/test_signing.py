"""Keys and envelopes: what is accepted, and what is refused with which words."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tvmflow import signing
from tvmflow.errors import UsageError

KIND = "application/vnd.in-toto+json"


@pytest.fixture
def key(tmp_path: Path) -> signing.PrivateKey:
    signing.generate(tmp_path / "mine")
    return signing.load_private(tmp_path / "mine")


def test_the_two_halves_of_a_key_have_one_name(tmp_path: Path, key: signing.PrivateKey) -> None:
    (public,) = signing.load_public(tmp_path / "mine.pub")
    assert public.id == key.public.id
    assert public.signed(key.sign(b"text"), b"text")
    assert not public.signed(key.sign(b"text"), b"another")


def test_only_its_owner_reads_a_private_key(tmp_path: Path, key: signing.PrivateKey) -> None:
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600


def test_no_key_is_overwritten(tmp_path: Path, key: signing.PrivateKey) -> None:
    before = (tmp_path / "mine").read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        signing.generate(tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == before


def test_a_folder_of_keys_holds_those_that_end_in_pub(tmp_path: Path) -> None:
    ids = {signing.generate(tmp_path / name).id for name in ("a", "b")}
    assert {key.id for key in signing.load_public(tmp_path)} == ids


def test_several_keys_may_stand_in_one_file(tmp_path: Path) -> None:
    ids = [signing.generate(tmp_path / name).id for name in ("a", "b")]
    both = tmp_path / "both"
    both.write_bytes((tmp_path / "a.pub").read_bytes() + b"\n" + (tmp_path / "b.pub").read_bytes())
    assert [key.id for key in signing.load_public(both)] == ids


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs the program openssl")
def test_openssl_makes_keys_that_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "made.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", path], check=True)
    key = signing.load_private(path)
    assert key.public.signed(key.sign(b"x"), b"x")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no private key"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "no private key"),
    ],
)
def test_what_is_no_key_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "strange"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        signing.load_private(path)
    with pytest.raises(UsageError, match="holds no public key"):
        signing.load_public(path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no key"):
        signing.load_private(tmp_path / "nobody")


def test_an_envelope_gives_back_text_and_signers(key: signing.PrivateKey) -> None:
    envelope = signing.seal(KIND, b'{"a": 1}', [key])
    text, by = signing.unseal_trusted(envelope, KIND, [key.public])
    assert text == b'{"a": 1}'
    assert [each.id for each in by] == [key.public.id]


def test_the_signed_text_is_that_of_the_specification() -> None:
    # the example in DSSE's own document
    assert signing.signed_text("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_an_envelope_is_refused_for_each_thing_that_is_wrong(
    tmp_path: Path, key: signing.PrivateKey
) -> None:
    signing.generate(tmp_path / "other")
    other = signing.load_private(tmp_path / "other")
    good = signing.seal(KIND, b"text", [key])
    altered = {**good, "payload": signing.seal(KIND, b"toxt", [])["payload"]}
    cases = {
        "not signed": signing.seal(KIND, b"text", []),
        "none of them is trusted": signing.seal(KIND, b"text", [other]),
        "is not of this text": altered,
        "and not": signing.seal("text/plain", b"text", [key]),
        "no envelope": {"payloadType": KIND, "payload": "?", "signatures": []},
    }
    for words, envelope in cases.items():
        with pytest.raises(signing.NotSigned, match=words):
            signing.unseal_trusted(envelope, KIND, [key.public])
    nothings: list[object] = [None, [], "text", {"payloadType": KIND}]
    for nothing in nothings:
        with pytest.raises(signing.NotSigned):
            signing.unseal(nothing, KIND)
