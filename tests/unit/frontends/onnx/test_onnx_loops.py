"""Scan and Loop with a known number of iterations, or a limit of it, are unrolled; all others are refused by name."""

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
from tvmflow.frontends import FRONTENDS

frontend = FRONTENDS["onnx"]

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


def test_a_condition_that_is_constant_ends_a_loop(tmp_path: Path) -> None:
    """In its first iteration."""
    agree(loop(4, goes_on=False), tmp_path, {"x": draw(2)})


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


INTEGERS: dict[str, Array] = {
    "zero": np.array(0, np.int64),
    "one": np.array(1, np.int64),
    "six": np.array(6, np.int64),
    "forever": np.array(2**63 - 1, np.int64),
    "true": np.array(True),
    "eos": np.array([2], np.int64),
    "position": np.array([-1], np.int64),
}
NUMBER, FLAG = value("i", [], "int64"), value("on", [], "bool")


def decoder(limit: str = "forever", conditions: tuple[str, ...] = ("fits", "is_open")) -> Any:
    """Return a model that appends the most probable token until the sixth, or until one ends the text."""
    body = helper.make_graph(
        [
            node("Gather", ["table", "last"], ["scores"], axis=0),
            node("ArgMax", ["scores"], ["token"], axis=1, keepdims=0),
            node("Add", ["length", "one"], ["length_out"]),
            node("Reshape", ["length", "position"], ["index"]),
            node("ScatterElements", ["text", "index", "token"], ["text_out"]),
            node("Equal", ["token", "eos"], ["is_end"]),
            node("Not", ["is_end"], ["open"]),
            node("Squeeze", ["open"], ["is_open"]),
            node("Less", ["length_out", "six"], ["fits"]),
            node("And", [*conditions, *conditions][:2], ["on_out"]),
        ],
        "body",
        [NUMBER, FLAG, *(value(n, s, "int64") for n, s in (("text", [6]), ("last", [1]), ("length", [])))],
        [
            value("on_out", [], "bool"),
            *(value(n, None, "int64") for n in ("text_out", "token", "length_out")),
        ],
    )  # fmt: skip
    return model(
        [node("Loop", [limit, "true", "start", "first", "zero"], ["text", "latest", "length"], body=body)],
        [value("start", [6], "int64"), value("first", [1], "int64"), value("table", [5, 5])],
        [value("text", None, "int64"), value("length", None, "int64")],
        INTEGERS,
    )  # fmt: skip


def follows(*pairs: tuple[int, int]) -> Array:
    """Return scores by which one token follows another."""
    table = np.zeros((5, 5), np.float32)
    for one, other in pairs:
        table[one, other] = 1
    return table


@pytest.mark.parametrize("limit", ["forever", "six"])
@pytest.mark.parametrize(
    "table",
    [
        follows((0, 1), (1, 3), (3, 4), (4, 2)),
        follows((0, 1), (1, 3), (3, 4), (4, 1)),
        follows((0, 2)),
    ],
)
def test_a_loop_ends_where_its_condition_says(limit: str, table: Array, tmp_path: Path) -> None:
    """Greedy decoding: in the middle, at the limit of a counter or of the loop, after one iteration."""
    feed = {"start": np.full(6, 9, np.int64), "first": np.array([0], np.int64), "table": table}
    made = decoder(limit, ("fits", "is_open") if limit == "forever" else ("is_open",))
    agree(made, tmp_path, feed)


def test_a_counter_in_the_condition_counts_the_iterations(tmp_path: Path) -> None:
    """As TensorFlow's and PyTorch's loops are exported: without a count, with results of every iteration, and states that grow."""
    body = helper.make_graph(
        [
            node("Add", ["n", "one"], ["n_out"]),
            node("Concat", ["x_in", "x_in"], ["x_out"], axis=0),
            node("ReduceSum", ["x_out"], ["total"], keepdims=0),
            node("Less", ["n_out", "six"], ["on_out"]),
        ],
        "body",
        [NUMBER, FLAG, value("n", [], "int64"), value("x_in", None)],
        [
            value("on_out", [], "bool"),
            value("n_out", [], "int64"),
            *(value(n, None) for n in ("x_out", "total")),
        ],
    )
    made = model(
        [node("Loop", ["forever", "true", "one", "x"], ["n", "y", "totals"], body=body)],
        [value("x", [2])],
        [value("n", None, "int64"), value("y", None), value("totals", None)],
        INTEGERS,
    )
    agree(made, tmp_path, {"x": draw(2)})


