"""What a release must reach, and what it is compared with. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tvmflow.locks import LockFile
from tvmflow.recipe import Gates
from tvmflow.report import latency_text


class Row(NamedTuple):
    """A recipe on a target: what was measured for it now and in the release before, if that had it.

    `timed` are seconds a call, now and before, measured side by side; `untimed` says why there are none.
    Nothing is timed where both have the `same` library.
    """

    recipe: str
    target: str
    now: Mapping[str, Any]
    before: Mapping[str, Any] | None = None
    timed: tuple[float, float] | None = None
    untimed: str = ""
    same: bool = False

    @property
    def place(self) -> str:
        return f"{self.recipe}/{self.target}"

    @property
    def seconds(self) -> float | None:
        """A call now, as it was timed last."""
        if self.timed:
            return self.timed[0]
        latency = self.now.get("latency_us")
        return None if latency is None else latency / 1e6

    @property
    def seconds_before(self) -> float | None:
        if self.timed:
            return self.timed[1]
        latency = (self.before or {}).get("latency_us")
        return None if latency is None else latency / 1e6


class Miss(NamedTuple):
    """A gate that was not passed."""

    place: str
    gate: str
    text: str


def rows(now: LockFile, before: LockFile | None) -> list[Row]:
    """Every recipe and target of a lock, beside what the other lock has of it."""
    return [
        Row(name, target, locked.measured, _measured(before, name, target))
        for name, recipe in now.recipes.items()
        for target, locked in recipe.targets.items()
    ]


def _measured(lock: LockFile | None, recipe: str, target: str) -> Mapping[str, Any] | None:
    there = lock.recipes.get(recipe) if lock else None
    found = there.targets.get(target) if there else None
    return found.measured if found else None


def misses(found: Sequence[Row], gates: Gates) -> list[Miss]:
    """Every gate that a recipe does not pass on a target."""
    return [
        Miss(row.place, gate, text)
        for row in found
        for gate, judge in _JUDGES.items()
        if (limit := getattr(gates, gate)) is not None
        for text in judge(row, limit)
    ]


def _least(field: str, what: str) -> Callable[[Row, float], Iterator[str]]:
    def judge(row: Row, limit: float) -> Iterator[str]:
        value = row.now.get(field)
        if value is None:
            if (row.before or {}).get(field) is not None:
                yield f"its {what} is no longer measured"
        elif value < limit:
            yield f"{what} {value:.2%}, below {limit:.2%}"

    return judge


def _accuracy_drop(row: Row, limit: float) -> Iterator[str]:
    now, before = row.now.get("accuracy"), (row.before or {}).get("accuracy")
    if before is None:
        return
    if now is None:
        yield "its accuracy is no longer measured"
    elif before - now > limit:
        yield f"accuracy {now:.2%}, {before - now:.2%} below the {before:.2%} of the last release"


def _slowdown(row: Row, limit: float) -> Iterator[str]:
    now, before = row.seconds, row.seconds_before
    if before is None or row.same:
        return
    if now is None:
        yield "its latency is no longer measured"
    elif now > before * (1 + limit):
        yield (
            f"{latency_text(now)} a call, {now / before - 1:.1%} slower than the last release "
            f"({latency_text(before)}{', side by side' if row.timed else ', as recorded'})"
        )


def _growth(row: Row, limit: float) -> Iterator[str]:
    before = (row.before or {}).get("bytes", {})
    for name, size in row.now.get("bytes", {}).items():
        if name in before and size > before[name] * (1 + limit):
            yield f"{name} has {size:,} bytes, {size / before[name] - 1:.1%} more than the last release"


def _bytes(row: Row, limit: float) -> Iterator[str]:
    for name, size in row.now.get("bytes", {}).items():
        if size > limit:
            yield f"{name} has {size:,} bytes, more than {limit:,}"


_JUDGES: Final[Mapping[str, Callable[[Row, Any], Iterator[str]]]] = {
    "min_accuracy": _least("accuracy", "accuracy"),
    "max_accuracy_drop": _accuracy_drop,
    "min_coverage": _least("coverage", "coverage"),
    "max_slowdown": _slowdown,
    "max_growth": _growth,
    "max_bytes": _bytes,
}
