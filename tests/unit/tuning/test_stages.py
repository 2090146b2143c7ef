"""lower, extract_tasks, tune and pick_best, run as a worker runs them, and the choice in build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.dynamic_networks import dynamic_rows
from tests.support.trials import TARGET
from tests.support.tuning import (
    conv,
    lowered,
    model,
    recipe,
    relu,
    resolved_target,
    softmax,
)
from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import ForkServer, Outcome
from tvmflow.core.types import Dimension
from tvmflow.recipe import Kernels
from tvmflow.stages import extract_tasks, lower, pick_best, tune
from tvmflow.stages.pick_best import Finalist, choose_finalist
from tvmflow.targets.tvm_target import make_target, split_threads
from tvmflow.tuning.ledger import WorkloadLedger
from tvmflow.tuning.libraries import TUNED, LibraryRequest, measure_libraries
from tvmflow.tuning.measure import apply_chosen
from tvmflow.tuning.workloads import extract_workloads

STAGES: dict[str, Any] = {
    "lower": lower,
    "extract_tasks": extract_tasks,
    "tune": tune,
    "pick_best": pick_best,
}
IMAGE = (1, 4, 12, 12)


class Pipeline:
    """Runs the four stages one after another, and keeps their files."""

    def __init__(self, fork_server: ForkServer, folder: Path) -> None:
        self._fork_server = fork_server
        self.folder = folder
        self.runs = 0

    def stage(
        self, name: str, chosen: Any, inputs: dict[str, str], unrunnable_reason: str = ""
    ) -> tuple[Outcome, dict[str, str]]:
        folder = self.folder / f"{self.runs}-{name}"
        outcome = self._fork_server.call(
            "tests.support.tuning:run_stage",
            {
                "name": name,
                "settings": STAGES[name]
                .settings(chosen, resolved_target(unrunnable_reason))
                .to_json(),
                "inputs": inputs,
                "folder": str(folder),
                "ledger": str(self.folder / "ledger"),
            },
            timeout_s=120,
            log=self.folder / "log",
            emit=lambda _: None,
        )
        return outcome, {f"{name}/{file.name}": str(file) for file in (folder / "out").iterdir()}

    def __call__(
        self, mod: tvm.IRModule, chosen: Any, until: str = "pick_best"
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The facts of each stage, and all files by `<stage>/<file>`."""
        self.runs += 1
        ir = self.folder / f"{self.runs}-model.json"
        ir.write_text(tvm.ir.save_json(mod))
        files = {"import/model.json": str(ir)}
        facts = {}
        for name in STAGES:
            outcome, written = self.stage(name, chosen, files)
            assert outcome.kind == "ok", outcome.message + (self.folder / "log").read_text()
            files |= written
            facts[name] = outcome.value
            if name == until:
                break
        return facts, files


@pytest.fixture
def pipeline(fork_server: ForkServer, tmp_path: Path) -> Pipeline:
    return Pipeline(fork_server, tmp_path)


def read(path: str) -> Any:
    return json.loads(Path(path).read_text())


