"""Messages for CI services, on stderr: GitHub's annotations, and logs that GitHub and GitLab fold."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from pathlib import Path
from typing import Final

from tvmflow.core.errors import RecipeError, TvmflowError
from tvmflow.core.formatting import printable, printable_lines
from tvmflow.core.generated_text import github_text
from tvmflow.engine.report import RunReport, StageReport

_POSITION: Final = re.compile(
    r"(?P<file>[^:\n]+):(?P<line>\d+):(?:(?P<col>\d+):)? (?P<text>.*)", re.DOTALL
)
_LOG_LINES: Final = 60
_MAX_ANNOTATIONS: Final = 10


def annotate_problem(problem: TvmflowError) -> None:
    """Mark the places of an error in the files of a pull request, on GitHub Actions."""
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
    """Show each stage that failed as an annotation, and the end of its log in a section that is folded."""
    for stage in [stage for stage in report.stages if stage.message][:_MAX_ANNOTATIONS]:
        if _is_github():
            _annotate({"title": stage.stage_id}, stage.message)
        if stage.log and (_is_github() or _is_gitlab()):
            _show_log(stage)


def _is_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def _is_gitlab() -> bool:
    return bool(os.environ.get("GITLAB_CI"))


def _from_workspace(name: str) -> str:
    """Return the path of a file from the root of the repository, where GitHub looks for it."""
    workspace = os.environ.get("GITHUB_WORKSPACE", "")
    path = Path(name).resolve()
    return (
        str(path.relative_to(workspace)) if workspace and path.is_relative_to(workspace) else name
    )


def _annotate(properties: dict[str, str], text: str) -> None:
    fields = ",".join(
        f"{name}={github_text(printable(value), ':,')}" for name, value in properties.items()
    )
    sys.stderr.write(f"::error {fields}::{github_text(printable_lines(text))}\n")


def _show_log(stage: StageReport) -> None:
    """Write the end of the log of a stage, which is gone with the machine of the job."""
    try:
        lines = Path(stage.log).read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return
    title = printable(f"the end of {stage.log}")
    if _is_github():
        # No line of the log may be taken for a command.
        token = secrets.token_hex(16)
        begin = [f"::group::{github_text(title)}", f"::stop-commands::{token}"]
        end = [f"::{token}::", "::endgroup::"]
    else:
        name = "tvmflow_" + re.sub(r"\W", "_", stage.stage_id)
        begin = [f"\x1b[0Ksection_start:{int(time.time())}:{name}[collapsed=true]\r\x1b[0K{title}"]
        end = [f"\x1b[0Ksection_end:{int(time.time())}:{name}\r\x1b[0K"]
    content = [*begin, *map(printable, lines), *end]
    sys.stderr.write("".join(f"{line}\n" for line in content))
