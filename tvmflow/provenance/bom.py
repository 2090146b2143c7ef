"""The bill of materials: CycloneDX 1.6 with the model, its files, its weights, and its libraries.

Equal results give equal bytes: the serial number is a digest of the content, and there is no time.
Accuracy, errors and latencies differ whenever they are measured, and are beside the other measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from tvmflow.compiler.form_names import C_LIBRARY
from tvmflow.core.bill_of_materials import digest_fields, encode_bom, stated_license_fields
from tvmflow.core.documents import get_field
from tvmflow.core.types import Json, shape_text
from tvmflow.core.version import VERSION
from tvmflow.provenance.lineage import Lineage, Source, Tool
from tvmflow.provenance.tools import find_license, wheel_digest
from tvmflow.stages import import_model

_MODEL: Final = "model"
_WEIGHTS: Final = "weights"

# The packages that run a delivered library (required), unless it runs itself, and that only
# `tvmflow.load` needs for it (optional). All others took part in making it.
_RUNTIME: Final[Mapping[str, str]] = {"apache-tvm": "required", "apache-tvm-ffi": "required"}
_LOADER: Final[Mapping[str, str]] = {"numpy": "optional"}
_MADE_WITH: Final = "excluded"
# The role of a file that is a data set; the model was made from all others.
_DATASET: Final = "data"


def make_bom(lineage: Lineage) -> bytes:
    """Return the bill of materials of one recipe's files for one target as canonical JSON.

    Raises:
        DamagedBlob: A result that has to be read is not what it should be.
    """
    scopes = {**_RUNTIME, **_LOADER} if _needs_tvm(lineage) else _LOADER
    libraries = [_library(tool, scopes) for tool in lineage.tools()]
    sources = [_source(source) for source in lineage.sources()]
    source_refs = [source["bom-ref"] for source in sources]
    weights = list(_weights(lineage))
    required = [library["bom-ref"] for library in libraries if library["scope"] == "required"]
    tvmflow = {"type": "application", "name": "tvmflow", "version": VERSION}
    return encode_bom(
        {
            "metadata": {"component": _model(lineage), "tools": {"components": [tvmflow]}},
            "components": [*weights, *sources, *libraries],
            "dependencies": [
                {"ref": _MODEL, "dependsOn": required + [entry["bom-ref"] for entry in weights]},
                *({"ref": entry["bom-ref"], "dependsOn": source_refs} for entry in weights),
            ],
        }
    )


def _needs_tvm(lineage: Lineage) -> bool:
    """Return whether anything else than plain C libraries was compiled."""
    builds = lineage.find_stages("build")
    files = [file.name.split("/") for stage in builds for file in stage.artifact.files]
    return {folders[0] for folders in files if len(folders) > 1} != {C_LIBRARY}


def _model(lineage: Lineage) -> Json:
    version = _model_version(lineage)
    settings = [stage.settings for stage in lineage.find_stages("build")]
    triples = dict.fromkeys(get_field(entry, "target", "mtriple", of=str) for entry in settings)
    return {
        "bom-ref": _MODEL,
        "type": "machine-learning-model",
        "name": lineage.recipe,
        **({"version": version} if version else {}),
        **stated_license_fields(lineage.license()),
        "components": [
            {
                "bom-ref": f"file:{name}",
                "type": "file",
                "name": name,
                "hashes": digest_fields(digest),
            }
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
    return f"{tensor['name']}: {tensor['dtype']}{shape_text(tensor)}"


def _weights(lineage: Lineage) -> Iterator[dict[str, Json]]:
    """Yield the weights of the library, which are apart from its code."""
    for stage in lineage.find_stages("import"):
        digest = stage.artifact.digests(()).get(import_model.PARAMS)
        if digest:
            yield {
                "bom-ref": _WEIGHTS,
                "type": "data",
                "name": import_model.PARAMS,
                "hashes": digest_fields(digest),
                "data": [{"type": "other", "name": import_model.PARAMS}],
            }


def _source(source: Source) -> dict[str, Json]:
    references = [{"type": "distribution", "url": source.url}] if source.url else []
    kind: dict[str, Json] = (
        {"type": "data", "data": [{"type": "dataset", "name": source.role}]}
        if source.role.partition("/")[0] == _DATASET
        else {"type": "file"}
    )
    return {
        "bom-ref": f"source:{source.role}:{source.sha256}",
        "name": source.role,
        "hashes": digest_fields(source.sha256),
        **kind,
        **({"externalReferences": references} if references else {}),
    }


def _distribution(tool: Tool) -> dict[str, Json]:
    """Return the digest of the wheel that a package was installed from, where it is known."""
    digest = wheel_digest(tool)
    return {"hashes": digest_fields(digest)} if digest else {}


def _library(tool: Tool, scopes: Mapping[str, str]) -> dict[str, Json]:
    return {
        "bom-ref": tool.purl,
        "type": "library",
        "name": tool.name,
        "version": tool.version,
        "purl": tool.purl,
        "scope": scopes.get(tool.name, _MADE_WITH),
        **find_license(tool),
        **_distribution(tool),
        "properties": [{"name": "tvmflow:record", "value": tool.record}],
    }