def countdown(branch: bool) -> onnx.ModelProto:
    """Return a loop that a computed condition ends, in a loop of the same kind, in an If or not."""
    inner = helper.make_graph(
        [
            node("Mul", ["y_in", "half"], ["y_out"]),
            node("ReduceMax", ["y_out"], ["largest"], keepdims=0),
            node("Greater", ["largest", "half"], ["inner_on"]),
        ],
        "inner",
        [value("j", [], "int64"), value("on2", [], "bool"), value("y_in", [3])],
        [value("inner_on", [], "bool"), value("y_out", [3])],
    )
    body = helper.make_graph(
        [
            node("Loop", ["six", "", "x_in"], ["halved"], body=inner),
            node("Sub", ["halved", "outer"], ["x_out"]),
            node("ReduceMin", ["x_out"], ["least"], keepdims=0),
            node("Greater", ["least", "low"], ["on_out"]),
        ],
        "body",
        [NUMBER, FLAG, value("x_in", [3])],
        [value("on_out", [], "bool"), value("x_out", [3])],
    )
    loop = node("Loop", ["four", "starts", "x"], ["z"], body=body)
    nodes = [node("ReduceMax", ["x"], ["top"], keepdims=0), node("Greater", ["top", "half"], ["starts"])]  # fmt: skip
    if branch:
        then = helper.make_graph([loop], "then", [], [value("z", [3])])
        other = helper.make_graph([node("Neg", ["x"], ["w"])], "else", [], [value("w", [3])])
        nodes += [node("If", ["starts"], ["y"], then_branch=then, else_branch=other)]
    else:
        nodes += [loop, node("Identity", ["z"], ["y"])]
    constants: dict[str, Array] = {
        **INTEGERS,
        "four": np.array(4, np.int64),
        "half": np.array(0.5, np.float32),
        "low": np.array(-2.0, np.float32),
    }
    constants["outer"] = np.array([0.25, 0.5, 1.0], np.float32)
    return model(nodes, [value("x", [3])], [value("y", [3])], constants)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("factor", [0.1, 1.0, 8.0, 100.0])
def test_computed_conditions_of_loops_in_loops_and_branches(
    factor: float, branch: bool, tmp_path: Path
) -> None:
    """Also one that is false before the first iteration."""
    feed = {"x": np.array([1.0, 2.0, 3.0], np.float32) * np.float32(factor)}
    agree(countdown(branch), tmp_path, feed)


@pytest.mark.parametrize("count", [0, 3])
def test_a_loop_without_iterations_returns_its_states(count: int, tmp_path: Path) -> None:
    """Its count is 0, or its condition false."""
    made = loop(count)
    del made.graph.output[1]
    if count:
        made.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array(False), "true"))
    agree(made, tmp_path, {"x": draw(2)})


def test_a_state_of_another_size_under_a_computed_condition_is_refused(tmp_path: Path) -> None:
    """How long the text is then is known only when the model runs."""
    body = helper.make_graph(
        [
            node("Concat", ["x_in", "x_in"], ["x_out"], axis=0),
            node("ReduceMax", ["x_out"], ["largest"], keepdims=0),
            node("Greater", ["largest", "largest"], ["on_out"]),
        ],
        "body",
        [NUMBER, FLAG, value("x_in", None)],
        [value("on_out", [], "bool"), value("x_out", None)],
    )
    made = model(
        [node("Loop", ["six", "true", "x"], ["y"], body=body)],
        [value("x", [2])],
        [value("y", None)],
        INTEGERS,
    )
    with pytest.raises(
        ImportFailed,
        match=r"^If \(node 'y iteration 1'\) has branches that return float32\[8\] and float32\[4\]",
    ):
        load(made, tmp_path, {"x": draw(2)})


def test_a_computed_condition_without_a_limit_is_refused(tmp_path: Path) -> None:
    """And one whose iterations all have results that are stacked."""
    made = decoder("forever", ("is_open",))
    feed = {
        "start": np.zeros(6, np.int64),
        "first": np.array([0], np.int64),
        "table": follows((0, 2)),
    }
    reason = r"^Loop is unrolled, which needs a number of iterations that is constant or has a constant limit, "
    with pytest.raises(ImportFailed, match=reason):
        load(made, tmp_path, feed)
    made = countdown(branch=False)
    [loop_node] = [n for n in made.graph.node if n.op_type == "Loop"]
    loop_node.output.append("stacked")
    loop_node.attribute[0].g.output.append(value("least", []))
    made.graph.output.append(value("stacked", None))
    with pytest.raises(ImportFailed, match=reason):
        load(made, tmp_path, {"x": draw(3)})


@pytest.mark.parametrize("made", [loop(None), loop(100_000)])
def test_other_loops_are_refused_by_name(made: onnx.ModelProto, tmp_path: Path) -> None:
    """A count that is an input, too many iterations."""
    feed: dict[str, Array] = {"x": draw(2)}
    if len(made.graph.input) > 1:
        feed["count"] = np.array(4, np.int64)
    with pytest.raises(
        ImportFailed,
        match=r"^Loop is unrolled, which needs a number of iterations that is constant .* \(node with output 'total'\)",
    ) as caught:
        load(made, tmp_path, feed)
    advice = "make it constant with inputs.count.value; or " if "count" in feed else ""
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
