"""Linear models, decision trees and preprocessing (ai.onnx.ml) agree with ONNX Runtime, or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.onnx_models import agree, draw, load, model, value
from tvmflow.core.errors import ImportFailed

ROWS = 6
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GT", "BRANCH_GTE", "BRANCH_EQ", "BRANCH_NEQ")
OPSETS: dict[str, Any] = {
    "opset_imports": [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
}


def single(operator: str, *, labelled: bool = False, **attributes: Any) -> onnx.ModelProto:
    """Return a model of one operator; a classifier also has scores."""
    names = ["y", "scores"] if labelled else ["y"]
    made = helper.make_node(operator, ["x"], names, domain="ai.onnx.ml", **attributes)
    outputs = [value("y", None, "int64" if labelled else "float32")]
    outputs += [value("scores", None)] if labelled else []
    return model([made], [value("x", [ROWS, 3])], outputs, **OPSETS)


def data() -> dict[str, Any]:
    """Return rows with values that equal thresholds and categories, NaN and infinities."""
    x = draw(ROWS, 3)
    x[0], x[1, 1], x[2] = (0.5, -0.25, 1.0), np.nan, (np.inf, -np.inf, 0.0)
    return {"x": x}


def trees(prefix: str, weights: Mapping[int, float], *, tracks: int = 0) -> dict[str, Any]:
    """Return two trees with all comparisons and one that is a leaf; `weights` is by column."""
    branch = {0: (1, 2), 1: (3, 4), 2: (5, 6)}
    rows = []
    for tree in range(2):
        for node in range(7):
            mode = MODES[tree * 3 + node] if node in branch else "LEAF"
            true, false = branch.get(node, (0, 0))
            rows.append(
                (tree, node, (tree + node) % 3, (0.5, -0.25, 1.0)[node % 3], mode, true, false)
            )
    rows.append((2, 0, 0, 0.0, "LEAF", 0, 0))
    names = "treeids nodeids featureids values modes truenodeids falsenodeids".split()
    nodes = {
        f"nodes_{n}": column
        for n, column in zip(names, map(list, zip(*rows, strict=True)), strict=True)
    }
    nodes["nodes_missing_value_tracks_true"] = [tracks] * len(rows)
    leaves = [(row[0], row[1], column) for row in rows if row[4] == "LEAF" for column in weights]
    entries = {
        f"{prefix}_{n}": list(c)
        for n, c in zip(("treeids", "nodeids", "ids"), zip(*leaves, strict=True), strict=True)
    }
    scale = [weights[column] * (1 + n) for n, (_, _, column) in enumerate(leaves)]
    return {**nodes, **entries, f"{prefix}_weights": scale}


@pytest.mark.parametrize("tracks", [0, 1])
@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE"])
def test_regression_trees(tmp_path: Path, aggregate: str, tracks: int) -> None:
    """Nodes compare in all ways; NaN goes to either side."""
    made = single(
        "TreeEnsembleRegressor",
        n_targets=2,
        aggregate_function=aggregate,
        base_values=[0.5, -1.0],
        **trees("target", {0: 1.0, 1: -0.5}, tracks=tracks),
    )
    agree(made, tmp_path, data())


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize(
    ("labels", "weights"),
    [
        ([3, 5, 9], {0: 0.01, 1: -0.02, 2: 0.015}),
        ([4, 7], {0: 0.01}),
        ([4, 7], {0: -0.01}),
        ([0, 1], {0: 0.02, 1: 0.01}),
    ],
)
def test_classification_trees(
    tmp_path: Path, labels: list[int], weights: dict[int, float], transform: str
) -> None:
    made = single(
        "TreeEnsembleClassifier",
        labelled=True,
        classlabels_int64s=labels,
        post_transform=transform,
        **trees("class", weights),
    )
    agree(made, tmp_path, data())


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("count", [1, 3])
def test_linear_classifiers(tmp_path: Path, count: int, transform: str) -> None:
    """One row of coefficients decides between two classes."""
    made = single(
        "LinearClassifier",
        labelled=True,
        classlabels_ints=[3, 5, 9][: max(count, 2)],
        coefficients=draw(count * 3).tolist(),
        intercepts=draw(count).tolist(),
        post_transform=transform,
    )
    agree(made, tmp_path, {"x": draw(ROWS, 3, seed=1)})


PREPROCESSING: Mapping[str, dict[str, Any]] = {
    "Scaler": {"offset": [1.0, 2.0, 3.0], "scale": [0.5, 2.0, 1.0]},
    "LinearRegressor": {"coefficients": draw(6).tolist(), "intercepts": [1.0, 2.0], "targets": 2},
    "Binarizer": {"threshold": 0.25},
    "Imputer": {"imputed_value_floats": [1.0, 2.0, 3.0], "replaced_value_float": float("nan")},
    "OneHotEncoder": {"cats_int64s": [0, 1, 5]},
}


@pytest.mark.parametrize("operator", PREPROCESSING)
def test_preprocessing(tmp_path: Path, operator: str) -> None:
    feed = {"x": np.nan_to_num(data()["x"], posinf=1.0)} if operator == "OneHotEncoder" else data()
    agree(single(operator, **PREPROCESSING[operator]), tmp_path, feed)


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_rows_of_zeros_are_not_normalized(tmp_path: Path, norm: str) -> None:
    x = draw(ROWS, 3)
    x[1] = 0
    agree(single("Normalizer", norm=norm), tmp_path, {"x": x})


def test_columns_are_selected(tmp_path: Path) -> None:
    select = helper.make_node("ArrayFeatureExtractor", ["x", "i"], ["y"], domain="ai.onnx.ml")
    weights = {"i": np.array([[2, 0]])}
    agree(
        model([select], [value("x", [4, 3])], [value("y", None)], weights, **OPSETS),
        tmp_path,
        {"x": draw(4, 3)},
    )
    agree(
        model([select], [value("x", [3])], [value("y", None)], weights, **OPSETS),
        tmp_path,
        {"x": draw(3)},
    )


def test_labels_of_text_are_refused(tmp_path: Path) -> None:
    made = single(
        "LinearClassifier", labelled=True, classlabels_strings=["a", "b"], coefficients=[1.0] * 6
    )
    with pytest.raises(ImportFailed, match="LinearClassifier is imported with numbers as labels"):
        load(made, tmp_path)


def test_trees_with_a_missing_or_repeated_node_are_refused(tmp_path: Path) -> None:
    """A child that does not exist, and a node that is its own descendant."""
    for child in (8, 0):
        attributes = trees("target", {0: 1.0})
        attributes["nodes_truenodeids"][1] = child
        with pytest.raises(ImportFailed, match="TreeEnsembleRegressor is imported with"):
            load(single("TreeEnsembleRegressor", **attributes), tmp_path)
