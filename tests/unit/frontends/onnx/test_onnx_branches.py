"""If: known branches are inlined, others are computed when they are taken, with the kernels of any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import helper, numpy_helper
from tvm import relax

from tests.support.kernels import FAST, host_level, kernels_of, outputs
from tests.support.mxnet_runs import compute
from tests.support.onnx_models import agree, draw, load, model, save, value
from tvmflow.compiler import lowering
from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.graph import ir
from tvmflow.targets.tvm_target import make_target

frontend = FRONTENDS["onnx"]

node = helper.make_node


def branch(*nodes: Any, result: str, weights: dict[str, Any] | None = None) -> onnx.GraphProto:
    """Return a branch that sees the values of the graph around it."""
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    return helper.make_graph(nodes, "branch", [], [value(result, None)], tensors)


def choose(condition: str, then: onnx.GraphProto, otherwise: onnx.GraphProto, y: str) -> Any:
    return node("If", [condition], [y], then_branch=then, else_branch=otherwise)


def convolution(name: str, channels: int, seed: int) -> onnx.GraphProto:
    """Return a branch with a convolution, a bias and an activation of the value `x`, with names that others have too."""
    weights = {"w": draw(channels, 8, 3, 3, seed=seed), "b": draw(channels, 1, 1, seed=seed + 1)}
    return branch(
        node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        node("Add", ["c", "b"], ["s"]),
        node(name, ["s"], ["y"]),
        result="y",
        weights=weights,
    )


def switched() -> onnx.ModelProto:
    """Return a model with an If in a branch of another one."""
    inner = choose("second", convolution("Relu", 12, 2), convolution("Tanh", 12, 4), "inner")
    outer = branch(inner, node("Neg", ["inner"], ["y"]), result="y")
    nodes = [
        node("Conv", ["data", "first_w"], ["x"], pads=[1] * 4),
        choose("first", convolution("Sigmoid", 12, 6), outer, "chosen"),
        node("MaxPool", ["chosen"], ["result"], kernel_shape=[2, 2]),
    ]
    return model(
        nodes,
        [
            value("data", [1, 3, 6, 6]),
            value("first", [], "bool"),
            value("second", [1], "bool"),
        ],
        [value("result", None)],
        {"first_w": draw(8, 3, 3, 3)},
    )


def test_a_bound_condition_leaves_one_branch(tmp_path: Path) -> None:
    """Also that of an If in a branch, and with weights of that branch alone."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=(1, 3, 6, 6)).astype(np.float32)
    made = switched()
    inputs = (
        TensorSpec("data", (1, 3, 6, 6), "float32"),
        TensorSpec("first", (), "bool"),
        TensorSpec("second", (1,), "bool"),
    )
    bound = {"first": np.array(False), "second": np.array([True])}
    loaded = frontend.load(save(made, tmp_path), inputs, bound=bound)
    assert not any(isinstance(b.value, relax.If) for b in ir.list_bindings(loaded.mod["main"].body))
    assert [spec.name for spec in loaded.inputs] == ["data"]
    session = onnxruntime.InferenceSession(made.SerializeToString())
    [expected] = session.run(None, {"data": data, **bound})
    [actual] = compute(loaded, {"data": data})
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_branch_that_does_not_fit_names_the_input_that_decides(tmp_path: Path) -> None:
    """A model for two sampling rates has a branch that cannot be computed for the chunks of the other one."""
    nodes = [
        node("Equal", ["rate", "low"], ["is_low"]),
        choose(
            "is_low",
            branch(node("MatMul", ["data", "narrow"], ["y"]), result="y"),
            branch(node("MatMul", ["data", "wide"], ["y"]), result="y"),
            "result",
        ),
    ]
    inputs = [value("data", [1, 6]), value("rate", [], "int64")]
    weights = {"low": np.array(8, np.int64), "narrow": draw(3, 4), "wide": draw(6, 4)}
    made = model(nodes, inputs, [value("result", None)], weights)
    with pytest.raises(ImportFailed, match="MatMul") as caught:
        load(made, tmp_path)
    assert caught.value.fix == ("make it constant with inputs.rate.value")
    specs = (TensorSpec("data", (1, 6), "float32"), TensorSpec("rate", (), "int64"))
    loaded = frontend.load(save(made, tmp_path), specs, bound={"rate": np.array(16, np.int64)})
    assert loaded.outputs[0].shape == (1, 4)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (False, False)])
