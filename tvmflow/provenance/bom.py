"""The bill of materials: CycloneDX 1.6 with the model, its files, its weights, and the libraries that it needs.

Equal results give equal bytes: the serial number is one of the content, and no time is given.
"""

from __future__ import annotations

import importlib.metadata
import uuid
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageMetadata
from typing import Final

from tvmflow import __version__
from tvmflow.keys import canonical
from tvmflow.provenance.documents import at
from tvmflow.provenance.trail import Source, Tool, Trail
from tvmflow.stages import import_model
from tvmflow.values import Json, TensorSpec

SPEC_VERSION: Final = "1.6"

_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "urn:tvmflow:bom:v1")
_MODEL: Final = "model"
_WEIGHTS: Final = "weights"

# What runs a delivered library, and what only `tvmflow.load` needs for it. All other packages took
# part in making it.
_SCOPES: Final[Mapping[str, str]] = {
    "apache-tvm": "required",
    "apache-tvm-ffi": "required",
    "numpy": "optional",
}
_MADE_WITH: Final = "excluded"
# What a role says of a file from outside, where it says more than that the model was made from it.
_DATASET: Final = "data"


def make(trail: Trail) -> bytes:
    """The bill of materials of one recipe's files for one target. Raises Damaged."""
    libraries = [_library(tool) for tool in trail.tools()]
    data = [_source(source) for source in trail.sources()]
    weights = list(_weights(trail))
    needed = [each["bom-ref"] for each in libraries if each["scope"] == "required"]
    document: dict[str, Json] = {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": {
            "component": _model(trail),
            "tools": {
                "components": [{"type": "application", "name": "tvmflow", "version": __version__}]
            },
        },
        "components": [*weights, *data, *libraries],
        "dependencies": [
            {"ref": _MODEL, "dependsOn": [*needed, *(each["bom-ref"] for each in weights)]},
            *(
                {"ref": each["bom-ref"], "dependsOn": [source["bom-ref"] for source in data]}
                for each in weights
            ),
        ],
    }
    serial = uuid.uuid5(_NAMESPACE, canonical(document).decode())
    return canonical({**document, "serialNumber": f"urn:uuid:{serial}"})


def _model(trail: Trail) -> Json:
    version = _version(trail)
    return {
        "bom-ref": _MODEL,
        "type": "machine-learning-model",
        "name": trail.recipe,
        **({"version": version} if version else {}),
        "components": [
            {
                "bom-ref": f"file:{name}",
                "type": "file",
                "name": name,
                "hashes": _hashes(digest),
            }
            for name, digest in trail.files
        ],
        "modelCard": _card(trail),
        "properties": [
            {"name": "tvmflow:target", "value": trail.target},
            *(
                {"name": "tvmflow:triple", "value": triple}
                for triple in dict.fromkeys(_triples(trail))
            ),
        ],
    }


def _version(trail: Trail) -> str:
    """What the recipe calls this version; empty where nothing was exported."""
    made = [*trail.of("join"), *trail.of("export")]
    return str(made[0].preimage["settings"].get("version", "")) if made else ""


def _triples(trail: Trail) -> Iterator[str]:
    for step in trail.of("build"):
        triple = at(step.preimage["settings"], "target", "mtriple", of=str)
        if triple:
            yield triple


def _card(trail: Trail) -> Json:
    """What is known of the model: its task and its training are not."""
    signature = trail.signature()
    kinds = [at(step.preimage["settings"], "model", "kind", of=str) for step in trail.of("import")]
    verdict, _ = trail.verdict()
    metrics = list(_metrics(verdict or {}))
    return {
        "modelParameters": {
            way: [{"format": _format(TensorSpec.from_json(each))} for each in signature[way]]
            for way in ("inputs", "outputs")
        },
        **({"quantitativeAnalysis": {"performanceMetrics": metrics}} if metrics else {}),
        "properties": [{"name": "tvmflow:source", "value": kind} for kind in kinds if kind],
    }


def _format(spec: TensorSpec) -> str:
    return f"{spec.name}: {spec.dtype}{list(spec.shape)}"


def _metrics(verdict: Mapping[str, Json]) -> Iterator[Json]:
    """What `verify` measured."""
    for name, word in (("accuracy", "top-1 accuracy"), ("reference_accuracy", "of the reference")):
        if name in verdict:
            yield {
                "type": word if name == "accuracy" else f"top-1 accuracy {word}",
                "value": str(verdict[name]),
            }
    for name, found in verdict.get("outputs", {}).items():
        if "max_abs_error" in found:
            yield {
                "type": f"largest error against {verdict.get('reference', 'the reference')}",
                "value": str(found["max_abs_error"]),
                "slice": f"output {name}",
            }
    timed = verdict.get("latency", {}).get("library")
    if timed:
        yield {
            "type": "latency in seconds, median",
            "value": str(timed["median"]),
            "confidenceInterval": {
                "lowerBound": str(timed["min"]),
                "upperBound": str(timed["max"]),
            },
        }


def _weights(trail: Trail) -> Iterator[dict[str, Json]]:
    """The weights as the library has them, apart from its code."""
    for step in trail.of("import"):
        digest = step.artifact.digests(()).get(import_model.PARAMS)
        if digest:
            yield {
                "bom-ref": _WEIGHTS,
                "type": "data",
                "name": import_model.PARAMS,
                "hashes": _hashes(digest),
                "data": [{"type": "other", "name": import_model.PARAMS}],
            }


def _source(source: Source) -> dict[str, Json]:
    is_dataset = source.role == _DATASET
    url = (
        {"externalReferences": [{"type": "distribution", "url": source.url}]} if source.url else {}
    )
    kind: dict[str, Json] = (
        {"type": "data", "data": [{"type": "dataset", "name": source.role}]}
        if is_dataset
        else {"type": "file"}
    )
    return {
        "bom-ref": f"source:{source.role}:{source.sha256}",
        "name": source.role,
        "hashes": _hashes(source.sha256),
        **kind,
        **url,
    }


def _library(tool: Tool) -> dict[str, Json]:
    purl = f"pkg:pypi/{tool.name}@{tool.version}"
    return {
        "bom-ref": purl,
        "type": "library",
        "name": tool.name,
        "version": tool.version,
        "purl": purl,
        "scope": _SCOPES.get(tool.name, _MADE_WITH),
        **_licence(tool),
        "properties": [{"name": "tvmflow:record", "value": tool.record}],
    }


def _licence(tool: Tool) -> dict[str, Json]:
    """As the package itself says; nothing where it says none, or where another version is installed by now."""
    try:
        about = importlib.metadata.metadata(tool.name)
    except importlib.metadata.PackageNotFoundError:
        return {}
    if about["Version"] != tool.version:
        return {}
    expression = _field(about, "License-Expression")
    if expression:
        return {"licenses": [{"expression": expression}]}
    written = _field(about, "License").strip()
    named = [
        each.rpartition(" :: ")[2]
        for each in about.get_all("Classifier") or ()
        if each.startswith("License ::")
    ]
    # some put the whole text there
    name = written if written and "\n" not in written else next(iter(named), "")
    return {"licenses": [{"license": {"name": name}}]} if name else {}


def _field(about: PackageMetadata, name: str) -> str:
    # where importlib_metadata is installed it answers, and it raises for a field that is asked for by index and is not there
    return str((about.get_all(name) or [""])[0])


def _hashes(sha256: str) -> list[Json]:
    return [{"alg": "SHA-256", "content": sha256}]
