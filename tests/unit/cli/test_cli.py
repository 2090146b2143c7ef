"""The command line: options, exit codes, and messages instead of tracebacks."""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.project import Project
from tvmflow import __version__
from tvmflow.cli import commands, main
from tvmflow.cli.commands import describe
from tvmflow.cli.options import Options
from tvmflow.core.errors import EXIT_CODES, EXIT_USAGE
from tvmflow.executors import local
from tvmflow.planning import prepare
from tvmflow.planning.recipes import load_recipe
from tvmflow.store.local import LocalStore
from tvmflow.targets.presets import MEANT, NAMES, OTHER_NAMES, PRESETS, find_presets

ROOT = Path(__file__).resolve().parents[3]
PYTHON = shlex.quote(sys.executable)
pytestmark = pytest.mark.usefixtures("one_fork_server")
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
    docs = ROOT.joinpath("docs/cli.md").read_text()
    for command in commands.COMMANDS:
        assert f"  {command} " in out and f"`{command}" in docs
    for code in EXIT_CODES:
        assert f"  {code:<3}  " in out and f"| {code} |" in docs


def test_the_help_of_every_command_is_that_of_its_module() -> None:
    """The table has it so that `tvmflow --help` need not import the modules."""
    for name, summary in commands.COMMANDS.items():
        first, *rest = commands.load_commands(name)
        if not rest:
            assert describe(first).summary == summary


def test_the_options_of_every_command_are_those_of_its_function() -> None:
    """Also of a function with a decorator."""
    for command in commands.load_all_commands():
        function = inspect.unwrap(command.run)
        assert issubclass(command.options, Options)
        assert function.__annotations__["options"] == command.options.__name__


def test_help_and_mistakes_import_no_command() -> None:
    """They would take ten times as long: what a command does is imported when it does that."""
    lines = [["help", *command.name.split()] for command in commands.load_all_commands()]
    lines += [["cache", "--help"], ["--version"], ["rum"], ["cache", "gv"], ["run", "--job"]]
    code = f"import sys; from tvmflow.cli import main; [main.main(line) for line in {lines}]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    assert not modules & {"tvmflow.store.local", "tvmflow.recipe", "logging", "dataclasses"}
    assert not modules & {
        *"dataclasses inspect doit numpy onnx pydantic subprocess tvm yaml".split()
    }


def test_the_overview_imports_no_options() -> None:
    """Nor do YAML, pydantic and cryptography delay it."""
    code = "import sys; from tvmflow.__main__ import main; sys.argv = ['tvmflow', '--help']; main(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    expected = {"tvmflow.cli", "tvmflow.cli.commands"}
    assert {name for name in modules if name.startswith("tvmflow.cli")} == expected
    assert not modules & {"argparse", "yaml", "pydantic", "cryptography", "logging", "tvm"}


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_closed_stream_is_no_bug(closed: str, tmp_path: Path) -> None:
    """What would be printed there is discarded, and no file gets its number."""
    command = f"{PYTHON} -m tvmflow help run {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (not closed.startswith(">"))


def run_in_c_locale(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run a command without Python's coercion of the locale.

    Without `site`, too, which in this locale fails where a `.pth` file names a folder with an umlaut.
    """
    own = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return subprocess.run(
        [sys.executable, "-S", "-m", "tvmflow", *words],
        cwd=cwd,
        env={**os.environ, **own, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("line", ["help run", "cache --help", "--help"])
def test_help_is_printed_in_any_encoding(line: str) -> None:
    """What the encoding lacks is escaped; with a C locale, Python would refuse to print it."""
    done = run_in_c_locale(*line.split())
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


@pytest.mark.parametrize("line", ["run --help", "targets"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_an_error(line: str, unbuffered: str) -> None:
    """It is standard output that is full, and no disk of tvmflow's files."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tvmflow", *line.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            text=True,
            check=False,
        )
    assert done.returncode == 4
    assert done.stderr.startswith("tvmflow: standard output cannot be written: No space left")


