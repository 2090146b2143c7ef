"""The pages of a release: what it has, and what was measured of it beside the previous release."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Final

from tvmflow.core.formatting import latency_text
from tvmflow.recipe.lock_file import LockedTarget, LockFile
from tvmflow.release.content import ContentChange
from tvmflow.release.gates import Comparison
from tvmflow.release.measurements import MEASUREMENTS_PAGE

_CONTENT_HEADINGS: Final = ("recipe", "target", "machine", "tuned kernels", "files")
_TARGET_FIELDS: Final = ("kind", "mtriple", "mcpu", "arch")
_HEADINGS: Final = ("recipe", "target", "latency", "accuracy", "largest error", "tuned", "files")

# A smaller change is not worth a figure.
_MIN_CHANGE: Final = 0.001

_STYLE: Final = """\
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #cf222e; --faint: #8889 }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --bad: #ff7b72 } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2.5rem auto; max-width: 72rem; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } p { margin: .2rem 0 1.6rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { text-align: left; font-weight: 600 } th, td { padding: .45rem .8rem .45rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
small { display: block; color: GrayText } .good { color: var(--good) } .bad { color: var(--bad) }
code { font-size: .9em } iframe { border: 0; width: 100%; height: 75vh }
"""


def render_report(name: str, lock: LockFile) -> str:
    """Return the HTML of the report: what a release has, and the page with its measurements inside.

    The same lock file gives the same text.

    Args:
        name: Name of the release.
        lock: The lock file of the release.
    """
    tools = ", ".join(f"{tool} {version.partition('+')[0]}" for tool, version in lock.tools.items())
    rows = [
        _target_cells(recipe_name, recipe.version, target_name, target)
        for recipe_name, recipe in lock.recipes.items()
        for target_name, target in recipe.targets.items()
    ]
    page = MEASUREMENTS_PAGE
    return _page(
        name,
        f"<p>built on {escape(lock.machine)} with {escape(tools)}</p>\n"
        f"{_table(_CONTENT_HEADINGS, rows)}"
        # A frame shows a file beside this one also without a server.
        f'<p><a href="{page}">Measurements, and the comparison with the release before</a></p>\n'
        f'<iframe src="{page}" title="Measurements"></iframe>\n',
    )


def render_measurements(
    name: str,
    previous: str,
    comparisons: Sequence[Comparison],
    content: ContentChange,
    pareto_optimal: Collection[tuple[str, str]] = (),
) -> str:
    """Return the HTML of the measurements of a release beside those of the previous one.

    Args:
        name: Name of the release.
        previous: Name of the previous release; empty if there is none.
        comparisons: All recipes and targets.
        content: What is new and what is gone since the previous release.
        pareto_optimal: Recipe and target of each library that is marked.
    """
    compared = (
        f"compared with <strong>{escape(previous)}</strong>" if previous else "the first release"
    )
    rows = [
        _cells(comparison, (comparison.recipe, comparison.target) in pareto_optimal)
        for comparison in comparisons
    ]
    changes = "".join(_content_lines(content))
    return _page(f"{name}: measurements", f"<p>{compared}</p>\n{changes}{_table(_HEADINGS, rows)}")


def _page(name: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(name)}</title>\n<style>\n{_STYLE}</style>\n"
        f"<h1>{escape(name)}</h1>\n{body}"
    )


def _table(headings: Sequence[str], rows: Iterable[Iterator[str]]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>\n"


def _target_cells(recipe: str, version: str, name: str, target: LockedTarget) -> Iterator[str]:
    yield f"{escape(recipe)} {escape(version)}"
    yield escape(name)
    words = [str(target.tvm[field]) for field in _TARGET_FIELDS if field in target.tvm]
    yield escape(" ".join(words))
    kernels = target.kernels.values()
    tuned = sum(1 for kernel in kernels if kernel.trial)
    yield f"{tuned} of {len(kernels)}" if kernels else "<small>–</small>"
    yield "".join(_size_rows(target.measured.bytes, {}))


def _content_lines(content: ContentChange) -> Iterator[str]:
    for title, names in (("New", content.added), ("No longer in it", content.removed)):
        if names:
            codes = ", ".join(f"<code>{escape(name)}</code>" for name in names)
            yield f"<p>{title}: {codes}</p>\n"


def _cells(comparison: Comparison, is_pareto_optimal: bool) -> Iterator[str]:
    current, previous = comparison.current, comparison.previous
    yield escape(comparison.recipe)
    mark = "<small>Pareto-optimal</small>" if is_pareto_optimal else ""
    yield escape(comparison.target) + mark
    yield _latency_cell(comparison)
    yield _figure(current.accuracy, previous.accuracy, "{:.2%}".format)
    yield _figure(
        current.max_abs_error,
        previous.max_abs_error,
        "{:.2g}".format,
        lower_is_better=True,
    )
    yield _figure(current.coverage, previous.coverage, "{:.0%}".format)
    yield "".join(_size_rows(current.bytes, previous.bytes))


def _latency_cell(comparison: Comparison) -> str:
    if comparison.seconds is None:
        return "<small>not timed</small>"
    latency = latency_text(comparison.seconds)
    others = [
        f"{escape(name)}: {latency_text(us / 1e6)}"
        for name, us in comparison.current.compared_us.items()
    ]
    if comparison.is_same_library:
        return latency + "".join(f"<small>{note}</small>" for note in ("the same library", *others))
    notes = [_change(comparison.previous_seconds, comparison.seconds)]
    if comparison.latencies:
        notes.append("measured alternately")
    elif comparison.not_timed_reason:
        notes.append(escape(f"not timed again: {comparison.not_timed_reason}"))
    return latency + "".join(f"<small>{note}</small>" for note in (*notes, *others) if note)


def _figure(
    value: float | None,
    previous: float | None,
    show: Callable[[float], str],
    *,
    lower_is_better: bool = False,
) -> str:
    if value is None:
        return "<small>–</small>"
    if previous is None or show(previous) == show(value):
        return show(value)
    is_better = (value < previous) == lower_is_better
    return f'{show(value)}<small class="{_class(is_better)}">was {show(previous)}</small>'


def _size_rows(current: Mapping[str, int], previous: Mapping[str, int]) -> Iterator[str]:
    for name, size in sorted(current.items()):
        change = _change(previous.get(name), size)
        note = f"<small>{change}</small>" if change else ""
        yield f"<div><code>{escape(name)}</code> {size:,} B{note}</div>"


def _change(previous: float | None, current: float) -> str:
    """Return the change of a value for which less is better; empty without a previous value."""
    if not previous:
        return ""
    change = current / previous - 1
    if abs(change) < _MIN_CHANGE:
        return "unchanged"
    return f'<span class="{_class(change < 0)}">{change:+.1%}</span>'


def _class(is_better: bool) -> str:
    return "good" if is_better else "bad"
