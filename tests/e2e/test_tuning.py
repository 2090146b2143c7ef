"""Tuning: the budget, trials that are never repeated, and gates on the gain."""

from __future__ import annotations

import base64
import json
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.interruption import RunningCommand
from tests.support.project import Project
from tvmflow.core.canonical_json import canonical
from tvmflow.stages import build
from tvmflow.tuning.ledger import WorkloadLedger
from tvmflow.tuning.ledger_folders import list_target_folders
from tvmflow.tuning.trials import trial_id


@pytest.mark.slow
def test_gates_on_the_gain_of_tuning_fail_the_run(project: Project) -> None:
    """Below the gate: exit code 3, the library is not delivered, and the next run reuses the trials."""
    project.spend_whole_budget()
    project.write_recipe(trials=4)
    project.edit_recipe("trials: 4", "trials: 4, min_speedup: 1000")
    failed = project.run()
    assert (failed.code, failed.outcome("verify/host")) == (3, "rejected")
    assert "below tune.min_speedup 1000" in failed.stages["verify/host"]["message"]
    assert not (project.folder / "dist/tiny/host/tiny.tvmflow").exists()
    project.edit_recipe("trials: 4, min_speedup: 1000", "trials: 1, min_coverage: 1.0")
    project.edit_recipe("tune:", "kernels: {schedules: none}\ntune:")
    failed = project.run()
    assert (failed.code, failed.outcome("pick_best/host")) == (3, "rejected")
    assert "below tune.min_coverage 1" in failed.stages["pick_best/host"]["message"]
    assert failed.stages["tune/host"]["facts"]["measured"] == 0


@pytest.mark.slow
def test_the_same_model_under_another_name_measures_nothing(project: Project) -> None:
    """The ledger is per kernel, not per recipe or weights, and `clean` keeps it."""
    project.spend_whole_budget()
    project.write_recipe(trials=6)
    project.run("--until", "tune")
    assert project.tvmflow("clean", "--yes").code == 0
    project.edit_recipe("name: tiny", "name: other")
    project.write_model(seed=1)
    again = project.run("--until", "tune").stages["tune/host"]["facts"]
    assert (again["measured"], again["reused"]) == (0, 6)
    assert len(project.trials()) == 6


@pytest.mark.slow
def test_a_changed_layer_is_the_only_one_that_is_measured(project: Project) -> None:
    """More channels are other kernels; those that stay as they were keep their trials."""
    project.spend_whole_budget()
    project.write_recipe(trials=20)
    project.run("--until", "tune")
    before = set(project.trials())
    project.write_model(channels=40)
    changed = project.run("--until", "tune").stages["tune/host"]["facts"]
    new = {trial.partition("/")[0] for trial in set(project.trials()) - before}
    old = {trial.partition("/")[0] for trial in before}
    assert changed["measured"] == len(set(project.trials()) - before)
    assert new and not new & old


def write_chain(project: Project, kernels: Sequence[int]) -> None:
    """A model of as many convolutions, each with more channels than the one before, then pooling and a dense layer."""
    rng = np.random.default_rng(0)
    nodes, weights, value, channels = [], [], "data", 3
    for layer, kernel in enumerate(kernels):
        # 16 more than before: another number of blocks for every width of vectors
        out, pad = channels + 16, kernel // 2
        shape = (out, channels, kernel, kernel)
        array = rng.normal(size=shape).astype(np.float32) / (channels * kernel)
        weights.append(numpy_helper.from_array(array, f"w{layer}"))
        nodes.append(helper.make_node("Conv", [value, f"w{layer}"], [f"c{layer}"], pads=[pad] * 4))
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]))
        value, channels = f"r{layer}", out
    dense = rng.normal(size=(5, channels)).astype(np.float32)
    weights.append(numpy_helper.from_array(dense, "dense"))
    nodes += [
        helper.make_node("GlobalAveragePool", [value], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "dense"], ["scores"], transB=1),
    ]
    shapes = {"data": [1, 3, 8, 8], "scores": [1, 5]}
    data, scores = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    )
    graph = helper.make_graph(nodes, "chain", [data], [scores], weights)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, str(project.folder / "tiny.onnx"))


