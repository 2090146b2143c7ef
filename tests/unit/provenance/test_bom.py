"""The bill of materials: its content, and its validity under CycloneDX's schema."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import COMMIT
from tests.support.provenance import MODEL, World, contents
from tests.support.validation import check_bom
from tvmflow.core.files import hash_file
from tvmflow.store.addresses import HubFile
from tvmflow.store.downloads import Snapshot
from tvmflow.store.source_files import note_snapshot


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    delivered_world = World(tmp_path_factory.mktemp("world"), url="https://models.example/net.onnx")
    delivered_world.deliver()
    return delivered_world


@pytest.fixture
def document(world: World) -> dict[str, Any]:
    bom_json: dict[str, Any] = json.loads(world.bom.read_bytes())
    return bom_json


def test_the_model_has_its_files_and_its_card(world: World, document: dict[str, Any]) -> None:
    model = document["metadata"]["component"]
    assert (model["type"], model["name"], model["version"]) == (
        "machine-learning-model",
        "net",
        "0",
    )
    for entry in model["components"]:
        digest = hash_file(str(world.folder / entry["name"]))
        assert entry["hashes"] == [{"alg": "SHA-256", "content": digest}]
    card = model["modelCard"]
    assert card["modelParameters"] == {"inputs": [{"format": "x: float32[1, 3]"}], "outputs": []}
    assert "quantitativeAnalysis" not in card
    assert "measurements.json" not in {entry["name"] for entry in model["components"]}


def test_sources_weights_and_libraries_are_components(document: dict[str, Any]) -> None:
    bom_json = {entry["name"]: entry for entry in document["components"]}
    assert bom_json["model"]["hashes"] == [{"alg": "SHA-256", "content": MODEL}]
    assert bom_json["model"]["externalReferences"][0]["url"] == "https://models.example/net.onnx"
    assert bom_json["params.safetensors"]["type"] == "data"
    library = bom_json["apache-tvm"]
    assert (library["purl"], library["scope"]) == ("pkg:pypi/apache-tvm@0.27.0", "required")
    # another version than the one installed: its licence is not known
    assert "licenses" not in library
    refs = [entry["bom-ref"] for entry in document["components"]]
    assert len(set(refs)) == len(refs)
    for entry in document["dependencies"]:
        assert {entry["ref"], *entry["dependsOn"]} <= {*refs, "model"}


def test_the_serial_number_is_a_digest_of_the_content(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    serial = document["serialNumber"]
    assert uuid.UUID(serial).version == 5
    other = World(tmp_path, url="https://elsewhere.example/net.onnx")
    other.deliver()
    assert json.loads(other.bom.read_bytes())["serialNumber"] != serial


def test_the_official_schema_accepts_it(world: World) -> None:
    """With every format in it: SPDX expressions, package URLs, digests."""
    check_bom(world.bom.read_text())


@pytest.mark.parametrize(
    ("stated", "licenses"),
    [
        ("apache-2.0", [{"expression": "Apache-2.0"}]),
        ("gemma", [{"license": {"name": "gemma"}}]),
        ("", None),
    ],
)
def test_the_license_on_the_hub_is_that_of_the_model(
    stated: str, licenses: list[Any] | None, tmp_path: Path
) -> None:
    """Where the recipe names none; one that is not an SPDX expression is a name."""
    made = World(tmp_path, url=f"hf://org/net/net.onnx@{COMMIT}")
    file = HubFile("org/net", "net.onnx", COMMIT)
    note_snapshot(file, Snapshot(COMMIT, stated, False, {}), made.store)
    made.deliver()
    model = json.loads(made.bom.read_bytes())["metadata"]["component"]
    assert model.get("licenses") == licenses
    check_bom(made.bom.read_text())


@pytest.mark.parametrize(
    ("forms", "scope"),
    [(["c-library"], "excluded"), (["c-library", "vm"], "required"), (["vm"], "required")],
)
def test_tvm_is_required_where_a_file_needs_its_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forms: list[str], scope: str
) -> None:
    """A C library runs itself."""
    built = {f"{form}/kernels0.o": b"\x7fELF" for form in forms}
    content = {**contents(), "build": {**contents()["build"], **built}}
    monkeypatch.setattr("tests.support.provenance.contents", lambda **_: content)
    made = World(tmp_path)
    made.deliver()
    document = json.loads(made.bom.read_bytes())
    scopes = {entry["name"]: entry.get("scope") for entry in document["components"]}
    assert scopes["apache-tvm"] == scope
