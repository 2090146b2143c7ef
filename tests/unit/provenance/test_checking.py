"""Files against their statements: each way in which they may differ is refused in words of its own."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.provenance import LIBRARY, World, bundle_with
from tvmflow import signing
from tvmflow.provenance import statement
from tvmflow.provenance.checking import Finding, check
from tvmflow.stores.local import hash_file


class Delivered:
    """A folder that was delivered and signed, and who signed it."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.folder = folder
        self.statement = folder / "net.intoto.jsonl"
        self.key = signing.load_private(keys)
        self.trusted = signing.load_public(keys.with_name(keys.name + ".pub"))

    def check(self, *trusted: signing.PublicKey) -> dict[str, Finding]:
        found = check(self.folder, trusted)
        return {each.path.relative_to(self.folder).as_posix(): each for each in found}

    def bad(self, *trusted: signing.PublicKey) -> dict[str, str]:
        """The files that are not good, and why."""
        return {name: each.words for name, each in self.check(*trusted).items() if not each.good}

    def envelope(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.statement.read_bytes())
        return found

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Edit what the statement says, and leave the signatures."""
        envelope = self.envelope()
        body = json.loads(base64.b64decode(envelope["payload"]))
        change(body)
        envelope["payload"] = base64.b64encode(json.dumps(body).encode()).decode()
        self.statement.write_text(json.dumps(envelope))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    signing.generate(root / "key")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(signing.KEY_VARIABLE, str(root / "key"))
        World(root / "world").deliver()
    return root


@pytest.fixture
def delivered(made: Path, tmp_path: Path) -> Delivered:
    shutil.copytree(made / "world" / "dist", tmp_path / "dist")
    return Delivered(tmp_path / "dist" / "net" / "host", made / "key")


@pytest.fixture
def stranger(tmp_path: Path) -> signing.PublicKey:
    return signing.generate(tmp_path / "stranger")


def test_what_was_delivered_is_good(delivered: Delivered) -> None:
    (key,) = delivered.trusted
    found = delivered.check(key)
    assert {name: each.good for name, each in found.items()} == dict.fromkeys(
        [
            "net.cdx.json",
            "net.intoto.jsonl",
            "net.so",
            "net.tvmflow",
            "roofline.svg",
            "verify.json",
        ],
        True,
    )
    assert found["net.so"].words == f"as delivered, signed by {key.name} ({key.id[:12]})"


def test_without_trusted_keys_it_says_that_nobody_looked_at_the_signature(
    delivered: Delivered,
) -> None:
    assert delivered.check()["net.so"].words == (
        f"as delivered, signed by {delivered.key.public.id[:12]}: "
        "not checked, for no trusted keys were given"
    )


@pytest.mark.parametrize(
    "name", ["net.so", "net.tvmflow", "verify.json", "net.cdx.json", "roofline.svg"]
)
def test_a_flipped_bit_is_found_in_every_file(delivered: Delivered, name: str) -> None:
    path = delivered.folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for trusted in ((), delivered.trusted):
        (words,) = delivered.bad(*trusted).values()
        assert words.startswith("it is not the file that was delivered: its sha256 is ")


def test_swapped_files_are_told_apart(delivered: Delivered) -> None:
    one, other, aside = (delivered.folder / name for name in ("net.so", "verify.json", "aside"))
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    assert delivered.bad() == {
        "net.so": "it is 'verify.json' under the name of 'net.so'",
        "verify.json": "it is 'net.so' under the name of 'verify.json'",
    }


def test_a_file_that_is_missing_and_one_that_is_too_much(delivered: Delivered) -> None:
    (delivered.folder / "net.so").unlink()
    (delivered.folder / "extra.so").write_bytes(b"extra")
    assert delivered.bad() == {
        "net.so": "it is missing: net.intoto.jsonl speaks of it",
        "extra.so": "net.intoto.jsonl says nothing of it",
    }


def test_a_wrong_key_is_named(delivered: Delivered, stranger: signing.PublicKey) -> None:
    """Every file falls with the statement."""
    bad = delivered.bad(stranger)
    why = f"it is signed by {delivered.key.public.id[:12]}, and none of them is trusted"
    assert bad.pop("net.intoto.jsonl") == why
    assert set(bad.values()) == {f"net.intoto.jsonl is not believed: {why}"}
    assert len(bad) == 5


def test_a_stripped_signature_is_refused_where_keys_are_given(delivered: Delivered) -> None:
    delivered.statement.write_text(json.dumps({**delivered.envelope(), "signatures": []}))
    assert delivered.bad() == {}
    assert delivered.check()["net.so"].words == "as delivered, not signed"
    assert delivered.bad(*delivered.trusted)["net.intoto.jsonl"] == "it is not signed"


def test_an_edited_statement_is_refused_by_its_signature(delivered: Delivered) -> None:
    """Whoever puts in another library and edits its digest has not the key."""
    (delivered.folder / "net.so").write_bytes(b"evil")

    def change(body: dict[str, Any]) -> None:

        for each in body["subject"]:
            if each["name"] == "net.so":
                each["digest"]["sha256"] = hash_file(str(delivered.folder / "net.so"))

    delivered.edit(change)
    assert delivered.bad() == {}
    words = delivered.bad(*delivered.trusted)["net.intoto.jsonl"]
    assert words == f"the signature of {delivered.trusted[0].name} is not of this text"


def test_a_statement_of_another_make_signed_by_a_friend_is_none_of_ours(
    delivered: Delivered,
) -> None:
    envelope = signing.seal(statement.PAYLOAD_TYPE, b'{"_type": "x"}', [delivered.key])
    delivered.statement.write_text(json.dumps(envelope))
    words = delivered.bad(*delivered.trusted)["net.intoto.jsonl"]
    assert words == f"its _type is 'x' and not {statement.STATEMENT_TYPE}"


def test_a_bundle_must_be_of_the_model_that_the_statement_names(delivered: Delivered) -> None:
    """And whole inside: a statement that knows its digest does not make it so."""

    path = delivered.folder / "net.tvmflow"

    def change(body: dict[str, Any]) -> None:
        for each in body["subject"]:
            if each["name"] == "net.tvmflow":
                each["digest"]["sha256"] = hash_file(str(path))

    bundle_with(path, library__so=b"another")
    delivered.edit(change)
    assert delivered.bad() == {
        "net.tvmflow": "its 'library.so' is not the one that its manifest describes"
    }
    manifest = {"bundle": 1, "library": "library.so", "model": {"weights_sha256": "0" * 64}}
    manifest["sha256"] = {"library.so": hashlib.sha256(LIBRARY).hexdigest()}
    bundle_with(path, manifest__json=json.dumps(manifest).encode())
    delivered.edit(change)
    assert delivered.bad() == {
        "net.tvmflow": "its manifest names another params.safetensors than net.intoto.jsonl does"
    }


def test_a_file_that_went_elsewhere_is_known_by_its_content(
    delivered: Delivered, tmp_path: Path
) -> None:
    moved = tmp_path / "model-7.bin"
    shutil.copy(delivered.folder / "net.so", moved)
    (alone,) = check(moved, ())
    assert (alone.good, alone.words) == (
        False,
        "no statement of provenance is beside it or in a folder above",
    )
    (given,) = check(moved, delivered.trusted, [delivered.statement])
    assert given.good and given.words.startswith("delivered as net.so, signed by ")


def test_a_file_below_is_known_by_the_statement_above(delivered: Delivered) -> None:
    below = delivered.folder / "include" / "model.hpp"
    below.parent.mkdir()
    below.write_bytes(b"a header")

    def change(body: dict[str, Any]) -> None:

        digest = {"sha256": hash_file(str(below))}
        body["subject"].append({"name": "include/model.hpp", "digest": digest})

    delivered.edit(change)
    (found,) = check(below, ())
    assert found.good
    assert delivered.bad() == {}


def test_one_statement_of_several_is_enough(delivered: Delivered) -> None:
    """A file of envelopes may hold more, also such as nobody here believes."""
    unsigned = {**delivered.envelope(), "signatures": []}
    text = delivered.statement.read_text() + json.dumps(unsigned) + "\n\n"
    delivered.statement.write_text(text)
    bad = delivered.bad(*delivered.trusted)
    assert bad == {"net.intoto.jsonl": "it is not signed"}


def test_two_statements_must_not_contradict_each_other(delivered: Delivered) -> None:
    """A library of another delivery does not get in with the statement that came with it, signed as that may be."""
    original = delivered.statement.read_bytes()
    (delivered.folder / "net.so").write_bytes(b"of another delivery")

    def change(body: dict[str, Any]) -> None:
        digest = {"sha256": hash_file(str(delivered.folder / "net.so"))}
        body["subject"] = [{"name": "net.so", "digest": digest}]

    delivered.edit(change)
    text = base64.b64decode(delivered.envelope()["payload"])
    other = signing.seal(statement.PAYLOAD_TYPE, text, [delivered.key])
    (delivered.folder / "other.intoto.jsonl").write_text(json.dumps(other))
    delivered.statement.write_bytes(original)
    (words,) = delivered.bad(*delivered.trusted).values()
    assert words.startswith("it is not the file that was delivered")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"\n\n", "it is empty"),
        (b"{}", "it is no envelope"),
        (b"[]", "it is no envelope"),
        (b"\x00", "it is no JSON"),
        (b"[" * 200_000, "it nests too deeply"),
        (b'{"payloadType": "application/vnd.in-toto+json", "payload": 1, "signatures": []}', "no envelope"),
        (b'{"payloadType": "text/plain", "payload": "", "signatures": []}', "it holds 'text/plain'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_statement_that_cannot_be_read_is_a_sentence(
    delivered: Delivered, content: bytes, words: str
) -> None:
    delivered.statement.write_bytes(content)
    for trusted in ((), delivered.trusted):
        assert words in delivered.bad(*trusted)["net.intoto.jsonl"]


@pytest.mark.parametrize(
    "signature",
    [1, None, {}, {"keyid": [], "sig": ""}, {"keyid": "x", "sig": "é"}, {"keyid": "x", "sig": 3}],
    ids=str,
)
def test_a_strange_signature_is_a_sentence(delivered: Delivered, signature: Any) -> None:
    delivered.statement.write_text(json.dumps({**delivered.envelope(), "signatures": [signature]}))
    assert delivered.bad(*delivered.trusted)["net.intoto.jsonl"]
    delivered.check()


def test_a_short_signature_under_a_trusted_name_is_refused(delivered: Delivered) -> None:
    signature = {"keyid": delivered.key.public.id, "sig": "AAAA"}
    delivered.statement.write_text(json.dumps({**delivered.envelope(), "signatures": [signature]}))
    assert "is not of this text" in delivered.bad(*delivered.trusted)["net.intoto.jsonl"]


def test_links_and_pipes_are_not_followed(delivered: Delivered) -> None:
    """Nothing hangs, and nothing outside is taken for what was delivered."""
    path = delivered.folder / "net.so"
    path.rename(delivered.folder.parent / "net.so")
    path.symlink_to("../net.so")
    os.mkfifo(delivered.folder / "pipe")
    (delivered.folder / "up").symlink_to("..")
    words = "it is no plain file, and nothing else was delivered"
    assert delivered.bad() == {"net.so": words, "pipe": words, "up": words}


def test_an_empty_folder_is_not_good(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (found,) = check(tmp_path / "empty", ())
    assert not found.good
