"""The command line: options, exit codes, and sentences instead of tracebacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.project import Project
from tvmflow import __version__, cli
from tvmflow.errors import EXIT_CODES

COMMANDS = (*"run plan explain targets clean schema doctor worker".split(),)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    made = Project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TVMFLOW_STORE", raising=False)
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` says what it does and lists its options."""
    assert cli.main([command, "--help"]) == 0
    assert f"usage: tvmflow {command}" in capsys.readouterr().out


def test_help_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that docs/cli.md documents too."""
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    docs = Path(__file__).resolve().parents[2].joinpath("docs/cli.md").read_text()
    for command in COMMANDS:
        assert command in out and f"| `{command}" in docs
    for code in EXIT_CODES:
        assert f"{code:>3}  " in out and f"| {code} |" in docs


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The one of the package."""
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tvmflow {__version__}\n"


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        ([], "COMMAND"),
        (["rum"], "rum"),
        (["run"], "RECIPE"),
        (["run", "tiny.yaml", "--jobs", "0"], "--jobs"),
        (["run", "tiny.yaml", "--job", "2"], "--job"),
        (["run", "tiny.yaml", "--stage-timeout", "soon"], "--stage-timeout"),
        (["run", "tiny.yaml", "--scheduler", "tcp://here:1"], "--executor dask"),
        (["run", "tiny.yaml", "--executor", "dask"], "no scheduler is named"),
        (
            ["run", "tiny.yaml", "--executor", "dask", "--scheduler", "ftp://here:1"],
            "tls://HOST:PORT",
        ),
        (["run", "tiny.yaml", "--executor", "dask", "--scheduler", "here:1"], "--remote URL"),
        (["run", "tiny.yaml", "--executor", "task"], "task"),
        (["worker", "--scheduler", "here"], "tcp://HOST:PORT"),
        (["plan", "tiny.yaml", "--until", "veryfy"], "did you mean 'verify'?"),
        (["plan", "tiny.yaml", "--target", "hots"], "did you mean 'host'?"),
        (["plan", "tiny.yaml", "--pipeline", "tunee"], "did you mean 'tune'?"),
        (["plan", "missing.yaml"], "missing.yaml"),
        (["plan", "."], "."),
        (["explain", "tiny.yaml", "nothing"], "import, extract_tasks/host"),
        (["clean", "--store", "nowhere"], "is not a tvmflow store"),
    ],
)
def test_wrong_words_are_explained(
    words: list[str], needle: str, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, on stderr, without a traceback, and nothing on stdout that a program could take for a result."""
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert needle in printed.err
    assert printed.out == ""


def test_a_bug_of_ours_is_said_to_be_one(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 70; the details are in a file that is named."""
    monkeypatch.setattr(cli, "prepare", lambda *_: 1 / 0)
    assert cli.main(["plan", "tiny.yaml"]) == 70
    err = capsys.readouterr().err
    assert "a bug in tvmflow: ZeroDivisionError" in err and "Traceback" not in err
    details = Path(err.split("the details are in ")[1].strip())
    assert "Traceback" in details.read_text()
    details.unlink()


def test_a_reader_that_goes_away_is_no_error(project: Project) -> None:
    """As in `tvmflow schema | head -1`."""
    done = subprocess.run(
        f"{sys.executable} -m tvmflow schema | head -1; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True,
        env=project.environment, cwd=project.folder,
    )  # fmt: skip
    assert done.stdout == "{\n0\n"
    assert done.stderr == ""


def test_a_store_that_cannot_be_made_is_this_machines_problem(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file where the store should be: exit code 4 and the place."""
    Path("place").write_text("a file")
    assert cli.main(["plan", "tiny.yaml", "--store", "place"]) == 4
    assert "place" in capsys.readouterr().err


def test_clean_removes_results_and_keeps_what_is_not_its_own(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trials stay until asked for; a stranger's file in the store's folder stays always."""
    assert cli.main(["plan", "tiny.yaml"]) == 0
    store = Path("cache")
    (store / "ledger").mkdir(exist_ok=True)
    (store / "ledger" / "trial").touch()
    (store / "stranger").touch()
    assert cli.main(["clean"]) == 0
    assert "measured trials are kept" in capsys.readouterr().out
    assert (store / "ledger" / "trial").exists()
    assert cli.main(["clean", "--ledger"]) == 0
    assert not (store / "ledger").exists()
    assert (store / "stranger").exists()


def test_the_environment_may_name_the_store(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`$TVMFLOW_STORE`, and `--store` before it."""
    monkeypatch.setenv("TVMFLOW_STORE", "from-environment")
    assert cli.main(["plan", "tiny.yaml"]) == 0
    assert Path("from-environment").is_dir() and not Path("cache").exists()
    assert cli.main(["plan", "tiny.yaml", "--store", "named"]) == 0
    assert Path("named").is_dir()


def test_a_recipe_may_lie_anywhere(project: Project, tmp_path: Path) -> None:
    """Spaces and letters of other alphabets in the path; another current folder; a link to it."""
    odd = tmp_path / "a folder with spaces – größe"
    odd.mkdir()
    for name in ("tiny.yaml", "tiny.onnx"):
        Path(name).rename(odd / name)
    assert cli.main(["plan", str(odd / "tiny.yaml")]) == 0
    os.chdir(odd)
    assert cli.main(["plan", "tiny.yaml"]) == 0


def test_a_pipeline_that_appears_is_seen(project: Project) -> None:
    """A remembered plan is not used when a file now stands where planning would have looked first."""
    first = project.run("--until", "import")
    assert first.code == 0
    again = project.run("--until", "import")
    assert again.ran == []
    Path("pipelines").mkdir()
    Path("pipelines/tune.yaml").write_text("pipeline: 1\nname: tune\nstages: [nonsense]\n")
    refused = project.tvmflow("run", "tiny.yaml", "--json", "--until", "import")
    assert refused.code == 2
    assert "pipelines/tune.yaml:3:10" in refused.err
