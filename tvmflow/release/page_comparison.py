"""A page beside another run, release, lock file or delivery, as `tvmflow compare` judges both."""

from __future__ import annotations

from typing import Final

from tvmflow.core.errors import UsageError
from tvmflow.core.formatting import names_text
from tvmflow.pages.content import KernelChange, Library, OtherChange, Page
from tvmflow.pages.run import time_text
from tvmflow.release.comparison import Figure, compare_sides
from tvmflow.release.sides import Side, read_sizes
from tvmflow.store.local import LocalStore

# The profile times each kernel in few calls: smaller differences may be noise.
_MIN_CHANGE: Final = 0.1
# Of the library's latency: who looks for what became slower need not see less.
_MIN_SHARE: Final = 0.01
_SHOWN_NAMES: Final = 3
_VERIFY: Final = "verify"


def compare_page(page: Page, before: Side, after: Side, store: LocalStore) -> Page:
    """Return a page whose builds are compared with those of another side, instead of with what they were.

    Args:
        page: The page.
        before: What it is compared with.
        after: What it is about.
        store: The store, which has what the stages of runs depended on.

    Raises:
        UsageError: Both are the same, or have no build in common.
    """
    _check_sides(before, after)
    comparison = compare_sides(before, after, store)
    latencies = {figure.build: figure for figure in comparison.figures if figure.what == "latency"}
    libraries = page.libraries
    # the page of a release knows how its libraries were measured beside those of the one before it
    knows_before = bool(before.release) and before.release == page.previous
    if not knows_before:
        libraries = tuple(
            _compare_library(library, before, after, latencies.get(library.label))
            for library in libraries
        )
    return page._replace(
        previous=_describe_side(before),
        libraries=libraries,
        notes=page.notes if after.run or knows_before else _describe_gates(page),
        kernel_changes=tuple(
            change
            for library in libraries
            if library.previous
            for change in _list_kernel_changes(library, before, after)
        ),
        changes=tuple(OtherChange(*change) for change in comparison.changes),
    )


def _check_sides(before: Side, after: Side) -> None:
    if before._replace(name=after.name) == after:
        raise UsageError(
            f"the page is about {after.name}: it cannot be compared with itself",
            fix="name an earlier run or release; `tvmflow runs` lists the runs",
        )
    if not before.builds.keys() & after.builds.keys():
        names = [
            names_text(list(side.builds), _SHOWN_NAMES) or "no build" for side in (before, after)
        ]
        raise UsageError(
            f"{before.name} and {after.name} have no build in common: {names[0]}; {names[1]}",
            fix="name a run or a release with the same recipe and target",
        )


def _describe_side(side: Side) -> str:
    if side.run:
        return f"{side.name} of {time_text(side.run.began_s)}"
    return side.release or side.name


def _describe_gates(page: Page) -> tuple[str, ...]:
    is_relative = page.gates and page.previous
    return (f"The gates compared it with {page.previous}.",) if is_relative else ()


def _compare_library(
    library: Library, before: Side, after: Side, latency: Figure | None
) -> Library:
    """Return a library beside its predecessor, with the latencies that the comparison has chosen."""
    build, previous = library.build, before.builds.get(library.label)
    if previous and latency:
        build = build._replace(latency_s=_number(latency.after))
        previous = previous._replace(latency_s=_number(latency.before))
    keys = [_find_measurement(side, library) for side in (before, after)]
    # `--force verify` measures again, and its result has the same key
    has_same_key = bool(keys[0]) and keys[0] == keys[1]
    is_same = has_same_key and previous is not None and build.latency_s == previous.latency_s
    return library._replace(
        build=build,
        previous=previous,
        judgement=latency.judgement if latency else None,
        is_same=is_same,
        note="not measured again" if is_same else "",
        previous_files=read_sizes(before, build),
    )


def _number(value: float | str | None) -> float | None:
    return value if isinstance(value, float | int) else None


def _find_measurement(side: Side, library: Library) -> str:
    """Return the key of the result that has the latency; empty where it is not known."""
    name = f"{library.build.recipe}:{_VERIFY}/{library.build.target}"
    stages = side.run.stages if side.run else ()
    return next((stage.key for stage in stages if stage.stage_id == name), "")


def _list_kernel_changes(library: Library, before: Side, after: Side) -> list[KernelChange]:
    """Return the kernels that only one side has or whose time has changed, the largest difference first.

    Where the library is as fast as before, times of kernels vary with that of the whole: they are noise.
    """
    old, new = (side.kernels.get(library.label, {}) for side in (before, after))
    if not old or not new:
        return []
    smallest = _MIN_SHARE * max(sum(old.values()), sum(new.values()))
    is_slower_or_faster = not (library.is_noise or library.is_same)
    changes = [
        KernelChange(library.label, name, old.get(name), new.get(name))
        for name in dict.fromkeys([*new, *old])
    ]
    changes = [
        change
        for change in changes
        if change.before_s is None
        or change.after_s is None
        or (is_slower_or_faster and _is_telling(change.before_s, change.after_s, smallest))
    ]
    return sorted(changes, key=lambda change: -abs(_difference(change)))


def _is_telling(before_s: float, after_s: float, smallest: float) -> bool:
    difference = abs(after_s - before_s)
    return difference >= smallest and difference > _MIN_CHANGE * before_s


def _difference(change: KernelChange) -> float:
    return (change.after_s or 0.0) - (change.before_s or 0.0)
