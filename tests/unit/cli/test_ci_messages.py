"""Messages for CI services: annotations, and folded logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvmflow.cli import ci_messages
from tvmflow.core.errors import RecipeError, UsageError
from tvmflow.engine.report import RunReport, StageReport


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GITLAB_CI", raising=False)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def failed(log: str) -> RunReport:
    stage = StageReport("net:build/host", "failed", "", 0.0, {}, "50% of\nit", "", log)
    return RunReport((stage, stage._replace(stage_id="net:x", message="")), (), (), 0.0)


def test_mistakes_in_recipes_are_marked_where_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With file, line and column, the file from the root of the repository."""
    problems = [f"{tmp_path}/a, b.yaml:3:15: model: no such file", "net.yaml:7: tune: what?"]
    ci_messages.annotate_problem(RecipeError(problems, fix="look"))
    assert capsys.readouterr().err.splitlines() == [
        "::error file=a%2C b.yaml,line=3,col=15,title=tvmflow::model: no such file%0Afix: look",
        "::error file=net.yaml,line=7,title=tvmflow::tune: what?%0Afix: look",
    ]


def test_other_errors_have_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    """The message alone."""
    ci_messages.annotate_problem(UsageError("no such stage"))
    assert capsys.readouterr().err == "::error title=tvmflow::no such stage\n"


def test_no_line_of_a_log_is_taken_for_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """GitHub gets the end of the log between a token that nobody can guess."""
    Path("a.log").write_text("".join(f"line {n}\n" for n in range(99)) + "::error::injected\n")
    ci_messages.report_failures(failed("a.log"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "::error title=net%3Abuild/host::50%25 of%0Ait",
        "::group::the end of a.log",
    ]
    token = lines[2].removeprefix("::stop-commands::")
    assert len(token) == 32 and lines[-2:] == [f"::{token}::", "::endgroup::"]
    assert lines[3] == "line 40" and lines[-3] == "::error::injected"


def test_gitlab_gets_a_section(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no annotations."""
    monkeypatch.delenv("GITHUB_ACTIONS")
    monkeypatch.setenv("GITLAB_CI", "true")
    Path("a.log").write_text("the cause\n")
    ci_messages.report_failures(failed("a.log"))
    first, cause, last = capsys.readouterr().err.split("\n")[:3]
    assert first.startswith("\x1b[0Ksection_start:") and "[collapsed=true]" in first
    assert cause == "the cause" and last.startswith("\x1b[0Ksection_end:")


def test_elsewhere_nothing_is_added(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary says it all."""
    monkeypatch.delenv("GITHUB_ACTIONS")
    Path("a.log").write_text("the cause\n")
    ci_messages.report_failures(failed("a.log"))
    ci_messages.annotate_problem(UsageError("no such stage"))
    assert capsys.readouterr().err == ""
