"""What a remote cache is trusted with: signed results, results of others, and credentials."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.cache_server import Cache, cache_server
from tests.support.small_runs import FETCHED, WRITES, RunHost, outcomes, plan_of
from tvmflow.core import signing
from tvmflow.core.canonical_json import digest_of
from tvmflow.core.types import StageKey
from tvmflow.store.garbage_collection import measure_usage
from tvmflow.store.remote import signed_actions
from tvmflow.store.remote.connection import BlobRef
from tvmflow.store.remote.signed_actions import Action, make_action_result, make_envelope

PLAN = plan_of(width=2)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    """Return two signers, `ci` and `eve`."""
    made = {}
    for name in ("ci", "eve"):
        made[name] = tmp_path / "keys" / name
        signing.generate_key(made[name])
    return made


def trusted(path: Path) -> tuple[signing.PublicKey, ...]:
    return signing.load_public_keys(path.with_name(path.name + signing.PUBLIC_SUFFIX))


def test_signed_results_are_accepted_with_their_signer(
    cache: Cache, tmp_path: Path, keys: dict[str, Path]
) -> None:
    """The signer is in the reason of each stage, and stays with the result, also when it is uploaded again."""
    signer = signing.load_private_key(keys["ci"])
    RunHost(tmp_path / "one", cache.url, **WRITES, signer=signer).run(PLAN)
    two = RunHost(tmp_path / "two", cache.url, trusted=trusted(keys["ci"]))
    report = two.run(PLAN)
    assert outcomes(report) == FETCHED
    name = f"ci ({signer.public.id[:12]})"
    assert {stage.reason for stage in report.stages} == {f"from {cache.url}, signed by {name}"}
    with cache_server() as second:
        remote_client = RunHost(tmp_path / "two", second.url, writes=True).remote_client()
        sent = dict(remote_client.uploader.upload_all(two.store.keys()))
        remote_client.finish()
        assert len(sent) == 7 and all(isinstance(outcome, int) for outcome in sent.values())
        three = RunHost(tmp_path / "three", second.url, trusted=trusted(keys["ci"]))
        assert outcomes(three.run(PLAN)) == FETCHED


@pytest.mark.parametrize("checks", [True, False])
def test_the_usage_of_a_store_shows_signatures(
    cache: Cache, tmp_path: Path, keys: dict[str, Path], checks: bool
) -> None:
    """How many fetched results each key signed and nobody did, and whether that was verified."""
    signer = signing.load_private_key(keys["ci"])
    machine = RunHost(tmp_path / "two", cache.url, trusted=trusted(keys["ci"]) if checks else ())
    RunHost(tmp_path / "one", cache.url, **WRITES, signer=signer).run(PLAN)
    machine.run(PLAN)
    key = signer.public.id[:12] + ("" if checks else " (not verified)")
    expected = [(f"signed by {key}", 7)]
    if not checks:
        RunHost(tmp_path / "three", cache.url, **WRITES).run(plan_of(value=9))
        machine.run(plan_of(value=9))
        expected.append(("fetched, not signed", 4))
    # made here
    machine.access = machine.access._replace(reads=False)
    machine.run(plan_of(value=5))
    rows = measure_usage(machine.store).rows
    assert [row[:2] for row in rows if "signed" in row.name] == expected


@pytest.mark.parametrize(
    ("signed_by", "why"),
    [(None, "it is not signed"), ("eve", "and none of them is trusted")],
)
def test_untrusted_results_are_rejected_and_reported(
    signed_by: str | None, why: str, cache: Cache, tmp_path: Path, keys: dict[str, Path]
) -> None:
    """Their stages run here; a machine that signs replaces them with its own."""
    signer = signing.load_private_key(keys[signed_by]) if signed_by else None
    RunHost(tmp_path / "one", cache.url, **WRITES, signer=signer).run(plan_of())
    two = RunHost(tmp_path / "two", cache.url, trusted=trusted(keys["ci"]))
    assert set(outcomes(two.run(plan_of())).values()) == {"ran"}
    assert len(two.messages) == 4
    assert all("is rejected: " in text and why in text for text in two.messages)
    signer = signing.load_private_key(keys["ci"])
    mending = RunHost(
        tmp_path / "three", cache.url, **WRITES, signer=signer, trusted=trusted(keys["ci"])
    )
    mending.run(plan_of())
    four = RunHost(tmp_path / "four", cache.url, trusted=trusted(keys["ci"]))
    assert set(outcomes(four.run(plan_of())).values()) == {"fetched"}


def test_files_that_were_exchanged_under_a_signature_are_rejected(
    cache: Cache, tmp_path: Path, keys: dict[str, Path]
) -> None:
    """The signature is valid for other files."""
    signer = signing.load_private_key(keys["ci"])
    RunHost(tmp_path / "one", cache.url, **WRITES, signer=signer).run(plan_of())
    evil = b"another library"
    digest = hashlib.sha256(evil).hexdigest()
    cache.cas[digest] = evil
    for key, content in cache.ac.items():
        files = signed_actions.decode(content)
        files["files/main.bin"] = BlobRef(digest, len(evil))
        cache.ac[key] = signed_actions.encode(files)
    two = RunHost(tmp_path / "two", cache.url, trusted=trusted(keys["ci"]))
    assert set(outcomes(two.run(plan_of())).values()) == {"ran"}
    assert {text.partition("rejected: ")[2] for text in two.messages} == {
        "its two lists of files differ"
    }
    assert not Path(two.store.blobs.path(digest)).exists()


@pytest.mark.parametrize(
    "facts", [{"schedule_rules": 1}, {"kernels": 3}, {"schedule_rules": {"tuned": ["\x1b[2J"]}}]
)
def test_a_result_with_facts_that_no_such_stage_reports_is_rejected(
    facts: dict[str, Any], cache: Cache, tmp_path: Path
) -> None:
    """Otherwise the summary of the run would fail on them, or the terminal would obey them."""
    preimage = {"stage": "build", "settings": {}}
    action = Action(digest_of(preimage), (), facts, preimage, 1.5, "2024-01-01T00:00:00Z")
    envelope = make_envelope(action, None)
    blob = BlobRef(hashlib.sha256(envelope).hexdigest(), len(envelope))
    cache.cas[blob.digest] = envelope
    cache.ac[action.key] = make_action_result(action, blob)
    machine = RunHost(tmp_path, cache.url)
    client = machine.remote_client()
    assert client.reader.fetch(StageKey(action.key, preimage)) is None
    client.finish()
    assert machine.messages == [
        f"{cache.url}: the result {action.key[:12]} of build is rejected: "
        "its facts do not have the types of this stage"
    ]
    assert machine.store.record(action.key) is None


def test_credentials_are_never_shown(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password in the URL and a token in the environment are used, and are in no file, event or line."""
    monkeypatch.delenv("TVMFLOW_REMOTE_TOKEN", raising=False)
    url = cache.url.replace("http://", "http://ann:hunter2%40x@")
    machine = RunHost(tmp_path / "one", url, **WRITES)
    report = machine.run(plan_of())
    assert set(cache.authorizations) == {"Basic YW5uOmh1bnRlcjJAeA=="}
    cache.token = "nobody"
    refused = RunHost(tmp_path / "two", url, **WRITES)
    shown = [*machine.messages, *refused.messages, report, refused.run(plan_of()), machine.events]
    monkeypatch.setenv("TVMFLOW_REMOTE_TOKEN", "s3cret-token")
    with_token = RunHost(tmp_path / "three", cache.url, **WRITES)
    shown += [with_token.run(plan_of()), with_token.messages]
    assert "Bearer s3cret-token" in cache.authorizations
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    names = "".join(str(path) for path in tmp_path.rglob("*"))
    for secret in ("hunter2", "s3cret", "aHVudGVy", "YW5uOmh1"):
        assert secret not in repr(shown) and secret not in names
        assert secret.encode() not in files
        assert all(secret.encode() not in content for content in cache.cas.values())