@pytest.mark.nightly
@pytest.mark.slow
def test_ten_workloads_are_tuned_once_each(project: Project) -> None:
    """Twice the budget measures the other half, another name nothing, one other layer no layer that was tuned."""
    project.spend_whole_budget()
    write_chain(project, [3] * 8)
    project.write_recipe(trials=16)

    def tune() -> dict[str, Any]:
        facts: dict[str, Any] = project.run("--until", "tune").stages["tune/host"]["facts"]
        return facts

    first = tune()
    assert first["measured"] == 16
    assert len(first["workloads"]) >= 10
    project.edit_recipe("trials: 16", "trials: 32")
    doubled = tune()
    assert (doubled["measured"], doubled["reused"]) == (16, 16)
    project.edit_recipe("name: tiny", "name: other")
    assert project.run("--until", "tune").outcome("tune/host") == "hit"
    # and where the result itself is gone
    assert project.tvmflow("clean", "--yes").code == 0
    assert (tune()["measured"], len(project.trials())) == (0, 32)

    # so many for each workload
    project.edit_recipe("trials: 32", "trials: 1000, trials_per_task: 5")
    known = {entry["key"]: entry["trials"] for entry in tune()["workloads"]}
    before = set(project.trials())
    write_chain(project, [3, 3, 3, 3, 5, 3, 3, 3])
    changed = tune()["workloads"]
    (layer,) = (entry for entry in changed if entry["key"] not in known)
    assert (layer["trials"], layer["measured"]) == (5, 5)
    # What had fewer promised too little of the longer inference: it may have the rest now.
    more = {entry["key"] for entry in changed if entry["measured"]} - {layer["key"]}
    assert all(known[key] < 5 for key in more)
    new = [trial.partition("/")[0] for trial in set(project.trials()) - before]
    assert set(new) == {layer["key"], *more}
    assert new.count(layer["key"]) == 5
    assert len(project.trials()) == len(set(project.trials()))


@pytest.mark.slow
def test_only_the_selected_kernels_are_tuned(project: Project) -> None:
    """By operator; a name without a match is an error that lists the kernels."""
    project.write_recipe(trials=4)
    project.edit_recipe("trials: 4", "trials: 4, only: [conv2d]")
    facts = project.run("--until", "tune").stages["tune/host"]["facts"]
    assert [entry["name"] for entry in facts["workloads"]] == ["fused_conv2d_NCHWc_add_relu"]
    project.edit_recipe("only: [conv2d]", "skip: [conv3d]")
    failed = project.run("--until", "tune").stages["tune/host"]
    assert "tune.skip: 'conv3d' names no kernel" in failed["message"]
    assert "fused_conv2d_NCHWc_add_relu" in failed["fix"]


@pytest.mark.slow
def test_a_limit_in_minutes_ends_in_a_library(project: Project) -> None:
    """Without a number of trials it runs until the time is over, and builds the best schedules."""
    project.spend_whole_budget()
    # In nine seconds, a busy machine may measure no more than the untuned kernels.
    for minutes in ("0.15", "1", "5"):
        project.write_recipe(trials=4)
        project.edit_recipe("trials: 4", f"minutes: {minutes}")
        done = project.run()
        facts = done.stages["tune/host"]["facts"]
        if facts["measured"]:
            break
    assert done.code == 0
    assert facts["stopped"] == "time"
    assert 0 < facts["measured"] == len(project.trials())
    assert project.run().ran == []


@pytest.mark.slow
def test_ctrl_c_while_tuning_keeps_every_trial(project: Project) -> None:
    """It stops within seconds; reported trials are in the ledger and count in the next run."""
    project.spend_whole_budget()
    project.write_recipe(trials=30)
    process = project.start("--until", "tune")
    assert process.stdout is not None
    reported = 0
    for line in process.stdout:
        event = json.loads(line)
        reported = event.get("done", 0) if event["event"] == "progress" else reported
        if reported >= 5:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    kept = len(project.trials())
    assert kept >= reported
    facts = project.run("--until", "tune").stages["tune/host"]["facts"]
    assert (facts["measured"], facts["reused"]) == (30 - kept, kept)


# A valid schedule that does nothing: the kernel as it was lowered, one operation after another.
NO_SCHEDULE: Any = [[], []]


