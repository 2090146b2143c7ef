"""Writes statement and bill of materials beside delivered files, signed where a key is named."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow import signing
from tvmflow.keys import canonical
from tvmflow.provenance import bom, statement
from tvmflow.provenance.beside import STATEMENT_SUFFIX, Group
from tvmflow.provenance.documents import Unreadable, at, read_file, read_json
from tvmflow.provenance.trail import walk
from tvmflow.stores.local import LocalStore, disk_errors, hash_file
from tvmflow.values import Json

_RELEASE: Final = "release"


def write(group: Group, store: LocalStore, statement_path: str, bom_path: str) -> None:
    """Write both for what was delivered; the statement is also about the bill of materials.

    Signatures of others stay on a statement that says what it said before. Raises Damaged.
    """
    trail = walk(group, store)
    materials = bom.make(trail)
    name = os.path.basename(bom_path)  # noqa: PTH119 - the caller does without pathlib
    subjects = {**dict(group.files), name: hashlib.sha256(materials).hexdigest()}
    text = statement.make(trail, subjects)
    key = signing.own_key()
    envelope = _with_others(text, Path(statement_path))
    if key is not None:
        envelope = _signed(envelope, key)
    put(Path(bom_path), materials)
    put(Path(statement_path), _line(envelope))


def write_release(
    folder: Path, name: str, version: str, groups: Sequence[Group], store: LocalStore
) -> None:
    """Write both for every target's files in a release, and a statement about all that is in the folder.

    Raises Damaged.
    """
    for group in groups:
        write(group, store, *group.paths(str(folder)))
    said = sorted(folder.rglob(f"*{STATEMENT_SUFFIX}"))
    files = sorted(each for each in folder.rglob("*") if each.is_file() and each not in said)
    text = statement.make_release(
        name,
        version,
        {each.relative_to(folder).as_posix(): hash_file(str(each)) for each in files},
        {each.relative_to(folder).as_posix(): _digest_of_text(each) for each in said},
    )
    key = signing.own_key()
    envelope = signing.seal(statement.PAYLOAD_TYPE, text, [key] if key else [])
    put(folder / f"{_RELEASE}{STATEMENT_SUFFIX}", _line(envelope))


def _digest_of_text(path: Path) -> str:
    """sha256 (hex) of what a statement says, whoever has signed it by now."""
    text = signing.unseal(read_json(read_file(path)), statement.PAYLOAD_TYPE)
    return hashlib.sha256(text).hexdigest()


def sign(path: Path, key: signing.PrivateKey) -> None:
    """Add a signature to every statement in a file. Raises Unreadable or NotSigned, and then adds none."""
    envelopes = [read_json(line) for line in read_file(path).splitlines() if line.strip()]
    if not envelopes:
        raise Unreadable("it is empty")
    for each in envelopes:
        statement.read(signing.unseal(each, statement.PAYLOAD_TYPE))
    put(path, b"".join(_line(_signed(each, key)) for each in envelopes))


def _line(envelope: Json) -> bytes:
    return canonical(envelope) + b"\n"


def _signed(envelope: Mapping[str, Json], key: signing.PrivateKey) -> Json:
    """The envelope with the signature of `key` instead of what stood there under its name."""
    text = signing.unseal(envelope, statement.PAYLOAD_TYPE)
    ours = signing.seal(statement.PAYLOAD_TYPE, text, [key])
    others = [each for each in envelope["signatures"] if each["keyid"] != key.public.id]
    signatures = sorted([*others, *ours["signatures"]], key=lambda each: str(each["keyid"]))
    return {**ours, "signatures": signatures}


def _with_others(text: bytes, path: Path) -> Json:
    """An envelope of the text, with the signatures that it has in the file that is there."""
    with contextlib.suppress(Unreadable, signing.NotSigned):
        found = read_json(read_file(path))
        if signing.unseal(found, statement.PAYLOAD_TYPE) == text:
            return {
                **signing.seal(statement.PAYLOAD_TYPE, text, []),
                "signatures": [
                    {"keyid": at(each, "keyid", of=str), "sig": at(each, "sig", of=str)}
                    for each in at(found, "signatures", of=list)
                ],
            }
    return signing.seal(statement.PAYLOAD_TYPE, text, [])


def put(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; one that is as it should be is left alone."""
    with contextlib.suppress(Unreadable):
        if not path.is_symlink() and read_file(path) == content:
            return
    with disk_errors(str(path)):
        aside = path.with_name(f"{path.name}.{os.getpid()}-{time.monotonic_ns()}.part")
        try:
            aside.write_bytes(content)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
