"""The report of a release: one HTML file with all recipes and targets beside the previous release."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Final

from tvmflow.core.formatting import latency_text
from tvmflow.recipe.lock_file import LockFile
from tvmflow.release.content import ContentChange
from tvmflow.release.gates import Comparison

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
code { font-size: .9em }
"""


def render_report(
    name: str,
    previous: str,
    comparisons: Sequence[Comparison],
    lock: LockFile,
    content: ContentChange = ContentChange(),  # noqa: B008 - it is frozen
) -> str:
    """Return the HTML of the report.

    Args:
        name: Name of the release.
        previous: Name of the previous release; empty if there is none.
        comparisons: All recipes and targets.
        lock: The lock file of the release.
        content: What is new and what is gone since the previous release.
    """
    compared = (
        f"compared with <strong>{escape(previous)}</strong>" if previous else "the first release"
    )
    tools = ", ".join(f"{tool} {version.partition('+')[0]}" for tool, version in lock.tools.items())
    head = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(comparison))}</tr>"
        for comparison in comparisons
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(name)}</title>\n<style>\n{_STYLE}</style>\n"
        f"<h1>{escape(name)}</h1>\n<p>{compared}; built on {escape(lock.machine)} with {escape(tools)}</p>\n"
        f"{''.join(_content_lines(content))}"
        f"<table>\n<tr>{head}</tr>\n{body}\n</table>\n"
    )


def _content_lines(content: ContentChange) -> Iterator[str]:
    for title, names in (("New", content.added), ("No longer in it", content.removed)):
        if names:
            codes = ", ".join(f"<code>{escape(name)}</code>" for name in names)
            yield f"<p>{title}: {codes}</p>\n"


def _cells(comparison: Comparison) -> Iterator[str]:
    current, previous = comparison.current, comparison.previous
    yield escape(comparison.recipe)
    yield escape(comparison.target)
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
    if comparison.is_same_library:
        return f"{latency}<small>the same library</small>"
    notes = [_change(comparison.previous_seconds, comparison.seconds)]
    if comparison.latencies:
        notes.append("measured alternately")
    elif comparison.not_timed_reason:
        notes.append(escape(f"not timed again: {comparison.not_timed_reason}"))
    return latency + "".join(f"<small>{note}</small>" for note in notes if note)


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
