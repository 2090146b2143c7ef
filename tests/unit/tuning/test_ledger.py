"""The ledger keeps every trial once, whoever writes and whatever breaks."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from tests.support.trials import DEVICE, TARGET, trial
from tvmflow.core.errors import StoreError
from tvmflow.core.file_locks import Locked
from tvmflow.tuning.ledger import Ledger, WorkloadDescription, WorkloadLedger, target_key
from tvmflow.tuning.ledger_folders import check_ledger, read_records
from tvmflow.tuning.trials import Ban, Failure


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "workload.jsonl"


def quarantined(path: Path) -> list[str]:
    """The reasons in the quarantine file."""
    quarantine = path.with_name(f"{path.stem}.quarantine.jsonl")
    if not quarantine.exists():
        return []
    return [json.loads(line)["reason"] for line in quarantine.read_text().splitlines()]


def test_trials_are_kept_when_the_ledger_is_opened_again(path: Path) -> None:
    """Every field of a record survives, of good trials and of failed ones."""
    failed = trial(2, run_secs=(), failure=Failure("build", "timeout", "took too long"))
    ledger = WorkloadLedger(path)
    assert ledger.append(trial(1))
    assert ledger.append(failed)
    again = WorkloadLedger(path)
    assert list(again.trials.values()) == [trial(1), failed]
    assert again.repairs == []


def test_a_trial_is_kept_once(path: Path) -> None:
    """The same schedule measured by two runs is one record: the first."""
    first, second = WorkloadLedger(path), WorkloadLedger(path)
    assert first.append(trial(1, seconds=1.0))
    assert not second.append(trial(1, seconds=2.0))
    assert [record.run_secs[0] for record in WorkloadLedger(path).trials.values()] == [1.0]


def test_trials_of_another_process_appear_on_refresh(path: Path) -> None:
    """A ledger that is open reads what others have added."""
    ledger = WorkloadLedger(path)
    WorkloadLedger(path).append(trial(1))
    assert len(ledger) == 0
    ledger.refresh()
    assert list(ledger.trials) == [trial(1).id]


def test_the_best_come_first_and_failures_never(path: Path) -> None:
    """Valid trials are ordered by the median of their repeats."""
    ledger = WorkloadLedger(path)
    ledger.append(trial(1, run_secs=(5.0, 1.0, 1.0)))
    ledger.append(trial(2, run_secs=(), failure=Failure("run", "crashed", "SIGSEGV")))
    ledger.append(trial(3, run_secs=(0.5, 9.0, 9.0)))
    assert [record.id for record in ledger.valid()] == [trial(1).id, trial(3).id]


def test_a_banned_trial_is_kept_but_never_chosen(path: Path) -> None:
    """The ban has its reason and its date, is written once, and is there when the ledger is opened again."""
    ledger = WorkloadLedger(path)
    ledger.extend([trial(1, seconds=1.0), trial(2, seconds=2.0)])
    ban = Ban(trial(1).id, "wrong numbers", "2024-01-02T00:00:00.000+00:00")
    ledger.add([ban])
    ledger.add([ban._replace(when="2024-01-03T00:00:00.000+00:00")])
    again = WorkloadLedger(path)
    assert [record.id for record in again.valid()] == [trial(2).id]
    assert [record.id for record in again.in_order()] == [trial(1).id, trial(2).id]
    assert (again.bans, again.repairs) == ({trial(1).id: ban}, [])


def test_an_incomplete_last_line_of_any_length_is_removed(path: Path) -> None:
    """Other records stay, and more can be appended."""
    ledger = WorkloadLedger(path)
    ledger.append(trial(1))
    first_line = path.read_bytes()
    ledger.append(trial(2))
    both = path.read_bytes()
    for length in range(len(first_line) + 1, len(both) - 1, 7):
        path.write_bytes(both[:length])
        torn = WorkloadLedger(path)
        assert list(torn.trials) == [trial(1).id]
        assert len(torn.repairs) == 1 and "incomplete last line" in torn.repairs[0]
        assert path.read_bytes() == first_line
        assert torn.append(trial(2))
        assert path.read_bytes() == both
    assert quarantined(path) == []


def test_a_record_that_lacks_only_its_line_end_is_kept(path: Path) -> None:
    """A process that died between the record and the newline loses nothing."""
    WorkloadLedger(path).append(trial(1))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    ledger = WorkloadLedger(path)
    assert ledger.append(trial(2))
    assert list(WorkloadLedger(path).trials) == [trial(1).id, trial(2).id]


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: b"\x00" * len(line),
        lambda line: line[:40] + b"\xff\r" + line[42:],
        lambda line: line.replace(b'"run_secs"', b'"run_sex"'),
        lambda line: line.replace(b"0.001", b"-1.01"),
        lambda line: line.replace(b"EnterPostproc", b"EnterPostpr0c"),
        lambda line: b"[1, 2, 3]",
    ],
)
def test_a_damaged_line_in_the_middle_is_quarantined_alone(path: Path, damage: object) -> None:
    """The record is no longer used, its bytes are in the quarantine file, and no other record changes."""
    ledger = WorkloadLedger(path)
    for number in (1, 2, 3):
        ledger.append(trial(number))
    lines = path.read_bytes().splitlines(keepends=True)
    assert callable(damage)
    # the first line is the header
    lines[2] = damage(lines[2].rstrip(b"\n")) + b"\n"
    path.write_bytes(b"".join(lines))
    reopened = WorkloadLedger(path)
    assert list(reopened.trials) == [trial(1).id, trial(3).id]
    assert len(reopened.repairs) == 1
    assert len(quarantined(path)) == 1
    assert WorkloadLedger(path).repairs == []
    assert reopened.append(trial(2))
    assert len(WorkloadLedger(path)) == 3


def test_the_second_of_two_equal_lines_is_quarantined(path: Path) -> None:
    """`cat` of a file onto itself does not count its trials twice."""
    WorkloadLedger(path).append(trial(1))
    path.write_bytes(path.read_bytes() * 2)
    assert len(WorkloadLedger(path)) == 1
    assert quarantined(path) == ["the same trial is in an earlier line"]


def test_a_record_that_no_longer_applies_is_quarantined_alone(path: Path) -> None:
    """The others stay in use, also when the ledger is opened again."""
    ledger = WorkloadLedger(path)
    for number in (1, 2, 3):
        ledger.append(trial(number))
    ledger.quarantine([trial(2).id], "its trace no longer applies")
    assert list(ledger.trials) == [trial(1).id, trial(3).id]
    assert list(WorkloadLedger(path).trials) == [trial(1).id, trial(3).id]
    assert quarantined(path) == ["its trace no longer applies"]


def test_a_newer_versions_records_are_left_alone(path: Path) -> None:
    """An older tvmflow neither uses nor damages what it does not understand."""
    line = b'{"v":99,"anything":"else"}\n'
    path.write_bytes(line)
    ledger = WorkloadLedger(path)
    assert len(ledger) == 0 and ledger.repairs == []
    ledger.append(trial(1))
    assert path.read_bytes().startswith(line)


def test_an_exhausted_search_is_remembered_until_something_is_added(path: Path) -> None:
    """The mark is valid for the search that made it, until a trial is added."""
    ledger = WorkloadLedger(path)
    ledger.append(trial(1))
    ledger.mark_exhausted("evolutionary/0")
    again = WorkloadLedger(path)
    assert again.is_exhausted("evolutionary/0")
    assert not again.is_exhausted("replay-trace/0")
    again.append(trial(2))
    assert not again.is_exhausted("evolutionary/0")


def _write_many(path: Path, offset: int) -> None:
    ledger = WorkloadLedger(path)
    for number in range(40):
        ledger.append(trial((number + offset) % 60))


def test_writers_in_several_processes_lose_and_duplicate_nothing(path: Path) -> None:
    """Four processes write 40 trials each, of which many are the same: 60 in all, each once."""
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_write_many, args=(path, 15 * writer)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    ledger = WorkloadLedger(path)
    assert len(ledger) == 60 and ledger.repairs == []
    assert path.read_text().count("run_secs") == 60


def test_a_ledger_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    """A file with the name of the ledger's folder is reported."""
    (tmp_path / "ledger").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        Ledger.open(tmp_path / "ledger", TARGET, "0", DEVICE)


