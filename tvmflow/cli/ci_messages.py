"""Messages for CI services: GitHub annotations, folded logs, JUnit XML and a Markdown summary."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tvmflow.core.errors import EXIT_OK, RecipeError, TvmflowError
from tvmflow.core.formatting import duration_text, printable, printable_lines
from tvmflow.core.generated_text import github_text, html_text, markdown_text
from tvmflow.core.types import Json
from tvmflow.engine.builds import Build, list_builds
from tvmflow.engine.report import MAX_SHOWN, STOPPED, ReportedFacts, RunReport, StageReport
from tvmflow.engine.summary import count_stages, make_headline, tabulate_builds

_POSITION: Final = re.compile(
    r"(?P<file>[^:\n]+):(?P<line>\d+):(?:(?P<col>\d+):)? (?P<text>.*)", re.DOTALL
)
_LOG_LINES: Final = 60
_MAX_ANNOTATIONS: Final = 10


def annotate_problem(problem: TvmflowError) -> None:
    """Annotate the lines of files that an error names, on GitHub Actions."""
    if not _is_github():
        return
    texts = problem.problems if isinstance(problem, RecipeError) else [problem.message]
    for text in texts[:_MAX_ANNOTATIONS]:
        match = _POSITION.match(text)
        fix = f"\nfix: {problem.fix}" if problem.fix else ""
        if match is None:
            _annotate({"title": "tvmflow"}, text + fix)
            continue
        place = {"file": _from_workspace(match["file"]), "line": match["line"]}
        column = {"col": match["col"]} if match["col"] else {}
        _annotate({**place, **column, "title": "tvmflow"}, match["text"] + fix)


def report_failures(report: RunReport) -> None:
    """Show each failed stage as an annotation, and the end of its log in a folded section."""
    for stage in [stage for stage in report.stages if stage.message][:_MAX_ANNOTATIONS]:
        if _is_github():
            _annotate({"title": stage.stage_id}, stage.message)
        if stage.log and (_is_github() or os.environ.get("GITLAB_CI")):
            _show_log(stage)


def _is_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def _from_workspace(name: str) -> str:
    """Return the path of a file relative to the root of the repository."""
    workspace = os.environ.get("GITHUB_WORKSPACE", "")
    path = Path(name).resolve()
    is_inside = workspace and path.is_relative_to(workspace)
    return str(path.relative_to(workspace)) if is_inside else name


def _annotate(properties: dict[str, str], text: str) -> None:
    fields = ",".join(
        f"{name}={github_text(printable(value), ':,')}" for name, value in properties.items()
    )
    sys.stderr.write(f"::error {fields}::{github_text(printable_lines(text))}\n")


def _show_log(stage: StageReport) -> None:
    """Write the end of a stage's log, because the job's machine is deleted with its files."""
    try:
        lines = Path(stage.log).read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return
    title = printable(f"the end of {stage.log}")
    if _is_github():
        # GitHub must not interpret lines of the log as workflow commands.
        token = secrets.token_hex(16)
        begin = [f"::group::{github_text(title)}", f"::stop-commands::{token}"]
        end = [f"::{token}::", "::endgroup::"]
    else:
        name = "tvmflow_" + re.sub(r"\W", "_", stage.stage_id)
        begin = [f"\x1b[0Ksection_start:{int(time.time())}:{name}[collapsed=true]\r\x1b[0K{title}"]
        end = [f"\x1b[0Ksection_end:{int(time.time())}:{name}\r\x1b[0K"]
    content = [*begin, *map(printable, lines), *end]
    sys.stderr.write("".join(f"{line}\n" for line in content))


_SKIPPED: Final = frozenset({"skipped", "cancelled"})
_PASSED: Final = frozenset({"hit", "fetched", "ran"})
_INVALID: Final = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(report: RunReport, release: Mapping[str, Json] | None = None) -> bytes:
    """Return a run as JUnit XML: a test suite for each recipe, and one for the gates of a release.

    A rejected library or a failed gate is a failure; other unsuccessful outcomes are errors.
    """
    facts = ReportedFacts(report.stages)
    cases: dict[str, list[ElementTree.Element]] = {}
    for stage in report.stages:
        case = _stage_case(stage, facts.describe(stage))
        cases.setdefault(stage.recipe, []).append(case)
    if release is not None:
        cases["release"] = list(_gate_cases(release))
    root = ElementTree.Element(
        "testsuites",
        {"name": "tvmflow", **_count([case for own in cases.values() for case in own])},
    )
    for name, own in cases.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": _valid(name), **_count(own)})
        suite.extend(own)
    ElementTree.indent(root)
    content: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return content + b"\n"


def _stage_case(stage: StageReport, lines: Sequence[str]) -> ElementTree.Element:
    place = f"{stage.recipe}.{stage.target}" if stage.target else stage.recipe
    case = _case(place, stage.stage, stage.seconds)
    fields = {"": stage.message, "fix: ": stage.fix, "log: ": stage.log}
    text = "\n".join(f"{name}{value}" for name, value in fields.items() if value)
    if stage.outcome in _SKIPPED:
        ElementTree.SubElement(case, "skipped", message=_valid(stage.message or stage.reason))
    elif stage.outcome not in _PASSED:
        kind = "failure" if stage.outcome == "rejected" else "error"
        first = stage.message.partition("\n")[0] or stage.outcome
        problem = ElementTree.SubElement(case, kind, type=stage.outcome, message=_valid(first))
        problem.text = _valid(text)
    if lines:
        ElementTree.SubElement(case, "system-out").text = _valid("\n".join(lines))
    return case


def _gate_cases(release: Mapping[str, Json]) -> Iterator[ElementTree.Element]:
    failed = release["failed_gates"]
    for gate in failed:
        case = _case(f"release.{gate['label']}", gate["gate"], 0.0)
        message = _valid(gate["message"])
        ElementTree.SubElement(case, "failure", type="gate", message=message).text = message
        yield case
    labels = [f"{entry['recipe']}/{entry['target']}" for entry in release["comparisons"]]
    for label in labels:
        if label not in {gate["label"] for gate in failed}:
            yield _case(f"release.{label}", "gates", 0.0)


def _case(place: str, name: str, seconds: float) -> ElementTree.Element:
    return ElementTree.Element(
        "testcase", classname=_valid(place), name=_valid(name), time=f"{seconds:.3f}"
    )


def _count(cases: Sequence[ElementTree.Element]) -> dict[str, str]:
    counts = {
        plural: str(sum(case.find(kind) is not None for case in cases))
        for plural, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    }
    seconds = sum(float(case.attrib["time"]) for case in cases)
    return {"tests": str(len(cases)), **counts, "time": f"{seconds:.3f}"}


def _valid(text: str) -> str:
    """Return text without the characters that XML cannot hold."""
    return _INVALID.sub("\N{REPLACEMENT CHARACTER}", text)


def markdown_summary(report: RunReport) -> str:
    """Return the Markdown of a run: the result, a row for each build, and the problems."""
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
