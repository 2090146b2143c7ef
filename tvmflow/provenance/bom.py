"""The bill of materials: CycloneDX 1.6 with the model, its files, its weights, and its libraries.

Equal results give equal bytes: the serial number is a digest of the content, and there is no time.
Accuracy, errors and latencies differ whenever they are measured, and are beside the other measurements.
"""

from __future__ import annotations

import importlib.metadata
import uuid
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageMetadata
from typing import Final

from tvmflow.core.canonical_json import canonical
from tvmflow.core.documents import get_field
from tvmflow.core.types import Json
from tvmflow.core.version import VERSION
from tvmflow.provenance.lineage import Lineage, Source, Tool
from tvmflow.stages import import_model

SPEC_VERSION: Final = "1.6"

_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "urn:tvmflow:bom:v1")
_MODEL: Final = "model"
_WEIGHTS: Final = "weights"

# The packages that run a delivered library (required) and that only `tvmflow.load` needs for it
# (optional). All others took part in making it.
_SCOPES: Final[Mapping[str, str]] = {
    "apache-tvm": "required",
    "apache-tvm-ffi": "required",
    "numpy": "optional",
}
_MADE_WITH: Final = "excluded"
# The role of a file that is a data set; the model was made from all others.
_DATASET: Final = "data"


def make_bom(lineage: Lineage) -> bytes:
    """Return the bill of materials of one recipe's files for one target as canonical JSON.

    Raises:
        DamagedBlob: A result that has to be read is not what it should be.
    """
    libraries = [_library(tool) for tool in lineage.tools()]
    sources = [_source(source) for source in lineage.sources()]
    source_refs = [source["bom-ref"] for source in sources]
    weights = list(_weights(lineage))
    required = [library["bom-ref"] for library in libraries if library["scope"] == "required"]
    tvmflow = {"type": "application", "name": "tvmflow", "version": VERSION}
    document: dict[str, Json] = {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": {"component": _model(lineage), "tools": {"components": [tvmflow]}},
        "components": [*weights, *sources, *libraries],
        "dependencies": [
            {"ref": _MODEL, "dependsOn": required + [entry["bom-ref"] for entry in weights]},
            *({"ref": entry["bom-ref"], "dependsOn": source_refs} for entry in weights),
        ],
    }
    serial = uuid.uuid5(_NAMESPACE, canonical(document).decode())
    return canonical({**document, "serialNumber": f"urn:uuid:{serial}"})


def _model(lineage: Lineage) -> Json:
    version = _model_version(lineage)
    settings = [stage.settings for stage in lineage.find_stages("build")]
    triples = dict.fromkeys(get_field(entry, "target", "mtriple", of=str) for entry in settings)
    return {
        "bom-ref": _MODEL,
        "type": "machine-learning-model",
        "name": lineage.recipe,
        **({"version": version} if version else {}),
        "components": [
            {"bom-ref": f"file:{name}", "type": "file", "name": name, "hashes": _hashes(digest)}
            for name, digest in lineage.files
        ],
        "modelCard": _model_card(lineage),
        "properties": [
            {"name": "tvmflow:target", "value": lineage.target},
            *({"name": "tvmflow:triple", "value": triple} for triple in triples if triple),
        ],
    }


def _model_version(lineage: Lineage) -> str:
    """Return the version in the recipe; an empty string where nothing was exported."""
    exports = [*lineage.find_stages("join"), *lineage.find_stages("export")]
    return str(exports[0].settings.get("version", "")) if exports else ""


def _model_card(lineage: Lineage) -> Json:
    """Return what is known of the model, which is neither its task nor its training."""
    signature = lineage.signature()
    imports = lineage.find_stages("import")
    kinds = [get_field(stage.settings, "model", "kind", of=str) for stage in imports]
    return {
        "modelParameters": {
            side: [{"format": _tensor_format(tensor)} for tensor in signature[side]]
            for side in ("inputs", "outputs")
        },
        "properties": [{"name": "tvmflow:source", "value": kind} for kind in kinds if kind],
    }


def _tensor_format(tensor: Mapping[str, Json]) -> str:
    return f"{tensor['name']}: {tensor['dtype']}{tensor['shape']}"


def _weights(lineage: Lineage) -> Iterator[dict[str, Json]]:
    """Yield the weights of the library, which are apart from its code."""
    for stage in lineage.find_stages("import"):
        digest = stage.artifact.digests(()).get(import_model.PARAMS)
        if digest:
            yield {
                "bom-ref": _WEIGHTS,
                "type": "data",
                "name": import_model.PARAMS,
                "hashes": _hashes(digest),
                "data": [{"type": "other", "name": import_model.PARAMS}],
            }


def _source(source: Source) -> dict[str, Json]:
    references = [{"type": "distribution", "url": source.url}] if source.url else []
    kind: dict[str, Json] = (
        {"type": "data", "data": [{"type": "dataset", "name": source.role}]}
        if source.role == _DATASET
        else {"type": "file"}
    )
    return {
        "bom-ref": f"source:{source.role}:{source.sha256}",
        "name": source.role,
        "hashes": _hashes(source.sha256),
        **kind,
        **({"externalReferences": references} if references else {}),
    }


def _library(tool: Tool) -> dict[str, Json]:
    return {
        "bom-ref": tool.purl,
        "type": "library",
        "name": tool.name,
        "version": tool.version,
        "purl": tool.purl,
        "scope": _SCOPES.get(tool.name, _MADE_WITH),
        **_licenses(tool),
        "properties": [{"name": "tvmflow:record", "value": tool.record}],
    }


def _licenses(tool: Tool) -> dict[str, Json]:
    """Return the license that a package names; nothing where another version is installed now."""
    try:
        metadata = importlib.metadata.metadata(tool.name)
    except importlib.metadata.PackageNotFoundError:
        return {}
    if metadata["Version"] != tool.version:
        return {}
    expression = _metadata_field(metadata, "License-Expression")
    if expression:
        return {"licenses": [{"expression": expression}]}
    text = _metadata_field(metadata, "License").strip()
    classifiers = [
        classifier.rpartition(" :: ")[2]
        for classifier in metadata.get_all("Classifier") or ()
        if classifier.startswith("License ::")
    ]
    # Some packages put the whole text of the license into the field.
    name = text if text and "\n" not in text else next(iter(classifiers), "")
    return {"licenses": [{"license": {"name": name}}]} if name else {}


def _metadata_field(metadata: PackageMetadata, name: str) -> str:
    # An installed importlib_metadata raises for a missing field that is read by index.
    return str((metadata.get_all(name) or [""])[0])


def _hashes(sha256: str) -> list[Json]:
    return [{"alg": "SHA-256", "content": sha256}]
