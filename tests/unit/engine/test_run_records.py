"""Run records: what a run leaves in the store, and how it is read again."""

from __future__ import annotations

import errno
import json
import logging
import time
from pathlib import Path

import pytest

from tvmflow.core.errors import StoreError, UsageError
from tvmflow.core.types import RecipeOrigin
from tvmflow.engine import run_records
from tvmflow.engine.builds import list_builds
from tvmflow.engine.report import RunReport, StageReport
from tvmflow.engine.run_records import RunRecord, is_record, list_runs, read_run, record_run
from tvmflow.store import garbage_collection
from tvmflow.store.garbage_collection import Limits, collect_garbage
from tvmflow.store.local import LocalStore

RAN = StageReport("net:import", "ran", "never ran", 1.5, {"weights": 2}, key="ab" * 32)
HIT = RAN._replace(outcome="hit")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    made = LocalStore(str(tmp_path / "store"))
    made.create()
    return made


def report(*stages: StageReport, origins: tuple[RecipeOrigin, ...] = ()) -> RunReport:
    return RunReport(stages, ("dist/net/host/net.so",), (), 2.0, origins=origins)


def record(store: LocalStore, *stages: StageReport, exit_code: int = 0) -> None:
    with record_run(store, ["run", "net.yaml"]) as recording:
        recording.report = report(*stages)
        recording.exit_code = exit_code


def test_a_run_that_did_something_can_be_read_again(store: LocalStore, tmp_path: Path) -> None:
    """With its command line without passwords, its recipe as it was, and what each stage did."""
    recipe, pipeline = tmp_path / "net.yaml", tmp_path / "p.yaml"
    recipe.write_text("recipe: 1\n")
    pipeline.write_text("stages: [import]\n")
    origin = RecipeOrigin("net-int8", str(recipe), str(pipeline), "int8")
    before_s = time.time()
    with record_run(
        store, ["run", "net.yaml", "--remote", "https://me:secret@host/x"]
    ) as recording:
        recording.report = report(RAN, origins=(origin,))
        recording.exit_code = 0
        recording.release = {"folder": "releases/1"}
    recipe.write_text("recipe: 1 # edited\n")
    (run,) = list_runs(store).runs
    assert run == read_run(store, "latest") == read_run(store, run.id)
    assert before_s <= run.began_s <= time.time()
    assert run.argv == ("run", "net.yaml", "--remote", "https://host/x")
    assert run.stages == (RAN,)
    assert run.builds == list_builds(report(RAN))
    assert run.delivered == ("dist/net/host/net.so",)
    assert run.release == {"folder": "releases/1"}
    assert [(source.kind, source.text) for source in run.sources] == [
        ("recipe", "recipe: 1\n"),
        ("pipeline", "stages: [import]\n"),
    ]
    assert [(entry.recipe, entry.variant) for entry in run.recipes] == [("net-int8", "int8")]


def test_a_run_that_was_up_to_date_leaves_nothing(store: LocalStore) -> None:
    """A run that failed before it had a plan leaves nothing, either; one that failed later does."""
    record(store, HIT)
    with pytest.raises(UsageError), record_run(store, ["run", "net.yaml"]):
        raise UsageError("no such recipe")
    assert list_runs(store).runs == ()
    record(store, HIT, exit_code=3)
    assert [run.exit_code for run in list_runs(store).runs] == [3]


def test_a_run_that_is_killed_leaves_what_was_known(store: LocalStore) -> None:
    """It is written as stages end, a second apart; the end of the run replaces it, or removes it if nothing was done."""
    with pytest.raises(BrokenPipeError), record_run(store, ["run"]) as recording:
        recording.note_progress(lambda: report(RAN))
        recording.note_progress(lambda: report(RAN, RAN))
        run = read_run(store, "latest")
        assert (run.end, run.exit_code, run.stages) == ("unfinished", 137, (RAN,))
        assert "was killed, or has not ended yet" in run.message
        recording.note_progress(lambda: report(RAN, HIT))
        raise BrokenPipeError
    [ended] = list_runs(store).runs
    assert (ended.id, ended.end, ended.exit_code, ended.stages) == (
        run.id,
        "stopped",
        141,
        (RAN, HIT),
    )
    assert "SIGPIPE" in ended.message
    with record_run(store, ["run"]) as recording:
        recording.note_progress(lambda: report(HIT))
        recording.report, recording.exit_code = report(HIT), 0
    assert list_runs(store).runs == (ended,)


def test_an_error_after_the_stages_is_recorded(store: LocalStore) -> None:
    """With its message and its exit code."""
    with pytest.raises(StoreError), record_run(store, ["run"]) as recording:
        recording.report = report(RAN)
        raise StoreError("the disk is full")
    run = read_run(store, "latest")
    assert (run.exit_code, run.message) == (4, "the disk is full")