def add_slow_schedule(project: Project) -> WorkloadLedger:
    """Make the ledger say that this is the fastest schedule of the convolution; return its records."""
    [folder] = list_target_folders(project.folder / "cache" / "ledger")
    [ledger] = [
        folder.ledger.workload(key)
        for key, _ in folder.workload_files()
        if "conv2d" in folder.ledger.description(key).name
    ]
    trial = next(iter(ledger.trials.values()))
    slow = trial._replace(id=trial_id(NO_SCHEDULE), trace=NO_SCHEDULE, run_secs=(1e-9,))
    assert ledger.append(slow)
    return ledger


def claim_that_it_wins(path: Path) -> None:
    """Make a file of the ledger say that the slow schedule also won against the untuned kernel."""

    def claim(record: dict[str, Any]) -> None:
        first, *others = record["samples"]
        record["untuned"] = [1e-3] * len(first)
        record["samples"] = [[1e-9] * len(first), *([1.0] * len(first) for _ in others)]

    change_records(path, "finalists", claim)


def claim_that_the_library_wins(path: Path) -> None:
    """Make a file of the ledger say that the whole library with that schedule is a hundred times as fast as without."""

    def claim(record: dict[str, Any]) -> None:
        record |= {"slower": [], "tuned": [1e-5] * 9, "untuned": [1e-3] * 9}

    change_records(path, "library", claim)


