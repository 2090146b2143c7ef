"""The bill of materials inside a wheel (PEP 770): the model, its code and weights, and the runtime that is copied."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from tvmflow.core.bill_of_materials import digest_fields, encode_bom, license_fields
from tvmflow.core.types import Json
from tvmflow.exporters._base import BuiltModel, PartitionedModel

# The fields of a manifest with the versions of what made the library.
_TOOLS: Final = {"tvmflow": "tvmflow", "tvm": "apache-tvm", "tvm_ffi": "apache-tvm-ffi"}
_OWN_LICENSE: Final = "Apache-2.0"
_MODEL: Final = "model"
_RUNTIME: Final = "runtime"


def make_wheel_bom(
    built: BuiltModel | PartitionedModel, content: Mapping[str, bytes], runtime: str
) -> bytes:
    """Return the bill of materials of a wheel as canonical JSON, the same for the same content.

    Args:
        built: The model.
        content: The files in the wheel by name.
        runtime: The folder of the copied runtime in it.
    """
    manifest = built.manifest
    version = str(manifest["tvmflow"])
    purl = f"pkg:pypi/tvmflow@{version}"
    is_runtime = {name: name.startswith(f"{runtime}/") for name in content}
    model: dict[str, Json] = {
        "bom-ref": _MODEL,
        "type": "machine-learning-model",
        "name": built.name,
        "version": built.request.version,
        **license_fields(str(manifest.get("license", ""))),
        "components": [_file(name, data) for name, data in content.items() if not is_runtime[name]],
        "properties": [
            {"name": "tvmflow:target", "value": built.request.target},
            *_describe_model(manifest.get("model", {})),
        ],
    }
    copied: dict[str, Json] = {
        "bom-ref": _RUNTIME,
        "type": "library",
        "name": "tvmflow",
        "version": version,
        "purl": purl,
        "description": "The modules of tvmflow that load a bundle, copied with other import paths",
        **license_fields(_OWN_LICENSE),
        "pedigree": {"notes": "imports are rewritten"},
        "components": [_file(name, data) for name, data in content.items() if is_runtime[name]],
    }
    tools = [
        {"type": "application", "name": name, "version": str(manifest[field])}
        for field, name in _TOOLS.items()
    ]
    return encode_bom(
        {
            "metadata": {"component": model, "tools": {"components": tools}},
            "components": [copied],
            "dependencies": [{"ref": _MODEL, "dependsOn": [_RUNTIME]}],
        }
    )


def _file(name: str, data: bytes) -> dict[str, Json]:
    digest = hashlib.sha256(data).hexdigest()
    return {
        "bom-ref": f"file:{name}",
        "type": "file",
        "name": name,
        "hashes": digest_fields(digest),
    }


def _describe_model(digests: Mapping[str, Json]) -> list[Json]:
    return [
        {"name": f"tvmflow:{name}", "value": str(value)} for name, value in sorted(digests.items())
    ]
