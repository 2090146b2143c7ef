"""Sizes that are known only when a model runs, as counts: detectors are C libraries, whose outputs have true sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from safetensors.numpy import save_file

from tests.support.c_library import BuiltTwice
from tests.support.detectors import (
    constants,
    draw_boxes,
    make_detector,
    run_onnx_runtime,
)
from tests.support.kernels import host_level
from tests.support.mxnet_runs import compute
from tests.support.onnx_models import Array, frontend, load, model, save, value
from tvmflow.compiler import lowering
from tvmflow.compiler.c_program.program import find_runtime
from tvmflow.compiler.options import LoweringOptions
from tvmflow.graph.counts import read_counts
from tvmflow.graph.index_inputs import find_indices
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.stages.verify.inner_tensors import cut_at_inner, load_with_inner
from tvmflow.stages.verify.inputs import ImportedModel
from tvmflow.targets.tvm_target import make_target

# What detectors do with the boxes that they keep.
ROW_BY_ROW = [
    helper.make_node("Slice", ["kept_boxes", "zero", "four", "zero"], ["first"]),
    helper.make_node("Gather", ["kept_boxes", "column_0"], ["left"], axis=1),
    helper.make_node("Unsqueeze", ["left", "one"], ["lefts"]),
    helper.make_node("Unsqueeze", ["kept_scores", "one"], ["score_column"]),
    helper.make_node("Cast", ["keep"], ["numbers"], to=onnx.TensorProto.FLOAT),
    helper.make_node("Unsqueeze", ["numbers", "one"], ["number_column"]),
    helper.make_node("Concat", ["lefts", "score_column", "number_column"], ["table"], axis=1),
    helper.make_node("MatMul", ["kept_boxes", "turn"], ["turned"]),
    helper.make_node("Softmax", ["turned"], ["weights"], axis=-1),
    helper.make_node("ReduceMax", ["weights", "one"], ["best"], keepdims=0),
    helper.make_node("Unsqueeze", ["weights", "zero"], ["batched"]),
    helper.make_node("ArgMax", ["weights"], ["place"], axis=1, keepdims=1),
    helper.make_node("Reshape", ["kept_boxes", "pairs"], ["points"]),
]
ROW_OUTPUTS = [
    value("first", [None, 4]),
    value("table", [None, 3]),
    value("best", [None]),
    value("batched", [1, None, 3]),
    value("place", [None, 1], "int64"),
    value("points", [None, 2, 2]),
]


def make_rows() -> onnx.ModelProto:
    turn = np.linspace(-1, 1, 12).reshape(4, 3)
    return make_detector(
        24, ROW_BY_ROW, ROW_OUTPUTS, four=[4], column_0=0, pairs=[-1, 2, 2], turn=turn
    )


def test_outputs_of_a_detector_have_their_true_sizes(tmp_path: Path) -> None:
    """In a C library and on TVM's virtual machine, as in ONNX Runtime; also where one box is selected, or all are."""
    made = make_rows()
    built = BuiltTwice.build(load(made, tmp_path), host_level(), tmp_path)
    bounded = {spec.name: (spec.shape, spec.bounded_axis) for spec in built.model.outputs}
    assert bounded == {
        "kept_boxes": ((24, 4), 0),
        "kept_scores": ((24,), 0),
        "keep": ((24,), 0),
        "first": ((4, 4), 0),
        "table": ((24, 3), 0),
        "best": ((24,), 0),
        "batched": ((1, 24, 3), 1),
        "place": ((24, 1), 0),
        "points": ((24, 2, 2), 0),
    }
    program = NativeProgram(built.library, "net", 2)
    assert program.outputs == built.model.outputs
    counts = set()
    for size in (1e-3, 0.3, 1.0, 50.0):
        feed = draw_boxes(24, seed=3, size=size)
        if size == 50.0:
            feed["boxes"][:] = feed["boxes"][0]
        expected = run_onnx_runtime(made, feed)
        actual = program.run([feed["boxes"], feed["scores"]], [None] * len(expected))
        for actual_rows, machine, expected_rows in zip(
            actual, built.run(feed)[1], expected, strict=True
        ):
            np.testing.assert_allclose(actual_rows, expected_rows, rtol=1e-5, atol=1e-6)
            assert actual_rows.shape == expected_rows.shape and actual_rows.flags.c_contiguous
            np.testing.assert_array_equal(actual_rows, machine)
        counts.add(len(expected[0]))
    assert {1, 24} < counts


