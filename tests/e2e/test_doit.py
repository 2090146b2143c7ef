"""doit's own command line does with the stages what its manual says, in processes and in threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from doit.cmd_base import ModuleTaskLoader  # noqa: TID251 - the command line itself is tested
from doit.doit_cmd import DoitMain  # noqa: TID251

from tests.support.project import STAGES, Project

ROOT: Final = Path(__file__).resolve().parents[2]
PARALLEL: Final = {"serial": (), "process": ("-n", "4"), "thread": ("-n", "4", "-P", "thread")}

# Stages that write a few bytes, in place of those of a recipe; `events` says what ran.
DODO: Final = """
import contextlib, functools, os
from tests.support.small_runs import RecordingExecutor, plan_of, store_in
from tvmflow.api.dodo_file import DodoTasks
from tvmflow.engine.stage_runs import RunContext
from pathlib import Path

store, value = store_in(Path("cache")), int(os.environ.get("VALUE", "0"))
lease = contextlib.ExitStack()

def record(event):
    if event["event"] == "stage_finished":
        with open("events", "a") as stream:
            stream.write(f"{event['stage_id']} {event['outcome']}\\n")

def fail(stage):
    if stage == os.environ.get("FAIL"):
        raise OSError(5, "Input/output error", "/dev/sda")

context = RunContext(store, RecordingExecutor(during=fail), record)
begin = functools.cache(lambda: lease.enter_context(store.running()))
tasks = DodoTasks(plan_of(width=2, value=value), context, "dist", "cache/doit.db", begin)
DOIT_CONFIG = {"dep_file": "cache/doit.db"}

def task_small():
    yield from tasks.list_tasks()
"""

ALL: Final = {
    *("net:import", "net:build/t0", "net:build/t1", "net:export/t0", "net:export/t1"),
    *("net:verify/t0", "net:verify/t1"),
}
BUNDLE: Final = "dist/net/t0/net.bin"


class Doit:
    """doit's command line in a folder with a dodo file: in this process, but for tasks in processes."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        (folder / "dodo.py").write_text(DODO)

    def __call__(self, *words: str, code: int = 0, **environment: str) -> str:
        is_parallel = "-n" in words and "-P" not in words and words[0] == "run"
        run = self._start if is_parallel else self._call
        status, output = run(words, {**os.environ, "PYTHONPATH": str(ROOT), **environment})
        assert status == code, output
        assert "Traceback" not in output
        return output

    def _start(self, words: tuple[str, ...], environment: dict[str, str]) -> tuple[int, str]:
        command = [sys.executable, "-m", "doit", *words]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def _call(self, words: tuple[str, ...], environment: dict[str, str]) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            for name, value in environment.items():
                patch.setenv(name, value)
            dodo: dict[str, Any] = {}
            exec(compile(DODO, self.folder / "dodo.py", "exec"), dodo)
            self._capsys.readouterr()
            # doit writes to what was stdout when it was imported
            report = ["-o", "report"] if words[0] == "run" else []
            status = DoitMain(ModuleTaskLoader(dodo)).run([words[0], *report, *words[1:]])
            dodo["lease"].close()
        output = self._capsys.readouterr()
        lines = (self.folder / "report").read_text() if report else ""
        return status or 0, lines + output.out + output.err

    def ran(self) -> set[str]:
        """Return the stages that ran since the last call."""
        events = self.folder / "events"
        lines = events.read_text().split("\n")[:-1] if events.exists() else []
        events.unlink(missing_ok=True)
        return {line.partition(" ")[0] for line in lines if line.endswith(" ran")}

    def status(self) -> dict[str, str]:
        """Return what `list -s` says of each task, but for the group, which doit always runs."""
        lines = self("list", "-s", "--all", "-q").splitlines()
        return {name: state for state, name in (line.split() for line in lines) if name != "net"}


@pytest.fixture
def doit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doit:
    return Doit(tmp_path, capsys)


