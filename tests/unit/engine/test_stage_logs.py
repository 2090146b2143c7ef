"""Logs of stages: which there are, and of which run they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tvmflow.core.errors import UsageError
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.run_records import RunRecord, find_logs, follow, read_run, record_run
from tvmflow.store.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def write(store: LocalStore, name: str, text: str = "log\n", age_s: float = 0.0) -> Path:
    path = Path(store.root, "logs", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    times = path.stat().st_mtime - age_s
    os.utime(path, (times, times))
    return path


def run_of(store: LocalStore, *stage_ids: str) -> RunRecord:
    with record_run(store, ["run"]) as recording:
        stages = tuple(StageReport(name, "ran", "", 1.0, {}) for name in stage_ids)
        recording.report, recording.exit_code = RunReport(stages, (), (), 1.0), 0
    return read_run(store, "latest")


def names(store: LocalStore, stage: str = "", run: RunRecord | None = None) -> list[str]:
    return [log.stage_id for log in find_logs(store, stage, run)]


def test_a_stage_is_named_as_on_every_command_line(store: LocalStore) -> None:
    """The log that was written last is at the end."""
    write(store, "net/tune+host.log", age_s=20)
    write(store, "net/tune+edge.log", age_s=10)
    write(store, "other/tune+host.log", "of other\n")
    write(store, "net/import.log", age_s=30)
    assert names(store) == ["net:import", "net:tune/host", "net:tune/edge", "other:tune/host"]
    assert names(store, "tune") == ["net:tune/host", "net:tune/edge", "other:tune/host"]
    assert names(store, "tune/host") == ["net:tune/host", "other:tune/host"]
    assert names(store, "net:tune") == ["net:tune/host", "net:tune/edge"]
    assert names(store, "other:tune/host") == ["other:tune/host"]
    assert list(follow(find_logs(store, "other:tune/host")[0].path, lambda: False)) == [
        "of other\n"
    ]


def test_what_is_no_file_is_no_log(store: LocalStore) -> None:
    """A pipe at which a reader would wait forever, a folder, a circle of links."""
    path = write(store, "net/import.log")
    os.mkfifo(path.with_name("build+host.log"))
    path.with_name("tune+host.log").mkdir()
    path.with_name("export+host.log").symlink_to("export+host.log")
    assert names(store) == ["net:import"]
    with pytest.raises(UsageError, match="there is no log of a stage 'build'"):
        find_logs(store, "build")


def test_a_log_that_does_not_exist_is_an_error(store: LocalStore) -> None:
    """With the nearest name, or the remark that there is none at all."""
    with pytest.raises(UsageError, match="has no log of a stage"):
        find_logs(store)
    write(store, "net/tune+host.log")
    with pytest.raises(UsageError) as refused:
        find_logs(store, "tine/host")
    assert refused.value.fix == "did you mean 'tune/host'? there are: net:tune/host"


def test_the_log_of_a_run_may_have_been_replaced(store: LocalStore) -> None:
    """By that of a later run; a run has the logs of the stages that it executed."""
    write(store, "net/tune+host.log")
    path = write(store, "net/build+host.log")
    run = run_of(store, "net:tune/host", "net:build/host", "net:verify/host")
    assert names(store, run=run) == ["net:tune/host", "net:build/host"]
    later_s = run.began_s + run.seconds + 60
    os.utime(path, (later_s, later_s))
    assert names(store, run=run) == ["net:tune/host"]
    with pytest.raises(UsageError, match="a later run has replaced the log of net:build/host"):
        find_logs(store, "build", run)
    with pytest.raises(UsageError, match="executed no stage that left a log"):
        find_logs(store, run=run_of(store, "net:import"))


def test_following_yields_what_is_written_later(store: LocalStore) -> None:
    """Also to a new file in the place of the old one."""
    path = write(store, "net/tune+host.log", "one\n")
    is_running = True
    texts = follow(find_logs(store, "tune")[0].path, lambda: is_running)
    assert next(texts) == "one\n"
    with path.open("a") as stream:
        stream.write("two\n")
    assert next(texts) == "two\n"
    replacement = path.with_suffix(".new")
    replacement.write_text("again\n")
    replacement.replace(path)
    assert next(texts) == "again\n"
    with path.open("a") as stream:
        stream.write("the end\n")
    is_running = False
    assert list(texts) == ["the end\n"]
