"""The differences of two lock files, for those who review a release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.formatting import latency_text
from tvmflow.core.keys import list_changes
from tvmflow.core.types import Json
from tvmflow.recipe.lock_file import LockedKernel, LockedRecipe, LockFile, Measurements
from tvmflow.stages import build, export, import_model, lower

_SHOWN_KERNELS: Final = 8
_EVERYWHERE: Final = "everywhere"

# Settings that have lines of their own.
_REPORTED_SETTINGS: Final = ("target", "inputs", "version")
# Settings that several stages share, and the stage that they are reported for.
_SHARED_SETTINGS: Final = {"lowering": lower.NAME, "schedules": build.NAME}


class Change(NamedTuple):
    """One difference: `place` is a recipe or one of its targets, `what` the kind of the difference."""

    place: str
    what: str
    text: str


Differences = Iterator[tuple[str, str]]
"""Kinds and texts of differences in one place."""


def diff_locks(before: LockFile, after: LockFile) -> list[Change]:
    """Return all differences: packages and the machine, then recipe by recipe and target by target."""
    changes = [Change(_EVERYWHERE, "package", text) for text in _values(before.tools, after.tools)]
    if before.machine != after.machine:
        changes.append(Change(_EVERYWHERE, "machine", f"{before.machine} -> {after.machine}"))
    for name in sorted({*before.recipes, *after.recipes}):
        old, new = before.recipes.get(name), after.recipes.get(name)
        if old is None or new is None:
            changes.append(Change(name, "recipe", "added" if new else "removed"))
            continue
        changes += [Change(name, what, text) for what, text in _diff_recipes(old, new)]
        for target in sorted({*old.targets, *new.targets}):
            place = f"{name}/{target}"
            if target not in old.targets or target not in new.targets:
                state = "added" if target in new.targets else "removed"
                changes.append(Change(place, "target", state))
            else:
                differences = _diff_targets(old, new, target)
                changes += [Change(place, what, text) for what, text in differences]
    return changes


def _diff_recipes(old: LockedRecipe, new: LockedRecipe) -> Differences:
    """Yield what differs for all targets of a recipe."""
    if old.version != new.version:
        yield "version", f"{old.version} -> {new.version}"
    weights_changed, graph_changed = (
        _outputs(old, import_model.NAME).get(name) != _outputs(new, import_model.NAME).get(name)
        for name in ("params.safetensors", "model.json")
    )
    if weights_changed:
        yield "weights", "changed" + ("" if graph_changed else "; the operators are the same")
    if graph_changed:
        counts = ", ".join(_values(old.operators, new.operators))
        yield "operators", counts or "the same number of each, with other connections or attributes"
    yield from (("inputs", text) for text in _values(old.inputs, new.inputs))
    yield from (("outputs", text) for text in _values(old.outputs, new.outputs))
    for label in sorted({*old.stages} & {*new.stages}):
        for cause in list_changes(_settings_preimage(old, label), _settings_preimage(new, label)):
            yield "settings", cause


def _settings_preimage(recipe: LockedRecipe, label: str) -> dict[str, Json]:
    """Return the settings of a stage that have no lines of their own, as a pre-image with nothing else."""
    locked = recipe.stages[label]
    stage = label.partition("/")[0]
    others = (name for name, owner in _SHARED_SETTINGS.items() if stage != owner)
    hidden = (*_REPORTED_SETTINGS, *others)
    settings = {name: value for name, value in locked.settings.items() if name not in hidden}
    preimage = {"stage": stage, "version": locked.version, "settings": settings}
    return {**preimage, "inputs": {}, "tools": {}, "machine": ""}


def _diff_targets(old_recipe: LockedRecipe, new_recipe: LockedRecipe, name: str) -> Differences:
    """Yield what differs for one target of a recipe."""
    old, new = old_recipe.targets[name], new_recipe.targets[name]
    for text in _values(old.tvm, new.tvm):
        yield "target", text
    old_features, new_features = {*old.features}, {*new.features}
    if new_features - old_features:
        yield "target", f"{', '.join(sorted(new_features - old_features))} now used"
    if old_features - new_features:
        yield "target", f"{', '.join(sorted(old_features - new_features))} no longer used"
    yield from _diff_kernels(old.kernels, new.kernels)
    yield from _diff_files(old_recipe, new_recipe, name)
    yield from _diff_measurements(old.measured, new.measured)


def _diff_kernels(old: Mapping[str, LockedKernel], new: Mapping[str, LockedKernel]) -> Differences:
    common = [key for key in old if key in new]
    rows = {
        "with another schedule": [
            f"{_name(new[key])}: another schedule{_latencies(old[key], new[key])}"
            for key in common
            if old[key].trial != new[key].trial
        ],
        "added": [
            f"{_name(kernel)}: added, {'tuned' if kernel.trial else 'untuned'}"
            for key, kernel in new.items()
            if key not in old
        ],
        "removed": [f"{_name(kernel)}: removed" for key, kernel in old.items() if key not in new],
    }
    if any(rows.values()):
        unchanged = len(common) - len(rows["with another schedule"])
        counts = [f"{len(texts)} {verb}" for verb, texts in rows.items() if texts]
        yield "kernels", ", ".join([f"{unchanged} unchanged", *counts])
        yield from _limit_rows([text for texts in rows.values() for text in texts])


def _limit_rows(rows: Sequence[str]) -> Differences:
    """Yield the first rows, and how many more there are."""
    for row in rows[:_SHOWN_KERNELS]:
        yield "kernel", row
    if len(rows) > _SHOWN_KERNELS:
        yield "kernel", f"and {len(rows) - _SHOWN_KERNELS} more, which are in the lock files"


def _name(kernel: LockedKernel) -> str:
    return kernel.names[0] if kernel.names else "a kernel"


def _latencies(old: LockedKernel, new: LockedKernel) -> str:
    before, after = (kernel.tuned_us or kernel.untuned_us for kernel in (old, new))
    if not before or not after:
        return ""
    return f", {latency_text(before / 1e6)} -> {latency_text(after / 1e6)}"


def _diff_files(old_recipe: LockedRecipe, new_recipe: LockedRecipe, target: str) -> Differences:
    """Yield the delivered files that differ, with their sizes."""
    recipes = (old_recipe, new_recipe)
    old, new = (_outputs(recipe, f"{export.NAME}/{target}") for recipe in recipes)
    old_sizes, new_sizes = (recipe.targets[target].measured.bytes for recipe in recipes)
    for name in sorted({*old_sizes, *new_sizes}):
        before, after = old_sizes.get(name), new_sizes.get(name)
        if before is None or after is None:
            yield "file", f"{name} {'added' if before is None else 'removed'}"
        elif old.get(name) != new.get(name):
            size = f"{before:,} bytes"
            if before != after:
                size += f" -> {after:,} bytes ({after / before - 1:+.1%})"
            yield "file", f"{name} changed, {size}"


def _values(old: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}"


def _outputs(recipe: LockedRecipe, label: str) -> Mapping[str, str]:
    stage = recipe.stages.get(label)
    return stage.outputs if stage else {}


# ---------------------------------------------------------------- measurements


class _Measurement(NamedTuple):
    """A measurement of a lock file, and its presentation.

    `relative` shows the change as a percentage, too.
    """

    what: str
    field: str
    show: Callable[[float], str]
    relative: bool = False


def _show_latency(us: float) -> str:
    return latency_text(us / 1e6)


_MEASUREMENTS: Final = (
    _Measurement("latency", "latency_us", _show_latency, relative=True),
    _Measurement("accuracy", "accuracy", "{:.2%}".format),
    _Measurement("coverage", "coverage", "{:.0%}".format),
    _Measurement("error", "max_abs_error", "{:.2g}".format),
)


def _diff_measurements(before: Measurements, after: Measurements) -> Differences:
    for what, field, show, relative in _MEASUREMENTS:
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            texts = ["unknown" if value is None else show(value) for value in (old, new)]
            change = f" ({new / old - 1:+.1%})" if relative and old and new is not None else ""
            yield what, f"{' -> '.join(texts)}{change}"
