"""After a library was rejected: the record, the rule, the pass or the converter at fault is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from onnx import TensorProto, helper, numpy_helper
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from tests.support.project import Project
from tvmflow.compiler import lowering, pipeline
from tvmflow.compiler.options import LoweringOptions
from tvmflow.engine import stage_runs
from tvmflow.frontends import FRONTENDS
from tvmflow.graph import ir
from tvmflow.graph.rewriter import MainRewriter, rewrite_main
from tvmflow.planning.decisions import evaluate_plan
from tvmflow.planning.prepare import RunRequest, prepare_run
from tvmflow.stages import build
from tvmflow.stages.lower import LOWERED_ROLE
from tvmflow.stages.verify import fault_localization
from tvmflow.store.local import LocalStore
from tvmflow.targets.tvm_target import make_target
from tvmflow.tuning import measure, traces
from tvmflow.tuning.ledger import WorkloadLedger
from tvmflow.tuning.ledger_folders import list_target_folders
from tvmflow.tuning.trials import Trial, trial_id

frontend = FRONTENDS["onnx"]


def poison(mod: str, trial: Trial) -> Trial:
    """Return a fast trial of a schedule whose kernel sums in integers of 8 bits."""
    from tvm.s_tir.schedule import Schedule

    schedule = Schedule(tvm.ir.load_json(mod), seed=1)
    block = schedule.get_sblock("b0")
    schedule.cache_write(block, 0, "local")
    schedule.unsafe_set_dtype(block, 0, "int8")
    row, column, depth = schedule.get_loops(block)
    outer, inner = schedule.split(column, [None, 64])
    schedule.reorder(row, outer, depth, inner)
    schedule.vectorize(inner)
    schedule.decompose_reduction(block, depth)
    trace = measure.trace_json(schedule.trace)
    return trial._replace(
        id=trial_id(trace), trace=trace, run_secs=tuple(t / 10 for t in trial.run_secs)
    )


def ledgers(project: Project) -> dict[str, tuple[str, WorkloadLedger]]:
    """Return the saved kernel and the ledger of each workload."""
    [folder] = list_target_folders(Path(project.folder, "cache/ledger"), ())
    return {
        key: (folder.ledger.kernel(key), folder.ledger.workload(key))
        for key, _ in folder.workload_files()
    }


@pytest.mark.slow
def test_a_schedule_that_computes_wrongly_is_banned(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on with the next best schedule, or the untuned kernel; the ban stays in the ledger."""
    project.spend_whole_budget()
    monkeypatch.setitem(traces.INSTRUCTIONS, "UnsafeSetDType", lambda inputs, values: "")
    project.environment["TESTS_ALLOW_UNSAFE_SCHEDULES"] = "1"
    project.write_recipe(trials=8)
    project.write_products(rows=8)
    project.edit_recipe("tune:", "kernels: {schedules: none}\ntune:")
    assert project.run("--until", "tune").code == 0
    mod, ledger = next(entry for entry in ledgers(project).values() if entry[1].valid())
    trials = ledger.valid()
    wrong = poison(mod, trials[0])
    ledger.append(wrong)
    ledger.remove([trial.id for trial in trials])
    # no more trials: the wrong one has no rival
    project.edit_recipe("trials: 8", "trials: 1")
    ran = project.run("--force", "tune")
    assert (ran.code, ran.outcome("verify/host")) == (0, "ran")
    [message] = [e["message"] for e in ran.events if e.get("outcome") == "rejected"]
    assert f"with the schedule of trial {wrong.id[:12]}" in message
    assert "MatMul" in message
    assert "the schedule is banned" in message
    [ban] = ran.stages["tune/host"]["facts"]["banned"]
    assert ban["trial"] == wrong.id
    ledger.refresh()
    assert list(ledger.bans) == [wrong.id]
    assert "banned 20" in project.tvmflow("records", "show", ledger.path.stem).out
    assert project.run().ran == []


@pytest.mark.slow
def test_a_tolerance_that_no_arithmetic_meets_is_blamed_on_the_recipe(project: Project) -> None:
    """The library is rejected; what to change is the recipe, and nobody is asked to report a bug."""
    write_normalized(project)
    project.edit_recipe("rtol: 1.0e-3, atol: 1.0e-4", "rtol: 1.0e-12, atol: 1.0e-14")
    failed = project.run()
    assert (failed.code, failed.outcome("verify/host")) == (3, "rejected")
    verify = failed.stages["verify/host"]
    assert "(rtol 1e-12, atol 1e-14)" in verify["message"]
    assert re.search(
        r"the model agrees with the reference within the default tolerance \(rtol 0.001, and for these outputs up to "
        r"atol \d\S*\), and verify.rtol and verify.atol of the recipe are stricter",
        verify["message"],
    )
    assert "raise verify.rtol and verify.atol or leave them out" in verify["fix"]
    assert "bug" not in verify["message"] + verify["fix"]
    assert not (project.folder / "dist/tiny/host/tiny.tvmflow").exists()


# ---------------------------------------------------------------- whatever else can be wrong


def payload_of(project: Project, folder: Path) -> dict[str, Any]:
    """Return what the search gets after a library of the project was rejected."""
    store = LocalStore(str(project.folder / "cache"))
    plan = prepare_run(RunRequest((str(project.folder / "tiny.yaml"),)), store).plan
    [verify] = [spec for spec in plan.stages if spec.stage == "verify"]
    return stage_runs.make_payload(verify, plan, evaluate_plan(plan, store), folder)


def search(payload: dict[str, Any]) -> str:
    [fault] = fault_localization.find_faults(payload, lambda event: None)
    assert not fault["trial"]
    return str(fault["text"])


