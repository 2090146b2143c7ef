"""Records that lie about a schedule: a library that is slower than the rules' is not delivered, or not unseen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm

from tests.support.project import Project
from tvmflow.tuning import measure
from tvmflow.tuning.ledger_folders import list_target_folders
from tvmflow.tuning.trials import Trial, trial_id

pytestmark = [pytest.mark.faults]

CLAIM = 100.0


def slow_trial(mod: str, trial: Trial) -> Trial:
    """Return a trial that claims to be fast: its schedule walks down the columns, one number at a time."""
    from tvm.s_tir.schedule import Schedule

    schedule = Schedule(tvm.ir.load_json(mod), seed=1)
    block = schedule.get_sblock("b0")
    row, column, depth = schedule.get_loops(block)
    schedule.reorder(depth, column, row)
    trace = measure.trace_json(schedule.trace)
    seconds = tuple(second / CLAIM for second in trial.run_secs)
    return trial._replace(id=trial_id(trace), trace=trace, run_secs=seconds)


def change_records(project: Project, change: Callable[[dict[str, Any]], None]) -> None:
    """Change each record in the files of the ledger."""
    for path in (project.folder / "cache/ledger").rglob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            change(record)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


def claim_fast_finalist(record: dict[str, Any]) -> None:
    if "finalists" in record:
        seconds = [second / CLAIM for second in record["untuned"] * 9][:9]
        record["samples"] = [seconds] * len(record["samples"])


def claim_fast_library(record: dict[str, Any]) -> None:
    if "library" in record:
        record["slower"] = []
        record["untuned"] = [1e-3] * 9
        record["tuned"] = [1e-3 / CLAIM] * 9


def plant_slow_trial(project: Project) -> str:
    """Replace all trials of a kernel by one that lies, and return its id."""
    [folder] = list_target_folders(Path(project.folder, "cache/ledger"), ())
    kernels = [(key, folder.ledger.workload(key)) for key, _ in folder.workload_files()]
    key, ledger = next(entry for entry in kernels if entry[1].valid())
    trials = ledger.valid()
    slow = slow_trial(folder.ledger.kernel(key), trials[0])
    ledger.append(slow)
    for _, other in kernels:
        other.remove([trial.id for trial in other.valid() if trial.id != slow.id])
    return slow.id


def test_records_that_lie_do_not_make_a_library_slower_than_untuned(project: Project) -> None:
    """Each lie is found by the next measurement: of the kernel, of the library, and of what is delivered."""
    project.spend_whole_budget()
    project.write_recipe(trials=4)
    project.write_products(rows=64)
    assert project.run("--until", "tune").code == 0
    slow = plant_slow_trial(project)

    # there is no other trial, and its kernel is slower than the rule's when it is measured again
    honest = project.run("--best-so-far", "--force", "tune")
    assert honest.code == 0
    assert [trial.rpartition("/")[2] for trial in project.trials()] == [slow]
    judged = honest.stages["pick_best/host"]["facts"]
    assert (judged["tuned"], judged["library"]) == (0, {})
    assert "speedup" not in honest.stages["verify/host"]["facts"]
    library = project.folder / "dist/tiny/host/tiny.so"
    untuned = library.read_bytes()

    # the record of the finalists lies, too: within the library the kernel is slower
    change_records(project, claim_fast_finalist)
    done = project.tvmflow("run", "tiny.yaml", "-v", "--best-so-far", "--force", "pick_best")
    assert done.code == 0
    assert "1 kernel is faster tuned alone and slower in the library, so left untuned" in done.out
    assert library.read_bytes() == untuned

    # so does that of the library: the library that would be delivered is slower than untuned
    change_records(project, claim_fast_library)
    project.edit_recipe("trials: 4", "trials: 4, min_speedup: 1")
    rejected = project.run("--best-so-far", "--force", "pick_best")
    assert (rejected.code, rejected.outcome("verify/host")) == (3, "rejected")
    assert "below tune.min_speedup 1" in rejected.stages["verify/host"]["message"]
    assert library.read_bytes() == untuned
    # without that gate the run says so, and how to get the untuned one
    project.edit_recipe("trials: 4, min_speedup: 1", "trials: 4")
    done = project.tvmflow("run", "tiny.yaml", "--best-so-far")
    assert done.code == 0
    assert "SLOWER THAN UNTUNED: speedup over untuned 0.0" in done.out
    assert "`--minutes 0` delivers the untuned library" in done.out
    assert project.tvmflow("run", "tiny.yaml", "--minutes", "0").code == 0
    assert library.read_bytes() == untuned
