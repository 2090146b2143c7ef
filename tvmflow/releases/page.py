"""The page of a release: a table of all recipes and targets beside the release before, in one file without a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from tvmflow.locks import LockFile
from tvmflow.releases.gates import Row
from tvmflow.report import latency_text

_HEAD: Final = ("recipe", "target", "latency", "accuracy", "largest error", "tuned", "files")

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


def render(name: str, against: str, rows: Sequence[Row], lock: LockFile) -> str:
    """The page, complete."""
    beside = f"compared with <strong>{escape(against)}</strong>" if against else "the first release"
    tools = ", ".join(f"{tool} {version.partition('+')[0]}" for tool, version in lock.tools.items())
    body = "\n".join(
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(row))}</tr>" for row in rows
    )
    head = "".join(f"<th>{word}</th>" for word in _HEAD)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(name)}</title>\n<style>\n{_STYLE}</style>\n"
        f"<h1>{escape(name)}</h1>\n<p>{beside}; built on {escape(lock.machine)} with {escape(tools)}</p>\n"
        f"<table>\n<tr>{head}</tr>\n{body}\n</table>\n"
    )


def _cells(row: Row) -> Iterator[str]:
    yield escape(row.recipe)
    yield escape(row.target)
    yield _latency(row)
    yield _figure(row, "accuracy", lambda value: f"{value:.2%}", higher_is_better=True)
    yield _figure(row, "max_abs_error", lambda value: f"{value:.2g}", higher_is_better=False)
    yield _figure(row, "coverage", lambda value: f"{value:.0%}", higher_is_better=True)
    yield "".join(_sizes(row.now.get("bytes", {}), (row.before or {}).get("bytes", {})))


def _latency(row: Row) -> str:
    if row.seconds is None:
        return "<small>not timed</small>"
    if row.same:
        return f"{latency_text(row.seconds)}<small>the same library</small>"
    how = "side by side" if row.timed else row.untimed and f"not timed again: {row.untimed}"
    notes = [_change(row.seconds_before, row.seconds), *([escape(how)] if how else [])]
    return latency_text(row.seconds) + "".join(f"<small>{note}</small>" for note in notes if note)


def _figure(row: Row, field: str, show: Any, *, higher_is_better: bool) -> str:
    value, before = row.now.get(field), (row.before or {}).get(field)
    if value is None:
        return "<small>–</small>"
    if before is None or show(before) == show(value):
        return str(show(value))
    kind = "good" if (value > before) == higher_is_better else "bad"
    return f'{show(value)}<small class="{kind}">was {show(before)}</small>'


def _sizes(now: Mapping[str, int], before: Mapping[str, int]) -> Iterator[str]:
    for name, size in sorted(now.items()):
        change = _change(before.get(name), size)
        note = f"<small>{change}</small>" if change else ""
        yield f"<div><code>{escape(name)}</code> {size:,} B{note}</div>"


def _change(before: float | None, now: float) -> str:
    if before is None or not before:
        return ""
    share = now / before - 1
    if abs(share) < 0.001:
        return "as before"
    return f'<span class="{"bad" if share > 0 else "good"}">{share:+.1%}</span>'