def test_targets_tvm_builds_and_devices_never_share_trials() -> None:
    """Each of them gives another folder; the order of CPU features does not matter."""
    base = target_key({**TARGET, "mattr": ["+a", "+b"]}, "1", DEVICE)
    assert base == target_key({"mattr": ["+b", "+a"], **TARGET}, "1", DEVICE)
    others = [
        target_key(TARGET, "1", DEVICE),
        target_key({**TARGET, "mattr": ["+a", "+b"], "num-cores": 3}, "1", DEVICE),
        target_key({**TARGET, "mattr": ["+a", "+b"]}, "2", DEVICE),
        target_key({**TARGET, "mattr": ["+a", "+b"]}, "1", {**DEVICE, "class": "other"}),
    ]
    assert len({base, *others}) == 5


def test_the_folder_describes_its_target(tmp_path: Path) -> None:
    """`about.json` has the TVM build, the target and the device."""
    ledger = Ledger.open(tmp_path, TARGET, "0.27.0+abc", DEVICE)
    about = json.loads((ledger.folder / "about.json").read_text())
    assert about["tvm"] == "0.27.0+abc"
    assert about["target"] == TARGET
    assert about["device"] == DEVICE


def test_many_trials_are_added_at_once(path: Path) -> None:
    """New ones are added once, and their number is returned."""
    ledger = WorkloadLedger(path)
    ledger.append(trial(1))
    assert ledger.extend([trial(1), trial(2), trial(3), trial(2)]) == 2
    assert list(WorkloadLedger(path).trials) == [trial(n).id for n in (1, 2, 3)]


