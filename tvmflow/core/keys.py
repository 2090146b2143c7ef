"""Cache keys of stages, and the reasons why a key changed."""

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.formatting import count_text
from tvmflow.core.types import InputFile, Json, StageKey, StageSpec

# Top-level fields of a recipe; messages name other settings `<stage>.<field>`.
_TOP_LEVEL = frozenset(
    "device inputs license model name outputs target tune verify version".split()
)

_HEX_DIGITS = frozenset("0123456789abcdef")
_DIGEST_LENGTH = 64

UNLIMITED_TRIALS = 10_000_000
"""The maximum number of trials that a recipe can set, and the limit if it sets only minutes."""

_BUDGET = (("tune", "trials"), ("tune", "minutes"), ("tune", "interim"))

# More settings than this that appear or disappear together share one phrase.
_FEW = 2
# If more files than this changed, such as images, the message has their number instead of their names.
_MAX_NAMES = 6


def group_files(files: Iterable[InputFile]) -> dict[str, list[InputFile]]:
    """Return the external files of a key by name: a role, or `data/20 files` for the files of a folder."""
    groups: dict[str, list[InputFile]] = {}
    for file in files:
        if file.keyed:
            name = f"{file.role.partition('/')[0]}/" if file.folder else file.role
            groups.setdefault(name, []).append(file)
    return {
        f"{name}{count_text(len(group), 'file')}" if name.endswith("/") else name: group
        for name, group in groups.items()
    }


def stage_key(
    spec: StageSpec, inputs: Mapping[str, str], tools: Mapping[str, str], machine: str
) -> StageKey:
    """Return the cache key of a stage, which contains no paths, recipe names, times or host names.

    `inputs` maps each `<stage>/<file>` and file role to its sha256, `tools` holds at least the identities of
    `spec.tools`, and `machine` is the platform of the building host.
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


def list_changes(
    before: Mapping[str, Json],
    after: Mapping[str, Json],
    described: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return why a stage's key changed: a short phrase for each cause, with the recipe's field names.

    `before` and `after` are pre-images; `described` maps stages to better descriptions of their changed files.
    """
    causes: list[str] = []
    if before["version"] != after["version"]:
        causes.append(f"this version of tvmflow runs {after['stage']} differently")
    settings = _find_changes(before["settings"], after["settings"])
    if any(change.path in _BUDGET for change in settings):
        old, new = (_describe_budget(preimage["settings"]["tune"]) for preimage in (before, after))
        # `pick_best` records only whether there was a search, so that both texts may be equal.
        causes += [f"{after['stage']}: {old} -> {new}"] if old != new else []
        settings = [change for change in settings if change.path not in _BUDGET]
    edited = [change for change in settings if not change.is_one_sided]
    causes += [_describe_setting(after, change) for change in edited]
    causes += _describe_inputs(_find_changes(before["inputs"], after["inputs"], depth=1), described)
    for (name,), old, new in _find_changes(before["tools"], after["tools"], depth=1):
        causes.append(f"{name} {_format(old)} -> {_format(new)}")
    if before["machine"] != after["machine"]:
        causes.append(f"build host {before['machine']} -> {after['machine']}")
    one_sided = [change for change in settings if change.is_one_sided]
    # Enabling a search adds many settings; the changed budget already explains them.
    is_explained = bool(causes) and len(one_sided) > _FEW
    return causes if is_explained else causes + _describe_one_sided_settings(after, one_sided)


class _Absent:
    def __repr__(self) -> str:
        return "(not set)"


_ABSENT = _Absent()


class _Change(NamedTuple):
    """A leaf that differs between two JSON objects; `_ABSENT` for a missing value."""

    path: tuple[str, ...]
    old: Json
    new: Json

    @property
    def is_one_sided(self) -> bool:
        return self.old is _ABSENT or self.new is _ABSENT


def _find_changes(
    old: Json, new: Json, path: tuple[str, ...] = (), depth: int = 99
) -> list[_Change]:
    if old == new:
        return []
    if not (isinstance(old, dict) and isinstance(new, dict) and depth):
        return [_Change(path, old, new)]
    changes: list[_Change] = []
    for name in sorted({*old, *new}):
        sides = (old.get(name, _ABSENT), new.get(name, _ABSENT))
        changes += _find_changes(*sides, (*path, name), depth - 1)
    return changes


def _describe_setting(after: Mapping[str, Json], change: _Change) -> str:
    name = _setting_name(after, change.path)
    if _is_digest(change.old) and _is_digest(change.new):
        return f"{name} changed"
    return f"{name} {_format(change.old)} -> {_format(change.new)}"


def _is_digest(value: Json) -> bool:
    return isinstance(value, str) and len(value) == _DIGEST_LENGTH and _HEX_DIGITS.issuperset(value)


def _setting_name(after: Mapping[str, Json], path: tuple[str, ...]) -> str:
    return ".".join(path if path[0] in _TOP_LEVEL else (after["stage"], *path))


def _describe_one_sided_settings(after: Mapping[str, Json], changes: list[_Change]) -> list[str]:
    if len(changes) <= _FEW:
        return [_describe_setting(after, change) for change in changes]
    added = [_setting_name(after, change.path) for change in changes if change.old is _ABSENT]
    removed = [_setting_name(after, change.path) for change in changes if change.new is _ABSENT]
    phrases = [("were added", added), ("were removed", removed)]
    return [f"{len(names)} settings {verb}: {', '.join(names)}" for verb, names in phrases if names]


def _describe_budget(tune: Mapping[str, Json]) -> str:
    """Return the budget of a search: `12 trials`, `4 minutes`, or both."""
    trials, minutes = tune.get("trials", 0), tune.get("minutes")
    if not trials:
        return "no search"
    if minutes == 0:
        return "the best so far"
    limits = [] if trials >= UNLIMITED_TRIALS else [count_text(trials, "trial")]
    limits += [] if minutes is None else [f"{minutes:g} {'minute' if minutes == 1 else 'minutes'}"]
    return " in at most ".join(limits) or "no limit"


def _describe_inputs(changes: list[_Change], described: Mapping[str, str]) -> list[str]:
    external: list[str] = []
    stages: dict[str, list[str]] = {}
    for (name,), old, new in changes:
        stage, slash, file = name.partition("/")
        if slash and stage != "external":
            stages.setdefault(stage, []).append(file)
        elif old is _ABSENT:
            external.append(f"file '{name}' is new")
        elif new is _ABSENT:
            external.append(f"file '{name}' is no longer used")
        else:
            external.append(f"the content of file '{name}' changed ({old[:8]} -> {new[:8]})")
    changed = (described.get(s) or f"{_join(files)} of {s} changed" for s, files in stages.items())
    return [*external, *changed]


def _join(names: list[str]) -> str:
    if len(names) > _MAX_NAMES:
        return f"{', '.join(names[:_FEW])} and {len(names) - _FEW} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _format(value: Json) -> str:
    return repr(value) if isinstance(value, _Absent) else json.dumps(value)
