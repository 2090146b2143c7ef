"""What a stage's result depends on, as a digest, and the difference of two such in the user's words."""

import hashlib
import json
from collections.abc import Mapping

from tvmflow.values import Json, StageKey, StageSpec

# Settings that stand at the top of a recipe keep their name; all others are fields of their stage.
_TOP_LEVEL = frozenset({"inputs", "model", "name", "outputs", "target", "tune", "verify"})


def canonical(value: Json) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest_of(value: Json) -> str:
    """sha256 (hex) of the canonical spelling."""
    return hashlib.sha256(canonical(value)).hexdigest()


def key_of(
    spec: StageSpec, inputs: Mapping[str, str], tools: Mapping[str, str], machine: str
) -> StageKey:
    """The key of a stage whose inputs are known.

    `inputs` maps every `<stage>/<file>` and file role to the sha256 of its content, `tools`
    every distribution in `spec.tools` to its identity. Paths, recipe names, times and host
    names are not in the key.
    """
    preimage: dict[str, Json] = {
        "stage": spec.stage,
        "version": spec.version,
        "settings": spec.settings,
        "inputs": dict(inputs),
        "tools": {name: tools[name] for name in spec.tools},
        "machine": machine,
    }
    return StageKey(digest_of(preimage), preimage)


def difference(before: Mapping[str, Json], after: Mapping[str, Json]) -> list[str]:
    """Why a stage's key changed, one short phrase per cause, in the words of the recipe."""
    causes: list[str] = []
    if before["version"] != after["version"]:
        causes.append(f"this tvmflow does {after['stage']} differently")
    for path, old, new in _changes(before["settings"], after["settings"]):
        name = ".".join(path if path[0] in _TOP_LEVEL else (after["stage"], *path))
        causes.append(f"{name} {_show(old)} -> {_show(new)}")
    for (name,), old, new in _changes(before["inputs"], after["inputs"], depth=1):
        causes.append(_input_cause(name, old, new))
    for (name,), old, new in _changes(before["tools"], after["tools"], depth=1):
        causes.append(f"{name} {_show(old)} -> {_show(new)}")
    if before["machine"] != after["machine"]:
        causes.append(f"building machine {before['machine']} -> {after['machine']}")
    return causes


def _input_cause(name: str, old: Json, new: Json) -> str:
    stage, slash, file = name.partition("/")
    if slash and stage != "external":
        return f"{stage} gave another {file}"
    if old is _ABSENT:
        return f"file '{name}' is new"
    if new is _ABSENT:
        return f"file '{name}' is no longer used"
    return f"the content of file '{name}' changed ({old[:8]} -> {new[:8]})"


class _Absent:
    def __repr__(self) -> str:
        return "(not set)"


_ABSENT = _Absent()


def _changes(
    old: Json, new: Json, path: tuple[str, ...] = (), depth: int = 99
) -> list[tuple[tuple[str, ...], Json, Json]]:
    """`(path, old, new)` of every leaf that differs; lists are leaves."""
    if old == new:
        return []
    if not (isinstance(old, dict) and isinstance(new, dict) and depth):
        return [(path, old, new)]
    found: list[tuple[tuple[str, ...], Json, Json]] = []
    for name in sorted({*old, *new}):
        found += _changes(old.get(name, _ABSENT), new.get(name, _ABSENT), (*path, name), depth - 1)
    return found


def _show(value: Json) -> str:
    return repr(value) if isinstance(value, _Absent) else json.dumps(value)
