"""What a stage's result depends on, as a digest, and the difference of two such in the user's words."""

import hashlib
import json
from collections.abc import Mapping

from tvmflow.values import Json, StageKey, StageSpec

# Settings that stand at the top of a recipe keep their name; all others are fields of their stage.
_TOP_LEVEL = frozenset(
    {"device", "inputs", "model", "name", "outputs", "target", "tune", "verify", "version"}
)

_ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode

# More settings than this that come or go together are told in one phrase.
_FEW = 2


def canonical(value: Json) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, ASCII."""
    return _ENCODE(value).encode()


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
    settings = _changes(before["settings"], after["settings"])
    changed = [change for change in settings if _ABSENT not in change[1:]]
    causes += [_setting_cause(after, *change) for change in changed]
    causes += _input_causes(_changes(before["inputs"], after["inputs"], depth=1))
    for (name,), old, new in _changes(before["tools"], after["tools"], depth=1):
        causes.append(f"{name} {_show(old)} -> {_show(new)}")
    if before["machine"] != after["machine"]:
        causes.append(f"building machine {before['machine']} -> {after['machine']}")
    return causes + _came_and_went(after, [each for each in settings if each not in changed])


def _setting_cause(after: Mapping[str, Json], path: tuple[str, ...], old: Json, new: Json) -> str:
    return f"{_setting(after, path)} {_show(old)} -> {_show(new)}"


def _setting(after: Mapping[str, Json], path: tuple[str, ...]) -> str:
    return ".".join(path if path[0] in _TOP_LEVEL else (after["stage"], *path))


def _came_and_went(
    after: Mapping[str, Json], changes: list[tuple[tuple[str, ...], Json, Json]]
) -> list[str]:
    """Settings that are on one side only; many come at once, as all of tuning does when trials leaves 0."""
    if len(changes) <= _FEW:
        return [_setting_cause(after, *change) for change in changes]
    came = [_setting(after, path) for path, old, _ in changes if old is _ABSENT]
    went = [_setting(after, path) for path, _, new in changes if new is _ABSENT]
    told = [("now matter", came), ("no longer matter", went)]
    return [f"{', '.join(names)} {verb}" for verb, names in told if names]


def _input_causes(changes: list[tuple[tuple[str, ...], Json, Json]]) -> list[str]:
    """One phrase for each stage whose files changed, and one for each file from outside."""
    outside: list[str] = []
    stages: dict[str, list[str]] = {}
    for (name,), old, new in changes:
        stage, slash, file = name.partition("/")
        if slash and stage != "external":
            stages.setdefault(stage, []).append(file)
        elif old is _ABSENT:
            outside.append(f"file '{name}' is new")
        elif new is _ABSENT:
            outside.append(f"file '{name}' is no longer used")
        else:
            outside.append(f"the content of file '{name}' changed ({old[:8]} -> {new[:8]})")
    return outside + [f"{stage} gave another {_and(files)}" for stage, files in stages.items()]


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


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