def test_what_goes_into_a_suppression_can_be_returned_besides(tmp_path: Path) -> None:
    """As `verify` compares it; of what it selects, only the rows that count are the reference's."""
    made = make_rows()
    plain = load(made, tmp_path)
    files = save(made, tmp_path) | {"import/params.safetensors": tmp_path / "params"}
    save_file(plain.params, files["import/params.safetensors"])
    whole = ImportedModel(files, plain.inputs, plain.outputs, (), {})
    imported = whole.load("onnx").mod
    indices = find_indices(imported["main"])
    loaded = load_with_inner(imported, indices.inputs, whole, "onnx", files)
    assert loaded is not None
    assert [spec.name for spec in loaded.tensors] == ["image", "classes"], "`weights` has rows"
    assert read_counts(loaded.mod["main"]) == read_counts(plain.mod["main"])
    cut = cut_at_inner(loaded)
    assert cut is not None
    assert read_counts(cut.mod["main"]) == read_counts(plain.mod["main"])
    parts = frontend.load(files, plain.inputs, ("image",), counts_rows=False)
    assert not read_counts(parts.mod["main"])


def test_a_detector_that_finds_nothing_has_no_rows(tmp_path: Path) -> None:
    """As YOLO is exported: columns of the selected rows choose among images, classes and boxes."""
    nodes = [
        helper.make_node(
            "NonMaxSuppression", ["boxes", "scores", "most", "half", "least"], ["rows"]
        ),
        helper.make_node("GatherND", ["scores", "rows"], ["kept_scores"]),
        helper.make_node("Gather", ["rows", "image_and_box"], ["places"], axis=1),
        helper.make_node("GatherND", ["boxes", "places"], ["kept_boxes"]),
        helper.make_node("Gather", ["rows", "class"], ["classes"], axis=1),
    ]
    inputs = [value("boxes", [2, 30, 4]), value("scores", [2, 3, 30])]
    outputs = [value("kept_scores", [None]), value("kept_boxes", [None, 4])]
    outputs += [value("classes", [None], "int64")]
    weights = constants(most=[7], half=[0.5], least=[0.25], image_and_box=[0, 2])
    weights["class"] = np.array(1)
    made = model(nodes, inputs, outputs, weights)
    built = BuiltTwice.build(load(made, tmp_path), host_level(), tmp_path)
    assert [spec.shape[0] for spec in built.model.outputs] == [42, 42, 42]
    program = NativeProgram(built.library, "net", 1)
    rng = np.random.default_rng(0)
    boxes, scores = rng.random((2, 30, 4), np.float32), rng.random((2, 3, 30), np.float32)
    for factor in (1.0, 0.3, 0.2):
        feed = {"boxes": boxes, "scores": scores * np.float32(factor)}
        expected = run_onnx_runtime(made, feed)
        actual = program.run([boxes, feed["scores"]], [None] * 3)
        for actual_rows, expected_rows in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(actual_rows, expected_rows)
    assert len(expected[0]) == 0


MIXING = {
    "ReduceMax": helper.make_node("ReduceMax", ["kept_scores"], ["more"], keepdims=0),
    "Softmax": helper.make_node("Softmax", ["kept_scores"], ["more"], axis=0),
    "Concat": helper.make_node("Concat", ["kept_scores", "kept_scores"], ["more"], axis=0),
    "Transpose": helper.make_node("Transpose", ["kept_boxes"], ["more"]),
    "Gather": helper.make_node("Gather", ["kept_scores", "zero"], ["more"], axis=0),
    "Slice": helper.make_node("Slice", ["kept_scores", "one", "three"], ["more"]),
}


@pytest.mark.parametrize("operator", MIXING)
def test_rows_that_influence_each_other_need_tvms_runtime(operator: str, tmp_path: Path) -> None:
    """Which is said by the name of the operator; the other outputs are described as before."""
    output = onnx.ValueInfoProto(name="more")
    made = make_detector(24, [MIXING[operator]], [output])
    loaded = load(made, tmp_path)
    assert [spec.bounded_axis for spec in loaded.outputs[:3]] == [0, 0, 0]
    lowered = lowering.lower(loaded.mod, make_target(host_level()), LoweringOptions())
    runtime, reason = find_runtime(lowered.mod, "auto")
    assert runtime == "vm"
    assert reason.startswith("sizes that are known only when it runs, which ")


@pytest.mark.slow
def test_rows_that_influence_each_other_are_computed(tmp_path: Path) -> None:
    """By TVM's runtime, which knows how many there are."""
    made = make_detector(24, [MIXING["ReduceMax"]], [value("more", [])])
    feed = draw_boxes(24)
    actual = compute(load(made, tmp_path), feed)
    for actual_rows, expected_rows in zip(actual, run_onnx_runtime(made, feed), strict=True):
        np.testing.assert_array_equal(actual_rows, expected_rows)


def test_other_models_have_no_counts(tmp_path: Path) -> None:
    """Not even where a selection is not an output."""
    node = helper.make_node("Relu", ["x"], ["y"])
    made = model([node], [value("x", [2, 3])], [value("y", [2, 3])])
    loaded = load(made, tmp_path, dict[str, Array]())
    assert loaded.outputs[0].bounded_axis is None
    assert "bounded_axis" not in loaded.outputs[0].to_json()
    assert set(loaded.mod["main"].attrs.keys()) == {"num_input", "global_symbol"}
