"""Markdown of a run, for the summary of a CI job: the result, a row for each build, and the problems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvmflow.core.errors import EXIT_OK
from tvmflow.core.formatting import duration_text, printable_lines
from tvmflow.core.generated_text import html_text, markdown_text
from tvmflow.engine.builds import Build, list_builds
from tvmflow.engine.headline import make_headline
from tvmflow.engine.report import MAX_SHOWN, STOPPED, RunReport, StageReport
from tvmflow.engine.summary import count_stages, tabulate_builds


def markdown_summary(report: RunReport) -> str:
    """Return the Markdown of a run, which ends with an empty line."""
    recipes = list(dict.fromkeys(stage.recipe for stage in report.stages))
    name = recipes[0] if len(recipes) == 1 else f"{len(recipes)} recipes"
    is_stopped = any(stage.outcome == STOPPED for stage in report.stages)
    mark = "✅" if report.exit_code == EXIT_OK else "⏹" if is_stopped else "❌"
    builds = list_builds(report)[:MAX_SHOWN]
    lines = [f"### {mark} tvmflow: {markdown_text(name)}", "", *_format_builds(builds)]
    if headline := make_headline(builds):
        lines += [markdown_text(headline), ""]
    counts = f"{count_stages(report.stages, report.remote)} ({duration_text(report.seconds)})"
    lines += [markdown_text(counts), ""]
    for stage in report.stages:
        if stage.message and stage.outcome != STOPPED:
            lines += _format_problem(stage)
    return "\n".join(lines) + "\n"


def _format_builds(builds: Sequence[Build]) -> Iterator[str]:
    rows = tabulate_builds(builds) if builds else []
    if not rows:
        return
    yield f"| {' | '.join(map(markdown_text, rows[0]))} |"
    yield f"|{' --- |' * len(rows[0])}"
    for row in rows:
        yield f"| {' | '.join(map(markdown_text, row.values()))} |"
    yield ""


def _format_problem(stage: StageReport) -> Iterator[str]:
    yield f"**{markdown_text(stage.stage_id)}**: {stage.outcome}"
    yield ""
    fix = f"\nfix: {stage.fix}" if stage.fix else ""
    lines = printable_lines(stage.message + fix).split("\n")
    text = "\n".join(map(html_text, lines))
    yield f"<pre>{text}</pre>"
    yield ""
