"""`tvmflow records`: trials are looked at, carried to another store, forgotten and checked."""

from __future__ import annotations

import pytest

from tests.support.project import Project
from tests.support.trials import trial
from tvmflow.stores.local import LocalStore
from tvmflow.tuning import records
from tvmflow.tuning.ledger import Failure, Ledger, trial_id

CONV = "fused_conv2d_NCHWc_add_relu"
NO_SUCH_BLOCK = [[["GetSBlock", [], ["b99", "main"], ["b0"]]], []]


@pytest.mark.slow
def test_trials_travel_to_another_store_and_are_not_measured_again(project: Project) -> None:
    """What one store measured and exported, a run on another one uses; kernels have names."""
    project.write_recipe(trials=6)
    project.run("--until", "tune")
    [listed] = project.tvmflow("records", "ls", "--workloads", "--json").events
    [target] = listed["targets"]
    assert (target["trials"], target["failed"]) == (6, 0)
    names = {each["about"]["name"]: each for each in target["by_workload"]}
    assert names[CONV]["about"]["buffers"][0] == "float32[1×3×8×8]"
    shown = project.tvmflow("records", "show", names[CONV]["key"][:12], "--trace")
    assert f"{CONV} float32[1×3×8×8]" in shown.out and "GetSBlock(" in shown.out

    assert project.tvmflow("records", "export", "trials.jsonl.gz").code == 0
    came = project.tvmflow("records", "import", "trials.jsonl.gz", "--store", "other", "--json")
    assert came.code == 0
    assert [each["new"] for each in came.events[0]["targets"]] == [6]
    facts = project.run("--until", "tune", "--store", "other").stages["tune/host"]["facts"]
    assert (facts["measured"], facts["reused"]) == (0, 6)


@pytest.mark.slow
def test_schedules_that_do_not_apply_are_found_before_they_are_used(project: Project) -> None:
    """Each is applied to its kernel again, in a process that may crash; the wrong one is set aside alone."""
    project.write_recipe(trials=3)
    project.run("--until", "tune")
    [folder] = records.folders(project.folder / "cache" / "ledger")
    key = next(iter(folder.workloads()))[0]
    forged = trial(1, trace=NO_SUCH_BLOCK, id=trial_id(NO_SUCH_BLOCK), tvm=folder.about["tvm"])
    folder.ledger.workload(key).append(forged)
    folder.ledger.workload("ab" * 32).append(forged)
    assert project.tvmflow("records", "verify").code == 0
    found = project.tvmflow("records", "verify", "--replay")
    assert (found.code, found.out.count("does not apply")) == (1, 1)
    assert (
        "3 of 4 schedules" in found.out
        and "1 workloads are known by their trials alone" in found.out
    )
    assert project.tvmflow("records", "verify", "--replay").code == 0


@pytest.fixture
def store(project: Project) -> Ledger:
    """A ledger with five trials of one workload, one of which failed, on a target of this machine."""
    here = records.this_machine()
    root = project.folder / "cache" / "ledger"
    LocalStore(str(root.parent)).create()
    ledger = Ledger.open(root, {"kind": "llvm", "num-cores": 2}, here.tvm, here.device)
    trials = [trial(number, tvm=here.tvm) for number in range(4)]
    failure = Failure("build", "error", "\x1b[2Jboo")
    trials.append(trial(9, tvm=here.tvm, run_secs=(), failure=failure))
    ledger.workload("ab" * 32).extend(trials)
    return ledger


def codes(project: Project, *commands: str) -> list[int]:
    """The exit codes of `records` commands, none of which may end in a bug of ours."""
    ran = [project.tvmflow("records", *command.split()) for command in commands]
    assert not any("bug in tvmflow" in each.err for each in ran), [each.err for each in ran]
    return [each.code for each in ran]


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


def test_nothing_is_forgotten_without_yes(project: Project, store: Ledger) -> None:
    """First it is told, then it is done, except where a search is under way."""
    told = project.tvmflow("records", "prune", "--keep-best", "1", "--failed")
    assert told.code == 0 and "4 trials would be forgotten" in told.out
    assert len(store.workload("ab" * 32)) == 5
    with store.workload("ab" * 32).searching():
        busy = project.tvmflow("records", "prune", "--failed", "--yes")
        assert busy.code == 1 and "left alone: it is being tuned" in busy.out
    done = project.tvmflow("records", "prune", "--keep-best", "1", "--failed", "--yes", "--json")
    assert [each["trials"] for each in done.events[0]["workloads"]] == [4]
    assert len(store.workload("ab" * 32)) == 1


def test_what_others_wrote_cannot_steer_the_terminal(project: Project, store: Ledger) -> None:
    """Messages are shown without their control characters, failures last."""
    shown = project.tvmflow("records", "show", "ab")
    assert "\x1b" not in shown.out
    assert shown.out.splitlines()[-1].endswith("build error: �[2Jboo")


def test_looking_at_a_store_that_is_not_there_makes_none(project: Project) -> None:
    """It is said that there are no trials."""
    looked = project.tvmflow("records", "ls", "--store", "none")
    assert (looked.code, looked.out) == (0, f"no trials in {project.folder / 'none' / 'ledger'}\n")
    assert codes(project, "verify --store none", "prune --failed --store none") == [2, 2]
    assert not (project.folder / "none").exists()
