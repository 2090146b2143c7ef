"""What changed from one lock to another, in the words of those who review a release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from tvmflow.keys import difference
from tvmflow.locks._file import LockedKernel, LockedRecipe, LockedTarget, LockFile
from tvmflow.report import latency_text

_SHOWN: Final = 8

# Settings that have lines of their own, and those that several stages share.
_SAID_ELSEWHERE: Final = ("target", "inputs", "version")
_OF_ALL: Final = ("lowering", "schedules")


class Change(NamedTuple):
    """One difference: `place` is a recipe, or one of its targets; `what` the kind of it."""

    place: str
    what: str
    text: str


def compare(before: LockFile, after: LockFile) -> list[Change]:
    """Every difference; packages and the machine first, then recipe by recipe and target by target."""
    found = [Change("everywhere", "package", text) for text in _values(before.tools, after.tools)]
    if before.machine != after.machine:
        found.append(Change("everywhere", "machine", f"{before.machine} -> {after.machine}"))
    for name in sorted({*before.recipes, *after.recipes}):
        old, new = before.recipes.get(name), after.recipes.get(name)
        if old is None or new is None:
            found.append(Change(name, "recipe", "is new" if new else "is gone"))
            continue
        found += [Change(name, what, text) for what, text in _recipe(old, new)]
        for target in sorted({*old.targets, *new.targets}):
            place = f"{name}/{target}"
            here, there = old.targets.get(target), new.targets.get(target)
            if here is None or there is None:
                found.append(Change(place, "target", "is new" if there else "is gone"))
            else:
                found += [Change(place, *each) for each in _target(old, new, target, here, there)]
    return found


def _recipe(old: LockedRecipe, new: LockedRecipe) -> Iterator[tuple[str, str]]:
    """What is otherwise for all targets."""
    if old.version != new.version:
        yield "version", f"{old.version} -> {new.version}"
    weights, graph = (
        _outputs(old, "import").get(name) != _outputs(new, "import").get(name)
        for name in ("params.safetensors", "model.json")
    )
    if weights:
        yield "weights", "changed" + ("" if graph else "; the operators are the same")
    if graph:
        counts = list(_values(old.operators, new.operators))
        told = ", ".join(counts) if counts else "connected, shaped or parametrised in another way"
        yield "operators", told
    for what in ("inputs", "outputs"):
        for text in _values(getattr(old, what), getattr(new, what)):
            yield what, text
    for label in sorted({*old.stages} & {*new.stages}):
        # what a target is, is said of the target
        for cause in difference(*(_asked(each, label) for each in (old, new))):
            yield "settings", cause


def _asked(recipe: LockedRecipe, label: str) -> dict[str, Any]:
    """What a stage was asked to do, as the pre-image of a key with nothing else in it."""
    stage = recipe.stages[label]
    stage_name = label.partition("/")[0]
    settings = {
        name: value
        for name, value in stage.settings.items()
        if name not in _SAID_ELSEWHERE and not (name in _OF_ALL and stage_name != "build")
    }
    return {
        "stage": stage_name,
        "version": stage.version,
        "settings": settings,
        "inputs": {},
        "tools": {},
        "machine": "",
    }


def _target(
    old: LockedRecipe, new: LockedRecipe, name: str, here: LockedTarget, there: LockedTarget
) -> Iterator[tuple[str, str]]:
    for text in _values(here.tvm, there.tvm):
        yield "target", text
    lost, gained = ({*a.features} - {*b.features} for a, b in ((here, there), (there, here)))
    for features, verb in ((gained, "now used"), (lost, "no longer used")):
        if features:
            yield "target", f"{', '.join(sorted(features))} {verb}"
    yield from _kernels(here.kernels, there.kernels)
    yield from _files(_outputs(old, f"export/{name}"), _outputs(new, f"export/{name}"), here, there)
    for field, told in _MEASURED.items():
        text = told(here.measured.get(field), there.measured.get(field))
        if text:
            yield field.partition("_")[0] if field != "max_abs_error" else "error", text


def _kernels(
    old: Mapping[str, LockedKernel], new: Mapping[str, LockedKernel]
) -> Iterator[tuple[str, str]]:
    same = [key for key in old if key in new]
    again = [key for key in same if old[key].trial != new[key].trial]
    came, went = ([key for key in a if key not in b] for a, b in ((new, old), (old, new)))
    if came or went or again:
        counts = [
            f"{len(same) - len(again)} as they were",
            *([f"{len(again)} with another schedule"] if again else []),
            *([f"{len(came)} new"] if came else []),
            *([f"{len(went)} gone"] if went else []),
        ]
        yield "kernels", ", ".join(counts)
    rows = [
        *(f"{_named(new[key])}: another schedule{_faster(old[key], new[key])}" for key in again),
        *(f"{_named(new[key])}: new{_how(new[key])}" for key in came),
        *(f"{_named(old[key])}: gone" for key in went),
    ]
    for row in rows[:_SHOWN]:
        yield "kernel", row
    if len(rows) > _SHOWN:
        yield "kernel", f"and {len(rows) - _SHOWN} more (--json has all of them in the locks)"


def _named(kernel: LockedKernel) -> str:
    return kernel.names[0] if kernel.names else "a kernel"


def _how(kernel: LockedKernel) -> str:
    return ", tuned" if kernel.trial else ", scheduled by rule"


def _faster(old: LockedKernel, new: LockedKernel) -> str:
    before, after = (each.tuned_us or each.untuned_us for each in (old, new))
    if not before or not after:
        return ""
    return f", {latency_text(before / 1e6)} -> {latency_text(after / 1e6)}"


def _files(
    old: Mapping[str, str], new: Mapping[str, str], here: LockedTarget, there: LockedTarget
) -> Iterator[tuple[str, str]]:
    """Files that were delivered and are others now, with their sizes."""
    sizes = [each.measured.get("bytes", {}) for each in (here, there)]
    for name in sorted({*sizes[0], *sizes[1]}):
        before, after = (each.get(name) for each in sizes)
        if before is None or after is None:
            yield "file", f"{name} {'is new' if before is None else 'is gone'}"
        elif old.get(name) != new.get(name):
            size = f"{before:,} bytes"
            changed = f"{size} -> {after:,} bytes ({after / before - 1:+.1%})"
            yield "file", f"{name} changed, {changed if before != after else size}"


def _values(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            before, after = (each.get(name, "none") for each in (old, new))
            yield f"{name} {before} -> {after}"


def _outputs(recipe: LockedRecipe, label: str) -> Mapping[str, str]:
    stage = recipe.stages.get(label)
    return stage.outputs if stage else {}


def _number(show: Callable[[float], str], relative: bool) -> Callable[[Any, Any], str]:
    def told(before: Any, after: Any) -> str:
        if before == after:
            return ""
        if before is None or after is None:
            return f"{'not known' if before is None else show(before)} -> " + (
                "not known" if after is None else show(after)
            )
        change = f" ({after / before - 1:+.1%})" if relative and before else ""
        return f"{show(before)} -> {show(after)}{change}"

    return told


_MEASURED: Final[Mapping[str, Callable[[Any, Any], str]]] = {
    "latency_us": _number(lambda value: latency_text(value / 1e6), True),
    "accuracy": _number(lambda value: f"{value:.2%}", False),
    "coverage": _number(lambda value: f"{value:.0%}", False),
    "max_abs_error": _number(lambda value: f"{value:.2g}", False),
}
