"""Scan and Loop with a known number of iterations are unrolled; all others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_models import Array, agree, draw, load, model, value
from tvmflow.core.errors import ImportFailed

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


@pytest.mark.parametrize("made", [loop(None), loop(4, goes_on=False), loop(100_000)])
def test_other_loops_are_refused_by_name(made: onnx.ModelProto, tmp_path: Path) -> None:
    """A count that is an input, a condition that is computed, too many iterations."""
    feed: dict[str, Array] = {"x": draw(2)}
    if len(made.graph.input) > 1:
        feed["count"] = np.array(4, np.int64)
    with pytest.raises(ImportFailed, match=r"TVM has no operator Loop \(node"):
        load(made, tmp_path, feed)


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
    with pytest.raises(ImportFailed, match=r"TVM has no operator Scan \(node"):
        load(made, tmp_path, {"start": draw(1, 2), "x": draw(1, 3, 2)})
