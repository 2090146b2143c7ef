"""The log file of a stage says what the stage decided, and why."""

from __future__ import annotations

from tests.support.project import Project


def test_the_log_file_of_build_names_the_rule_of_each_kernel(finished_project: Project) -> None:
    """Decisions are logged in the worker, whatever the terminal shows."""
    [log] = finished_project.folder.glob("**/logs/tiny/build+host.log")
    assert (
        "DEBUG   tvmflow.compiler.schedules.rules: schedule rules of kernels: " in log.read_text()
    )
