"""Scan and Loop with a known number of iterations are unrolled; all others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import Array, agree, draw, load, model, save, value
from tvmflow.core.errors import ImportFailed
from tvmflow.core.types import TensorSpec
from tvmflow.frontends import onnx as frontend

node = helper.make_node
STEP: Array = draw(3)


def scan(**attributes: Any) -> onnx.ModelProto:
    """Return a sum and a product of all elements, and the sums before; the body has a weight, and reads one outside."""
    body = helper.make_graph(
        [
            node("Mul", ["element", "inner"], ["scaled"]),
            node("Add", ["scaled", "outer"], ["shifted"]),
            node("Add", ["total_in", "shifted"], ["total_out"]),
            node("Identity", ["total_out"], ["partial"]),
        ],
        "body",
        [value("total_in", [3]), value("element", [3])],
        [value("total_out", [3]), value("partial", [3])],
        [numpy_helper.from_array(draw(3, seed=1), "inner")],
    )
    return model(
        [node("Scan", ["start", "x"], ["total", "y"], body=body, num_scan_inputs=1, **attributes)],
        [value("start", [3]), value("x", [5, 3] if not attributes else [3, 5])],
        [value("total", [3]), value("y", None)],
        {"outer": STEP},
    )


def loop(count: int | None, goes_on: bool = True) -> onnx.ModelProto:
    """Return a sum that grows by the number of the iteration; its number is an input without a count."""
    last = node("Identity", ["on"], ["on_out"]) if goes_on else node("Not", ["on"], ["on_out"])
    body = helper.make_graph(
        [
            last,
            node("Cast", ["i"], ["number"], to=TensorProto.FLOAT),
            node("Add", ["total_in", "number"], ["total_out"]),
            node("Mul", ["total_out", "total_out"], ["square"]),
        ],
        "body",
        [value("i", [], "int64"), value("on", [], "bool"), value("total_in", [2])],
        [value("on_out", [], "bool"), value("total_out", [2]), value("square", [2])],
    )
    constants: dict[str, Array] = {"true": np.array(True)}
    inputs = [value("x", [2])]
    if count is None:
        inputs.append(value("count", [], "int64"))
    else:
        constants["count"] = np.array(count, np.int64)
    return model(
        [node("Loop", ["count", "true", "x"], ["total", "squares"], body=body)],
        inputs,
        [value("total", [2]), value("squares", None)],
        constants,
    )


def test_a_scan_is_unrolled(tmp_path: Path) -> None:
    """Names and weights of the body are those of no other value."""
    agree(scan(), tmp_path, {"start": draw(3, seed=2), "x": draw(5, 3, seed=3)})


def test_a_scan_goes_backward_along_any_axis(tmp_path: Path) -> None:
    """Its results too."""
    made = scan(
        scan_input_axes=[1],
        scan_input_directions=[1],
        scan_output_axes=[1],
        scan_output_directions=[1],
    )
    agree(made, tmp_path, {"start": draw(3, seed=2), "x": draw(3, 5, seed=3)})


def test_a_loop_with_a_constant_count_is_unrolled(tmp_path: Path) -> None:
    """The condition goes through it."""
    agree(loop(4), tmp_path, {"x": draw(2)})


def test_a_count_that_the_recipe_binds_is_constant(tmp_path: Path) -> None:
    """As if the model had it."""
    inputs = (TensorSpec("x", (2,), "float32"), TensorSpec("count", (), "int64"))
    made = loop(None)
    loaded = frontend.load(save(made, tmp_path), inputs, bound={"count": np.array(3, np.int64)})
    feed = {"x": draw(2)}
    session = onnxruntime.InferenceSession(made.SerializeToString())
    expected = session.run(None, {**feed, "count": np.array(3, np.int64)})
    for one, other in zip(compute(loaded, feed), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_loops_and_branches_in_a_loop_are_those_of_each_iteration(tmp_path: Path) -> None:
    """They read values of their iteration, and have names and weights of their own."""

    def branch(name: str, factor: float) -> onnx.GraphProto:
        weight = numpy_helper.from_array(np.array([factor], np.float32), "factor")
        nodes = [node("Mul", ["total_in", "factor"], ["scaled"]), node("Neg", ["scaled"], [name])]
        return helper.make_graph(nodes, name, [], [value(name, None)], [weight])

    inner = helper.make_graph(
        [
            node("Identity", ["on2"], ["on2_out"]),
            node("Add", ["inner_in", "chosen"], ["inner_out"]),
        ],
        "inner",
        [value("j", [], "int64"), value("on2", [], "bool"), value("inner_in", [2])],
        [value("on2_out", [], "bool"), value("inner_out", [2])],
    )
    body = helper.make_graph(
        [
            node("Identity", ["on"], ["on_out"]),
            node("Equal", ["i", "one"], ["is_second"]),
            node("If", ["is_second"], ["chosen"], then_branch=branch("then", 2), else_branch=branch("else", 3)),
            node("Loop", ["two", "true", "chosen"], ["total_out"], body=inner),
            node("ReduceMax", ["total_out"], ["largest"], keepdims=0),
            node("Greater", ["largest", "zero"], ["is_positive"]),
            node("If", ["is_positive"], ["seen"], then_branch=branch("then", 5), else_branch=branch("else", 7)),
        ],
        "body",
        [value("i", [], "int64"), value("on", [], "bool"), value("total_in", [2])],
        [value("on_out", [], "bool"), value("total_out", [2]), value("seen", [2])],
    )  # fmt: skip
    constants: dict[str, Array] = {
        "true": np.array(True),
        "one": np.array(1, np.int64),
        "two": np.array(2, np.int64),
        "three": np.array(3, np.int64),
        "zero": np.array(0, np.float32),
    }
    made = model(
        [node("Loop", ["three", "true", "x"], ["total", "all_seen"], body=body)],
        [value("x", [2])],
        [value("total", [2]), value("all_seen", None)],
        constants,
    )
    agree(made, tmp_path, {"x": draw(2)})


@pytest.mark.parametrize("made", [loop(None), loop(4, goes_on=False), loop(100_000)])
def test_other_loops_are_refused_by_name(made: onnx.ModelProto, tmp_path: Path) -> None:
    """A count that is an input, a condition that is computed, too many iterations."""
    feed: dict[str, Array] = {"x": draw(2)}
    if len(made.graph.input) > 1:
        feed["count"] = np.array(4, np.int64)
    with pytest.raises(
        ImportFailed,
        match=r"^Loop is unrolled, which needs a constant number of iterations, .* \(node with output 'total'\)",
    ) as caught:
        load(made, tmp_path, feed)
    advice = (
        "bind what decides on it to a constant with inputs.count.value; or "
        if "count" in feed
        else ""
    )
    fix = "replace the operator in the model, or end the model before it"
    assert caught.value.fix == advice + fix


def test_the_form_of_the_first_scan_is_refused(tmp_path: Path) -> None:
    """ONNX's converter takes it for the new one, whose inputs have other axes."""
    body = helper.make_graph(
        [node("Add", ["a", "b"], ["c"]), node("Identity", ["c"], ["d"])],
        "body",
        [value("a", [2]), value("b", [2])],
        [value("c", [2]), value("d", [2])],
    )
    made = model(
        [node("Scan", ["", "start", "x"], ["y", "z"], body=body, num_scan_inputs=1)],
        [value("start", [1, 2]), value("x", [1, 3, 2])],
        [value("y", None), value("z", None)],
        opset=8,
    )
    with pytest.raises(
        ImportFailed, match=r"^Scan is unrolled, which needs opset 9, .* \(node with output 'y'\)"
    ):
        load(made, tmp_path, {"start": draw(1, 2), "x": draw(1, 3, 2)})
