"""Inspects a file without running it: its kind, its content, and its provenance.

The result is JSON, which `inspection_text` formats for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.core.documents import Unreadable, get_field, get_number, read_file, read_json
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import last_line
from tvmflow.core.signing import PublicKey
from tvmflow.core.types import STATEMENT_SUFFIX, Json, TensorSpec
from tvmflow.provenance.check import check_file
from tvmflow.provenance.contents import BUNDLE, describe_kind, find_bundle
from tvmflow.recipe.lock_file import SUFFIX, read_lock
from tvmflow.runtime.bundles import DEFAULT_MAX_BYTES, VM, Bundle
from tvmflow.runtime.images import read_preprocessing
from tvmflow.runtime.labels import read_labels
from tvmflow.runtime.statements import (
    SignedStatement,
    Statement,
    find_statements,
    read_statements,
)

_DOCUMENT_SUFFIXES: Final = (".json", ".jsonl")


class UnknownFile(Exception):
    """A file of a kind that tvmflow does not deliver, and for which there is no statement."""


def inspect_file(
    path: Path,
    trusted: Sequence[PublicKey],
    statements: Sequence[Path] = (),
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Json:
    """Return everything that is known of a file.

    Args:
        path: The file.
        trusted: Keys of which one must have signed a statement; none to believe all.
        statements: Files of statements; by default those beside the file or in folders above.
        max_bytes: How much a bundle may have, and an archive may unpack to.

    Raises:
        UnknownFile: Nothing is known of it.
        Unreadable: It is of a kind that tvmflow delivers, and damaged.
        OSError: It cannot be read.
    """
    if path.name.endswith(STATEMENT_SUFFIX):
        return _inspect_statements(path, trusted)
    if not path.is_file():
        raise UnknownFile(f"{path} is not a file")
    about: dict[str, Json] = {
        "path": str(path),
        "kind": describe_kind(path),
        "sha256": hash_file(str(path)),
        "bytes": path.stat().st_size,
        **_inspect_content(path, max_bytes),
    }
    files = list(statements) or find_statements(path)
    signed = [statement for file in files for statement in read_statements(file, trusted)]
    finding = check_file(path, signed, max_bytes)
    about["provenance"] = {"good": finding.good, "message": finding.message}
    if finding.source is not None and finding.source.statement is not None:
        about["provenance"] |= _statement_json(finding.source)
        about["provenance"] |= _find_measurements(signed, finding.source.statement)
    elif "content" not in about:
        raise UnknownFile(f"{path} is {about['kind']}, and {finding.message}")
    return about


def _find_measurements(
    statements: Sequence[SignedStatement], described: Statement
) -> dict[str, Json]:
    """Return what was measured of the files of a statement; empty without a statement about it."""
    for signed in statements:
        measured = signed.statement
        if measured is None or signed.problem or not measured.is_of_measurements:
            continue
        digests = [
            get_field(entry, "digest", "sha256", of=str)
            for entry in measured.dependencies("statement")
        ]
        if described.text_digest in digests:
            return {
                "measurements": str(signed.path),
                "kernels": [dict(kernel) for kernel in measured.kernels],
                "verification": _verification(measured.verdict),
            }
    return {}


def _inspect_statements(path: Path, trusted: Sequence[PublicKey]) -> Json:
    signed = read_statements(path, trusted)
    for statement in signed:
        if statement.statement is None:
            raise Unreadable(statement.problem)
    statements = [_statement_json(statement) for statement in signed]
    return {"path": str(path), "kind": "statements of provenance", "statements": statements}


def _statement_json(signed: SignedStatement) -> dict[str, Json]:
    """Return a statement that could be read."""
    assert signed.statement is not None
    statement = signed.statement
    return {
        "statement": str(signed.path),
        "problem": signed.problem,
        "signature": signed.signature,
        "signed_by": list(signed.key_ids),
        "trusted": [key.id for key in signed.trusted],
        "about": statement.about,
        "recipe": statement.recipe,
        "target": statement.target,
        "subjects": dict(statement.subjects),
        "sources": [_source_json(entry) for entry in statement.dependencies("source")],
        "tools": {
            get_field(entry, "name", of=str): get_field(entry, "annotations", "version", of=str)
            for entry in statement.dependencies("tool")
        },
        "kernels": [dict(kernel) for kernel in statement.kernels],
        "verification": _verification(statement.verdict),
    }


def _source_json(entry: Mapping[str, Json]) -> Json:
    return {
        "name": get_field(entry, "name", of=str),
        "sha256": get_field(entry, "digest", "sha256", of=str),
        **({"url": get_field(entry, "uri", of=str)} if "uri" in entry else {}),
    }


def _verification(verdict: Mapping[str, Json]) -> dict[str, Json]:
    """Return the parts of a verdict that say how good a library is; empty when there is none."""
    if not verdict:
        return {}
    outputs = [
        output
        for kind in ("outputs", "index_inputs")
        for output in get_field(verdict, kind, of=dict).values()
    ]
    errors = [get_number(output, "max_abs_error") for output in outputs]
    return {
        "passed": get_field(verdict, "passed", of=bool),
        "against": get_field(verdict, "reference", of=str) or get_field(verdict, "against", of=str),
        "accuracy": get_number(verdict, "accuracy"),
        "max_abs_error": max((error for error in errors if error is not None), default=None),
        "seconds": get_number(verdict, "latency", "library", "median"),
        "not_run": get_field(verdict, "not_run", of=str),
    }


# ---------------------------------------------------------------- content by kind


def _inspect_content(path: Path, max_bytes: int) -> dict[str, Json]:
    """Return `kind`, `content` and `problems` as far as a file has them."""
    if path.name.endswith(SUFFIX):
        return _inspect_lock(path)
    if path.suffix in _DOCUMENT_SUFFIXES:
        return _inspect_document(path)
    return _inspect_bundle(path, max_bytes)


def _inspect_lock(path: Path) -> dict[str, Json]:
    """Return the content of a lock file.

    Raises:
        RecipeError: It is none.
    """
    lock = read_lock(path).file
    locked = [
        {
            "name": name,
            "version": recipe.version,
            "target": target,
            "tvm": entry.tvm,
            "kernels": len(entry.kernels),
            "tuned": len(entry.choice),
        }
        for name, recipe in lock.recipes.items()
        for target, entry in recipe.targets.items()
    ]
    return {"kind": "a lock file", "content": {"locked": locked, "tools": lock.tools}}


def _inspect_document(path: Path) -> dict[str, Json]:
    """Return the content of a JSON file, if it is one that tvmflow delivers."""
    try:
        value = read_json(read_file(path))
    except Unreadable as error:
        return {"problems": [str(error)]}
    if get_field(value, "bomFormat", of=str) == "CycloneDX":
        return _inspect_bom(value)
    if "passed" in get_field(value, of=dict) and "against" in value:
        return {"kind": "a verdict", "content": {"verification": _verification(value)}}
    return {"kind": "a JSON file"}


def _inspect_bom(value: Json) -> dict[str, Json]:
    model = get_field(value, "metadata", "component", of=dict)
    components = get_field(value, "components", of=list)
    return {
        "kind": f"a bill of materials, CycloneDX {get_field(value, 'specVersion', of=str)}",
        "content": {
            **_text_fields(model, "name", "version"),
            "components": [
                _text_fields(entry, "type", "name", "version", "purl") for entry in components
            ],
        },
    }


def _text_fields(value: Json, *names: str) -> dict[str, str]:
    return {name: get_field(value, name, of=str) for name in names}


def _inspect_bundle(path: Path, max_bytes: int) -> dict[str, Json]:
    """Return the content of the bundle that a file is or contains.

    Raises:
        Unreadable: It is a damaged bundle.
    """
    try:
        packed = find_bundle(path, max_bytes)
    except Unreadable as error:
        if path.suffix == BUNDLE:
            raise
        return {"problems": [str(error)]}
    if packed is None:
        return {}
    is_bundle = path.suffix == BUNDLE
    kind = "a bundle" if is_bundle else f"an archive with the bundle {packed.path_in_archive}"
    return {
        "kind": kind,
        "content": _bundle_json(packed.bundle),
        "problems": [*packed.bundle.problems, *_read_images(packed.bundle)[1]],
    }


def _bundle_json(bundle: Bundle) -> dict[str, Json]:
    manifest = bundle.manifest
    parts = {name: _bundle_json(part) for name, part in bundle.parts.items()}
    return {
        **_text_fields(manifest, "name", "version"),
        "target": get_field(manifest, "target", of=dict),
        "made_with": _text_fields(manifest, "tvm", "tvm_ffi", "tvmflow"),
        "verified_against": get_field(manifest, "verified_against", of=str),
        "model": get_field(manifest, "model", of=dict),
        "inputs": get_field(bundle.signature, "inputs", of=list),
        "outputs": get_field(bundle.signature, "outputs", of=list),
        **_read_images(bundle)[0],
        **({"parts": parts} if parts else {"runtime": str(manifest.get("runtime", VM))}),
    }


def _read_images(bundle: Bundle) -> tuple[dict[str, Json], list[str]]:
    """Return how images become inputs with the labels of the scores, and why these are damaged, if they are."""
    manifest = bundle.manifest
    if not manifest.keys() & {"images", "labels"}:
        return {}, []
    try:
        inputs = map(TensorSpec.from_json, get_field(bundle.signature, "inputs", of=list))
        images, labels = read_preprocessing(manifest, inputs), read_labels(manifest)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return {}, [f"its preprocessing or its labels are damaged: {last_line(error)}"]
    about: dict[str, Json] = {"images": {name: image.to_json() for name, image in images.items()}}
    return (about | {"labels": labels.to_json()} if labels else about), []