def run_model(mod: tvm.IRModule, arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """What a lowered module computes."""
    library = tvm.compile(mod, make_target(TARGET))
    machine = relax.VirtualMachine(library, tvm.cpu())
    result: np.ndarray[Any, Any] = machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()
    return result


@pytest.mark.slow
def test_chosen_schedules_are_applied_and_compute_the_same(pipeline: Pipeline) -> None:
    """Every chosen schedule is in the module that is built, and outputs do not change."""
    mod = model(conv(8), relu, conv(8), relu, conv(8), relu, shape=IMAGE)
    _, files = pipeline(mod, recipe(trials=8), until="tune")
    # of so few trials none may be worth choosing: any that works has to compute the same
    records = read(files["tune/records.json"])
    chosen = {key: trials[0]["trace"] for key, trials in records.items() if trials}
    assert chosen
    plain = lowered(mod)
    target = make_target(TARGET)
    tuned, names = apply_chosen(plain, chosen, read(files["extract_tasks/workloads.json"]), target)
    scheduled = [
        var.name_hint
        for var, function in tuned.functions_items()
        if isinstance(function, tvm.tirx.PrimFunc) and function.attrs.get("tirx.is_scheduled")
    ]
    assert names == sorted(scheduled)
    assert len(names) >= len(chosen)
    random = np.random.default_rng(1)
    shapes = [tuple(int(n) for n in param.ty.shape) for param in mod["main"].params]
    arrays = [random.standard_normal(shape).astype("float32") for shape in shapes]
    np.testing.assert_allclose(
        run_model(tuned, arrays), run_model(plain, arrays), rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
def test_a_second_run_measures_nothing_and_gives_the_same_records(pipeline: Pipeline) -> None:
    """The ledger holds the budget, so tune's output is the same to the byte."""
    mod = model(conv(8), relu, shape=IMAGE)
    first, files = pipeline(mod, recipe(trials=4), until="tune")
    again, same = pipeline(mod, recipe(trials=4), until="tune")
    assert (first["tune"]["measured"], again["tune"]["measured"]) == (4, 0)
    assert again["tune"]["reused"] == 4
    for name in ("extract_tasks/tasks.json", "extract_tasks/workloads.json", "tune/records.json"):
        assert Path(files[name]).read_bytes() == Path(same[name]).read_bytes()


def tune_at(
    pipeline: Pipeline, *sizes: int, until: str = "tune"
) -> tuple[dict[str, Any], dict[str, str]]:
    """Tune a product with a dynamic number of rows, with two trials."""
    chosen = recipe(Kernels(), trials=2)
    chosen.list_dimensions = lambda: (Dimension("rows", 1, 40, 1, sizes),)
    facts, files = pipeline(dynamic_rows().mod, chosen, until=until)
    return facts["tune"], files


@pytest.mark.slow
def test_schedules_are_tried_first_at_other_sizes_to_tune_at(pipeline: Pipeline) -> None:
    """At the same sizes nothing is measured again."""
    first, files = tune_at(pipeline, 4, 16)
    assert first["workloads"][0]["sizes"] == ["rows=4", "rows=16"]
    again, same = tune_at(pipeline, 4, 16)
    assert (again["measured"], again["reused"]) == (0, 2)
    other, others = tune_at(pipeline, 8)
    assert other["measured"] == 2
    found = [read(entry["tune/records.json"]) for entry in (files, same, others)]
    assert found[0] == found[1]
    [ids, other_ids] = [
        {trial["id"] for trial in next(iter(entry.values()))} for entry in found[1:]
    ]
    assert ids == other_ids and found[1].keys() != found[2].keys()


@pytest.mark.slow
def test_finalists_and_libraries_are_measured_at_each_size_to_tune_at(
    pipeline: Pipeline, fork_server: ForkServer
) -> None:
    """The kernels by themselves, then the library with them; what lies between is the geometric mean."""
    _, files = tune_at(pipeline, 4, 16, until="pick_best")
    [(key, trials)] = read(files["tune/records.json"]).items()
    [folder] = [path for path in (pipeline.folder / "ledger").iterdir() if path.name != "locks"]
    [record] = WorkloadLedger(folder / f"{key}.jsonl").finalists.values()
    assert [len(rows) for rows in record.sizes] == [2, 2, 2]
    [task] = read(files["extract_tasks/tasks.json"])
    request = LibraryRequest(
        workloads=files["extract_tasks/workloads.json"],
        target=split_threads(TARGET)[0],
        threads=2,
        runtime="c",
        rules_version=1,
    )
    lowered, kernels = Path(files["lower/lowered.json"]), dict.fromkeys(task["names"], 1.0)
    outcome = fork_server.call(
        measure_libraries,
        request.make_payload(
            (lowered, {key: trials[0]["trace"]}), lowered, {key: (kernels, kernels)}, TUNED
        ),
        timeout_s=120,
        log=pipeline.folder / "log",
        emit=lambda _: None,
    )
    assert outcome.kind == "ok", outcome.message
    if outcome.value["slower"]:
        assert outcome.value["tuned"] == []
    else:
        tuned, untuned = outcome.value["sizes"]
        assert len(tuned) == len(untuned) == 2
        assert {len(row) for row in (*tuned, *untuned)} == {len(outcome.value["tuned"])}


@pytest.mark.slow
def test_only_the_changed_layer_is_tuned_again(pipeline: Pipeline) -> None:
    """A model with one other layer measures that layer's workload and no other."""
    pipeline(model(conv(8), relu, conv(4), relu, shape=IMAGE), recipe(trials=6), until="tune")
    facts, _ = pipeline(
        model(conv(8), relu, conv(4), relu, softmax, shape=IMAGE), recipe(trials=9), until="tune"
    )
    measured = {entry["name"]: entry["measured"] for entry in facts["tune"]["workloads"]}
    assert len(measured) == 3
    assert {name: count for name, count in measured.items() if count} == {"softmax": 3}


@pytest.mark.slow
def test_the_gain_of_tuning_is_in_the_facts(pipeline: Pipeline) -> None:
    """How many kernels are tuned, which share of the time they take, and how much faster they became.

    Whether a schedule is faster depends on the machine and its load.
    """
    facts, files = pipeline(model(conv(16), relu, shape=(1, 16, 24, 24)), recipe(trials=6))
    gain = facts["pick_best"]
    assert gain["tunable"] == 1
    is_tuned = gain["tuned"] == 1
    assert gain["coverage"] == float(is_tuned)
    assert gain["speedup"] == pytest.approx(gain["untuned_us"] / gain["tuned_us"], rel=1e-3)
    assert (gain["speedup"] > 1) == is_tuned
    chosen = read(files["pick_best/chosen.json"])
    report = read(files["pick_best/finalists.json"])
    assert list(chosen) == (list(report) if is_tuned else [])
    finalists = report[next(iter(report))]["finalists"]
    assert [9 <= len(entry["samples_us"]) <= 36 for entry in finalists] == [True, True]
    if "speedup" in gain["library"]:
        assert (gain["library"]["speedup"] > 1) == is_tuned


def test_without_trials_nothing_is_measured_and_nothing_chosen(pipeline: Pipeline) -> None:
    """A budget of zero gives the same empty output whatever the ledger holds."""
    mod = model(conv(8), relu, shape=IMAGE)
    pipeline(mod, recipe(trials=4), until="tune")
    facts, files = pipeline(mod, recipe(trials=0))
    assert facts["tune"]["measured"] == 0
    assert Path(files["tune/records.json"]).read_text() == "{}"
    assert Path(files["pick_best/chosen.json"]).read_text() == "{}"


def test_when_every_trial_fails_the_stage_fails_with_the_first_reason(pipeline: Pipeline) -> None:
    """Otherwise the library would be untuned without notice."""
    mod = model(conv(8), relu, shape=IMAGE)
    pipeline.runs += 1
    ir = pipeline.folder / "model.json"
    ir.write_text(tvm.ir.save_json(mod))
    chosen = recipe(trials=2, trial_timeout_s=0.001)
    _, files = pipeline.stage("lower", chosen, {"import/model.json": str(ir)})
    _, files = pipeline.stage("extract_tasks", chosen, files)
    outcome, _ = pipeline.stage("tune", chosen, files)
    assert (outcome.kind, outcome.error) == ("error", "StageError")
    assert outcome.message.startswith("all 2 trials failed; the first: ")
    assert "took longer than 0.001 s" in outcome.message
    assert "trial_timeout_s" in outcome.fix


def test_a_target_that_this_machine_cannot_run_is_refused(pipeline: Pipeline) -> None:
    """Times of another machine would mislead the search."""
    mod = model(conv(8), relu, shape=IMAGE)
    ir = pipeline.folder / "model.json"
    ir.write_text(tvm.ir.save_json(mod))
    _, files = pipeline.stage("lower", recipe(), {"import/model.json": str(ir)})
    _, files = pipeline.stage("extract_tasks", recipe(), files)
    outcome, _ = pipeline.stage(
        "tune", recipe(), files, unrunnable_reason="it is for another machine"
    )
    assert outcome.kind == "error" and "it is for another machine" in outcome.message


def test_a_choice_that_fits_no_kernel_is_an_error() -> None:
    """Otherwise the library would be slow without notice."""
    mod = lowered(model(conv(8), relu, shape=IMAGE))
    other = lowered(model(softmax, shape=(4, 4)))
    workload = extract_workloads(other)[0]
    with pytest.raises(StageError, match="1 of 1 chosen schedules fit no kernel"):
        apply_chosen(
            mod,
            {workload.key: [[], []]},
            {workload.key: workload.mod},
            make_target(TARGET),
        )


# ---------------------------------------------------------------- the choice


def finalist(name: str, ledger_s: float, *samples: float) -> Finalist:
    return Finalist(name, ledger_s, samples)


def test_the_clearly_fastest_finalist_wins() -> None:
    """Its time in the ledger does not matter."""
    slow = finalist("a", 1.0, 2.0, 2.0, 2.0)
    fast = finalist("b", 9.0, 1.0, 1.0, 1.0)
    assert choose_finalist([slow, fast], (5.0,)) == fast


def test_within_the_noise_the_ledger_decides() -> None:
    """So that measuring again does not change the choice."""
    one = finalist("a", 1.01, 1.00, 1.00, 1.00)
    two = finalist("b", 1.00, 1.01, 1.01, 1.01)
    assert choose_finalist([one, two], (5.0,)) == two
    assert choose_finalist([two, one], (5.0,)) == two


def test_nothing_is_kept_that_is_not_faster_than_untuned() -> None:
    """A tie within the noise is not a gain."""
    assert choose_finalist([finalist("a", 1.0, 1.0, 1.0)], (1.01,)) is None
    assert choose_finalist([], (1.0,)) is None
