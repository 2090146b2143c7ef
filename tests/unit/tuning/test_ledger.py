"""The ledger keeps every trial once, whoever writes and whatever breaks."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from tests.support.trials import DEVICE, TARGET, trial
from tvmflow.errors import StoreError
from tvmflow.tuning.ledger import Failure, Ledger, WorkloadLedger, target_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "workload.jsonl"


def quarantined(path: Path) -> list[str]:
    """The reasons in the quarantine file."""
    aside = path.with_name(f"{path.stem}.quarantine.jsonl")
    if not aside.exists():
        return []
    return [json.loads(line)["reason"] for line in aside.read_text().splitlines()]


def test_trials_are_there_when_the_ledger_is_opened_again(path: Path) -> None:
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
    assert [each.run_secs[0] for each in WorkloadLedger(path).trials.values()] == [1.0]


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
    assert [each.id for each in ledger.valid()] == [trial(1).id, trial(3).id]


def test_a_torn_last_line_is_cut_off_at_any_length(path: Path) -> None:
    """Whatever is left of a record that was being written, the others stay and the file can grow."""
    ledger = WorkloadLedger(path)
    ledger.append(trial(1))
    whole = path.read_bytes()
    ledger.append(trial(2))
    both = path.read_bytes()
    for length in range(len(whole) + 1, len(both) - 1, 7):
        path.write_bytes(both[:length])
        torn = WorkloadLedger(path)
        assert list(torn.trials) == [trial(1).id]
        assert len(torn.repairs) == 1 and "torn" in torn.repairs[0]
        assert path.read_bytes() == whole
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
def test_a_damaged_line_in_the_middle_is_set_aside_alone(path: Path, damage: object) -> None:
    """The record is out of use, its bytes are kept for a look, and no other record is touched."""
    ledger = WorkloadLedger(path)
    for number in (1, 2, 3):
        ledger.append(trial(number))
    lines = path.read_bytes().splitlines(keepends=True)
    assert callable(damage)
    lines[1] = damage(lines[1].rstrip(b"\n")) + b"\n"
    path.write_bytes(b"".join(lines))
    reopened = WorkloadLedger(path)
    assert list(reopened.trials) == [trial(1).id, trial(3).id]
    assert len(reopened.repairs) == 1
    assert len(quarantined(path)) == 1
    assert WorkloadLedger(path).repairs == []
    assert reopened.append(trial(2))
    assert len(WorkloadLedger(path)) == 3


def test_the_second_of_two_equal_lines_is_set_aside(path: Path) -> None:
    """`cat` of a file onto itself does not count its trials twice."""
    WorkloadLedger(path).append(trial(1))
    path.write_bytes(path.read_bytes() * 2)
    assert len(WorkloadLedger(path)) == 1
    assert quarantined(path) == ["the same trial is in an earlier line"]


def test_a_record_that_no_longer_applies_is_quarantined_alone(path: Path) -> None:
    """The others stay in use, here and when the ledger is opened again."""
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
    """The mark counts for the search that made it, and for the trials that were there then."""
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
    writers = [spawn.Process(target=_write_many, args=(path, 15 * each)) for each in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    ledger = WorkloadLedger(path)
    assert len(ledger) == 60 and ledger.repairs == []
    assert len(path.read_text().splitlines()) == 60


def test_a_ledger_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    """A file where the folder should be is the user's to move."""
    (tmp_path / "ledger").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        Ledger.open(tmp_path / "ledger", TARGET, "0", DEVICE)


def test_targets_tvm_builds_and_devices_never_share_trials() -> None:
    """Each of them names another folder; the order of CPU features does not."""
    base = target_key({**TARGET, "mattr": ["+a", "+b"]}, "1", DEVICE)
    assert base == target_key({"mattr": ["+b", "+a"], **TARGET}, "1", DEVICE)
    others = [
        target_key(TARGET, "1", DEVICE),
        target_key({**TARGET, "mattr": ["+a", "+b"], "num-cores": 3}, "1", DEVICE),
        target_key({**TARGET, "mattr": ["+a", "+b"]}, "2", DEVICE),
        target_key({**TARGET, "mattr": ["+a", "+b"]}, "1", {**DEVICE, "class": "other"}),
    ]
    assert len({base, *others}) == 5


def test_the_folder_says_what_its_trials_are_about(tmp_path: Path) -> None:
    """A person who meets the folder can read which machine and build it belongs to."""
    ledger = Ledger.open(tmp_path, TARGET, "0.27.0+abc", DEVICE)
    about = json.loads((ledger.folder / "about.json").read_text())
    assert about["tvm"] == "0.27.0+abc"
    assert about["target"] == TARGET
    assert about["device"] == DEVICE


def test_many_trials_are_kept_at_once(path: Path) -> None:
    """Those that are new, each once; how many they were is told."""
    ledger = WorkloadLedger(path)
    ledger.append(trial(1))
    assert ledger.extend([trial(1), trial(2), trial(3), trial(2)]) == 2
    assert list(WorkloadLedger(path).trials) == [trial(n).id for n in (1, 2, 3)]


def test_removed_trials_are_gone_for_everybody_who_has_the_ledger_open(path: Path) -> None:
    """The file is another one then, or one whose number the file system has used again."""
    ledger, other = WorkloadLedger(path), WorkloadLedger(path)
    ledger.extend(trial(number) for number in range(1, 7))
    other.refresh()
    for gone in (1, 2, 3):
        assert ledger.remove([trial(gone).id, "not there"]) == 1
    other.refresh()
    assert list(other.trials) == list(ledger.trials) == [trial(n).id for n in (4, 5, 6)]
    assert other.append(trial(1))
    assert list(WorkloadLedger(path).trials) == [trial(n).id for n in (4, 5, 6, 1)]
    assert other.repairs == [] and quarantined(path) == []


def test_removing_drops_marks_and_keeps_what_is_newer(path: Path) -> None:
    """A search that had come to its end has not any more; a newer version's lines are left alone."""
    newer = b'{"v":99,"anything":"else"}\n'
    path.write_bytes(newer)
    ledger = WorkloadLedger(path)
    ledger.extend([trial(1), trial(2)])
    ledger.mark_exhausted("evolutionary/0")
    ledger.remove([trial(1).id])
    ledger.append(trial(3))
    assert path.read_bytes().startswith(newer)
    assert not WorkloadLedger(path).is_exhausted("evolutionary/0")


def test_a_search_that_is_under_way_elsewhere_need_not_be_waited_for(path: Path) -> None:
    """Whoever does not want to wait is told at once."""
    with (
        WorkloadLedger(path).searching(),
        pytest.raises(BlockingIOError),
        WorkloadLedger(path).searching(wait=False),
    ):
        pass
    with WorkloadLedger(path).searching(wait=False):
        pass


def test_a_workload_is_described_once(tmp_path: Path) -> None:
    """The first description stays, and is no trial; a damaged one is none."""
    ledger = Ledger.open(tmp_path, TARGET, "0", DEVICE)
    assert ledger.description("k") == {}
    ledger.describe("k", {"name": "first"})
    ledger.describe("k", {"name": "second"})
    assert Ledger.open(tmp_path, TARGET, "0", DEVICE).description("k") == {"name": "first"}
    (ledger.folder / "k.about.json").write_text("{")
    assert ledger.description("k") == {}
    assert len(ledger.workload("k")) == 0
