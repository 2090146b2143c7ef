"""Bundles that are loaded only if a trusted key signed for them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import tvmflow
from tvmflow.core import signing
from tvmflow.core.canonical_json import canonical
from tvmflow.core.errors import BundleError, UsageError
from tvmflow.runtime import bundles, c_loader, statements

STATEMENT = {
    "_type": statements.STATEMENT_TYPE,
    "predicateType": statements.PREDICATE_TYPE,
    "predicate": {"buildDefinition": {"buildType": statements.BUILD_TYPE}},
}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with the keys `release` and `other`."""
    folder = tmp_path / "keys"
    for name in ("release", "other"):
        signing.generate_key(folder / name)
    return folder


@pytest.fixture
def bundle(small_bundle: Path, tmp_path: Path) -> Path:
    path = tmp_path / "dist" / "net" / "host" / "net.tvmflow"
    path.parent.mkdir(parents=True)
    shutil.copyfile(small_bundle, path)
    return path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries whose code was loaded."""
    seen: list[str] = []

    class Recorded(c_loader.NativeProgram):
        def __init__(self, path: Path, *arguments: Any) -> None:
            seen.append(hashlib.sha256(path.read_bytes()).hexdigest())
            super().__init__(path, *arguments)

    monkeypatch.setattr("tvmflow.runtime.loading.NativeProgram", Recorded)
    return seen


def sign(bundle: Path, *private_keys: Path, statement: object = STATEMENT, name: str = "") -> None:
    """Write a statement beside a bundle."""
    digest = {"sha256": hashlib.sha256(bundle.read_bytes()).hexdigest()}
    subject = [{"name": name or bundle.name, "digest": digest}]
    assert isinstance(statement, dict)
    text = canonical({**statement, "subject": subject})
    signers = [signing.load_private_key(path) for path in private_keys]
    envelope = signing.sign_envelope(statements.PAYLOAD_TYPE, text, signers)
    bundle.with_name("net.intoto.jsonl").write_text(json.dumps(envelope) + "\n")


def test_a_signed_bundle_is_loaded(bundle: Path, keys: Path, loaded: list[str]) -> None:
    sign(bundle, keys / "release")
    for trusted in (keys / "release.pub", [str(keys / "release.pub")], keys):
        assert tvmflow.load(bundle, trusted_keys=trusted).manifest["name"] == "small"
    assert len(loaded) == 3


def refused(bundle: Path, keys: Path, words: str) -> None:
    with pytest.raises(BundleError, match=words) as raised:
        tvmflow.load(bundle, trusted_keys=[keys / "release.pub"])
    assert str(bundle) in raised.value.message and raised.value.fix


def test_what_no_trusted_key_signed_for_is_refused(
    bundle: Path, keys: Path, loaded: list[str]
) -> None:
    """No statement, no signature, that of another key, and one of a statement about other things."""
    refused(bundle, keys, "no statement of provenance is beside it")
    sign(bundle)
    refused(bundle, keys, "it is not signed")
    sign(bundle, keys / "other")
    refused(bundle, keys, "none of them is trusted")
    sign(bundle, keys / "release", name="another.tvmflow")
    assert tvmflow.load(bundle, trusted_keys=keys / "release.pub")
    sign(bundle, keys / "release", statement={**STATEMENT, "predicateType": "https://x/warning"})
    refused(bundle, keys, "its predicateType is")
    assert len(loaded) == 1


def test_a_bundle_that_was_replaced_is_refused(bundle: Path, keys: Path, loaded: list[str]) -> None:
    """Its own manifest agrees with it, and the statement does not."""
    sign(bundle, keys / "release")
    with bundle.open("r+b") as stream:
        # the time of the first entry, which no digest in the bundle covers
        stream.seek(10)
        stream.write(b"\1")
    assert tvmflow.load(bundle)
    refused(bundle, keys, "it is not the file that was delivered")
    assert len(loaded) == 1


def test_what_was_checked_is_what_is_loaded(
    bundle: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is edited after its signature was checked does not matter."""
    sign(bundle, keys / "release")
    original = bundles.read_open_bundle

    def edit_first(path: str | Path, stream: object, libraries: Path) -> object:
        bundle.write_bytes(b"something else")
        return original(path, stream, libraries)  # type: ignore[arg-type]

    monkeypatch.setattr("tvmflow.runtime.bundles.read_open_bundle", edit_first)
    assert tvmflow.load(bundle, trusted_keys=keys / "release.pub").manifest["name"] == "small"


def test_keys_have_to_be_named(bundle: Path, keys: Path) -> None:
    """An empty list of keys trusts nobody."""
    sign(bundle, keys / "release")
    with pytest.raises(BundleError, match="no key is trusted"):
        tvmflow.load(bundle, trusted_keys=[])
    with pytest.raises(UsageError, match="there is no key"):
        tvmflow.load(bundle, trusted_keys=keys / "gone.pub")
