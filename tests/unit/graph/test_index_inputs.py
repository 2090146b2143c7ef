"""The scores of an index: found from the outputs of an imported model, in the order of computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.support.onnx_models import draw, load, model, value
from tvmflow.graph.index_inputs import find_indices, find_nodes_of

node = helper.make_node
LOGITS = [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["logits"])]


def list_indices(
    folder: Path, nodes: list[Any], *outputs: Any
) -> tuple[list[str], tuple[int, ...]]:
    """Return the nodes whose results go into an index, and the places of outputs that are one."""
    weights = {
        "w": draw(6, 5),
        "b": draw(5),
        "k": np.array([2]),
        "zero": np.array([0]),
        "half": np.array(0.5, np.float32),
        "table": draw(9, 5),
    }
    inputs = [value("x", [4, 6]), value("ids", [3], "int64")]
    loaded = load(model([*LOGITS, *nodes], inputs, list(outputs), weights), folder)
    main = loaded.mod["main"]
    indices = find_indices(main)
    names = find_nodes_of(main, indices.inputs, loaded.nodes)
    assert indices.selects == any(other.op_type == "Gather" for other in nodes if indices.inputs)
    return [names.get(var, "") for var in indices.inputs], indices.outputs


@pytest.mark.parametrize(
    ("nodes", "outputs", "expected"),
    [
        pytest.param(
            [node("ArgMax", ["logits"], ["best"], axis=1)],
            [value("best", [4, 1], "int64")],
            (["Add (logits)"], (0,)),
            id="argmax",
        ),
        pytest.param(
            [node("TopK", ["logits", "k"], ["top", "places"])],
            [value("top", [4, 2])],
            (["Add (logits)"], ()),
            id="the largest values alone",
        ),
        pytest.param(
            [node("Softmax", ["logits"], ["p"]), node("ArgMax", ["p"], ["best"], axis=1)],
            [value("p", [4, 5]), value("best", [4, 1], "int64")],
            ([], (1,)),
            id="the scores of the index are an output",
        ),
        pytest.param(
            [node("Greater", ["logits", "half"], ["is_high"])],
            [value("is_high", [4, 5], "bool")],
            (["Add (logits)"], (0,)),
            id="flags",
        ),
        pytest.param(
            [
                node("Greater", ["logits", "half"], ["is_high"]),
                node("Where", ["is_high", "logits", "half"], ["y"]),
            ],
            [value("y", [4, 5])],
            ([], ()),
            id="an activation with a threshold",
        ),
        pytest.param(
            [
                node("Relu", ["logits"], ["r"]),
                node("Neg", ["logits"], ["n"]),
                node("ArgMax", ["n"], ["at"], axis=1, keepdims=0),
                node("Gather", ["r", "at"], ["y"], axis=1),
            ],
            [value("y", [4, 4])],
            (["Neg (n)", "Relu (r)"], ()),
            id="selected values",
        ),
        pytest.param(
            [node("Gather", ["table", "ids"], ["y"])],
            [value("y", [3, 5])],
            ([], ()),
            id="a table of weights",
        ),
        pytest.param(
            [node("ArgMax", ["x"], ["best"], axis=1)],
            [value("best", [4, 1], "int64")],
            ([], (0,)),
            id="the index of an input",
        ),
        pytest.param(
            [node("Add", ["ids", "ids"], ["y"])],
            [value("y", [3], "int64")],
            ([], ()),
            id="integers of integers",
        ),
    ],
)
def test_what_goes_into_an_index_is_found(
    tmp_path: Path, nodes: list[Any], outputs: list[Any], expected: Any
) -> None:
    assert list_indices(tmp_path, nodes, *outputs) == expected
