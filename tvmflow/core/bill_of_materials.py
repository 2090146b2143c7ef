"""Common parts of bills of materials: CycloneDX 1.6 as canonical JSON."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final

from tvmflow.core.canonical_json import canonical
from tvmflow.core.types import Json

SPEC_VERSION: Final = "1.6"
_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "urn:tvmflow:bom:v1")


def file_component(name: str, sha256: str) -> dict[str, Json]:
    """Return the component of a file with a SHA-256 digest (hex)."""
    hashes = digest_fields(sha256)
    return {"bom-ref": f"file:{name}", "type": "file", "name": name, "hashes": hashes}


def encode_bom(fields: Mapping[str, Json]) -> bytes:
    """Return a document as canonical JSON; its serial number is a digest of the content."""
    document = {"bomFormat": "CycloneDX", "specVersion": SPEC_VERSION, "version": 1, **fields}
    serial = uuid.uuid5(_NAMESPACE, canonical(document).decode())
    return canonical({**document, "serialNumber": f"urn:uuid:{serial}"})


def digest_fields(sha256: str) -> list[Json]:
    """Return the field `hashes` of a component."""
    return [{"alg": "SHA-256", "content": sha256}]


def license_fields(expression: str) -> dict[str, Json]:
    """Return the field `licenses` of a component under an SPDX expression; nothing for an empty one."""
    return {"licenses": [{"expression": expression}]} if expression else {}


def stated_license_fields(name: str) -> dict[str, Json]:
    """Return a component's field `licenses` for a license name, which may be an SPDX expression."""
    expression = license_expression(name) if name else ""
    if name and not expression:
        return {"licenses": [{"license": {"name": name}}]}
    return license_fields(expression)


def license_expression(name: str) -> str:
    """Return a name as a canonical SPDX expression, or an empty string if it is not one."""
    # Imported here because most recipes name no license, and loading the list of licenses is slow.
    from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

    try:
        return str(canonicalize_license_expression(name))
    except InvalidLicenseExpression:
        return ""
