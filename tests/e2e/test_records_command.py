"""`tvmflow records`: trials are listed, shared with another store, pruned and checked."""

from __future__ import annotations

import pytest

from tests.support.project import Project
from tests.support.trials import trial
from tvmflow.store.local import LocalStore
from tvmflow.tuning.ledger import Ledger, this_machine_class
from tvmflow.tuning.ledger_folders import list_target_folders
from tvmflow.tuning.trials import Failure, trial_id

CONV = "fused_conv2d_NCHWc_add_relu"
NO_SUCH_BLOCK = [[["GetSBlock", [], ["b99", "main"], ["b0"]]], []]


@pytest.mark.nightly
@pytest.mark.slow
def test_trials_of_another_store_are_not_measured_again(project: Project) -> None:
    """A run uses the trials that another store measured and exported; kernels have names."""
    project.spend_whole_budget()
    project.write_recipe(trials=6)
    project.run("--until", "tune")
    [listed] = project.call("records", "ls", "--workloads", "--json").events
    [target] = listed["targets"]
    assert (target["trials"], target["failed"]) == (6, 0)
    names = {entry["description"]["name"]: entry for entry in target["by_workload"]}
    assert names[CONV]["description"]["buffers"][0] == "float32[1×3×8×8]"
    shown = project.call("records", "show", names[CONV]["key"][:12], "--trace")
    assert f"{CONV} float32[1×3×8×8]" in shown.out and "GetSBlock(" in shown.out

    assert project.call("records", "export", "trials.jsonl.gz").code == 0
    came = project.call("records", "import", "trials.jsonl.gz", "--store", "other", "--json")
    assert came.code == 0
    assert [entry["new"] for entry in came.events[0]["targets"]] == [6]
    facts = project.run("--until", "tune", "--store", "other").stages["tune/host"]["facts"]
    assert (facts["measured"], facts["reused"]) == (0, 6)


@pytest.mark.slow
def test_schedules_that_do_not_apply_are_found_by_a_replay(project: Project) -> None:
    """Each is applied to its kernel again in a child process; only the wrong one is quarantined."""
    project.spend_whole_budget()
    project.write_recipe(trials=3)
    project.run("--until", "tune")
    [folder] = list_target_folders(project.folder / "cache" / "ledger")
    assert folder.description is not None
    key = next(iter(folder.workload_files()))[0]
    forged = trial(1, trace=NO_SUCH_BLOCK, id=trial_id(NO_SUCH_BLOCK), tvm=folder.description.tvm)
    folder.ledger.workload(key).append(forged)
    folder.ledger.workload("ab" * 32).append(forged)
    assert project.call("records", "verify").code == 0
    checked = project.call("records", "verify", "--replay")
    assert (checked.code, checked.out.count("does not apply")) == (1, 1)
    assert "3 of 4 traces" in checked.out and "no kernel in the store for 1 workload" in checked.out
    assert project.call("records", "verify", "--replay").code == 0


@pytest.fixture
def store(project: Project) -> Ledger:
    """A ledger with five trials of one workload, one of which failed, on a target of this machine."""
    machine_class = this_machine_class()
    root = project.folder / "cache" / "ledger"
    LocalStore(str(root.parent)).create()
    ledger = Ledger.open(
        root, {"kind": "llvm", "num-cores": 2}, machine_class.tvm, machine_class.device
    )
    trials = [trial(number, tvm=machine_class.tvm) for number in range(4)]
    failure = Failure("build", "error", "\x1b[2Jboo")
    trials.append(trial(9, tvm=machine_class.tvm, run_secs=(), failure=failure))
    ledger.workload("ab" * 32).extend(trials)
    return ledger


def codes(project: Project, *commands: str) -> list[int]:
    """Return the exit codes of `records` commands, none of which may report a bug."""
    ran = [project.call("records", *command.split()) for command in commands]
    assert not any("bug in tvmflow" in entry.err for entry in ran), [entry.err for entry in ran]
    return [entry.code for entry in ran]


@pytest.mark.slow
def test_exit_codes_say_whether_anything_was_left_out(project: Project, store: Ledger) -> None:
    """0 for all of it, 1 for part of it, 2 when nothing was changed."""
    assert codes(project, "export x.jsonl", "import x.jsonl", "merge cache --store b") == [0, 0, 0]
    path = store.folder / f"{'ab' * 32}.jsonl"
    path.write_bytes(path.read_bytes() + b"damage\n")
    assert codes(project, "export y.jsonl", "merge cache --store b", "verify") == [1, 1, 1]
    assert codes(project, "export z.jsonl", "merge cache --store b", "verify") == [0, 0, 0]
    exported = project.folder / "x.jsonl"
    exported.write_bytes(exported.read_bytes().replace(b'"seed":0', b'"seed":1', 1))
    wrong = ["import x.jsonl", "import none", "merge cache", "prune", "show cd", "show", "nix"]
    wrong += ["export dir", "ls --target-key nix", "prune --keep-best 0", "export", "merge nix"]
    (project.folder / "dir").mkdir()
    assert codes(project, *wrong) == [2] * 7 + [4] + [2] * 4
    assert len(store.workload("ab" * 32)) == 5


def test_nothing_is_pruned_without_yes(project: Project, store: Ledger) -> None:
    """A dry run is the default; a workload with a running search is skipped."""
    planned = project.call("records", "prune", "--keep-best", "1", "--failed")
    assert planned.code == 0 and "4 trials would be removed" in planned.out
    assert len(store.workload("ab" * 32)) == 5
    with store.workload("ab" * 32).exclusive_search():
        busy = project.call("records", "prune", "--failed", "--yes")
        assert busy.code == 1 and "skipped: it is being tuned" in busy.out
    done = project.call("records", "prune", "--keep-best", "1", "--failed", "--yes", "--json")
    assert [entry["trials"] for entry in done.events[0]["workloads"]] == [4]
    assert len(store.workload("ab" * 32)) == 1


def test_control_characters_do_not_reach_the_terminal(project: Project, store: Ledger) -> None:
    """Messages are shown without their control characters, failures last."""
    shown = project.call("records", "show", "ab")
    assert "\x1b" not in shown.out
    assert shown.out.splitlines()[-1].endswith("build error: \\x1b[2Jboo")


def test_listing_a_missing_store_creates_none(project: Project) -> None:
    """The output says that there are no trials."""
    looked = project.call("records", "ls", "--store", "none")
    assert (looked.code, looked.out) == (0, "no trials in none/ledger\n")
    assert codes(project, "verify --store none", "prune --failed --store none") == [2, 2]
    assert not (project.folder / "none").exists()
