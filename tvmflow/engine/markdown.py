"""Markdown of a run, for the summary of a CI job: the result, a row for each build, and the problems."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Final

from tvmflow.core.errors import EXIT_OK
from tvmflow.core.formatting import duration_text, printable, printable_lines
from tvmflow.engine.builds import Build, list_builds
from tvmflow.engine.headline import make_headline
from tvmflow.engine.report import MAX_SHOWN, STOPPED, RunReport, StageReport
from tvmflow.engine.summary import count_stages, tabulate_builds

_SPECIAL: Final = str.maketrans({char: f"\\{char}" for char in "\\`*_[]|#~"})


def markdown_summary(report: RunReport) -> str:
    """Return the Markdown of a run, which ends with an empty line."""
    recipes = list(dict.fromkeys(stage.recipe for stage in report.stages))
    name = recipes[0] if len(recipes) == 1 else f"{len(recipes)} recipes"
    is_stopped = any(stage.outcome == STOPPED for stage in report.stages)
    mark = "✅" if report.exit_code == EXIT_OK else "⏹" if is_stopped else "❌"
    builds = list_builds(report)[:MAX_SHOWN]
    lines = [f"### {mark} tvmflow: {_escape(name)}", "", *_format_builds(builds)]
    if headline := make_headline(builds):
        lines += [_escape(headline), ""]
    lines += [f"{count_stages(report.stages, report.remote)} ({duration_text(report.seconds)})", ""]
    for stage in report.stages:
        if stage.message and stage.outcome != STOPPED:
            lines += _format_problem(stage)
    return "\n".join(lines) + "\n"


def _format_builds(builds: Sequence[Build]) -> Iterator[str]:
    rows = tabulate_builds(builds) if builds else []
    if not rows:
        return
    yield f"| {' | '.join(map(_escape, rows[0]))} |"
    yield f"|{' --- |' * len(rows[0])}"
    for row in rows:
        yield f"| {' | '.join(map(_escape, row.values()))} |"
    yield ""


def _format_problem(stage: StageReport) -> Iterator[str]:
    yield f"**{_escape(stage.stage_id)}**: {stage.outcome}"
    yield ""
    fix = f"\nfix: {stage.fix}" if stage.fix else ""
    yield f"<pre>{html.escape(printable_lines(stage.message + fix))}</pre>"
    yield ""


def _escape(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return html.escape(printable(text), quote=False).translate(_SPECIAL)
