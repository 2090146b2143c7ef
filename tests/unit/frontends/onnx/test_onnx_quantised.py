"""Quantised models: QuantizeLinear and DequantizeLinear around floating-point operators are taken, other forms refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from tests.support.kernels import FAST, host_level, kernels_of
from tests.support.mxnet_runs import compute
from tests.support.onnx_models import Array, classifier, draw, load, model, quantised, save, value
from tvmflow.errors import ImportFailed
from tvmflow.frontends import onnx as frontend
from tvmflow.stages import _lowering, _tolerances
from tvmflow.stages._judging import compare
from tvmflow.values import TensorSpec

FEED = {"data": draw(1, 3, 8, 8, seed=5)}
node = helper.make_node


def reference(made: Any, folder: Path) -> Array:
    """What the reference gives for FEED."""
    inputs = (TensorSpec("data", (1, 3, 8, 8), "float32"),)
    outputs = (TensorSpec("prob", (1, 4), "float32"),)
    (scratch := folder / "scratch").mkdir()
    with frontend.reference(
        save(made, folder), inputs, outputs, {}, threads=1, scratch=scratch
    ) as found:
        assert found.latency(FEED, repeat=1, min_seconds=0)[0] > 0
        return found.run(FEED)["prob"]


@pytest.mark.parametrize(("signed", "per_channel"), [(False, True), (False, False), (True, True)])
def test_a_quantised_model_agrees_with_the_reference(
    signed: bool, per_channel: bool, tmp_path: Path
) -> None:
    """Data of uint8 or int8, one scale for all weights or one for each channel."""
    made = quantised(classifier(), tmp_path, signed=signed, per_channel=per_channel)
    loaded = load(made, tmp_path)
    [ours] = compute(loaded, FEED)
    tolerance = _tolerances.DEFAULTS[_tolerances.QUANTISED]
    assert compare(ours, reference(made, tmp_path), tolerance)["passed"]


def test_weights_become_floats_when_the_library_is_built(tmp_path: Path) -> None:
    """They are imported as whole numbers; no kernel of the library turns them back."""
    loaded = load(quantised(classifier(), tmp_path), tmp_path)
    kinds = {name: str(array.dtype) for name, array in loaded.params.items()}
    mod, target = loaded.mod, host_level()
    folded = _lowering.fold_weights(mod, loaded.params, _lowering.make_target(target), FAST)
    assert set(kinds.values()) <= {"int8", "int32", "float32"}
    assert {str(each.dtype) for each in folded} == {"float32"}
    names = kernels_of(mod, target)
    assert not [name for name in names if name.startswith(("dequantize", "quantize"))]


def test_rounding_stays_on_blocked_layouts(tmp_path: Path) -> None:
    """Between two convolutions nothing is unpacked to be rounded: the first one does it in registers."""
    weights = {"v": draw(16, 3, 3, 3), "w": draw(16, 16, 3, 3)}
    nodes = [node("Conv", ["data", "v"], ["c"]), node("Conv", ["c", "w"], ["d"])]
    made = model(nodes, [value("data", [1, 3, 8, 8])], [value("d", None)], weights)
    names = kernels_of(load(quantised(made, tmp_path), tmp_path).mod, host_level())
    assert sum("unpack" in name for name in names) == 1
    assert any("conv2d_NCHWc" in name and "quantize" in name for name in names)


@pytest.mark.parametrize("operator", ["QLinearConv", "QLinearMatMul", "ConvInteger"])
def test_operators_on_whole_numbers_are_refused_by_name(operator: str, tmp_path: Path) -> None:
    """With the form that is taken instead."""
    made = model(
        [node(operator, ["data"], ["y"], name="q")],
        [value("data", [1, 4], "uint8")],
        [value("y", None)],
    )
    with pytest.raises(ImportFailed, match=f"TVM has no operator: {operator} \\(node 'q'\\)") as no:
        load(made, tmp_path)
    assert "QDQ" in no.value.fix