def test_ids_sort_by_time_and_can_be_abbreviated(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that began at the same instant have different ids."""
    for began_s in (1.8e9, 1.8e9, 1.8e9 + 1e6, 1.8e9 + 3e7):
        monkeypatch.setattr(time, "time", lambda began_s=began_s: began_s)
        record(store, RAN)
    ids = run_records.list_ids(store)
    assert ids == ["1xak400", "1xak401", "1y93p00", "2sy4000"]
    assert [run.id for run in list_runs(store).runs] == ids[::-1]
    assert [run.id for run in list_runs(store, limit=1).runs] == ids[-1:]
    for name, run in {"1y": ids[2], "2": ids[3], "latest": ids[3], "latest~3": ids[0]}.items():
        assert read_run(store, name).id == run
    for name, problem in {
        "1xa": "'1xa' is the beginning of 2 runs: 1xak400, 1xak401",
        "zz": "there is no run 'zz'",
        "latest~4": "run latest~4: the store has records of 4 runs only",
        "latest~x": "there is no run 'latest~x'",
    }.items():
        with pytest.raises(UsageError) as refused:
            read_run(store, name)
        assert refused.value.message == problem


def test_a_store_without_runs_says_so(tmp_path: Path) -> None:
    """Also one that does not exist."""
    store = LocalStore(str(tmp_path / "none"))
    assert list_runs(store) == ((), ())
    with pytest.raises(UsageError, match="has no record of a run"):
        read_run(store, "latest")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"format": 99}', '{"id": "x"'])
def test_a_damaged_record_is_named_and_skipped(store: LocalStore, content: str) -> None:
    """The others are shown; one that is asked for is an error."""
    record(store, RAN)
    damaged = Path(store.root, "history", "zzzzzzz.json")
    damaged.write_text(content)
    history = list_runs(store)
    assert len(history.runs) == 1
    assert [path for path, _ in history.damaged] == [str(damaged)]
    with pytest.raises(UsageError, match="cannot be read"):
        read_run(store, "zz")


def test_a_record_in_the_place_of_another_is_damaged(store: LocalStore) -> None:
    """What a run is said to have done is what it did."""
    record(store, RAN)
    [own] = Path(store.root, "history").iterdir()
    other = own.with_name("zzzzzzz.json")
    other.write_bytes(own.read_bytes())
    assert is_record(own.read_bytes(), own.stem) and not is_record(other.read_bytes(), other.stem)
    assert [run.id for run in list_runs(store).runs] == [own.stem]
    with pytest.raises(UsageError, match=f"it is the record of run '{own.stem}'"):
        read_run(store, "latest")


def test_a_record_of_a_later_version_with_more_in_its_builds_is_read(store: LocalStore) -> None:
    """The format is raised only when a reader of today would go wrong."""
    record(store, RAN)
    (run,) = list_runs(store).runs
    value = json.loads(json.dumps(run.to_json()))
    assert RunRecord.from_json({**value, "more": 1}) == run


def test_a_full_disk_does_not_fail_a_run(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The user is warned."""

    def fail(path: str, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(store, "write_file", fail)
    with caplog.at_level(logging.WARNING):
        record(store, RAN)
    assert "the record of this run cannot be written" in caplog.text


def test_garbage_collection_keeps_the_last_records(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of old ones; young ones stay however many they are."""
    monkeypatch.setattr(garbage_collection, "_KEPT_RUNS", 2)
    # what was just written counts as written before
    limits = Limits(clock_margin_s=-5.0)
    for _ in range(4):
        record(store, RAN)
    ids = run_records.list_ids(store)
    collect_garbage(store, limits)
    assert run_records.list_ids(store) == ids
    collected = collect_garbage(store, limits._replace(max_age_s=0.0))
    assert run_records.list_ids(store) == ids[2:]
    assert [eviction.name for eviction in collected.evictions] == [
        f"history/{name}.json" for name in ids[:2]
    ]


@pytest.mark.parametrize(
    ("exit_code", "end"), [(0, "ok"), (1, "exit 1"), (130, "stopped"), (143, "stopped")]
)
def test_the_end_of_a_run_in_words(store: LocalStore, exit_code: int, end: str) -> None:
    """A run that a signal ended did not fail; its record says what is kept."""
    record(store, RAN, exit_code=exit_code)
    run = read_run(store, "latest")
    assert run.end == end
    is_stopped = end == "stopped"
    assert ("measured trials are kept, and the same command continues" in run.message) == is_stopped


def test_the_last_run_is_the_latest_after_the_clock_was_set_back(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` is the run that was recorded last, whenever it says that it began."""
    now = time.time()
    for years in (10, 0, -20):
        began_s = now + years * 365 * 86_400
        monkeypatch.setattr(time, "time", lambda began_s=began_s: began_s)
        record(store, RAN)
    runs = list_runs(store).runs
    assert [round((run.began_s - now) / 86_400 / 365) for run in runs] == [-20, 0, 10]
    assert read_run(store, "latest") == runs[0]
