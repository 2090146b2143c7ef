"""Checks of delivered documents by the libraries that others read them with (the extra tvmflow[test])."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest


def _load(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'tvmflow[test]'")


def check_bom(text: str) -> None:
    """Check a bill of materials with CycloneDX's own schema, with all formats in it."""
    _load("jsonschema")
    validation = _load("cyclonedx.validation.json")
    schema = importlib.import_module("cyclonedx.schema")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(text) is None


def check_statement(text: bytes) -> None:
    """Check a statement with in-toto's own types, which refuse a field that they do not know."""
    statement = _load("in_toto_attestation.v1.statement")
    provenance = _load("in_toto_attestation.predicates.provenance.v1.provenance_pb2")
    descriptor = _load("in_toto_attestation.v1.resource_descriptor")
    json_format = _load("google.protobuf.json_format")
    parsed = json_format.Parse(text, statement.spb.Statement())
    statement.Statement.copy_from_pb(parsed).validate()
    predicate = json_format.ParseDict(json.loads(text)["predicate"], provenance.Provenance())
    assert predicate.build_definition.build_type and predicate.run_details.builder.id
    resources = [*predicate.build_definition.resolved_dependencies]
    for entry in [*resources, *predicate.run_details.byproducts]:
        descriptor.ResourceDescriptor.copy_from_pb(entry).validate()
    assert all(len(entry.digest) for entry in resources)


def check_envelope(line: bytes, public_key: bytes) -> bytes:
    """Check a signed envelope with securesystemslib, which does not know tvmflow, and return its text."""
    dsse = _load("securesystemslib.dsse")
    signer = _load("securesystemslib.signer")
    serialization = importlib.import_module("cryptography.hazmat.primitives.serialization")
    document = json.loads(line)
    loaded = serialization.load_pem_public_key(public_key)
    key = signer.SSlibKey.from_crypto(loaded, keyid=document["signatures"][0]["keyid"])
    envelope = dsse.Envelope.from_dict(document)
    assert envelope.verify([key], 1)
    return bytes(envelope.payload)
