"""`tvmflow records` on a small real ledger: what it shows, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.trials import trial
from tvmflow.cli import main
from tvmflow.core.types import Json
from tvmflow.store.local import LocalStore
from tvmflow.tuning.ledger import Ledger, this_machine_class
from tvmflow.tuning.trials import Failure

WORKLOAD = "ab" * 32


class Answer(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Json:
        return json.loads(self.out)


class Records:
    """A store whose ledger has four trials of one workload and one that failed."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.folder = folder
        self.store = LocalStore(str(folder / "cache"))
        self.store.create()
        machine = this_machine_class()
        target = {"kind": "llvm", "num-cores": 2}
        self.ledger = Ledger.open(Path(self.store.ledger), target, machine.tvm, machine.device)
        self.workload = self.ledger.workload(WORKLOAD)
        trials = [trial(n, seconds=(n + 1) * 1e-3, tvm=machine.tvm) for n in range(4)]
        failure = Failure("build", "error", "no memory")
        trials.append(trial(9, tvm=machine.tvm, run_secs=(), failure=failure))
        self.workload.extend(trials)

    def __call__(self, *arguments: str, store: str = "cache") -> Answer:
        code = main.main(["records", *arguments, "--store", str(self.folder / store)])
        captured = self._capsys.readouterr()
        return Answer(code, captured.out, captured.err)


@pytest.fixture
def records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Records:
    return Records(tmp_path, capsys)


def test_ls_has_a_line_for_each_target_and_workload(records: Records) -> None:
    target, workload = records("ls", "--workloads").out.splitlines()
    key = records.ledger.folder.name
    assert " ".join(target.split()).startswith(f"{key[:12]} 1 workload 5 trials (1 failed)")
    assert workload.split()[0] == WORKLOAD[:12]
    assert "2 ms" in workload and "no description" in workload
    (listed,) = records("ls", "--json").json["targets"]
    assert (listed["key"], listed["trials"], listed["failed"]) == (key, 5, 1)
    assert "by_workload" not in listed
    (detailed,) = records("ls", "--workloads", "--json").json["targets"]
    (counts,) = detailed["by_workload"]
    assert (counts["key"], counts["trials"], counts["best_s"]) == (WORKLOAD, 5, 0.002)
    assert counts["description"] == {"name": "", "flops": None, "buffers": []}


def test_ls_of_a_ledger_without_trials(records: Records) -> None:
    answer = records("ls", store="none")
    assert (answer.code, answer.out) == (0, f"no trials in {records.folder / 'none' / 'ledger'}\n")


def test_show_lists_the_fastest_trials_first(records: Records) -> None:
    answer = records("show", WORKLOAD[:6], "--best", "2")
    head, target, first, second = answer.out.splitlines()
    assert head == f"workload {WORKLOAD}"
    assert target.startswith(f"on {records.ledger.folder.name[:12]}  llvm")
    assert "2 ms" in first and "4 ms" in second
    everything = records("show", WORKLOAD[:6]).out.splitlines()
    assert len(everything) == 2 + 5
    assert "failed" in everything[-1] and everything[-1].endswith("build error: no memory")
    (shown,) = records("show", WORKLOAD[:6], "--best", "1", "--json").json["workloads"]
    assert [row["seconds"] for row in shown["trials"]] == [pytest.approx(2e-3)]


def test_show_with_traces_has_their_instructions(records: Records) -> None:
    lines = records("show", WORKLOAD[:6], "--best", "1", "--trace").out.splitlines()
    assert lines[-1].startswith("    EnterPostproc(")


def test_trials_are_exported_and_imported(records: Records) -> None:
    """A pack says what it holds; a second import finds nothing new."""
    file = records.folder / "trials.jsonl.gz"
    exported = records("export", str(file))
    first, second = exported.out.splitlines()
    assert first.startswith(f"{file}: 5 trials (1 failed) of 1 workload on 1 target, ")
    assert second.startswith("sha256 of the content ")
    target = records.ledger.folder.name[:12]
    imported = records("import", str(file), store="other")
    assert imported.out.startswith(f"{target}  5 new trials, 0 known, 0 invalid, in 1 workload  (")
    again = records("import", str(file), store="other")
    assert again.out.startswith(f"{target}  0 new trials, 5 known, 0 invalid, in 1 workload")
    assert (imported.code, again.code) == (0, 0)


def test_merge_takes_the_trials_of_another_store(records: Records) -> None:
    merged = records("merge", records.store.root, "--json", store="other").json
    assert [(row["new"], row["known"]) for row in merged["targets"]] == [(5, 0)]
    assert merged["complete"] is True


def test_an_export_that_leaves_damaged_lines_out_is_incomplete(records: Records) -> None:
    path = records.ledger.folder / f"{WORKLOAD}.jsonl"
    path.write_bytes(path.read_bytes() + b"damage\n")
    answer = records("export", str(records.folder / "pack.jsonl"))
    assert answer.code == 1
    assert answer.out.splitlines()[-1].startswith("left out: ")


def test_prune_removes_nothing_without_yes(records: Records) -> None:
    preview = records("prune", "--keep-best", "3", "--failed")
    key = f"{records.ledger.folder.name[:12]}/{WORKLOAD[:12]}"
    assert preview.out.splitlines() == [
        f"{key}  2 of 5 trials (1 failed)",
        "2 trials would be removed; --yes removes them",
    ]
    assert len(records.workload) == 5
    done = records("prune", "--keep-best", "3", "--failed", "--yes")
    assert (done.code, done.out.splitlines()[-1]) == (0, "2 trials removed")
    assert len(records.ledger.workload(WORKLOAD)) == 3


def test_a_workload_that_is_being_tuned_is_skipped(records: Records) -> None:
    with records.workload.exclusive_search():
        answer = records("prune", "--failed", "--yes")
    assert answer.code == 1
    assert "  skipped: it is being tuned" in answer.out
    assert answer.out.splitlines()[-1] == "0 trials removed"


def test_verify_quarantines_damaged_lines_once(records: Records) -> None:
    sound = records("verify")
    assert (sound.code, sound.out) == (
        0,
        "5 trials of 1 workload on 1 target can be read; 0 lines quarantined\n",
    )
    path = records.ledger.folder / f"{WORKLOAD}.jsonl"
    path.write_bytes(path.read_bytes() + b"damage\n")
    damaged = records("verify")
    assert damaged.code == 1
    assert damaged.out.splitlines()[-1].endswith("; 1 line quarantined")
    assert records("verify", "--json").json["clean"] is True


def test_a_key_that_no_workload_has_is_an_error(records: Records) -> None:
    answer = records("show", "cd")
    assert answer.code == 2
    assert answer.err.startswith("tvmflow: ") and answer.out == ""