def test_branches_agree_with_onnx_runtime(first: bool, second: bool, tmp_path: Path) -> None:
    """Also branches in branches, with weights of the same names."""
    feed = {"data": draw(1, 3, 6, 6), "first": np.array(first), "second": np.array([second])}
    agree(switched(), tmp_path, feed)


def test_branches_have_the_kernels_of_any_model(tmp_path: Path) -> None:
    """Blocked layouts and fusion work inside them, and weights are packed when the library is built."""
    loaded = load(switched(), tmp_path)
    names = kernels_of(loaded.mod, host_level())
    for activation in ("relu", "tanh", "sigmoid"):
        assert any("conv2d_NCHWc" in name and activation in name for name in names), names
    lowered = lowering.lower(loaded.mod, make_target(host_level()), FAST)
    ranks = {len(ir.shape_of(var) or ()) for var in ir.list_weights(lowered.mod["main"])}
    assert ranks == {5, 6}


def test_only_the_branch_that_is_taken_is_computed(tmp_path: Path) -> None:
    """A call counts the kernels that run."""
    loaded = load(switched(), tmp_path)
    library = (
        lowering.lower(loaded.mod, make_target(host_level()), FAST)
        .schedule_untuned(loaded.params, host_level(), 1)
        .compile()
    )
    machine = relax.VirtualMachine(library, tvm.cpu())
    ran: list[str] = []

    def record(_: Any, name: str, is_before: bool, *__: Any) -> None:
        if (is_before and "tanh" in name) or "sigmoid" in name:
            ran.append(name)

    machine.set_instrument(record)
    feed = (draw(1, 3, 6, 6), np.array(True), np.array([True]))
    machine["main"](*map(tvm.runtime.tensor, feed))
    assert ran and not any("tanh" in name for name in ran)


@pytest.mark.parametrize("taken", [True, False])
def test_a_known_condition_is_folded_before_shapes_are_inferred(
    taken: bool, tmp_path: Path
) -> None:
    """The branches give other shapes, which only the taken one decides."""
    nodes = [
        node("Shape", ["data"], ["shape"]),
        node("Gather", ["shape", "zero"], ["rows"]),
        node("Equal", ["rows", "expected"], ["is_expected"]),
        choose(
            "is_expected",
            branch(node("Squeeze", ["data", "zeros"], ["y"]), result="y"),
            branch(node("Identity", ["data"], ["y"]), result="y"),
            "chosen",
        ),
        node("Relu", ["chosen"], ["result"]),
    ]
    weights = {
        "zero": np.array(0),
        "zeros": np.array([0]),
        "expected": np.array(1 if taken else 2),
    }
    made = model(nodes, [value("data", [1, 5])], [value("result", None)], weights)
    loaded = agree(made, tmp_path, {"data": draw(1, 5)})
    assert not ir.has_branches(loaded.mod)
    assert loaded.outputs[0].shape == ((5,) if taken else (1, 5))


def test_a_branch_may_return_values_from_outside(tmp_path: Path) -> None:
    """Several of them, computed by an operator that is a copy."""
    both = helper.make_graph([], "branch", [], [value("a", None), value("b", None)])
    swapped = helper.make_graph([], "branch", [], [value("b", None), value("a", None)])
    nodes = [
        node("Relu", ["data"], ["a"]),
        node("Identity", ["a"], ["copy"]),
        node("Neg", ["copy"], ["b"]),
        node("If", ["is_same"], ["p", "q"], then_branch=both, else_branch=swapped),
        node("Sub", ["p", "q"], ["result"]),
    ]
    inputs = [value("data", [4]), value("is_same", [], "bool")]
    made = model(nodes, inputs, [value("result", None)])
    feed = {"data": draw(4), "is_same": np.array(False)}
    [result] = outputs(load(made, tmp_path, feed), feed)
    assert np.array_equal(result, -2 * np.maximum(feed["data"], 0))
