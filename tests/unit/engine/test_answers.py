"""Cached answers: what is up to date is answered at once, and no change goes unnoticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.support.engine import COMPILE, plan_of, planned, recipe
from tests.support.fake_executor import FakeExecutor
from tests.support.file_edits import write_with_old_times
from tvmflow.core import packages
from tvmflow.engine import answers, session, up_to_date
from tvmflow.engine.report import RunReport
from tvmflow.engine.summary import render
from tvmflow.planning import environment
from tvmflow.planning.prepare import PreparedRun
from tvmflow.store.local import LocalStore

ARGV = ["run", "net.yaml"]


class FinishedRun(NamedTuple):
    """A finished and delivered plan, and a copy of some of tvmflow's source files."""

    folder: Path
    store: LocalStore
    prepared: PreparedRun

    def run(self, *options: str, later_s: float = 3.0) -> RunReport | None:
        """Confirm the plan and save the answer, as `tvmflow run` does where there is no cached one.

        The files of a test are always new, so that planning begins `later_s` seconds after they were written.
        """
        prepared = self.prepared._replace(started_ns=time.time_ns() + round(later_s * 1e9))
        as_json = "--json" in options
        confirmed = up_to_date.confirm_run(
            [*ARGV, *options], prepared, self.store, "dist", as_json=as_json, quiet=False
        )
        return confirmed and confirmed[0]

    def answer(self) -> str | None:
        return answers.find_answer(ARGV)


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinishedRun:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("TVMFLOW_")]:
        monkeypatch.delenv(name)
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    (package / "module.py").write_text("x = 1\n")
    monkeypatch.setattr(environment, "__file__", str(package / "module.py"))
    (tmp_path / "net.onnx").write_text("model")
    (tmp_path / "net.yaml").write_text("recipe")
    plan = plan_of(planned(recipe(outputs=["bundle"]), stages=COMPILE, folder=str(tmp_path)))
    store = LocalStore(str(tmp_path / "cache"))
    store.create()
    options = session.SessionOptions(dist="dist")
    report = session.run_plan(plan, store, FakeExecutor(), lambda event: None, options)
    assert report.exit_code == 0
    reads = (str(tmp_path / "net.yaml"), str(tmp_path / "pipelines" / "compile.yaml"))
    return FinishedRun(tmp_path, store, PreparedRun(plan, (), reads, 0))


def test_the_second_answer_is_the_first_with_another_duration(
    finished: FinishedRun,
) -> None:
    """The first one evaluates the plan and saves the text; both name the delivered files."""
    assert finished.answer() is None
    report = finished.run()
    assert report is not None and report.exit_code == 0
    [summary, *paths] = render(report, as_json=False).splitlines()
    text = finished.answer()
    assert text is not None
    [cached_summary, *cached_paths] = text.splitlines()
    expected = "all 5 stages are up to date, nothing to run"
    assert summary.rpartition("  (")[0] == cached_summary.rpartition("  (")[0] == expected
    assert cached_summary.endswith(" ms)")
    assert cached_paths == paths
    assert "  dist/net/host/: net.tvmflow, 6 metadata files" in paths


def edit(name: str) -> Callable[[FinishedRun], object]:
    """Return what writes to a file, of the same size and with its old modification time."""

    def write(finished: FinishedRun) -> None:
        path = finished.folder / name
        path.chmod(0o644)
        write_with_old_times(path, path.read_bytes().swapcase())

    return write


def first_file(folder: str) -> Callable[[FinishedRun], object]:
    """Return what edits one file in a folder of the store."""

    def write(finished: FinishedRun) -> None:
        path = min(
            path for path in (finished.folder / "cache" / folder).rglob("*") if path.is_file()
        )
        edit(str(path.relative_to(finished.folder)))(finished)

    return write


def make_pipeline(finished: FinishedRun) -> None:
    (finished.folder / "pipelines").mkdir()
    (finished.folder / "pipelines" / "compile.yaml").touch()


