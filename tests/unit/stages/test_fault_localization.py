"""What the search for faults can compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import helper

from tests.support.detectors import constants
from tests.support.onnx_models import load, model, value
from tvmflow.stages.verify.fault_localization import list_tvmflow_operators


def test_operators_that_tvm_has_no_kernels_of_are_known_by_name(tmp_path: Path) -> None:
    """The imported model is not compiled by TVM's rules then, which ended with an internal error."""
    nodes = [
        helper.make_node("Relu", ["scores"], ["positive"]),
        helper.make_node("NonMaxSuppression", ["boxes", "positive", "limit"], ["rows"]),
    ]
    inputs = [value("boxes", [1, 4, 4]), value("scores", [1, 1, 4])]
    outputs = [value("rows", [None, 3], "int64"), value("positive", [1, 1, 4])]
    feed = {"boxes": np.zeros((1, 4, 4), "float32"), "scores": np.zeros((1, 1, 4), "float32")}
    made = model(nodes, inputs, outputs, constants(limit=[9]))
    assert list_tvmflow_operators(load(made, tmp_path, feed).mod) == ["non_max_suppression"]
    plain = model(nodes[:1], inputs[1:], outputs[1:], {})
    assert list_tvmflow_operators(load(plain, tmp_path, {"scores": feed["scores"]}).mod) == []