def write_normalized(project: Project) -> None:
    """Write a model with two convolutions and a normalization between them, whose ε is not small."""
    rng = np.random.default_rng(0)
    make = helper.make_node
    nodes = [
        make("Conv", ["data", "first"], ["a"], "first_conv", pads=[1, 1, 1, 1]),
        make("InstanceNormalization", ["a", "scale", "shift"], ["b"], "norm", epsilon=0.5),
        make("Relu", ["b"], ["c"], "relu"),
        make("Conv", ["c", "second"], ["scores"], "second_conv", pads=[1, 1, 1, 1]),
    ]
    shapes = {"first": (4, 3, 3, 3), "scale": (4,), "shift": (4,), "second": (5, 4, 3, 3)}
    weights = [
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    sides = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in (("data", [1, 3, 8, 8]), ("scores", [1, 5, 8, 8]))
    ]
    graph = helper.make_graph(nodes, "tiny", *sides, weights)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, str(project.folder / "tiny.onnx"))


@pytest.mark.slow
def test_rules_passes_and_converters_are_told_apart(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The culprit is named with its kernel or tensor, and with the nodes of the model."""
    write_normalized(project)
    assert project.run().code == 0
    payload = payload_of(project, tmp_path)
    assert "the fault is in the C library or its packaging" in search(payload)

    with monkeypatch.context() as patch:
        schedule = build.schedule_kernels
        name = "tvmflow.stages.verify.fault_localization.schedule_kernels"
        patch.setattr(name, lambda *arguments: wrong_rule(schedule(*arguments)))
        text = search(payload)
        assert "as the schedule rule register_tiles schedules it" in text
        assert "first_conv" in text

    with monkeypatch.context() as patch:
        phases = dict(pipeline.GRAPH_PHASES)
        wrong_pass = pipeline._pass("wrong", wrong_relu)
        phases["layouts"] = (wrong_pass, *phases["layouts"])
        patch.setattr(pipeline, "GRAPH_PHASES", phases)
        text = search(with_lowered(payload, tmp_path))
        assert "the fault is in a pass of the lowering" in text
        assert "'c' of node relu" in text

    with monkeypatch.context() as patch:
        convert = ONNXGraphImporter._convert_operator
        patch.setattr(ONNXGraphImporter, "_convert_operator", with_epsilon(convert, 1e-5))
        loaded = frontend.load({"model": project.folder / "tiny.onnx"}, ())
        path = tmp_path / "model.json"
        path.write_text(tvm.ir.save_json(loaded.mod))
        changed = {**payload, "inputs": {**payload["inputs"], "import/model.json": str(path)}}
        text = search(with_lowered(changed, tmp_path))
        assert "the import differs from ONNX Runtime already" in text
        assert "'b' of node norm" in text


@pytest.mark.slow
def test_a_model_that_enlarges_roundings_is_blamed_itself(project: Project) -> None:
    """No two runtimes agree on it; the reference does not agree with itself, and nobody is asked to report a bug."""
    write_normalized(project)
    path = str(project.folder / "tiny.onnx")
    made = onnx.load(path)
    made.graph.initializer.append(numpy_helper.from_array(np.float32(1e7), "much"))
    made.graph.node[-1].output[0] = "d"
    made.graph.node.append(helper.make_node("Mul", ["d", "much"], ["e"], "enlarge"))
    made.graph.node.append(helper.make_node("Sin", ["e"], ["scores"], "sine"))
    made.graph.output.append(helper.make_tensor_value_info("d", TensorProto.FLOAT, [1, 5, 8, 8]))
    onnx.save(made, path)
    failed = project.run()
    assert (failed.code, failed.outcome("verify/host")) == (3, "rejected")
    verify = failed.stages["verify/host"]
    assert "the model enlarges the smallest differences" in verify["message"]
    assert "ONNX Runtime itself gives other outputs (output 'scores'" in verify["message"]
    assert "verify.data" in verify["fix"]
    assert "bug" not in verify["message"] + verify["fix"]


def with_lowered(payload: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what the search gets where the model that was imported is lowered as it is now."""
    path = folder / "lowered.json"
    mod = ir.load_module(Path(payload["inputs"]["import/model.json"]))
    target = make_target(payload["build"]["target"])
    lowering.lower(mod, target, LoweringOptions()).write(path)
    return {**payload, "inputs": {**payload["inputs"], LOWERED_ROLE: str(path)}}


def with_epsilon(convert: Any, epsilon: float) -> Any:
    """Return a converter that takes another ε than the model's."""

    def converted(self: Any, name: str, inputs: Any, attrs: Any, opset: int) -> Any:
        if name == "InstanceNormalization":
            attrs["epsilon"] = epsilon
        return convert(self, name, inputs, attrs, opset)

    return converted


def wrong_relu(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module with the absolute value in place of the ReLU."""

    class Rewriter(MainRewriter):
        def visit_call_(self, call: Any) -> Any:
            call = super().visit_call_(call)
            is_relu = ir.operator_name(call) == "relax.nn.relu"
            return relax.op.abs(call.args[0]) if is_relu else call

    return rewrite_main(mod, Rewriter)


def wrong_rule(scheduled: tuple[tvm.IRModule, dict[str, str]]) -> Any:
    """Return a module in which a convolution subtracts where it should add."""
    mod, rules = scheduled
    changed = ir.copy_module(mod)
    var = next(
        var
        for var, function in mod.functions_items()
        if rules.get(var.name_hint) == "register_tiles" and "relu" not in var.name_hint
    )

    def subtract(node: Any) -> Any:
        return tvm.tirx.Sub(node.a, node.b) if node.a.ty.dtype == "float32" else node

    body = tvm_ffi.structural_map(mod[var].body, (tvm.tirx.Add, subtract))
    function = mod[var]
    changed[var] = tvm.tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)
    return changed, rules