@pytest.mark.parametrize("words", PARALLEL.values(), ids=PARALLEL)
def test_stages_run_once_and_are_up_to_date_then(doit: Doit, words: tuple[str, ...]) -> None:
    """Those of one process know what the others made; files are delivered."""
    doit("run", *words)
    assert doit.ran() == ALL
    assert (doit.folder / BUNDLE).is_file()
    again = doit("run", *words)
    assert doit.ran() == set()
    assert [line for line in again.splitlines() if not line.startswith("-- ")] == []
    assert set(doit.status().values()) == {"U"}
    # another value for all stages
    doit("run", *words, VALUE="5")
    assert doit.ran() == ALL


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=[pytest.mark.slow] if name == "process" else [], id=name)
        for name, words in PARALLEL.items()
    ],
)
def test_a_failed_stage_is_told_and_runs_again(doit: Doit, words: tuple[str, ...]) -> None:
    """What depends on it does not run; the exit code is doit's for a failure; the rest is kept."""
    assert "Input/output error" in doit("run", "-c", *words, FAIL="export", code=2)
    assert doit.ran() == {"net:import", "net:build/t0", "net:build/t1"}
    assert not (doit.folder / "dist").exists()
    doit("run", *words)
    assert doit.ran() == ALL - {"net:import", "net:build/t0", "net:build/t1"}


def test_list_and_info_say_what_is_up_to_date(doit: Doit) -> None:
    assert set(doit.status().values()) == {"R"}
    assert "never ran" in doit("info", "net:import", code=1)
    doit("run", "net:export/t0")
    assert doit.ran() == {"net:import", "net:build/t0", "net:export/t0"}
    up_to_date = {name for name, state in doit.status().items() if state == "U"}
    assert up_to_date == {"net:import", "net:build/t0", "net:export/t0"}
    assert "status     : up-to-date" in doit("info", "net:export/t0")
    assert doit.ran() == set()


def test_a_target_can_be_named(doit: Doit) -> None:
    """What it needs is made, and nothing else."""
    doit("run", BUNDLE)
    assert doit.ran() == {name for name in ALL if "t1" not in name}
    assert (doit.folder / BUNDLE).is_file() and not (doit.folder / "dist/net/t1").exists()
    (doit.folder / BUNDLE).write_text("edited")
    assert doit.status()["net:deliver/t0"] == "R"
    doit("run", BUNDLE)
    assert doit.ran() == set() and (doit.folder / BUNDLE).read_text() != "edited"


def test_a_forgotten_stage_runs_again(doit: Doit) -> None:
    """Also one that doit itself has never run; the others stay, and it runs once."""
    doit("run")
    for database in doit.folder.glob("cache/doit.db*"):
        database.unlink()
    doit.ran()
    doit("run")
    assert doit.ran() == set()
    assert "forgetting net:build/t0" in doit("forget", "net:build/t0")
    assert {name for name, state in doit.status().items() if state == "R"} == {"net:build/t0"}
    assert "it was forgotten" in doit("info", "net:build/t0", code=1)
    doit("run", "-n", "2")
    assert doit.ran() == {"net:build/t0"}
    doit("run")
    assert doit.ran() == set()
    doit("forget", "--all")
    doit("run")
    assert doit.ran() == ALL


def test_a_stage_that_failed_was_not_forgotten(doit: Doit) -> None:
    """doit takes both out of its database; what another run makes is up to date."""
    doit("run", FAIL="verify", code=1)
    doit("run")
    doit.ran()
    doit("run")
    assert doit.ran() == set()


@pytest.mark.slow
@pytest.mark.parametrize("words", PARALLEL.values(), ids=PARALLEL)
def test_always_execute_runs_everything(doit: Doit, words: tuple[str, ...]) -> None:
    doit("run", *words)
    assert doit.ran() == ALL
    doit("run", "-a", *words)
    assert doit.ran() == ALL
    doit("run", "-a", "-s", *words, "net:build/t1")
    assert doit.ran() == {"net:build/t1"}