def test_removed_trials_disappear_from_every_open_ledger(path: Path) -> None:
    """The file is replaced, perhaps by one with the same inode number."""
    ledger, other = WorkloadLedger(path), WorkloadLedger(path)
    ledger.extend(trial(number) for number in range(1, 7))
    other.refresh()
    for number in (1, 2, 3):
        assert ledger.remove([trial(number).id, "not there"]) == 1
    other.refresh()
    assert list(other.trials) == list(ledger.trials) == [trial(n).id for n in (4, 5, 6)]
    assert other.append(trial(1))
    assert list(WorkloadLedger(path).trials) == [trial(n).id for n in (4, 5, 6, 1)]
    assert other.repairs == [] and quarantined(path) == []


def test_removing_drops_marks_and_keeps_what_is_newer(path: Path) -> None:
    """An exhausted search is no longer marked; lines of a newer version stay."""
    newer = b'{"v":99,"anything":"else"}\n'
    path.write_bytes(newer)
    ledger = WorkloadLedger(path)
    ledger.extend([trial(1), trial(2)])
    ledger.mark_exhausted("evolutionary/0")
    ledger.remove([trial(1).id])
    ledger.append(trial(3))
    assert path.read_bytes().startswith(newer)
    assert not WorkloadLedger(path).is_exhausted("evolutionary/0")


def test_what_is_no_file_has_no_records(tmp_path: Path) -> None:
    """A report that reads a pipe would wait forever."""
    path = tmp_path / f"{'a' * 64}.jsonl"
    os.mkfifo(path)
    assert read_records(path).records.trials == {}
    path.unlink()
    path.mkdir()
    assert read_records(path).records.trials == {}
    path.rmdir()
    path.symlink_to(path.name)
    assert read_records(path).records.trials == {}


def test_a_file_copied_over_another_is_set_aside(tmp_path: Path) -> None:
    """Its trials are those of another workload or target; both are named, and nothing is deleted."""
    ledger = Ledger.open(tmp_path, TARGET, "0", DEVICE)
    other = Ledger.open(tmp_path, TARGET, "1", DEVICE)
    ledger.workload("a" * 64).append(trial(1))
    for source in (ledger.folder / f"{'a' * 64}.jsonl", other.folder / f"{'b' * 64}.jsonl"):
        other.workload("b" * 64).append(trial(2))
        victim = ledger.folder / f"{'b' * 64}.jsonl"
        shutil.copy(source, victim)
        assert read_records(victim).records.trials == {}
        assert "not of its own" in read_records(victim).problems[0]
        opened = ledger.workload("b" * 64)
        assert len(opened) == 0 and "not of its own" in opened.repairs[0]
        opened.append(trial(3))
        assert list(ledger.workload("b" * 64).trials) == [trial(3).id]
        assert [path.read_bytes() for path in ledger.folder.glob("b*.set-aside-*")][-1:]
    assert len(list(ledger.folder.glob("b*.set-aside-*.jsonl"))) == 2


def test_swapped_files_are_named_once_and_put_right_by_renaming(tmp_path: Path) -> None:
    """Their trials are not called lost when the ledger is checked again."""
    ledger = Ledger.open(tmp_path, TARGET, "0", DEVICE)
    files = [ledger.folder / f"{digit * 64}.jsonl" for digit in "ab"]
    for number, path in enumerate(files):
        ledger.workload(path.stem).append(trial(number))
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, reversed(contents), strict=True):
        path.write_bytes(content)
    findings = check_ledger(tmp_path).findings
    asides = [next(ledger.folder.glob(f"{path.stem}.set-aside-*.jsonl")) for path in files]
    for finding, aside, workload in zip(findings, asides, "ba", strict=True):
        assert f"it has the records of workload {workload * 12} on target" in finding
        assert f"moved to {aside.name}: rename it to the file of that workload" in finding
    assert check_ledger(tmp_path).findings == []
    for aside, path in zip(asides, reversed(files), strict=True):
        aside.replace(path)
    checked = check_ledger(tmp_path)
    assert (checked.trials, checked.findings) == (2, [])


def test_an_open_ledger_notices_that_its_file_was_replaced(tmp_path: Path) -> None:
    """What it has read before is no longer used."""
    one, two = (WorkloadLedger(tmp_path / f"{name}.jsonl") for name in ("one", "two"))
    one.append(trial(1))
    two.extend([trial(2), trial(3)])
    shutil.copy(two.path, one.path)
    assert one.append(trial(4))
    assert list(one.trials) == [trial(4).id] and len(one.repairs) == 1


