"""Delivery to the `dist` folder: complete files only, and only verified ones."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from tvmflow.core.disk_errors import check_writable, disk_errors, make_folder
from tvmflow.core.files import hash_file, replacing
from tvmflow.core.types import Artifact, Delivery, Plan
from tvmflow.store.file_digests import note_name, stamp
from tvmflow.store.local import LocalStore


class _File(NamedTuple):
    path: str
    digest: str
    is_delivered: bool


def delivered_paths(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str] | None:
    """Return the paths of all delivered files of a plan; None if a file still has to be copied."""
    files = _list_files(plan, artifacts, store, dist)
    return [file.path for file in files] if all(file.is_delivered for file in files) else None


def list_files_to_copy(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str]:
    """Return the paths in `dist` whose files are missing or changed, and may be delivered now."""
    files = _list_files(plan, artifacts, store, dist)
    return [file.path for file in files if not file.is_delivered]


def check_folders(plan: Plan, dist: str, pending: Container[str]) -> None:
    """Check, before pending stages run, that their results can be written to `dist`."""
    folders = dict.fromkeys(
        os.path.join(dist, delivery.recipe, delivery.target)
        for delivery in plan.deliveries
        if delivery.stage_id in pending or delivery.verified_by in pending
    )
    for folder in folders:
        check_writable(folder)


def deliver(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str]:
    """Copy missing and changed files to `dist`; return the paths of all delivered files.

    No file of a target is delivered before its library is verified. All files are first written beside the old ones,
    and only then replace them.

    Raises:
        StoreError: when `dist` cannot be written.
        DamagedBlob: when a stored file does not have its digest.
    """
    files = _list_files(plan, artifacts, store, dist)
    changed = [file for file in files if not file.is_delivered]
    with contextlib.ExitStack() as replacements:
        for file in changed:
            replacements.enter_context(_copying(store, file.digest, file.path))
    for file in changed:
        _write_note(store, file.path, file.digest)
    return [file.path for file in files]


def deliver_verdicts(
    plan: Plan, verdicts: Mapping[str, str], store: LocalStore, dist: str
) -> list[str]:
    """Deliver the verdicts on rejected libraries, but not these libraries."""
    paths = []
    for delivery in plan.deliveries:
        if delivery.stage_id in verdicts:
            # The first file of the verifying stage is the verdict; its other files describe a verified library.
            path = _delivered_path(delivery, delivery.files[0][1], dist)
            with _copying(store, verdicts[delivery.stage_id], path):
                pass
            _write_note(store, path, verdicts[delivery.stage_id])
            paths.append(path)
    return paths


def _list_files(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[_File]:
    files = []
    for delivery in plan.deliveries:
        is_unverified = delivery.verified_by and delivery.verified_by not in artifacts
        if is_unverified or delivery.stage_id not in artifacts:
            continue
        digests = delivery.digests(artifacts)
        for stored_name, delivered_name in delivery.files:
            path = _delivered_path(delivery, delivered_name, dist)
            digest = digests[stored_name]
            files.append(_File(path, digest, _is_delivered(store, path, digest)))
    return files


def _delivered_path(delivery: Delivery, name: str, dist: str) -> str:
    return os.path.join(dist, delivery.recipe, delivery.target, name)


def _is_delivered(store: LocalStore, path: str, digest: str) -> bool:
    """Return whether the file at a path has this digest, by its recorded stamp or by hashing it."""
    try:
        current_stamp = stamp(path)
    except OSError:
        return False
    note = store.notes.read("delivered", note_name(path))
    if note == json.dumps([digest, current_stamp]):
        return True
    try:
        if hash_file(path) != digest:
            return False
    except OSError:
        # A folder or an unreadable file is in the way: copying reports it.
        return False
    _write_note(store, path, digest)
    return True


def _write_note(store: LocalStore, path: str, digest: str) -> None:
    store.notes.keep(json.dumps([digest, stamp(path)]), "delivered", note_name(path))


@contextlib.contextmanager
def _copying(store: LocalStore, digest: str, path: str) -> Iterator[None]:
    """Copy a stored file to a temporary one beside `path`, which it replaces when the block ends."""
    blob = store.blobs.verified_path(digest)
    make_folder(os.path.dirname(path))
    with disk_errors(path, needed=os.path.getsize(blob)), replacing(path) as temporary:
        if os.path.isdir(path):
            # Check this before any file of the delivery is replaced.
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        # Stored files are read-only; a delivered file gets the permissions of the umask instead.
        shutil.copyfile(blob, temporary)
        yield
