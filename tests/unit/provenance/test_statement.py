"""Statements of provenance: their content, and which are refused."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.provenance import MODEL, TRIAL, TVM, WORKLOAD, World
from tests.support.validation import check_envelope, check_statement
from tvmflow.core import signing
from tvmflow.core.documents import Unreadable
from tvmflow.core.errors import UsageError
from tvmflow.core.files import hash_file
from tvmflow.core.version import VERSION
from tvmflow.provenance import statement
from tvmflow.provenance.delivered import read_builder_id
from tvmflow.runtime import statements
from tvmflow.store.addresses import without_secrets
from tvmflow.targets.tvm_target import with_threads
from tvmflow.tuning.ledger import target_key


def body_of(world: World, path: Path | None = None) -> dict[str, Any]:
    world.deliver()
    payload = json.loads((path or world.statement).read_bytes())["payload"]
    body_json: dict[str, Any] = json.loads(base64.b64decode(payload))
    return body_json


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture
def body(world: World) -> dict[str, Any]:
    return body_of(world)


def test_its_subjects_are_all_files_beside_it(world: World, body: dict[str, Any]) -> None:
    """Including the bill of materials, but not itself."""
    digests = {entry["name"]: entry["digest"] for entry in body["subject"]}
    files = {path.name for path in world.folder.iterdir()}
    files -= {world.statement.name, world.measurements.name, "measurements.json"}
    assert digests == {name: {"sha256": hash_file(str(world.folder / name))} for name in files}


def test_it_is_an_in_toto_statement_with_slsa_provenance(body: dict[str, Any]) -> None:
    assert body["_type"] == "https://in-toto.io/Statement/v1"
    assert body["predicateType"] == "https://slsa.dev/provenance/v1"
    assert set(body["predicate"]) == {"buildDefinition", "runDetails"}
    definition = body["predicate"]["buildDefinition"]
    assert definition["buildType"] == statements.BUILD_TYPE
    assert definition["externalParameters"]["settings"].keys() == {
        "import", "lower/host", "extract_tasks/host", "build/host", "export/host", "verify/host",
    }  # fmt: skip
    assert "target" not in definition["externalParameters"]["settings"]["verify/host"]
    assert "key" not in definition["internalParameters"]["stages"]["verify/host"]
    stage = definition["internalParameters"]["stages"]["build/host"]
    assert stage["machine"] == "linux-x86_64"
    assert stage["tools"]["apache-tvm"] == TVM


def test_in_totos_own_types_accept_it(world: World) -> None:
    """Every field is one of theirs, and every dependency has a digest."""
    world.deliver()
    check_statement(base64.b64decode(json.loads(world.statement.read_bytes())["payload"]))
    check_statement(
        statement.make_release_statement("all", "1.0", {"a": "0" * 64}, {"b": "1" * 64})
    )


def test_securesystemslib_accepts_a_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DSSE with Ed25519, as sigstore and in-toto read it."""
    public = signing.generate_key(tmp_path / "key")
    monkeypatch.setenv(signing.KEY_VARIABLE, str(tmp_path / "key"))
    world = World(tmp_path / "world")
    world.deliver()
    line = world.statement.read_bytes()
    text = check_envelope(line, (tmp_path / "key.pub").read_bytes())
    assert public and statements.parse_statement(text).recipe == "net"


@pytest.mark.parametrize("name", ["ci", "http://[", "https://me:pw@example.org", "a b:c\n"])
def test_a_builder_without_a_uri_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, which says what to write."""
    monkeypatch.setenv("TVMFLOW_BUILDER_ID", name)
    with pytest.raises(UsageError, match=r"^TVMFLOW_BUILDER_ID is not a URI: '[^\n]*'\n  fix: "):
        read_builder_id()


def test_the_builder_is_whom_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tvmflow's version; another builder writes another statement."""
    world = World(tmp_path)
    builder = body_of(world)["predicate"]["runDetails"]["builder"]
    assert builder == {"id": "urn:tvmflow:builder:v1", "version": {"tvmflow": VERSION}}
    monkeypatch.setenv("TVMFLOW_BUILDER_ID", "https://example.org/builders/ci")
    assert world.pending()
    builder = body_of(world)["predicate"]["runDetails"]["builder"]
    assert builder["id"] == "https://example.org/builders/ci"
    assert not world.pending()


def test_model_tools_and_results_are_named_with_their_digests(
    world: World, body: dict[str, Any]
) -> None:
    body_json = body["predicate"]["buildDefinition"]["resolvedDependencies"]
    by_kind: dict[str, dict[str, Any]] = {"source": {}, "tool": {}, "result": {}}
    for entry in body_json:
        by_kind[entry["annotations"]["kind"]][entry["name"]] = entry
    assert by_kind["source"]["model"]["digest"] == {"sha256": MODEL}
    assert by_kind["tool"]["apache-tvm"]["uri"] == "pkg:pypi/apache-tvm@0.27.0"
    assert by_kind["tool"]["apache-tvm"]["digest"] == {"tvmflowRecord": "0123456789ab"}
    built = world.artifacts["net:build/host"].digests(())
    assert by_kind["result"]["build/host/lib0.o"]["digest"] == {"sha256": built["lib0.o"]}


