"""NonMaxSuppression selects what ONNX Runtime does, box by box and in its order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from tests.support.detectors import ALL_BOXES, constants, run_onnx_runtime
from tests.support.kernels import FAST
from tests.support.mxnet_runs import compute
from tests.support.onnx_models import Array, load, model, value
from tvmflow.compiler import lowering
from tvmflow.core.errors import ImportFailed
from tvmflow.targets.tvm_target import make_target

BATCH, CLASSES, BOXES = 2, 3, 40
# Limit, overlap and threshold; None for one that is not there.
CASES: dict[str, tuple[int | None, float | None, float | None]] = {
    "all": (ALL_BOXES, 0.5, None),
    "few": (5, 0.3, 0.2),
    "one": (1, 0.5, 0.5),
    "nothing_is_above": (ALL_BOXES, 0.5, 2.0),
    "everything_is_kept": (ALL_BOXES, 1.0, -9.0),
    "any_overlap": (ALL_BOXES, 0.0, 0.1),
    "no_overlap_is_said": (7, None, 0.1),
    "none_is_wanted": (0, 0.5, None),
    "less_than_none": (-3, 0.5, None),
    "no_limit_is_said": (None, 0.5, None),
}


@pytest.mark.parametrize("is_centered", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_boxes_are_those_of_onnx_runtime(is_centered: bool, tmp_path: Path) -> None:
    """Several images and classes, equal scores, and boxes without an area or with corners in any order."""
    nodes, weights = [], dict[str, Array]()
    for name, numbers in CASES.items():
        operands = ["boxes", "scores"]
        for word, number in zip(("limit", "overlap", "score"), numbers, strict=True):
            operands.append("" if number is None else f"{name}_{word}")
            if number is not None:
                weights |= constants(**{operands[-1]: [number]})
        while not operands[-1]:
            operands.pop()
        node = helper.make_node(
            "NonMaxSuppression", operands, [name], center_point_box=int(is_centered)
        )
        nodes.append(node)
    made = model(
        nodes,
        [value("boxes", [BATCH, BOXES, 4]), value("scores", [BATCH, CLASSES, BOXES])],
        [value(name, [None, 3], "int64") for name in CASES],
        weights,
    )
    rng = np.random.default_rng(5)
    boxes = rng.normal(size=(BATCH, BOXES, 4)).astype("float32")
    if is_centered:
        boxes[..., 2:] = np.abs(boxes[..., 2:])
    boxes[:, ::7, 2:] = 0 if is_centered else boxes[:, ::7, :2]
    scores = np.round(rng.normal(size=(BATCH, CLASSES, BOXES)) * 4).astype("float32") / 4
    feed = {"boxes": boxes, "scores": scores}
    actual = compute(load(made, tmp_path, feed), feed)
    counts = {}
    for (name, *_), rows, expected in zip(
        CASES.items(), actual, run_onnx_runtime(made, feed), strict=True
    ):
        np.testing.assert_array_equal(rows, expected, err_msg=name)
        counts[name] = len(rows)
    assert counts["nothing_is_above"] == counts["none_is_wanted"] == 0
    assert counts["everything_is_kept"] == BATCH * CLASSES * BOXES
    assert counts["few"] == BATCH * CLASSES * 5


def test_limits_may_be_computed(tmp_path: Path) -> None:
    """From constants, which are folded, and from inputs, which are read when it runs."""
    names = ["boxes", "scores", "limit", "overlap", "threshold"]
    nodes = [
        helper.make_node("Sub", ["largest", "some"], ["folded"]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "folded", "half"], ["all"]),
        helper.make_node("NonMaxSuppression", names, ["few"]),
    ]
    inputs = [value("boxes", [1, 9, 4]), value("scores", [1, 2, 9])]
    inputs += [value("limit", [1], "int64"), value("overlap", [1]), value("threshold", [1])]
    outputs = [value(name, [None, 3], "int64") for name in ("all", "few")]
    weights = constants(largest=[ALL_BOXES], some=[5], half=[0.5])
    made = model(nodes, inputs, outputs, weights)
    rng = np.random.default_rng(1)
    feed = {
        "boxes": rng.random((1, 9, 4), np.float32),
        "scores": rng.random((1, 2, 9), np.float32),
        **constants(limit=[2], overlap=[0.1], threshold=[0.3]),
    }
    loaded = load(made, tmp_path, feed)
    assert [spec.shape for spec in loaded.outputs] == [(18, 3), (18, 3)]
    for rows, expected in zip(compute(loaded, feed), run_onnx_runtime(made, feed), strict=True):
        np.testing.assert_array_equal(rows, expected)


def test_a_score_that_is_no_number_is_never_selected(tmp_path: Path) -> None:
    """ONNX Runtime does as it likes there without a threshold."""
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "limit"], ["rows"])
    inputs = [value("boxes", [1, 4, 4]), value("scores", [1, 1, 4])]
    made = model([node], inputs, [value("rows", [None, 3], "int64")], constants(limit=[9]))
    scores = np.array([[[np.nan, 0.5, -np.inf, np.inf]]], "float32")
    feed = {"boxes": np.arange(16, dtype="float32").reshape(1, 4, 4), "scores": scores}
    feed["boxes"][..., 2:] = feed["boxes"][..., :2] + 1
    (rows,) = compute(load(made, tmp_path, feed), feed)
    assert rows[:, 2].tolist() == [3, 1, 2]


def test_boxes_of_many_classes_are_selected_by_several_threads(tmp_path: Path) -> None:
    """Without a sort of all scores; equal ones, infinite ones and both zeros are in the order of the boxes."""
    node = helper.make_node(
        "NonMaxSuppression", ["boxes", "scores", "limit", "half", "least"], ["rows"]
    )
    inputs = [value("boxes", [2, 333, 4]), value("scores", [2, 9, 333])]
    limits = constants(limit=[40], half=[0.5], least=[-0.4])
    made = model([node], inputs, [value("rows", [None, 3], "int64")], limits)
    rng = np.random.default_rng(3)
    corners = rng.uniform(0, 200, (2, 333, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(1, 90, (2, 333, 2))], 2)
    scores = np.round(rng.normal(size=(2, 9, 333)) * 3).astype("float32") / 3
    scores[..., ::5], scores[..., 1::9], scores[..., 2::9] = -0.0, np.inf, -np.inf
    boxes[:, ::4] = boxes[:, :1]
    feed = {"boxes": boxes.astype("float32"), "scores": scores}
    loaded = load(made, tmp_path, feed)
    (rows,) = compute(loaded, feed)
    np.testing.assert_array_equal(rows, run_onnx_runtime(made, feed)[0])
    target = make_target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
    lowered = lowering.lower(loaded.mod, target, FAST).mod
    kernels = [name.name_hint for name in lowered.get_global_vars()]
    assert not any("sort" in name for name in kernels)
    (kernel,) = [lowered[name] for name in kernels if name.startswith("non_max_suppression")]
    assert "T.parallel" in kernel.script()


def test_a_selection_in_a_branch_is_refused(tmp_path: Path) -> None:
    """Its rows would not be counted, and the If would return another number of them than it says."""
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("NonMaxSuppression", ["boxes", "scores", "limit"], [name])],
            name,
            [],
            [helper.ValueInfoProto(name=name)],
        )
        for name in ("then", "else")
    }
    inputs = [value("boxes", [1, 4, 4]), value("scores", [1, 1, 4]), value("c", [], "bool")]
    node = helper.make_node("If", ["c"], ["rows"], **branches)
    made = model([node], inputs, [value("rows", [None, 3], "int64")], constants(limit=[2]))
    with pytest.raises(ImportFailed) as error:
        load(made, tmp_path)
    assert error.value.message == (
        "If (node with output 'rows') cannot be imported: NonMaxSuppression in a branch selects a "
        "number of boxes that is known only when it runs"
    )
    assert error.value.fix == "make it constant with inputs.c.value"
