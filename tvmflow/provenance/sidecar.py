"""The sidecar files of a delivery.

These are statements of its provenance and measurements, a bill of materials, and a README.

They describe finished results and are none themselves: a signature does not belong in a cache. A
note in the store and their stamps show a run that they are present and describe its results.
"""

import json
import os
from collections.abc import Iterator, Mapping

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.project import shortest_path
from tvmflow.core.types import Artifact, Json, Plan
from tvmflow.provenance.delivered import (
    DeliveredTarget,
    list_delivered_targets,
    read_builder_id,
    read_source_state,
)
from tvmflow.store.file_digests import note_name, stamp
from tvmflow.store.local import LocalStore

# The version of the written form: raised when the same results are described differently.
_VERSION = 3

# The same as in core.signing, whose import costs far more than the rest of an up-to-date run.
_KEY_VARIABLE = "TVMFLOW_SIGNING_KEY"


def find_sidecars(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str] | None:
    """Return the paths of all sidecar files in `dist`; None when one has to be written."""
    targets = list(_list_targets(plan, artifacts, store, dist))
    if not all(is_current for _, is_current in targets):
        return None
    return [path for delivered, _ in targets for path in delivered.sidecar_paths(dist)]


def list_sidecars_to_write(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str]:
    """Return the paths of the sidecar files that have to be written."""
    targets = _list_targets(plan, artifacts, store, dist)
    old = (delivered for delivered, is_current in targets if not is_current)
    return [path for delivered in old for path in delivered.sidecar_paths(dist)]


def write_sidecars(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str]:
    """Write the sidecar files that are missing or describe other results; return all their paths."""
    paths: list[str] = []
    for delivered, is_current in _list_targets(plan, artifacts, store, dist):
        if not is_current:
            # An up-to-date run imports this module only to find out that it is up to date.
            from tvmflow.provenance.write import write_target_sidecars

            _warn_of_replaced_recipe(store, delivered, dist)
            write_target_sidecars(delivered, store, delivered.sidecar_paths(dist))
            _write_note(store, delivered, dist)
        paths += delivered.sidecar_paths(dist)
    return paths


def _list_targets(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> Iterator[tuple[DeliveredTarget, bool]]:
    """Yield each target, and whether its sidecar files are present and describe its results."""
    for delivered in list_delivered_targets(plan, artifacts):
        yield delivered, _is_current(store, delivered, dist)


def _is_current(store: LocalStore, delivered: DeliveredTarget, dist: str) -> bool:
    paths = delivered.sidecar_paths(dist)
    note = _parse_note(store.notes.read("delivered", note_name(paths[0])))
    try:
        if note.get("of") != _fingerprint(delivered):
            return False
        if note.get("stamps") != [stamp(path) for path in paths]:
            return False
        # A run without a key does not remove another's signature.
        return not os.environ.get(_KEY_VARIABLE) or note.get("key") == _key_stamp()
    except OSError:
        return False


def _warn_of_replaced_recipe(store: LocalStore, delivered: DeliveredTarget, dist: str) -> None:
    """Log that the folder had the files of another recipe, which has the same name."""
    import logging

    path = delivered.sidecar_paths(dist)[0]
    other = _parse_note(store.notes.read("delivered", note_name(path))).get("recipe")
    # a recipe that was moved is no other one, and `build` mentions its own, which are in the store
    if not isinstance(other, str) or other == _recipe_path(delivered) or not os.path.isfile(other):
        return
    if os.path.commonpath([store.root, other]) != store.root:
        logging.getLogger(__name__).warning(
            "%s had the files of %s, which has the same name as %s: they were replaced; "
            "to keep both, give one of the recipes another name",
            os.path.dirname(path),
            *map(shortest_path, (other, _recipe_path(delivered))),
        )


def _recipe_path(delivered: DeliveredTarget) -> str:
    return os.path.abspath(delivered.origin.path) if delivered.origin else ""


def _write_note(store: LocalStore, delivered: DeliveredTarget, dist: str) -> None:
    paths = delivered.sidecar_paths(dist)
    note = {
        "of": _fingerprint(delivered),
        "stamps": [stamp(path) for path in paths],
        "key": _key_stamp(),
        "recipe": _recipe_path(delivered),
    }
    store.notes.write(json.dumps(note), "delivered", note_name(paths[0]))


def _parse_note(note: str | None) -> dict[str, Json]:
    try:
        value = json.loads(note or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _key_stamp() -> Json:
    path = os.environ.get(_KEY_VARIABLE)
    return [os.path.abspath(path), stamp(path)] if path else None


def _fingerprint(delivered: DeliveredTarget) -> str:
    """Return a digest of everything that the files depend on."""
    stages = [
        [
            spec.label,
            delivered.artifacts[spec.id].key,
            [file.digest for file in delivered.artifacts[spec.id].files],
            [file.url for file in spec.files],
        ]
        for spec in delivered.stages
    ]
    sources = read_source_state(delivered.origin) if delivered.origin else None
    of = [_VERSION, delivered.recipe, delivered.target, delivered.files, stages]
    return digest_of([*of, sources, read_builder_id()])
