"""The bill of materials: its content, and its validity under CycloneDX's schema."""

from __future__ import annotations

import json
import uuid
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from tests.support.provenance import MODEL, World
from tvmflow.core.files import hash_file
from tvmflow.provenance import bom
from tvmflow.provenance.lineage import Tool


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


def test_a_license_is_that_of_the_installed_package() -> None:
    from importlib.metadata import version

    library = bom._library(Tool("pytest", version("pytest"), "0"))
    assert "MIT" in json.dumps(library["licenses"])
    assert bom._licenses(Tool("no-such-package", "1", "0")) == {}


@pytest.mark.slow
def test_the_official_schema_accepts_it(world: World) -> None:
    """Needs `cyclonedx-python-lib[json-validation]`, which tvmflow itself does not need."""
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(world.bom.read_text()) is None


class _Strict(Message):
    """The metadata of the package importlib_metadata: a missing field raises instead of giving None."""

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return super().__getitem__(name)


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({}, {}),
        ({"License-Expression": "MIT"}, {"licenses": [{"expression": "MIT"}]}),
        ({"License": "Apache 2.0"}, {"licenses": [{"license": {"name": "Apache 2.0"}}]}),
    ],
)
def test_a_license_is_that_which_the_package_names(
    fields: dict[str, str], licence: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    about = _Strict()
    for name, value in {"Version": "1.0", **fields}.items():
        about[name] = value
    monkeypatch.setattr("importlib.metadata.metadata", lambda _: about)
    assert bom._licenses(Tool("some", "1.0", "")) == licence
