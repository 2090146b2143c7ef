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
from tvmflow.provenance.delivered import DeliveredTarget, SidecarPaths
from tvmflow.provenance.lineage import Lineage, load_lineage
from tvmflow.provenance.readme import make_readme
from tvmflow.provenance.source_state import SourceState, read_source_state
from tvmflow.runtime.statements import MEASUREMENTS_TYPE, PAYLOAD_TYPE, parse_statement
from tvmflow.store.local import LocalStore

RELEASE_STATEMENT: Final = f"release{STATEMENT_SUFFIX}"
"""The name of the statement about the folder of a release."""
MEASUREMENTS_STATEMENT: Final = f"measurements{STATEMENT_SUFFIX}"
"""The name of the statement about the measurements of a release."""

_log = logging.getLogger(__name__)


def write_target_sidecars(
    delivered: DeliveredTarget, store: LocalStore, paths: SidecarPaths
) -> None:
    """Write the sidecar files of a target; its statement also covers the bill of materials.

    Signatures of others stay on a statement whose text does not change.

    Raises:
        DamagedBlob: A result that has to be read is not what it should be.
        StoreError: A file cannot be written.
    """
    lineage = load_lineage(delivered, store)
    text = _write_reproducible(lineage, delivered, paths)
    # A statement must be about something, also where nothing was verified.
    measured = dict(delivered.measured_files or delivered.files)
    sources = _read_sources(delivered)
    measurements = statement.make_measurement_statement(lineage, measured, text, sources)
    _write_statement(Path(paths.measurements), measurements)


def _read_sources(delivered: DeliveredTarget) -> SourceState | None:
    return read_source_state(delivered.origin) if delivered.origin else None


def _write_reproducible(lineage: Lineage, delivered: DeliveredTarget, paths: SidecarPaths) -> bytes:
    """Write the statement, the bill of materials and the README, and return the text of the statement."""
    reproducible = lineage._replace(files=delivered.reproducible_files)
    others = [Path(path).name for path in (paths.statement, paths.bom)]
    documents = {
        Path(paths.bom): bom.make_bom(reproducible),
        Path(paths.readme): make_readme(reproducible, others),
    }
    digests = {path.name: hashlib.sha256(text).hexdigest() for path, text in documents.items()}
    subjects = {**dict(reproducible.files), **digests}
    text = statement.make_statement(reproducible, subjects, _read_sources(delivered))
    for path, content in documents.items():
        write_if_changed(path, content)
    _write_statement(Path(paths.statement), text)
    return text


def write_release_targets(
    folder: Path, targets: Sequence[DeliveredTarget], store: LocalStore
) -> None:
    """Write statement, bill of materials and README of every target in a release.

    Raises:
        DamagedBlob: A result that has to be read is not what it should be.
        StoreError: A file cannot be written.
    """
    for delivered in targets:
        paths = delivered.sidecar_paths(str(folder))
        _write_reproducible(load_lineage(delivered, store), delivered, paths)


def write_release_statements(
    folder: Path, name: str, version: str, measured: Sequence[str] = ()
) -> None:
    """Write the statement about all files of a release but the measured ones, and one about those.

    Args:
        folder: The folder of the release, with all other files.
        name: The pipeline.
        version: The version of the release.
        measured: The files with measurements.

    Raises:
        StoreError: A file cannot be written.
    """
    statements = sorted(folder.rglob(f"*{STATEMENT_SUFFIX}"))
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path not in statements)
    digests = {path.relative_to(folder).as_posix(): hash_file(path) for path in files}
    text = statement.make_release_statement(
        name,
        version,
        {path: digest for path, digest in digests.items() if path not in measured},
        {path.relative_to(folder).as_posix(): text_digest(path) for path in statements},
        measured=measured,
    )
    _write_statement(folder / RELEASE_STATEMENT, text)
    if measured:
        measurements = statement.make_release_statement(
            name,
            version,
            {path: digests[path] for path in measured},
            {RELEASE_STATEMENT: hashlib.sha256(text).hexdigest()},
            build_type=MEASUREMENTS_TYPE,
        )
        _write_statement(folder / MEASUREMENTS_STATEMENT, measurements)


def _write_statement(path: Path, text: bytes) -> None:
    """Write a statement, with the signature of the own key and those that the present file has for its text."""
    key = signing.load_signing_key()
    envelope = _keep_signatures(text, path)
    if key is not None:
        envelope = _add_signature(envelope, key)
    write_if_changed(path, _line(envelope))


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
