"""`tvmflow runs`, `show run` and `trace`: what happened, whatever the names are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.trace_checks import check_trace
from tvmflow.cli import main
from tvmflow.core.codec import to_json
from tvmflow.core.errors import EXIT_OK, EXIT_USAGE
from tvmflow.core.types import Plan, RecipeOrigin
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.run_records import record_run
from tvmflow.engine.timeline import TimedStage, Timeline, TimelineRecording
from tvmflow.store.local import LocalStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TVMFLOW_STORE", str(tmp_path / "cache"))
    made = LocalStore(str(tmp_path / "cache"))
    made.create()
    return made


def record(store: LocalStore, *recipes: str, message: str = "") -> None:
    facts = {"passed": True, "against": "reference", "outputs": {}}
    stages = tuple(
        StageReport(f"{recipe}:{stage}", "ran", "never ran", 2.0, facts)
        for recipe in recipes
        for stage in ("import", "verify/a-board-with-a-long-name")
    )
    path = str(Path("net.yaml").absolute())
    with record_run(store, ["run", "net.yaml"]) as recording:
        origins = tuple(RecipeOrigin(recipe, path, path) for recipe in recipes)
        recording.report = RunReport(stages, (), (), 2.0, origins=origins)
        recording.exit_code, recording.message = (3, message) if message else (0, "")


def test_a_row_has_how_many_recipes_there_are(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long names lose their middle, and never the count."""
    record(store, "a", "b", "c")
    record(store, "a-name-of-a-recipe-that-is-long", "b", "c")
    record(store, "a-name-of-a-recipe-that-is-long")
    assert main.main(["runs"]) == 0
    out = capsys.readouterr().out
    assert "a, b and 1 more" in out
    assert "a-na…-is-long and 2 more" in out
    assert "a-name-…ipe-that-is-long " in out


def test_a_run_that_an_error_ended_says_so(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although all of its builds are verified."""
    record(store, "net", message="net-1.0 exists with another library")
    assert main.main(["runs"]) == 0
    assert capsys.readouterr().out.endswith("net-1.0 exists with another library\n")


def test_the_stages_of_a_run_are_a_table(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    record(store, "a-name-of-a-recipe-that-is-long")
    assert main.main(["show", "run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "never ran" in line]
    assert len({line.index(" ran ") for line in lines}) == 1


def test_a_named_folder_without_a_store_is_no_store_without_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped `--store` or `$TVMFLOW_STORE` is a mistake; a project has no store before its first run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TVMFLOW_STORE", raising=False)
    assert main.main(["runs"]) == EXIT_OK
    assert "no run has done anything in this store yet" in capsys.readouterr().out
    assert main.main(["runs", "--store", "typo"]) == EXIT_USAGE
    assert "typo is not a tvmflow store" in capsys.readouterr().err
    monkeypatch.setenv("TVMFLOW_STORE", str(tmp_path))
    assert main.main(["runs"]) == EXIT_USAGE


def test_following_a_log_ends_where_nothing_runs(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody would write to it: what there is is shown, and that this is all."""
    path = Path(store.root, "logs", "net", "tune+host.log")
    path.parent.mkdir(parents=True)
    path.write_text("one trial\n")
    assert main.main(["logs", "tune", "--follow"]) == EXIT_OK
    shown = capsys.readouterr()
    assert shown.out == "one trial\n"
    assert shown.err == "nothing runs in cache: this log is complete\n"
    assert main.main(["logs", "tune", "--follow", "-q"]) == EXIT_OK
    assert not capsys.readouterr().err


def test_logs_and_explain_take_the_same_arguments(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """`RECIPE STAGE[/TARGET]`, each of them alone too; of a recipe with variants, the logs of all of these."""
    for recipe in ("net", "net-small", "other"):
        path = Path(store.root, "logs", recipe, "tune+host.log")
        path.parent.mkdir(parents=True)
        path.write_text(f"of {recipe}\n")
    Path("net.onnx").write_bytes(b"")
    Path("net.yaml").write_text(
        "recipe: 1\nname: net\nmodel: {onnx: net.onnx}\ntargets: [host]\n"
        "variants: {small: {kernels: {precision: mixed}}}\n"
    )
    assert main.main(["logs", "net.yaml", "tune/host"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "of net\n" in shown and "of net-small\n" in shown and "of other" not in shown
    assert main.main(["logs", "net.yaml"]) == EXIT_OK
    assert "2 logs" in capsys.readouterr().out
    assert main.main(["logs", "other:tune"]) == EXIT_OK
    assert capsys.readouterr().out == "of other\n"
    for command in ("logs", "explain"):
        assert main.main([command, "--help"]) == EXIT_OK
        usage = f"tvmflow {command} [OPTIONS] [RECIPE] [STAGE[/TARGET]]"
        assert usage in capsys.readouterr().out


def test_a_trace_is_written_of_the_last_run(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named by the run, or as `-o` says; a run of an earlier version is missing."""
    record(store, "net")
    assert main.main(["trace"]) == EXIT_USAGE
    assert "the timeline of run" in capsys.readouterr().err
    recorder = TimelineRecording(lambda _: None)
    recorder.event({"event": "stage_finished", "stage_id": "net:import", "outcome": "hit"})
    with record_run(store, ["run", "net.yaml"]) as recording:
        stage = StageReport("net:import", "hit", "unchanged", 0.0, {})
        value = to_json(recorder.finish(Plan((), ()), jobs=2))
        recording.report, recording.exit_code = RunReport((stage,), timeline=value), 0
        recording.did_more = True
    assert main.main(["trace", "-o", "x/t.json.gz", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written == {"path": "x/t.json.gz", "bytes": Path("x/t.json.gz").stat().st_size}
    assert main.main(["trace"]) == 0
    (path,) = Path().glob("trace-*.json")
    content = json.loads(gzip.decompress(Path("x/t.json.gz").read_bytes()))
    assert content == json.loads(path.read_text())
    assert content["otherData"]["command"] == "tvmflow run net.yaml"
    check_trace(content)


def test_the_stages_that_decided_the_time_are_explained(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a named run, too; there is no chain of one stage alone."""
    stages = (
        TimedStage("net:import", "ran", 0.5, 1.5),
        TimedStage("net:build/a", "ran", 1.5, 3.5, ("net:import",)),
        TimedStage("net:build/b", "ran", 3.5, 8.5, ("net:import",)),
    )
    timeline = Timeline(began_s=0.0, seconds=9.0, jobs=1, stages=stages, spans=())
    with record_run(store, ["run", "net.yaml"]) as recording:
        stage = StageReport("net:import", "ran", "never ran", 1.0, {})
        recording.report = RunReport((stage,), timeline=to_json(timeline))
        recording.exit_code = 0
    assert main.main(["explain", "--critical"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith(
        "500 ms before its stages, 8.0 s for them with 1 worker, 500 ms after them"
    )
    assert shown[2:5] == [
        "net:import   1.0 s  1.0 s          1.0 s  at once",
        "net:build/a  2.0 s  2.0 s           0 ms  when net:import had ended",
        "net:build/b  5.0 s  5.0 s          3.0 s  when net:build/a freed a worker",
    ]
    assert main.main(["explain", "--critical", "latest", "build"]) == EXIT_USAGE
    assert main.main(["explain"]) == EXIT_USAGE
    assert "no recipe is named" in capsys.readouterr().err