def test_a_folder_copied_over_another_is_set_aside(tmp_path: Path) -> None:
    """Trials of version 0.1 do not say what they are of, but the folder does; a damaged description is written again."""
    other = Ledger.open(tmp_path / "other", TARGET, "1", DEVICE)
    other.workload("a" * 64).append(trial(2))
    key = target_key(TARGET, "0", DEVICE)
    shutil.copytree(other.folder, tmp_path / key)
    ledger = Ledger.open(tmp_path, TARGET, "0", DEVICE)
    assert len(ledger.workload("a" * 64)) == 0
    assert "describes another target" in ledger.repairs[0]
    assert len(list(tmp_path.glob(f"{key}.set-aside-*/{'a' * 64}.jsonl"))) == 1
    ledger.workload("a" * 64).append(trial(3))
    for damage in (b"", b"\0" * 99, b"[" * 9999, b"{}"):
        (ledger.folder / "about.json").write_bytes(damage)
        again = Ledger.open(tmp_path, TARGET, "0", DEVICE)
        assert len(again.workload("a" * 64)) == 1 and "written again" in again.repairs[0]
    assert Ledger.open(tmp_path, TARGET, "0", DEVICE).repairs == []


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 5000,
        os.urandom(5000),
        b"\xff\xfe{\0",
        b"[" * 5000,
        b"no record",
        b"\n\n\r\n",
        b"{" * 9999,
    ],
)
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_garbage_in_place_of_a_file_or_behind_it_never_becomes_a_trial(
    path: Path, garbage: bytes, end: bytes
) -> None:
    """It is quarantined, or removed where it is the beginning of a record; the next reading finds nothing."""
    for before in (b"", None):
        path.unlink(missing_ok=True)
        if before is None:
            WorkloadLedger(path).append(trial(1))
        good = path.read_bytes() if path.exists() else b""
        path.write_bytes(good + garbage + end)
        ledger = WorkloadLedger(path)
        assert len(ledger) == (1 if good else 0)
        assert bool(ledger.repairs) == bool(garbage.strip())
        assert WorkloadLedger(path).repairs == []
        assert ledger.append(trial(2))
        assert trial(2).id in WorkloadLedger(path).trials


def test_an_emptied_file_is_reported_and_used_again(tmp_path: Path) -> None:
    """Its trials are lost; nothing else is."""
    ledger = Ledger.open(tmp_path, TARGET, "0", DEVICE)
    opened = ledger.workload("a" * 64)
    opened.append(trial(1))
    os.truncate(opened.path, 0)
    assert "it is empty" in check_ledger(tmp_path).findings[0]
    opened.refresh()
    assert len(opened) == 0 and opened.append(trial(2))
    assert list(ledger.workload("a" * 64).trials) == [trial(2).id]
    assert check_ledger(tmp_path).findings == []


def test_a_pipe_or_folder_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """It is named, and all other workloads can be used."""
    ledger = Ledger.open(tmp_path, TARGET, "0", DEVICE)
    ledger.workload("c" * 64).append(trial(1))
    os.mkfifo(ledger.folder / f"{'a' * 64}.jsonl")
    (ledger.folder / f"{'b' * 64}.jsonl").mkdir()
    for key in ("a" * 64, "b" * 64):
        with pytest.raises(StoreError, match="cannot write the trial ledger"):
            ledger.workload(key)
    result = check_ledger(tmp_path)
    assert (result.workloads, result.trials) == (1, 1)
    assert [("not a regular file" in text) for text in result.findings] == [True, True]
    os.mkfifo(ledger.folder / f"{'c' * 64}.about.json")
    assert ledger.description("c" * 64) == WorkloadDescription()


def test_a_search_of_another_process_need_not_be_waited_for(path: Path) -> None:
    """Without waiting, Locked is raised at once."""
    with (
        WorkloadLedger(path).exclusive_search(),
        pytest.raises(Locked),
        WorkloadLedger(path).exclusive_search(wait=False),
    ):
        pass
    with WorkloadLedger(path).exclusive_search(wait=False):
        pass


def test_a_workload_is_described_once(tmp_path: Path) -> None:
    """The first description stays and is not a trial; a damaged one is ignored."""
    ledger = Ledger.open(tmp_path, TARGET, "0", DEVICE)
    assert ledger.description("k") == WorkloadDescription()
    ledger.describe("k", WorkloadDescription("first"))
    ledger.describe("k", WorkloadDescription("second"))
    reopened = Ledger.open(tmp_path, TARGET, "0", DEVICE)
    assert reopened.description("k") == WorkloadDescription("first")
    (ledger.folder / "k.about.json").write_text("{")
    assert ledger.description("k") == WorkloadDescription()
    assert len(ledger.workload("k")) == 0