def change_records(path: Path, field: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the records of one kind in a file of the ledger."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if field in record:
            change(record)
    path.write_text("".join(f"{canonical(record).decode()}\n" for record in records))


@pytest.mark.slow
def test_a_library_whose_tuned_schedule_is_slow_is_delivered_untuned(project: Project) -> None:
    """Neither alone nor, where the ledger claims that it won there, in the whole library does it pass, nor unseen at the end."""
    project.spend_whole_budget()
    project.write_model(channels=64)
    project.write_recipe(trials=6)
    project.edit_recipe("trials: 6", "trials: 6, only: [conv2d]")
    assert project.run("--until", "tune").code == 0
    ledger = add_slow_schedule(project)
    project.edit_recipe("trials: 6", "trials: 7")
    alone = project.run()
    kernels = alone.stages["pick_best/host"]["facts"]["kernels"]
    [conv] = [kernel for kernel in kernels if "conv2d" in kernel["name"]]
    assert alone.code == 0
    assert conv["tuned_us"] is None or conv["tuned_us"] < conv["untuned_us"]

    claim_that_it_wins(ledger.path)
    assert project.tvmflow("clean", "--yes").code == 0
    whole = project.run()
    library = whole.stages["pick_best/host"]["facts"]["library"]
    assert whole.code == 0 and sum(map(len, library["overruled"].values())) == 1
    assert build.TUNED not in whole.stages["build/host"]["facts"]["schedule_rules"]
    assert "speedup" not in whole.stages["verify/host"]["facts"]
    # It is measured once: the ledger keeps the decision.
    assert project.tvmflow("clean", "--yes").code == 0
    again = project.run().stages["pick_best/host"]["facts"]["library"]
    assert again == library
    delivered = project.folder / "dist/tiny/host/tiny.so"
    untuned = delivered.read_bytes()

    # Where the ledger claims that, too, what would be delivered is measured: a gate refuses it.
    for path in (project.folder / "cache/ledger").rglob("*.jsonl"):
        claim_that_the_library_wins(path)
    project.edit_recipe("trials: 7", "trials: 7, min_speedup: 1")
    rejected = project.run("--force", "pick_best")
    assert (rejected.code, rejected.outcome("verify/host")) == (3, "rejected")
    assert "below tune.min_speedup 1" in rejected.stages["verify/host"]["message"]
    assert delivered.read_bytes() == untuned
    # Without it the run says so, and how to get the untuned one.
    project.edit_recipe("trials: 7, min_speedup: 1", "trials: 7")
    said = project.tvmflow("run", "tiny.yaml")
    assert said.code == 0
    assert "SLOWER THAN UNTUNED: speedup over untuned 0." in said.out
    assert "`--minutes 0` delivers the untuned library" in said.out
    assert project.tvmflow("run", "tiny.yaml", "--minutes", "0").code == 0
    assert delivered.read_bytes() == untuned


def trials_of(project: Project) -> dict[str, int]:
    """Return how many trials the ledger has of each kernel, by its key."""
    names = [trial.partition("/")[0] for trial in project.trials()]
    return {name: names.count(name) for name in names}


@pytest.mark.nightly
@pytest.mark.slow
def test_the_minutes_of_a_changed_layer_go_to_that_layer(project: Project) -> None:
    """A kernel that stays has no further trial, and the same recipe again measures nothing."""
    project.spend_whole_budget()
    project.write_recipe(trials=1)
    project.edit_recipe("trials: 1", "minutes: 0.7")
    assert project.run("--until", "tune").code == 0
    before = trials_of(project)
    # another number of outputs: the convolution stays as it was
    write_outputs(project, 64)
    changed = project.run("--until", "tune").stages["tune/host"]["facts"]
    after = trials_of(project)
    assert {key: after[key] for key in before} == before
    new = {entry["name"] for entry in changed["workloads"] if entry["measured"]}
    assert len(new) == 1 and len(after) == len(before) + 1
    assert project.tvmflow("clean", "--yes").code == 0
    assert project.run("--until", "tune").stages["tune/host"]["facts"]["measured"] == 0


def write_outputs(project: Project, outputs: int) -> None:
    """Give the model's last layer another number of outputs."""
    path = project.folder / "tiny.onnx"
    model = onnx.load(str(path))
    for weight in model.graph.initializer:
        if weight.name == "dense":
            array = np.resize(numpy_helper.to_array(weight), (outputs, weight.dims[1]))
            weight.CopyFrom(numpy_helper.from_array(array, "dense"))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = outputs
    onnx.save(model, str(path))


def delivered_events(out: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return [event for event in events if event["event"] == "delivered"]


def delivered_files(project: Project) -> dict[str, bytes]:
    """Return the delivered files, without statements, which name the recipe by its digest."""
    folder = project.folder / "dist/tiny/host"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".jsonl"}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_long_search_delivers_before_it_ends(project: Project) -> None:
    """First untuned, then the best so far; the end is the same as without, to the byte."""
    project.spend_whole_budget()
    project.write_recipe(trials=24)
    project.edit_recipe("trials: 24", "trials: 24, deliver_every: 0.1")
    ran = project.run()
    assert ran.code == 0
    delivered = delivered_events(ran.out)
    assert delivered[0]["trials"] == 0 and delivered[0]["folders"] == ["dist/tiny/host"]
    assert [event["trials"] for event in delivered] == sorted(
        event["trials"] for event in delivered
    )
    facts = ran.stages["tune/host"]["facts"]
    assert facts["measured"] + facts["reused"] == 24
    files = delivered_files(project)
    project.edit_recipe(", deliver_every: 0.1", "")
    again = project.run()
    assert again.code == 0 and again.ran == []
    assert delivered_files(project) == files


@pytest.mark.nightly
@pytest.mark.slow
def test_an_interrupted_search_leaves_a_library_and_names_the_next_command(
    project: Project,
) -> None:
    """What is in dist was verified; the command in the message delivers what was found since, and measures nothing."""
    project.spend_whole_budget()
    project.write_recipe(trials=500)
    project.edit_recipe("trials: 500", "trials: 500, deliver_every: 60")
    running = RunningCommand(
        project.command("run", "tiny.yaml", "--json"), project.folder, project.environment
    )
    try:
        running.wait_for('"event": "delivered"', 300)
        running.wait_for('"unit": "trial"', 300)
        ended = running.end(signal.SIGINT)
    finally:
        running.kill()
    assert ended.code == 130
    assert "; delivered: dist/tiny/host (untuned so far);" in ended.err
    [command] = re.findall(r"`tvmflow ([^`]*)` delivers the best of the trials so far", ended.err)
    assert command == "run tiny.yaml --json --best-so-far"
    assert (project.folder / "dist/tiny/host/tiny.tvmflow").exists()
    known = project.trials()
    best = project.tvmflow(*command.split())
    assert best.code == 0 and project.trials() == known
    facts = best.stages["tune/host"]["facts"]
    assert (facts["stopped"], facts["reused"]) == ("no search", len(known))
    [statement] = (project.folder / "dist/tiny/host").glob("*.measurements.intoto.jsonl")
    assert (
        '"interim":true' in base64.b64decode(json.loads(statement.read_text())["payload"]).decode()
    )
    planned = project.tvmflow("plan", "tiny.yaml").out
    assert f"({len(known)} more are in the ledger" in planned
