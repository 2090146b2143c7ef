"""Checks of files against statements: each difference is reported with its own message."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.provenance import BUNDLE, World, bundle_with
from tvmflow.core import signing
from tvmflow.core.files import hash_file
from tvmflow.provenance.check import check_delivered
from tvmflow.provenance.write import sign_statements
from tvmflow.runtime import statements
from tvmflow.runtime.statements import Finding


class Delivered:
    """A delivered and signed folder, and its signer."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.folder = folder
        self.statement = folder / "net.intoto.jsonl"
        self.key = signing.load_private_key(keys)
        self.trusted = signing.load_public_keys(keys.with_name(keys.name + ".pub"))

    def check(self, *trusted: signing.PublicKey) -> dict[str, Finding]:
        findings = check_delivered(self.folder, trusted)
        return {entry.path.relative_to(self.folder).as_posix(): entry for entry in findings}

    def bad(self, *trusted: signing.PublicKey) -> dict[str, str]:
        """Return the messages of the files that are not good."""
        return {
            name: entry.message for name, entry in self.check(*trusted).items() if not entry.good
        }

    def envelope(self) -> dict[str, Any]:
        findings: dict[str, Any] = json.loads(self.statement.read_bytes())
        return findings

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Edit what the statement says, and leave the signatures."""
        envelope = self.envelope()
        body = json.loads(base64.b64decode(envelope["payload"]))
        change(body)
        envelope["payload"] = base64.b64encode(json.dumps(body).encode()).decode()
        self.statement.write_text(json.dumps(envelope))


@pytest.fixture(scope="module")
def signed_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("signed_world")
    signing.generate_key(root / "key")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(signing.KEY_VARIABLE, str(root / "key"))
        World(root / "world").deliver()
    return root


@pytest.fixture
def delivered(signed_world: Path, tmp_path: Path) -> Delivered:
    shutil.copytree(signed_world / "world" / "dist", tmp_path / "dist")
    return Delivered(tmp_path / "dist" / "net" / "host", signed_world / "key")


@pytest.fixture
def stranger(tmp_path: Path) -> signing.PublicKey:
    return signing.generate_key(tmp_path / "stranger")


def test_what_was_delivered_is_good(delivered: Delivered) -> None:
    (key,) = delivered.trusted
    findings = delivered.check(key)
    assert {name: entry.good for name, entry in findings.items()} == dict.fromkeys(
        [
            "net.cdx.json",
            "net.intoto.jsonl",
            "net.measurements.intoto.jsonl",
            "measurements.json",
            "net.so",
            "net.tvmflow",
            "roofline.svg",
            "verify.json",
            "README.md",
        ],
        True,
    )
    assert findings["net.so"].message == f"as delivered, signed by {key.name} ({key.id[:12]})"


def test_without_trusted_keys_the_signature_is_reported_as_not_checked(
    delivered: Delivered,
) -> None:
    assert delivered.check()["net.so"].message == (
        f"as delivered, signed by {delivered.key.public.id[:12]}: "
        "not checked, because no trusted keys are given"
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
        (message,) = delivered.bad(*trusted).values()
        assert message.startswith("it is not the file that was delivered: its sha256 is ")


def test_swapped_files_are_reported(delivered: Delivered) -> None:
    library, verdict, aside = (
        delivered.folder / name for name in ("net.so", "verify.json", "aside")
    )
    library.rename(aside)
    verdict.rename(library)
    aside.rename(verdict)
    assert delivered.bad() == {
        "net.so": "it is 'verify.json' under the name of 'net.so'",
        "verify.json": "it is 'net.so' under the name of 'verify.json'",
    }


def test_a_missing_file_and_an_additional_one_are_reported(delivered: Delivered) -> None:
    (delivered.folder / "net.so").unlink()
    (delivered.folder / "extra.so").write_bytes(b"extra")
    assert delivered.bad() == {
        "net.so": "it is missing, but net.intoto.jsonl names it",
        "extra.so": "net.intoto.jsonl does not name it",
    }


def test_an_untrusted_key_is_reported(delivered: Delivered, stranger: signing.PublicKey) -> None:
    """No file is accepted without the statement."""
    bad = delivered.bad(stranger)
    why = f"it is signed by {delivered.key.public.id[:12]}, and none of them is trusted"
    for name in ("net.intoto.jsonl", "net.measurements.intoto.jsonl"):
        assert bad.pop(name) == why
    assert set(bad.values()) == {f"net.intoto.jsonl is not believed: {why}"}
    assert len(bad) == 7


def test_a_stripped_signature_is_refused_where_keys_are_given(delivered: Delivered) -> None:
    delivered.statement.write_text(json.dumps({**delivered.envelope(), "signatures": []}))
    assert delivered.bad() == {}
    assert delivered.check()["net.so"].message == "as delivered, not signed"
    assert delivered.bad(*delivered.trusted)["net.intoto.jsonl"] == "it is not signed"


def test_an_edited_statement_is_refused_by_its_signature(delivered: Delivered) -> None:
    """An edited digest needs the key to sign again."""
    (delivered.folder / "net.so").write_bytes(b"evil")

    def change(body: dict[str, Any]) -> None:

        for entry in body["subject"]:
            if entry["name"] == "net.so":
                entry["digest"]["sha256"] = hash_file(str(delivered.folder / "net.so"))

    delivered.edit(change)
    assert delivered.bad() == {}
    message = delivered.bad(*delivered.trusted)["net.intoto.jsonl"]
    assert message == f"the signature of {delivered.trusted[0].name} does not match this text"


def test_a_statement_of_another_type_is_refused_even_when_signed_by_a_trusted_key(
    delivered: Delivered,
) -> None:
    envelope = signing.sign_envelope(statements.PAYLOAD_TYPE, b'{"_type": "x"}', [delivered.key])
    delivered.statement.write_text(json.dumps(envelope))
    message = delivered.bad(*delivered.trusted)["net.intoto.jsonl"]
    assert message == f"its _type is 'x' and not {statements.STATEMENT_TYPE}"


def test_a_bundle_must_be_of_the_model_that_the_statement_names(delivered: Delivered) -> None:
    """Its content must match its own manifest too, even if the statement has its digest."""

    path = delivered.folder / "net.tvmflow"

    def change(body: dict[str, Any]) -> None:
        for entry in body["subject"]:
            if entry["name"] == "net.tvmflow":
                entry["digest"]["sha256"] = hash_file(str(path))

    bundle_with(path, library__so=b"another")
    delivered.edit(change)
    assert delivered.bad() == {
        "net.tvmflow": "its 'library.so' is not the one that its manifest describes"
    }
    with zipfile.ZipFile(io.BytesIO(BUNDLE)) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    manifest["model"]["weights_sha256"] = "0" * 64
    bundle_with(path, manifest__json=json.dumps(manifest).encode())
    delivered.edit(change)
    assert delivered.bad() == {
        "net.tvmflow": "its manifest names another params.safetensors than net.intoto.jsonl does"
    }


def test_a_moved_file_is_known_by_its_content(delivered: Delivered, tmp_path: Path) -> None:
    moved = tmp_path / "model-7.bin"
    shutil.copy(delivered.folder / "net.so", moved)
    (alone,) = check_delivered(moved, ())
    assert (alone.good, alone.message) == (
        False,
        "no statement of provenance is beside it or in a folder above",
    )
    (with_statement,) = check_delivered(moved, delivered.trusted, [delivered.statement])
    assert with_statement.good and with_statement.message.startswith(
        "delivered as net.so, signed by "
    )


def test_a_file_in_a_subfolder_is_known_by_the_statement_above(delivered: Delivered) -> None:
    below = delivered.folder / "include" / "model.hpp"
    below.parent.mkdir()
    below.write_bytes(b"a header")

    def change(body: dict[str, Any]) -> None:

        digest = {"sha256": hash_file(str(below))}
        body["subject"].append({"name": "include/model.hpp", "digest": digest})

    delivered.edit(change)
    (findings,) = check_delivered(below, ())
    assert findings.good
    assert delivered.bad() == {}


def test_one_statement_of_several_is_enough(delivered: Delivered) -> None:
    """A file may hold more envelopes, also untrusted ones."""
    unsigned = {**delivered.envelope(), "signatures": []}
    text = delivered.statement.read_text() + json.dumps(unsigned) + "\n\n"
    delivered.statement.write_text(text)
    bad = delivered.bad(*delivered.trusted)
    assert bad == {"net.intoto.jsonl": "it is not signed"}


def test_two_statements_must_not_contradict_each_other(delivered: Delivered) -> None:
    """A library of another delivery is not accepted with its own signed statement."""
    original = delivered.statement.read_bytes()
    (delivered.folder / "net.so").write_bytes(b"of another delivery")

    def change(body: dict[str, Any]) -> None:
        digest = {"sha256": hash_file(str(delivered.folder / "net.so"))}
        body["subject"] = [{"name": "net.so", "digest": digest}]

    delivered.edit(change)
    text = base64.b64decode(delivered.envelope()["payload"])
    other = signing.sign_envelope(statements.PAYLOAD_TYPE, text, [delivered.key])
    (delivered.folder / "other.intoto.jsonl").write_text(json.dumps(other))
    delivered.statement.write_bytes(original)
    (message,) = delivered.bad(*delivered.trusted).values()
    assert message.startswith("it is not the file that was delivered")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"\n\n", "it is empty"),
        (b"{}", "it is not an envelope"),
        (b"[]", "it is not an envelope"),
        (b"\x00", "it is not JSON"),
        (b"[" * 200_000, "it nests too deeply"),
        (b'{"payloadType": "application/vnd.in-toto+json", "payload": 1, "signatures": []}', "not an envelope"),
        (b'{"payloadType": "text/plain", "payload": "", "signatures": []}', "it holds 'text/plain'"),
    ],
    ids=str,
)  # fmt: skip
def test_an_unreadable_statement_is_reported(
    delivered: Delivered, content: bytes, message: str
) -> None:
    delivered.statement.write_bytes(content)
    for trusted in ((), delivered.trusted):
        assert message in delivered.bad(*trusted)["net.intoto.jsonl"]


@pytest.mark.parametrize(
    "signature",
    [1, None, {}, {"keyid": [], "sig": ""}, {"keyid": "x", "sig": "é"}, {"keyid": "x", "sig": 3}],
    ids=str,
)
def test_a_malformed_signature_is_reported(delivered: Delivered, signature: Any) -> None:
    delivered.statement.write_text(json.dumps({**delivered.envelope(), "signatures": [signature]}))
    assert delivered.bad(*delivered.trusted)["net.intoto.jsonl"]
    delivered.check()


def test_a_short_signature_of_a_trusted_key_is_refused(delivered: Delivered) -> None:
    signature = {"keyid": delivered.key.public.id, "sig": "AAAA"}
    delivered.statement.write_text(json.dumps({**delivered.envelope(), "signatures": [signature]}))
    assert "does not match this text" in delivered.bad(*delivered.trusted)["net.intoto.jsonl"]


def test_links_and_pipes_are_not_followed(delivered: Delivered) -> None:
    """Nothing hangs, and no file outside counts as delivered."""
    path = delivered.folder / "net.so"
    path.rename(delivered.folder.parent / "net.so")
    path.symlink_to("../net.so")
    os.mkfifo(delivered.folder / "pipe")
    (delivered.folder / "up").symlink_to("..")
    message = "it is not a regular file, and nothing else was delivered"
    assert delivered.bad() == {"net.so": message, "pipe": message, "up": message}


def test_an_empty_folder_is_not_good(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (findings,) = check_delivered(tmp_path / "empty", ())
    assert not findings.good


@pytest.mark.parametrize("older", [("net.so",), ("verify.json",), ("net.so", "verify.json")])
def test_files_of_an_older_signed_delivery_are_refused_beside_newer_ones(
    delivered: Delivered, older: tuple[str, ...]
) -> None:
    """Although a trusted key signed both, and both statements are there."""
    newer = delivered.statement.read_bytes()
    for name in older:
        (delivered.folder / name).write_bytes(b"older")

    def change(body: dict[str, Any]) -> None:
        for subject in body["subject"]:
            subject["digest"]["sha256"] = hash_file(str(delivered.folder / subject["name"]))

    delivered.edit(change)
    sign_statements(delivered.statement, delivered.key)
    delivered.statement.rename(delivered.statement.with_name("old.intoto.jsonl"))
    delivered.statement.write_bytes(newer)
    bad = delivered.bad()
    assert {*older} <= {*bad}
    assert all(bad[name].startswith("it is not the file that was delivered") for name in older)
