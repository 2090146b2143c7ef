"""The one road to kernels: what importers wrote survives it, and weights arrive where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.mxnet_runs import write_checkpoint
from tvmflow.frontends import mxnet as frontend
from tvmflow.frontends._base import LoadedModel
from tvmflow.recipe import Kernels
from tvmflow.stages import _lowering
from tvmflow.tuning.workloads import workloads_of
from tvmflow.values import TensorSpec

TARGET = {"kind": "llvm"}
KERNELS = Kernels().model_dump(mode="json")


def var(name: str) -> dict[str, Any]:
    return {"op": "null", "name": name}


def node(op: str, name: str, inputs: list[int], **attrs: str) -> dict[str, Any]:
    return {"op": op, "name": name, "inputs": inputs, "attrs": attrs}


@pytest.fixture
def detector(tmp_path: Path) -> LoadedModel:
    """A dense layer whose output is scored boxes, which non-maximum suppression then thins out."""
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
    return frontend.load(files, (TensorSpec("data", (1, 3), "float32"),), {})


def run(
    model: LoadedModel, lowered: tvm.IRModule, data: Any, kernels: dict[str, Any] = KERNELS
) -> Any:
    weights = _lowering.fold_weights(
        model.mod, model.params, _lowering.make_target(TARGET), kernels
    )
    library = _lowering.compile_with_weights(lowered, weights, _lowering.make_target(TARGET))
    result = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(data))
    return (result if hasattr(result, "numpy") else result[0]).numpy()


def test_kernels_that_come_with_a_schedule_are_kept_and_not_tuned(detector: LoadedModel) -> None:
    """Suppression is written as a kernel by the importer: it is in the library, and no search touches it."""
    lowered = _lowering.lower(detector.mod, _lowering.make_target(TARGET), KERNELS)
    reasons = {name: each.reason for each in workloads_of(lowered) for name in each.names}
    nms = [reason for name, reason in reasons.items() if "nms" in name]
    assert nms == ["it comes with a schedule"]
    assert "" in reasons.values()
    found = run(detector, lowered, np.ones((1, 3), np.float32))
    assert found.shape == (1, 4, 6)


def test_weights_of_one_name_do_not_mix(tmp_path: Path) -> None:
    """Lifting weight arithmetic out of `main` may leave two parameters with one name: each gets its own value."""
    plain = {**KERNELS, "layout": "plain", "weights": "plain"}
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
    lowered = _lowering.lower(mod, _lowering.make_target(TARGET), plain)
    assert [var.name for var in lowered["main"].params] == ["x", "lv", "lv"]
    assert (run(model, lowered, data, plain) == 2 * params["a"] - 9).all()