def test_messages_that_cannot_be_written_leave_the_exit_code() -> None:
    """The exit code is what is left to tell."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "tvmflow", "verify", "there-is-none"]
        done = subprocess.run(command, stderr=full, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize("names_by", ["argument", "pyproject.toml"])
def test_any_name_of_a_folder_works_in_any_locale(names_by: str, tmp_path: Path) -> None:
    """In the locale C without its coercion, Python itself has no name for a folder with an umlaut."""
    words = ["cache", "stat", "--json"]
    LocalStore(str(tmp_path / "b\xfccher")).create()
    if names_by == "argument":
        words += ["--store", "b\xfccher"]
    else:
        text = '[tool.tvmflow]\nstore = "b\xfccher"\n'
        (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    done = run_in_c_locale(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


# Reads Python's own modules wherever they are, and has not the rights by which root exceeds the limit.
_WITHOUT_RIGHTS = (
    "setpriv --reuid=54321 --clear-groups --inh-caps=+dac_override,+dac_read_search "
    "--ambient-caps=+dac_override,+dac_read_search"
).split()


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs another user")
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_without_spare_processes_commands_say_so(processes: int, tmp_path: Path) -> None:
    """Neither a traceback nor a bug: what needs no process works, and the limit is named where it ends a command."""
    (tmp_path / "remote").mkdir()
    for words in (["doctor"], ["cache", "push", "--all", "--remote", "remote"]):
        limit = ["prlimit", f"--nproc={processes}"]
        done = subprocess.run(
            [*_WITHOUT_RIGHTS, *limit, sys.executable, "-m", "tvmflow", *words],
            cwd=tmp_path,
            env={**os.environ, "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, 1, 4), done.stderr
        assert "Traceback" not in done.stderr and "bug" not in done.stderr
        if done.returncode == 4:
            assert (
                "the system starts no more processes or threads for this user"
                in done.stdout + done.stderr
            )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version of the package."""
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tvmflow {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        ([], "usage: tvmflow COMMAND"),
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
        (["plan", "tiny.yaml", "--until", "tune", "--pipeline", "compile"], "has no such stage"),
        (["plan", "tiny.yaml", "--target", "hots"], "did you mean 'host'?"),
        (["plan", "tiny.yaml", "--pipeline", "tunee"], "did you mean 'tune'?"),
        (["plan", "tiny.yaml", "--variant", "b"], "there are none"),
        (
            ["plan", "tiny.yaml", "--output", "tiny.yaml"],
            "is read by this command and would be lost",
        ),
        (["run", "tiny.yaml", "--junit", "."], ". is a folder, so no file can be written there"),
        (["run", "tiny.yaml", "--summary", "tiny.yaml"], "would be lost"),
        (["lock", "tiny.yaml", "--lock", "tiny.yaml"], "would be lost"),
        (["lock", "tiny.yaml", "--lock", "."], ". is a folder"),
        (["plan", "missing.yaml"], "missing.yaml"),
        (["plan", "."], "."),
        (["explain", "tiny.yaml", "nothing"], "import, lower/host, extract_tasks/host"),
        (["clean", "--store", "nowhere"], "is not a tvmflow store"),
        (["clean", "--store", "nowhere", "--yes"], "is not a tvmflow store"),
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
    monkeypatch.setattr(prepare, "prepare_run", lambda *_: 1 / 0)
    assert main.main(["plan", "tiny.yaml"]) == 70
    err = capsys.readouterr().err
    assert "a bug in tvmflow: ZeroDivisionError" in err and "Traceback" not in err
    details = Path(err.split("the details are in ")[1].strip())
    assert "Traceback" in details.read_text()
    details.unlink()


def test_a_folder_whose_name_is_not_utf_8_is_no_bug(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reports and keys are UTF-8: the path is named with what to do."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    try:
        shutil.copytree(tmp_path, folder)
    except OSError:
        pytest.skip("this file system has no such names")
    assert main.main(["plan", f"{folder}/tiny.yaml"]) == 4
    err = capsys.readouterr().err
    assert "the name of a file or folder is not UTF-8: '" in err and "caf\\udce9" in err
    assert "fix: rename it" in err


def test_a_command_whose_output_nobody_reads_ends_quietly(project: Project) -> None:
    """As in `tvmflow help run | head -1`: as a program does that SIGPIPE ends."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "tvmflow", "help", "run"],
        stdout=writer, stderr=subprocess.PIPE, env=project.environment, cwd=project.folder,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_store_that_cannot_be_created_is_a_problem_of_the_environment(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in the place of the store, or a link to a disk that is not mounted: exit code 4 and its path."""
    Path("place").write_text("a file")
    assert main.main(["plan", "tiny.yaml", "--store", "place"]) == 4
    assert "place" in capsys.readouterr().err
    Path("link").symlink_to("/unmounted/disk")
    for command in ("plan", "run"):
        assert main.main([command, "tiny.yaml", "--store", "link"]) == 4
        err = capsys.readouterr().err
        assert "link is a link to /unmounted/disk, which does not exist" in err


def test_clean_removes_results_and_keeps_files_of_others(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trials are removed with --ledger only; a foreign file in the store's folder never is."""
    assert main.main(["plan", "tiny.yaml"]) == 0
    store = Path("cache")
    (store / "ledger").mkdir(exist_ok=True)
    (store / "ledger" / "trial").touch()
    (store / "stranger").touch()
    assert main.main(["clean", "--yes"]) == 0
    assert "measured trials are kept" in capsys.readouterr().out
    assert (store / "ledger" / "trial").exists()
    assert main.main(["clean", "--ledger", "--yes"]) == 0
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


def test_a_plan_can_be_checked_for_something_to_do(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """`plan --check` ends with 1 then; `run --dry-run` shows the same plan, runs nothing and ends with 0."""
    assert main.main(["plan", "tiny.yaml"]) == 0
    planned = capsys.readouterr().out
    assert main.main(["plan", "tiny.yaml", "--check"]) == 1
    assert capsys.readouterr().out == planned
    assert main.main(["run", "tiny.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out == planned
    assert not Path("dist").exists()


def test_a_recipe_that_is_named_twice_is_planned_once(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the way to its folder; it is not refused for having its own name."""
    names = ("tiny.yaml", "./tiny.yaml", str(project.folder / "tiny.yaml"))
    assert main.main(["plan", *names]) == 0
    out = capsys.readouterr().out
    assert main.main(["plan", "tiny.yaml"]) == 0
    assert capsys.readouterr().out == out


def test_a_plan_can_be_a_graph_in_a_file(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--output` writes the same text; JSON has the edges itself."""
    assert main.main(["plan", "tiny.yaml", "--graph", "mermaid"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("flowchart LR\n")
    assert main.main(["plan", "tiny.yaml", "--graph", "mermaid", "--output", "plan.mmd"]) == 0
    assert capsys.readouterr().out == "" and Path("plan.mmd").read_text() == shown
    assert main.main(["plan", "tiny.yaml", "--graph", "svg", "--json"]) == 2
    assert "`needs`" in capsys.readouterr().err
    assert main.main(["plan", "tiny.yaml", "--output", "new/plan.txt"]) == 0
    assert Path("new/plan.txt").read_text().startswith("tiny:import ")
    assert main.main(["plan", "tiny.yaml", "--output", "plan.mmd/plan.txt"]) == 4


def test_a_stage_that_is_to_be_forced_must_exist(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """The nearest name is suggested, before anything runs."""
    for command in ("plan", "run"):
        assert main.main([command, "tiny.yaml", "--force", "verify/hots"]) == 2
        assert "did you mean 'verify/host'?" in capsys.readouterr().err


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_quiet_run_prints_nothing_but_problems(project: Project) -> None:
    """Also when everything is up to date, the second time from the saved answer."""
    command = ("run", "tiny.yaml", "--until", "import", "-q")
    for _ in range(3):
        done = project.tvmflow(*command)
        assert (done.code, done.out, done.err) == (0, "", "")
    assert project.tvmflow("plan", "tiny.yaml", "--until", "import", "-q").out
    refused = project.tvmflow("run", "other.yaml", "-q")
    assert refused.code == 2 and "other.yaml" in refused.err


@pytest.mark.parametrize(
    "line",
    [
        "init tiny.onnx --output new.yaml",
        "keygen own.key",
        "cache gc --dry-run",
        "clean --dry-run",
        "cache verify",
    ],
)
def test_a_quiet_command_that_did_its_work_prints_nothing(line: str, project: Project) -> None:
    """Without -q it says what it did."""
    project.call("plan", "tiny.yaml")
    quiet = project.call(*line.split(), "-q")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    again = [word.replace("new", "newer").replace("own", "other") for word in line.split()]
    assert project.call(*again).out


@pytest.mark.slow
def test_verbose_runs_log_decisions_with_their_reasons(project: Project) -> None:
    """To stderr; -v is answered with the decisions even when everything is up to date."""
    command = ("run", "tiny.yaml", "--until", "import")
    assert "tiny:import: runs: never ran" in project.tvmflow(*command, "-v").err
    assert "tiny:import: up to date: unchanged" in project.tvmflow(*command, "-v").err
    assert "DEBUG" in project.tvmflow(*command, "-vv").err
    assert "tiny:import | " in project.tvmflow(*command, "--force", "import", "-vv").err
    project.environment["TVMFLOW_LOG"] = "info"
    assert "tiny:import: up to date: unchanged" in project.tvmflow(*command).err
    assert project.tvmflow(*command, "-q").err == ""


def test_windows_is_refused_at_the_entry() -> None:
    """Before anything that only POSIX systems have is imported; the message names WSL."""
    code = (
        "import runpy, sys; sys.platform = 'win32'; sys.modules['fcntl'] = None; "
        "sys.modules['_signal'] = None; runpy.run_module('tvmflow', run_name='__main__')"
    )
    command = [sys.executable, "-S", "-c", code]
    folder = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 4
    assert done.stderr.startswith("tvmflow: Windows is not supported")
    assert "WSL" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("arm64", "did you mean 'aarch64' or 'aarch64-any'?"),
        ("x86_64", "did you mean 'x86-64-v3' or 'x86-64-any'?"),
        ("snapdragon-8-gen-3", "did you mean 'snapdragon' or 'android-arm64-v8a'?"),
        ("pixel-8", "did you mean 'snapdragon' or 'android-arm64-v8a'?"),
        ("raspberry-pi-zero-2", "did you mean 'cortex-a53'?"),
        ("Raspberry Pi 5", "did you mean 'raspberry-pi-5'?"),
        ("zen4", "did you mean 'x86-64-v4'?"),
        ("sm_86", "did you mean 'cuda-sm86'?"),
        ("avx", "did you mean 'x86-64-v2'?"),
        ("a100-40gb", "did you mean 'cuda-sm80'?"),
        ("cuda-12.4", "or 'cuda-sm75' or 'cuda-sm80' or "),
        ("cortex-x4", "did you mean 'cortex-a78'?"),
        ("pi4", "did you mean 'cortex-a72'?"),
        ("gravitn3", "did you mean 'graviton3'?"),
        ("rasberry-pi-5", "did you mean 'raspberry-pi-5'?"),
        ("jetson_orin_cpu", "did you mean 'jetson-orin-cpu'?"),
        ("CUDA", "or 'cuda-sm75' or 'cuda-sm80' or "),
        ("local", "did you mean 'host'?"),
        ("windows", "did you mean 'x86-64-windows' or 'aarch64-windows'?"),
        ("cortex-a73", "did you mean 'cortex-a"),
    ],
)
def test_an_unknown_target_is_answered_with_presets(
    name: str, hint: str, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other tools' names of targets are known."""
    project.write_recipe(targets=[name])
    assert main.main(["plan", "tiny.yaml"]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        *("rp2040", "cortex-m4", "cortex-m4f", "cortex-m0+", "STM32F4"),
        *("loongarch64", "power9", "riscv32", "metal", "jetson-thor"),
    ],
)
def test_no_preset_is_suggested_for_a_machine_that_has_none(name: str) -> None:
    """Code for one that only has a similar name would crash there (rp2040 is like rpi4)."""
    assert find_presets(name) == []


def test_other_names_of_targets_are_presets() -> None:
    """None of them hides a preset."""
    meant = {preset for presets in MEANT.values() for preset in presets if "\\" not in preset}
    assert {*meant, *OTHER_NAMES.values()} <= set(PRESETS)
    assert not {*OTHER_NAMES} & {*PRESETS}
    assert all(find_presets(name) == [name] for name in NAMES)
    for name, preset in [("m3-max", "apple-m3"), ("compute_90a", "cuda-sm90")]:
        assert find_presets(name) == [preset]


@pytest.mark.parametrize("target", ["graviton4", "{name: graviton4, preset: graviton4}"])
def test_machines_are_targets(target: str, project: Project) -> None:
    """A recipe may name a machine in place of its CPU: the target keeps the name, and has the CPU's code."""
    project.write_recipe(targets=[target])
    [listed] = load_recipe(project.folder / "tiny.yaml").recipe.targets
    assert listed.name == "graviton4"
    assert listed.tvm_target() == PRESETS["neoverse-v2"].tvm


@pytest.mark.parametrize("is_new", [True, False])
def test_the_process_that_loads_tvm_starts_before_what_plans_is_imported(
    is_new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take long, and on two cores they take as long as one; a store with results may need neither."""
    started = []
    store = LocalStore(str(tmp_path / "store"))
    if not is_new:
        store.create()
        store.notes.keep("a key", "last", "net")

    def start_early() -> None:
        started.append("tvmflow.planning.prepare" in sys.modules)

    monkeypatch.setattr(local, "start_early", start_early)
    monkeypatch.delitem(sys.modules, "tvmflow.planning.prepare")
    main.main(["run", "missing.yaml", "--store", store.root])
    assert started[:1] == ([False] if is_new else [])


def test_the_process_that_loads_tvm_ends_with_a_command_that_is_refused(tmp_path: Path) -> None:
    """It has the command's streams, whose readers would wait for it."""
    recipe = tmp_path / "net.yaml"
    recipe.touch()
    options = ["--junit", str(recipe), "--store", str(tmp_path / "store")]
    assert main.main(["run", str(recipe), *options]) == EXIT_USAGE
    assert local._spare is None
