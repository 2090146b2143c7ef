"""Puts what recipes ask for into their `dist` folder: complete files only, and only what was verified."""

import json
import os
import time
from collections.abc import Mapping, Sequence

from tvmflow.stores.filestat import stamp
from tvmflow.stores.local import LocalStore, disk_errors, hash_file
from tvmflow.values import Artifact, Plan, StageSpec

VERDICT = "verify.json"
"""What the verdict on a library is called beside it."""


def delivered(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> tuple[str, ...] | None:
    """The paths of everything that the plan's recipes have in `dist`; None when anything has to be copied."""
    wanted = _wanted(plan, artifacts, store, dist)
    return tuple(path for path, _, _ in wanted) if all(there for *_, there in wanted) else None


def deliver(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str]:
    """Copy what is not there yet; the paths of everything that the plan's recipes have in `dist`.

    Nothing of a target is delivered while the stage that verifies it has no result.
    """
    paths = []
    for path, digest, there in _wanted(plan, artifacts, store, dist):
        if not there:
            _copy(store, digest, path)
        paths.append(path)
    return paths


def deliver_verdicts(
    rejected: Sequence[StageSpec], verdicts: Mapping[str, str], store: LocalStore, dist: str
) -> list[str]:
    """Put the verdicts against libraries where people look; their libraries stay out of `dist`."""
    paths = []
    for spec in rejected:
        if spec.id in verdicts:
            path = os.path.join(dist, spec.recipe, spec.target, VERDICT)
            _copy(store, verdicts[spec.id], path)
            paths.append(path)
    return paths


def _wanted(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[tuple[str, str, bool]]:
    """`(path, digest, already there)` of every file that may be delivered."""
    found = []
    for delivery in plan.deliveries:
        gated = delivery.verified_by and delivery.verified_by not in artifacts
        if gated or delivery.stage_id not in artifacts:
            continue
        digests = artifacts[delivery.stage_id].digests(())
        for stored, delivered in delivery.files:
            path = os.path.join(dist, delivery.recipe, delivery.target, delivered)
            digest = digests[stored]
            found.append((path, digest, _is_there(store, path, digest)))
    return found


def note_name(path: str) -> str:
    """What a note on a delivered file is called, by which it can be told whether that is still there."""
    return os.path.abspath(path).strip("/").replace("/", "+")[-200:]


def _is_there(store: LocalStore, path: str, digest: str) -> bool:
    """Whether the delivered file is the one that we put there, by its stamp, or else by its content."""
    try:
        now = stamp(path)
    except OSError:
        return False
    note = store.read_note("delivered", note_name(path))
    if note == json.dumps([digest, now]):
        return True
    try:
        if hash_file(path) != digest:
            return False
    except OSError:
        # something else stands there; copying will say so
        return False
    _note(store, path, digest)
    return True


def _note(store: LocalStore, path: str, digest: str) -> None:
    store.write_note(json.dumps([digest, stamp(path)]), "delivered", note_name(path))


def _copy(store: LocalStore, digest: str, path: str) -> None:
    # shutil is too slow to import for a run that copies nothing
    import shutil

    with disk_errors(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        aside = f"{path}.{os.getpid()}-{time.monotonic_ns()}.part"
        try:
            shutil.copyfile(store.checked_blob(digest), aside)
            os.chmod(aside, 0o644)
            os.replace(aside, path)
        finally:
            if os.path.exists(aside):
                os.unlink(aside)
    _note(store, path, digest)
