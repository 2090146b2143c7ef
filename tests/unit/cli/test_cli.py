"""The command line: options, exit codes, and messages instead of tracebacks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.project import Project
from tvmflow import __version__
from tvmflow.cli import commands, main, plan
from tvmflow.core.errors import EXIT_CODES

COMMANDS = (*"run plan explain targets clean schema doctor worker".split(),)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    made = Project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TVMFLOW_STORE", raising=False)
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` has its usage."""
    assert main.main([command, "--help"]) == 0
    assert f"usage: tvmflow {command}" in capsys.readouterr().out


def test_help_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """The same that docs/cli.md documents."""
    assert main.main(["--help"]) == 0
    out = capsys.readouterr().out
    docs = Path(__file__).resolve().parents[3].joinpath("docs/cli.md").read_text()
    for command in COMMANDS:
        assert command in out and f"| `{command}" in docs
    for code in EXIT_CODES:
        assert f"{code:>3}  " in out and f"| {code} |" in docs


def test_the_help_of_every_command_is_that_of_its_module() -> None:
    """The table has it so that `tvmflow --help` need not import the modules."""
    for name, summary in commands.COMMANDS.items():
        parser = commands.make_parser([name])
        (subparsers,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        helps = {action.dest: action.help for action in subparsers._choices_actions}
        assert helps == commands.COMMANDS
        assert subparsers.choices[name].description == summary


def test_help_imports_no_command() -> None:
    """Nor do YAML, pydantic and cryptography delay it."""
    code = "import sys; from tvmflow.__main__ import main; sys.argv = ['tvmflow', '--help']; main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    expected = {"tvmflow.cli", "tvmflow.cli.commands"}
    assert {name for name in modules if name.startswith("tvmflow.cli")} == expected
    assert not modules & {"yaml", "pydantic", "cryptography", "logging", "tvm"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version of the package."""
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tvmflow {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "needle"),
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
def test_a_wrong_command_line_is_explained(
    arguments: list[str], needle: str, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, on stderr, without a traceback, and nothing on stdout that a program could take for a result."""
    assert main.main(arguments) == 2
    printed = capsys.readouterr()
    assert needle in printed.err
    assert printed.out == ""


def test_an_unexpected_exception_is_reported_as_a_bug(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 70; the message names the file with the details."""
    monkeypatch.setattr(plan, "prepare_run", lambda *_: 1 / 0)
    assert main.main(["plan", "tiny.yaml"]) == 70
    err = capsys.readouterr().err
    assert "a bug in tvmflow: ZeroDivisionError" in err and "Traceback" not in err
    details = Path(err.split("the details are in ")[1].strip())
    assert "Traceback" in details.read_text()
    details.unlink()


def test_output_that_nobody_reads_to_the_end_is_not_an_error(project: Project) -> None:
    """As in `tvmflow schema | head -1`."""
    done = subprocess.run(
        f"{sys.executable} -m tvmflow schema | head -1; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True,
        env=project.environment, cwd=project.folder,
    )  # fmt: skip
    assert done.stdout == "{\n0\n"
    assert done.stderr == ""


def test_a_store_that_cannot_be_created_is_a_problem_of_the_environment(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in the place of the store: exit code 4 and its path."""
    Path("place").write_text("a file")
    assert main.main(["plan", "tiny.yaml", "--store", "place"]) == 4
    assert "place" in capsys.readouterr().err


def test_clean_removes_results_and_keeps_files_of_others(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trials are removed with --ledger only; a foreign file in the store's folder never is."""
    assert main.main(["plan", "tiny.yaml"]) == 0
    store = Path("cache")
    (store / "ledger").mkdir(exist_ok=True)
    (store / "ledger" / "trial").touch()
    (store / "stranger").touch()
    assert main.main(["clean"]) == 0
    assert "measured trials are kept" in capsys.readouterr().out
    assert (store / "ledger" / "trial").exists()
    assert main.main(["clean", "--ledger"]) == 0
    assert not (store / "ledger").exists()
    assert (store / "stranger").exists()


def test_the_environment_can_name_the_store(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`$TVMFLOW_STORE`; `--store` takes precedence."""
    monkeypatch.setenv("TVMFLOW_STORE", "from-environment")
    assert main.main(["plan", "tiny.yaml"]) == 0
    assert Path("from-environment").is_dir() and not Path("cache").exists()
    assert main.main(["plan", "tiny.yaml", "--store", "named"]) == 0
    assert Path("named").is_dir()


def test_a_recipe_can_be_in_any_folder(project: Project, tmp_path: Path) -> None:
    """Spaces and letters of other alphabets in the path; another current folder; a link to it."""
    odd = tmp_path / "a folder with spaces – größe"
    odd.mkdir()
    for name in ("tiny.yaml", "tiny.onnx"):
        Path(name).rename(odd / name)
    assert main.main(["plan", str(odd / "tiny.yaml")]) == 0
    os.chdir(odd)
    assert main.main(["plan", "tiny.yaml"]) == 0


def test_a_new_pipeline_file_is_noticed(project: Project) -> None:
    """A cached plan is not used when a file exists now where planning looks first."""
    first = project.run("--until", "import")
    assert first.code == 0
    again = project.run("--until", "import")
    assert again.ran == []
    Path("pipelines").mkdir()
    Path("pipelines/tune.yaml").write_text("pipeline: 1\nname: tune\nstages: [nonsense]\n")
    refused = project.tvmflow("run", "tiny.yaml", "--json", "--until", "import")
    assert refused.code == 2
    assert "pipelines/tune.yaml:3:10" in refused.err


def test_a_quiet_run_shows_the_summary_only(project: Project) -> None:
    """Also when everything is up to date; another verbosity does not share the answer."""
    first = project.tvmflow("run", "tiny.yaml", "--until", "extract_tasks", "-q")
    assert first.out.splitlines()[0].startswith("2 ran, 0 up to date  (")
    again = project.tvmflow("run", "tiny.yaml", "--until", "extract_tasks", "-q")
    assert again.out.splitlines()[0].startswith("all 2 stages are up to date, nothing to run  (")
    normal = project.tvmflow("run", "tiny.yaml", "--until", "extract_tasks")
    assert "workloads, " in normal.out


def test_verbose_runs_log_decisions_with_their_reasons(project: Project) -> None:
    """To stderr; -v is answered with the decisions even when everything is up to date."""
    command = ("run", "tiny.yaml", "--until", "import")
    assert "tiny:import: run: never ran" in project.tvmflow(*command, "-v").err
    assert "tiny:import: hit: unchanged" in project.tvmflow(*command, "-v").err
    assert "DEBUG" in project.tvmflow(*command, "-vv").err
    project.environment["TVMFLOW_LOG"] = "info"
    assert "tiny:import: hit: unchanged" in project.tvmflow(*command).err
    assert project.tvmflow(*command, "-q").err == ""