CHANGES: dict[str, Callable[[FinishedRun], object]] = {
    "a source file of tvmflow": edit("package/inner/module.py"),
    "a new source file": lambda finished: (finished.folder / "package/inner/new.txt").touch(),
    "a removed source file": lambda finished: (
        finished.folder / "package/inner/module.py"
    ).unlink(),
    "the recipe": edit("net.yaml"),
    "a file that planning looked for": make_pipeline,
    "the model": edit("net.onnx"),
    "a delivered file": edit("dist/net/host/net.tvmflow"),
    "a removed delivered file": lambda finished: (
        finished.folder / "dist/net/host/verify.json"
    ).unlink(),
    "a sidecar file": edit("dist/net/host/net.cdx.json"),
    "a result": first_file("actions"),
    "a blob": first_file("cas"),
    "the key of the last run": first_file("last"),
    "a store of another version": edit("cache/format"),
    "a result that waits for its upload": lambda finished: finished.store.notes.write(
        "", "spool", "a", "b"
    ),
    "a folder that is not a store": lambda finished: (finished.folder / "cache").rename(
        finished.folder / "c"
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_the_cached_answer_invalid(change: str, finished: FinishedRun) -> None:
    """Even one that keeps size and modification time."""
    assert finished.run() is not None
    assert finished.answer() is not None
    CHANGES[change](finished)
    assert finished.answer() is None


@pytest.mark.parametrize(
    "name", ["PATH", "CUDA_VISIBLE_DEVICES", "TVMFLOW_SIGNING_KEY", "TVMFLOW_REMOTE"]
)
def test_another_variable_makes_the_cached_answer_invalid(
    name: str, finished: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs, GPUs, keys and settings come from the environment."""
    assert finished.run() is not None
    assert finished.answer() is not None
    monkeypatch.setenv(name, "another")
    assert finished.answer() is None


@pytest.fixture
def tool(finished: FinishedRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only tool of the plan: a package in the first folder of the import path."""
    site = finished.folder / "site"
    (site / "some_tool").mkdir(parents=True)
    (site / "some_tool/__init__.py").write_text("x = 1\n")
    (site / "some_tool/data.txt").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(site))
    # The tools that are installed are in other tests; here the cached answer watches one folder.
    monkeypatch.setattr(packages, "import_folders", lambda: [str(site)])
    packages.forget()
    yield site / "some_tool"
    packages.forget()


def with_tool(finished: FinishedRun) -> FinishedRun:
    """Return the same plan as if its stages used `some-tool`; their keys stay as they are."""
    stages = tuple(spec._replace(tools=("some-tool",)) for spec in finished.prepared.plan.stages)
    report = session.run_plan(
        plan := finished.prepared.plan._replace(stages=stages),
        finished.store,
        FakeExecutor(),
        lambda event: None,
        session.SessionOptions(dist="dist"),
    )
    assert report.exit_code == 0
    return finished._replace(prepared=finished.prepared._replace(plan=plan))


TOOL_CHANGES: dict[str, Callable[[Path], object]] = {
    "an edited module": lambda tool: (tool / "__init__.py").write_text("x = 2\n"),
    "a new module": lambda tool: (tool / "more.py").write_text(""),
    "a removed module": lambda tool: (tool / "__init__.py").unlink(),
    "a file that takes its place": lambda tool: (tool.parent / "some_tool.py").write_text(""),
}


@pytest.mark.parametrize("change", TOOL_CHANGES)
def test_a_changed_tool_makes_the_cached_answer_invalid(
    change: str, finished: FinishedRun, tool: Path
) -> None:
    """Where it lies, what it consists of, and what would be imported in its place."""
    run = with_tool(finished)
    assert run.run() is not None
    assert run.answer() is not None
    TOOL_CHANGES[change](tool)
    assert run.answer() is None


def test_another_import_path_makes_the_cached_answer_invalid(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTHONPATH may put another package in front."""
    assert finished.run() is not None
    assert finished.answer() is not None
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    assert finished.answer() is None


def test_an_answer_expires_when_its_results_must_be_marked_as_used(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection keeps what was used; that is written down once a day."""
    assert finished.run() is not None
    now = time.time_ns()
    monkeypatch.setattr("time.time_ns", lambda: now + 86_400 * 10**9)
    assert finished.answer() is None


def test_an_answer_is_not_saved_while_a_file_is_new(finished: FinishedRun) -> None:
    """A coarse clock could give the next edit the same stamp."""
    assert finished.run(later_s=0.0) is not None
    assert finished.answer() is None


def test_a_damaged_answer_is_not_used(finished: FinishedRun) -> None:
    """Its first line is the digest of the others."""
    assert finished.run() is not None
    [path] = (finished.folder / "cache" / "plans").glob("*.answer")
    path.write_bytes(path.read_bytes().replace(b"5 stages", b"6 stages"))
    assert finished.answer() is None


def test_a_missing_file_hides_no_change_of_another(tmp_path: Path) -> None:
    """One stamp stands for many files, of which some may never have been there."""
    (tmp_path / "a").write_text("a")
    watched = [[str(tmp_path), "a", "missing"]]
    before = answers.read_stamps([], watched)
    write_with_old_times(tmp_path / "a", b"b")
    after = answers.read_stamps([], watched)
    (tmp_path / "missing").touch()
    assert len({*before, *after, *answers.read_stamps([], watched)}) == 3


def test_a_link_to_a_file_of_the_same_tick_is_another_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coarse clock gives two files the same change time."""
    for name in ("a", "b"):
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("a")
    real = os.stat

    def coarse(*words: Any, **named: Any) -> SimpleNamespace:
        return SimpleNamespace(st_ctime_ns=1, st_ino=real(*words, **named).st_ino)

    def stamp() -> list[str]:
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", coarse)
            return answers.read_stamps([], [[str(tmp_path), "link"]])

    before = stamp()
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("b")
    assert stamp() != before


def test_another_folder_or_command_line_has_its_own_answer(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths mean other files there."""
    assert finished.run() is not None
    assert answers.find_answer([*ARGV, "--json"]) is None
    (finished.folder / "other").mkdir()
    monkeypatch.chdir(finished.folder / "other")
    monkeypatch.setenv("TVMFLOW_STORE", str(finished.folder / "cache"))
    assert finished.answer() is None


def test_another_copy_of_tvmflow_has_its_own_answer(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another checkout or environment with the same store may have other code."""
    assert finished.run() is not None
    assert finished.answer() is not None
    monkeypatch.setattr(
        environment, "__file__", str(finished.folder / "other" / "inner" / "module.py")
    )
    assert finished.answer() is None


def test_a_password_in_a_variable_is_not_saved(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may read the store does not learn it."""
    monkeypatch.setenv("TVMFLOW_REMOTE", "https://user:secret@example.org")
    monkeypatch.setenv("TVMFLOW_TOKEN_MODELS_EXAMPLE", "secret")
    assert "secret" not in environment.describe_environment()


def test_a_json_answer_has_a_number_as_duration(finished: FinishedRun) -> None:
    """The placeholder is replaced by the real seconds."""
    assert finished.run() is not None
    [path] = (finished.folder / "cache" / "plans").glob("*")
    assert finished.run("--json") is not None
    text = answers.find_answer([*ARGV, "--json"])
    assert text is not None
    report: dict[str, Any] = json.loads(text)
    assert 0 < report["seconds"] < 60
    assert path.exists()


def test_the_cached_answer_imports_next_to_nothing() -> None:
    """Neither json nor re nor typing nor contextlib: each costs a tenth of the start of Python."""
    code = "import os, sys; before = set(sys.modules); import tvmflow.engine.answers; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True
    )
    imported = {name for name in done.stdout.split() if not name.startswith("tvmflow")}
    assert imported <= {"_blake2", "time"}
    modules = {name for name in done.stdout.split() if name.startswith("tvmflow")}
    assert modules == {
        "tvmflow", "tvmflow.core", "tvmflow.core.project", "tvmflow.core.formatting", "tvmflow.core.version", "tvmflow.engine", "tvmflow.engine.answers",
        "tvmflow.planning", "tvmflow.planning.environment",
    }  # fmt: skip


def test_an_answer_is_found_with_hardly_any_import() -> None:
    """Each module costs a part of the time that an empty Python takes."""
    heavy = (
        "argparse",
        "json",
        "pathlib",
        "re",
        "subprocess",
        "tempfile",
        "typing",
        "tvmflow.core.errors",
    )
    modules = "tvmflow.__main__, tvmflow.engine.answers, tvmflow.core.formatting"
    code = f"import sys, {modules}; print([name for name in {heavy!r} if name in sys.modules])"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
