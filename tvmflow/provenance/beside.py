"""The two files beside what is delivered: a statement of what it was made from, and a bill of materials.

They describe finished results and are none themselves: a signature has no place in a cache. That
they are there, and of the results that lie beside them, a run knows from a note and two stamps.
"""

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

from tvmflow.delivery import note_name
from tvmflow.keys import digest_of
from tvmflow.stores.filestat import stamp
from tvmflow.stores.local import LocalStore
from tvmflow.values import Artifact, Json, Plan, StageSpec

STATEMENT_SUFFIX = ".intoto.jsonl"
BOM_SUFFIX = ".cdx.json"

# Of what is written: raised when the same results are described otherwise.
_VERSION = 1

# As in `signing`, which loads far more than a run with nothing to do needs.
_KEY_VARIABLE = "TVMFLOW_SIGNING_KEY"


class Group(NamedTuple):
    """What one recipe has for one target: the files delivered, and every stage behind them in order.

    `files` are names in the folder with their digests; the results are in `artifacts` by stage id.
    """

    recipe: str
    target: str
    files: tuple[tuple[str, str], ...]
    stages: tuple[StageSpec, ...]
    artifacts: Mapping[str, Artifact]

    def paths(self, dist: str) -> tuple[str, str]:
        """Where statement and bill of materials belong."""
        base = os.path.join(dist, self.recipe, self.target, self.recipe)
        return base + STATEMENT_SUFFIX, base + BOM_SUFFIX


def found(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str] | None:
    """The paths of all such files in `dist`; None when one of them has to be written."""
    paths: list[str] = []
    for group in groups(plan, artifacts):
        if not _is_there(store, group, dist):
            return None
        paths += group.paths(dist)
    return paths


def attach(
    plan: Plan, artifacts: Mapping[str, Artifact], store: LocalStore, dist: str
) -> list[str]:
    """Write what is missing or describes other results; the paths of all such files in `dist`.

    Raises Damaged when a result that has to be read is not what it should be.
    """
    paths: list[str] = []
    for group in groups(plan, artifacts):
        if not _is_there(store, group, dist):
            # a run with nothing to do comes here only to find that out
            from tvmflow.provenance.writing import write

            write(group, store, *group.paths(dist))
            _note(store, group, dist)
        paths += group.paths(dist)
    return paths


def groups(plan: Plan, artifacts: Mapping[str, Artifact]) -> list[Group]:
    """Every recipe's targets of which all that is to be delivered is there, and verified if it is to be."""
    wanted: dict[tuple[str, str], list[tuple[str, str]] | None] = {}
    behind: dict[tuple[str, str], list[str]] = {}
    for delivery in plan.deliveries:
        place = (delivery.recipe, delivery.target)
        makers = [delivery.stage_id, *([delivery.verified_by] if delivery.verified_by else [])]
        behind.setdefault(place, []).extend(makers)
        files = wanted.setdefault(place, [])
        if files is None or any(maker not in artifacts for maker in makers):
            wanted[place] = None
            continue
        digests = artifacts[delivery.stage_id].digests(())
        files += [(delivered, digests[stored]) for stored, delivered in delivery.files]
    specs = {spec.id: spec for spec in plan.stages}
    order = {spec.id: index for index, spec in enumerate(plan.stages)}
    return [
        Group(*place, tuple(sorted(files)), _chain(behind[place], specs, order), artifacts)
        for place, files in wanted.items()
        if files
    ]


def _chain(
    ids: list[str], specs: Mapping[str, StageSpec], order: Mapping[str, int]
) -> tuple[StageSpec, ...]:
    """These stages and all that they need, directly or not, in the plan's order."""
    found: dict[str, StageSpec] = {}
    left = list(ids)
    while left:
        each = left.pop()
        if each not in found:
            found[each] = specs[each]
            left += [need.stage_id for need in specs[each].needs]
    return tuple(sorted(found.values(), key=lambda spec: order[spec.id]))


def _is_there(store: LocalStore, group: Group, dist: str) -> bool:
    note = _read(store.read_note("delivered", note_name(group.paths(dist)[0])))
    try:
        if note.get("of") != _fingerprint(group):
            return False
        if note.get("stamps") != [stamp(path) for path in group.paths(dist)]:
            return False
        # who runs without a key does not take away another's signature
        return not os.environ.get(_KEY_VARIABLE) or note.get("key") == _key_stamp()
    except OSError:
        return False


def _note(store: LocalStore, group: Group, dist: str) -> None:
    stamps = [stamp(path) for path in group.paths(dist)]
    note = {"of": _fingerprint(group), "stamps": stamps, "key": _key_stamp()}
    store.write_note(json.dumps(note), "delivered", note_name(group.paths(dist)[0]))


def _read(note: str | None) -> dict[str, Json]:
    try:
        found = json.loads(note or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _key_stamp() -> Json:
    named = os.environ.get(_KEY_VARIABLE)
    return [os.path.abspath(named), stamp(named)] if named else None


def _fingerprint(group: Group) -> str:
    """A digest of all that the two files depend on."""
    stages = [
        [
            spec.label,
            group.artifacts[spec.id].key,
            [file.digest for file in group.artifacts[spec.id].files],
            [file.url for file in spec.files],
        ]
        for spec in group.stages
    ]
    return digest_of([_VERSION, group.recipe, group.target, group.files, stages])