def test_clean_removes_results_and_delivered_files(doit: Doit) -> None:
    """Of the tasks that are named, or of all; `-n` only shows it."""
    doit("run")
    doit.ran()
    shown = doit("clean", "-n")
    assert "net:build/t0 - executing 'Python: remove its result from the store'" in shown
    assert set(doit.status().values()) == {"U"}
    doit("clean", "net:deliver/t0", "net:verify/t1")
    assert not (doit.folder / BUNDLE).exists()
    states = doit.status()
    assert [name for name, state in states.items() if state == "R"] == [
        *("net:deliver/t0", "net:deliver/t1", "net:verify/t1")
    ]
    doit("run")
    assert doit.ran() == {"net:verify/t1"} and (doit.folder / BUNDLE).is_file()
    doit("clean")
    assert not (doit.folder / "dist/net").exists()
    doit("run")
    assert doit.ran() == ALL


def test_an_ignored_task_is_left_out(doit: Doit) -> None:
    doit("ignore", "net:build/t0")
    assert "!! net:build/t0" in doit("run")
    assert doit.ran() == {"net:import", *(name for name in ALL if "t1" in name)}


def test_the_list_describes_a_recipe_by_itself(doit: Doit) -> None:
    """Not by the docstring of the code that yields its tasks."""
    assert doit("list").split() == "net all stages of net for t0, t1".split()


@pytest.mark.slow
def test_a_dodo_file_of_ones_own_needs_the_installed_package_alone(tmp_path: Path) -> None:
    """Plain `doit` in the folder of the project; a wrong recipe is an error there, too."""
    (tmp_path / "dodo.py").write_text(
        "from tvmflow.api.dodo_file import plan_tasks\n"
        "tasks = plan_tasks('net.yaml')\n"
        "DOIT_CONFIG = tasks.config\n"
        "task_tvmflow = tasks.list_tasks\n"
    )
    model = ROOT / "recipes" / "models" / "digits.onnx"
    recipe = (
        f"recipe: 1\nname: net\nmodel: {{onnx: {model}}}\ntargets: [host]\ntune: {{trials: 0}}\n"
    )
    for text, code, output in ((recipe, 0, "net   all stages of net.yaml for host"), ("", 3, "")):
        (tmp_path / "net.yaml").write_text(text)
        done = subprocess.run(
            [sys.executable, "-m", "doit", "list"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (code, output), done.stderr
        assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir())[-1] == "cache"


@pytest.mark.parametrize(
    "recipe", [pytest.param("gone.yaml", marks=pytest.mark.slow), "broken.yaml"]
)
def test_a_wrong_recipe_is_an_error_without_a_traceback(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "broken.yaml").write_text("recipe: 1\nnam: x\n")
    done = _real_doit(tmp_path, "list", recipes=recipe)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    assert done.stderr.startswith("ERROR: ") and recipe in done.stderr


def _real_doit(
    folder: Path, *words: str, recipes: str = "tiny.yaml"
) -> subprocess.CompletedProcess[str]:
    """Run the dodo file of tvmflow from a folder, as users do."""
    command, *rest = words
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TVMFLOW_")}
    dodo = str(ROOT / "pipelines" / "dodo.py")
    return subprocess.run(
        [sys.executable, "-m", "doit", command, "-f", dodo, *rest],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), "TVMFLOW_RECIPES": recipes},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=[] if name == "process" else pytest.mark.nightly, id=name)
        for name, words in PARALLEL.items()
    ],
)
def test_doit_and_tvmflow_share_everything(project: Project, words: tuple[str, ...]) -> None:
    """Store, delivered files and results are those of `tvmflow run` in the folder of the caller."""
    done = _real_doit(project.folder, "run", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" done ") == len(STAGES)
    assert not (ROOT / "pipelines" / "cache").exists()
    assert project.run().ran == []
    bundle = project.folder / "dist" / "tiny" / "host" / "tiny.tvmflow"
    content = bundle.read_bytes()
    bundle.unlink()
    done = _real_doit(project.folder, "run", "dist/tiny/host/tiny.tvmflow")
    assert done.returncode == 0 and bundle.read_bytes() == content
    done = _real_doit(project.folder, "run", "-a", *words, "tiny:build/host")
    assert done.returncode == 0 and "doit runs it again" in done.stdout
    assert project.run().ran == []