def test_measurements_and_the_search_have_a_statement_of_their_own(world: World) -> None:
    """Every tuned kernel with the trial that was measured; what a locked run does not have."""
    read = statements.parse_statement(json.dumps(body_of(world, world.measurements)).encode())
    text = base64.b64decode(json.loads(world.statement.read_bytes())["payload"])
    (dependency,) = read.dependencies("statement")
    assert dependency["digest"] == {"sha256": hashlib.sha256(text).hexdigest()}
    assert list(read.subjects) == ["measurements.json"]
    assert set(read.settings) == {"tune/host", "pick_best/host", "verify/host"}
    assert read.settings["tune/host"]["tune"]["trials"] == 4
    settings = read.settings["tune/host"]
    record = {
        "trial": TRIAL.id,
        "target": target_key(
            with_threads(settings["target"], settings["threads"]), TVM, settings["device"]
        ),
        "seconds": TRIAL.seconds,
        "when": TRIAL.when,
        "again_seconds": 1.5e-6,
        "untuned_seconds": 3e-6,
    }
    assert read.kernels == [
        {"name": "conv", "schedule": "tuned", "workload": WORKLOAD, "record": record},
        {"name": "conv1", "schedule": "tuned", "workload": WORKLOAD, "record": record},
        {"name": "softmax", "schedule": "rows"},
    ]
    # the speedup has one place, the verdict
    assert "speedup" not in read.byproduct("kernels")["coverage"]["host"]
    assert read.verdict["accuracy"] == 0.97


def test_every_tuned_kernel_has_the_id_of_its_trial(body: dict[str, Any]) -> None:
    """The id is a digest of the schedule, which a locked run has too."""
    read = statements.parse_statement(json.dumps(body).encode())
    assert [kernel.get("record") for kernel in read.kernels] == [{"trial": TRIAL.id}] * 2 + [None]
    assert set(read.byproduct("kernels")) == {"kernels"}
    assert "accuracy" not in read.verdict and "latency" not in read.verdict


def test_it_has_no_path_and_no_secret_of_a_url(tmp_path: Path) -> None:
    world = World(
        tmp_path / "secret-place", url="https://me:pw@models.example/net.onnx?token=xyz#f"
    )
    text = json.dumps(body_of(world)) + world.bom.read_text()
    assert "https://models.example/net.onnx" in text
    assert not [word for word in ("pw@", "xyz", "secret-place", "store") if word in text]


def test_a_url_keeps_its_port() -> None:
    assert without_secrets("http://a:b@[::1]:8080/x?y#z") == "http://[::1]:8080/x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_type": "https://in-toto.io/Statement/v0.1"}, "its _type is 'https://in-toto.io/Statement/v0.1'"),
        ({"predicateType": "https://slsa.dev/provenance/v0.2"}, "its predicateType is"),
        ({"predicate": []}, "its buildType is ''"),
        ({"subject": []}, "about no file"),
        ({"subject": "all"}, "about no file"),
        ({"subject": [{"name": "../net.so", "digest": {"sha256": "0" * 64}}]}, "not in its folder: '../net.so'"),
        ({"subject": [{"name": "/net.so", "digest": {"sha256": "0" * 64}}]}, "not in its folder"),
        ({"subject": [{"name": "a//b", "digest": {"sha256": "0" * 64}}]}, "not in its folder"),
        ({"subject": [{"name": "a\u202eb", "digest": {"sha256": "0" * 64}}]}, "not in its folder"),
        ({"subject": [{"name": "net.so", "digest": {"sha256": "0"}}]}, "no sha256 for 'net.so'"),
        ({"subject": [{"name": "net.so", "digest": "x"}]}, "no sha256 for 'net.so'"),
        (
            {"subject": [{"name": "a", "digest": {"sha256": sign * 64}} for sign in "01"]},
            "two digests for 'a'",
        ),
    ],
)  # fmt: skip
def test_another_statement_is_refused(
    body: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(Unreadable) as raised:
        statements.parse_statement(json.dumps({**body, **change}).encode())
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "predicate",
    [
        {"externalParameters": 1, "resolvedDependencies": {}},
        {
            "externalParameters": {"recipe": [], "settings": 3},
            "resolvedDependencies": [1, {"name": {}}],
        },
    ],
)
def test_fields_of_wrong_types_read_as_empty(
    body: dict[str, Any], predicate: dict[str, Any]
) -> None:
    definition = {"buildType": statements.BUILD_TYPE, **predicate}
    foreign = {
        "buildDefinition": definition,
        "runDetails": {"byproducts": [None, {"name": "kernels"}]},
    }
    read = statements.parse_statement(json.dumps({**body, "predicate": foreign}).encode())
    assert (read.recipe, read.target, dict(read.settings)) == ("", "", {})
    assert (read.kernels, dict(read.verdict), read.dependencies("tool")) == ([], {}, [])
