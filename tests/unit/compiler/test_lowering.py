"""Lowering keeps kernels that frontends bring, and each weight reaches its parameter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.mxnet_runs import write_checkpoint
from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel
from tvmflow.targets.tvm_target import make_target
from tvmflow.tuning.workloads import extract_workloads

frontend = FRONTENDS["mxnet"]

TARGET = {"kind": "llvm"}
OPTIONS = LoweringOptions()


def test_a_lowered_model_is_read_as_it_was_written(detector: LoadedModel, tmp_path: Path) -> None:
    """The same kernels, calls, weights and nodes, and the same bytes however often it is written."""
    model = lowering.lower(detector.mod, make_target(TARGET), OPTIONS)
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    model.write(first)
    read = lowering.LoweredModel.read(first)
    read.write(second)
    assert first.read_bytes() == second.read_bytes()
    tvm.ir.assert_structural_equal(read.mod, model.mod)
    assert read.weight_mod is not None
    tvm.ir.assert_structural_equal(read.weight_mod, model.weight_mod)
    assert read.weight_names == model.weight_names
    assert read.kernel_nodes == dict(model.kernel_nodes)
    for one, other in zip(
        *(m.compute_weights(detector.params) for m in (read, model)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def var(name: str) -> dict[str, Any]:
    return {"op": "null", "name": name}


def node(op: str, name: str, inputs: list[int], **attrs: str) -> dict[str, Any]:
    return {"op": op, "name": name, "inputs": inputs, "attrs": attrs}


@pytest.fixture
def detector(tmp_path: Path) -> LoadedModel:
    """Return a dense layer that gives scored boxes, and non-maximum suppression of them."""
    nodes = [
        var("data"),
        var("fc_weight"),
        var("fc_bias"),
        node("FullyConnected", "fc", [0, 1, 2], num_hidden="24"),
        node("Reshape", "boxes", [3], shape="(1, 4, 6)"),
        node(
            "_contrib_box_nms",
            "nms",
            [4],
            overlap_thresh="0.5",
            coord_start="2",
            score_index="1",
            id_index="0",
        ),
    ]
    rng = np.random.default_rng(0)
    weights = {
        "arg:fc_weight": rng.normal(size=(24, 3)).astype(np.float32),
        "arg:fc_bias": rng.normal(size=24).astype(np.float32),
    }
    files = write_checkpoint(tmp_path, nodes, [[5, 0]], weights)
    return frontend.load(files, (TensorSpec("data", (1, 3), "float32"),))


def run(model: LoadedModel, lowered: lowering.LoweredModel, data: Any) -> Any:
    weights = lowered.compute_weights(model.params)
    library = lowering.ScheduledModel(lowered.mod, weights, make_target(TARGET)).compile()
    result = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(data))
    return (result if hasattr(result, "numpy") else result[0]).numpy()


def test_kernels_with_a_schedule_are_kept_and_not_tuned(detector: LoadedModel) -> None:
    """The frontend imports suppression as a kernel: it is in the library, but not a tuning task."""
    lowered = lowering.lower(detector.mod, make_target(TARGET), OPTIONS)
    reasons = {
        name: workload.untunable_reason
        for workload in extract_workloads(lowered.mod)
        for name in workload.names
    }
    nms = [reason for name, reason in reasons.items() if "nms" in name]
    assert nms == ["it comes with a schedule"]
    assert "" in reasons.values()
    output = run(detector, lowered, np.ones((1, 3), np.float32))
    assert output.shape == (1, 4, 6)


def test_weights_with_the_same_name_are_not_confused(tmp_path: Path) -> None:
    """Lifting may give two parameters of `main` the same name: each gets its own value."""
    plain = LoweringOptions(layout="plain", weights="plain")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 2), "float32"))
    a = relax.Var("a", relax.TensorType((2, 2), "float32"))
    b = relax.Var("b", relax.TensorType((2, 2), "float32"))

    def named(name: str, value: Any) -> Any:
        normal = builder.normalize(value)
        var = relax.Var(name, normal.ty)
        builder.emit_normalized(relax.VarBinding(var, normal))
        return var

    add, multiply = relax.op.add, relax.op.multiply
    with builder.function("main", [x, a, b], attrs={"num_input": 1}):
        with builder.dataflow():
            doubled, squared = (named("lv", op(v, v)) for op, v in ((add, a), (multiply, b)))
            total = builder.emit_output(
                relax.op.subtract(relax.op.matmul(x, doubled), squared), name_hint="out"
            )
        builder.emit_func_output(total)
    mod = builder.get()
    params = {
        "a": np.arange(4, dtype=np.float32).reshape(2, 2),
        "b": np.full((2, 2), 3, np.float32),
    }
    data = np.eye(2, dtype=np.float32)
    model = LoadedModel(mod, params, (), ())
    lowered = lowering.lower(mod, make_target(TARGET), plain)
    assert [var.name for var in lowered.mod["main"].params] == ["x", "lv", "lv"]
    assert (run(model, lowered, data) == 2 * params["a"] - 9).all()


def test_names_of_parameters_are_none_of_kernels(tmp_path: Path) -> None:
    """TVM writes them into C as they are; weights are known by the names that the import gave them."""
    names = ["x; int stolen(void) { return 0; } //", "/model/in:0", "plain.weight-1", "9"]
    parameters = [relax.Var(name, relax.TensorType((1, 4), "float32")) for name in names]
    builder = relax.BlockBuilder()
    with builder.function("main", parameters, attrs={"num_input": 2}):
        with builder.dataflow():
            total = parameters[0]
            for other in parameters[1:]:
                total = builder.emit(relax.op.add(total, other))
            result = builder.emit_output(total)
        builder.emit_func_output(result)
    lowered = lowering.lower(builder.finalize(), make_target({"kind": "c"}), OPTIONS)
    assert lowered.weight_names == ("plain.weight-1", "9")
    used = {
        str(parameter.name)
        for function in lowered.mod.functions.values()
        for parameter in function.params
    }
    assert not used & {*names} - {"plain.weight-1"}
    assert all(re.fullmatch(r"[A-Za-z_][\w.:-]*", name, re.ASCII) for name in used)
