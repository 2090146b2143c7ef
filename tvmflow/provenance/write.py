"""Writes the sidecar files of deliveries and releases, signed where a key is set."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.core import signing
from tvmflow.core.canonical_json import canonical
from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.documents import Unreadable, get_field, read_file, read_json
from tvmflow.core.files import hash_file, write_atomically
from tvmflow.core.types import STATEMENT_SUFFIX, Json
from tvmflow.provenance import bom, statement
from tvmflow.provenance.delivered import DeliveredTarget
from tvmflow.provenance.lineage import load_lineage
from tvmflow.provenance.source_state import read_source_state
from tvmflow.runtime.statements import PAYLOAD_TYPE, parse_statement
from tvmflow.store.local import LocalStore

RELEASE_STATEMENT: Final = f"release{STATEMENT_SUFFIX}"
"""The name of the statement about the folder of a release."""

_log = logging.getLogger(__name__)


def write_target_sidecars(
    delivered: DeliveredTarget, store: LocalStore, statement_path: str, bom_path: str
) -> None:
    """Write both sidecar files of a target; the statement also covers the bill of materials.

    Signatures of others stay on a statement whose text does not change.

    Raises:
        DamagedBlob: A result that has to be read is not what it should be.
        StoreError: A file cannot be written.
    """
    lineage = load_lineage(delivered, store)
    materials = bom.make_bom(lineage)
    bom_digest = hashlib.sha256(materials).hexdigest()
    subjects = {**dict(delivered.files), Path(bom_path).name: bom_digest}
    sources = read_source_state(delivered.origin) if delivered.origin else None
    text = statement.make_statement(lineage, subjects, sources)
    key = signing.load_signing_key()
    envelope = _keep_signatures(text, Path(statement_path))
    if key is not None:
        envelope = _add_signature(envelope, key)
    write_if_changed(Path(bom_path), materials)
    write_if_changed(Path(statement_path), _line(envelope))


def write_release_sidecars(
    folder: Path, name: str, version: str, targets: Sequence[DeliveredTarget], store: LocalStore
) -> None:
    """Write the sidecar files of every target in a release, and a statement about its whole folder.

    Raises:
        DamagedBlob: A result that has to be read is not what it should be.
        StoreError: A file cannot be written.
    """
    for delivered in targets:
        write_target_sidecars(delivered, store, *delivered.sidecar_paths(str(folder)))
    statements = sorted(folder.rglob(f"*{STATEMENT_SUFFIX}"))
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path not in statements)
    text = statement.make_release_statement(
        name,
        version,
        {path.relative_to(folder).as_posix(): hash_file(str(path)) for path in files},
        {path.relative_to(folder).as_posix(): text_digest(path) for path in statements},
    )
    key = signing.load_signing_key()
    envelope = signing.sign_envelope(PAYLOAD_TYPE, text, [key] if key else [])
    write_if_changed(folder / RELEASE_STATEMENT, _line(envelope))


def text_digest(path: Path) -> str:
    """Return the sha256 (hex) of a statement's text, which is the same whoever signs it later.

    Raises:
        Unreadable: The file cannot be read, or holds no single statement.
        InvalidEnvelope: It holds no envelope of a statement.
    """
    text = signing.open_envelope(read_json(read_file(path)), PAYLOAD_TYPE)
    return hashlib.sha256(text).hexdigest()


def sign_statements(path: Path, key: signing.PrivateKey) -> None:
    """Add a signature to every statement in a file, or to none when one cannot be read.

    Raises:
        Unreadable: The file or a statement in it cannot be read.
        InvalidEnvelope: A line is no envelope of a statement.
    """
    envelopes = [read_json(line) for line in read_file(path).splitlines() if line.strip()]
    if not envelopes:
        raise Unreadable("it is empty")
    for envelope in envelopes:
        parse_statement(signing.open_envelope(envelope, PAYLOAD_TYPE))
    write_if_changed(path, b"".join(_line(_add_signature(entry, key)) for entry in envelopes))


def _line(envelope: Json) -> bytes:
    return canonical(envelope) + b"\n"


def _add_signature(envelope: Mapping[str, Json], key: signing.PrivateKey) -> Json:
    """Return the envelope with a signature of `key` in place of one with the same id."""
    text = signing.open_envelope(envelope, PAYLOAD_TYPE)
    signed = signing.sign_envelope(PAYLOAD_TYPE, text, [key])
    others = [entry for entry in envelope["signatures"] if entry["keyid"] != key.public.id]
    signatures = sorted([*others, *signed["signatures"]], key=lambda entry: str(entry["keyid"]))
    return {**signed, "signatures": signatures}


def _keep_signatures(text: bytes, path: Path) -> Json:
    """Return an envelope of the text, with the signatures that the present file has for it."""
    unsigned = signing.sign_envelope(PAYLOAD_TYPE, text, [])
    with contextlib.suppress(Unreadable, signing.InvalidEnvelope):
        present = read_json(read_file(path))
        if signing.open_envelope(present, PAYLOAD_TYPE) == text:
            signatures = [
                {name: get_field(entry, name, of=str) for name in ("keyid", "sig")}
                for entry in get_field(present, "signatures", of=list)
            ]
            return {**unsigned, "signatures": signatures}
    return unsigned


def write_if_changed(path: Path, content: bytes) -> None:
    """Write a file atomically, unless it already has this content.

    Raises:
        StoreError: It cannot be written.
    """
    with contextlib.suppress(Unreadable):
        if not path.is_symlink() and read_file(path) == content:
            return
    _log.debug("writing %s", path)
    with disk_errors(str(path)):
        write_atomically(path, content)
