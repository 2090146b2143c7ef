"""The estimated share of the time of kernels without a schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import TensorProto, helper

from tests.support.kernels import host_level
from tests.support.onnx_models import load, model, value
from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.targets.tvm_target import make_target


def shares(rows: int, updates: int, tmp_path: Path) -> dict[str, float | None]:
    """Return the share of a scatter that reads the product of a matrix of 64 columns and weights."""
    nodes = [
        helper.make_node("MatMul", ["x", "x_t"], ["a"]),
        helper.make_node("ScatterElements", ["a", "i", "u"], ["y"], axis=1),
    ]
    inputs = [
        value("x", [rows, 64]),
        value("x_t", [64, rows]),
        helper.make_tensor_value_info("i", TensorProto.INT64, [rows, updates]),
        value("u", [rows, updates]),
    ]
    loaded = load(model(nodes, inputs, [value("y", [rows, rows])], {}), tmp_path)
    options = LoweringOptions(checks=False)
    lowered = lowering.lower(loaded.mod, make_target(host_level()), options)
    return lowered.estimate_shares(["scatter_elements"])


@pytest.mark.parametrize(("rows", "updates"), [(256, 1), (256, 256)])
def test_a_kernel_has_a_share_by_the_numbers_that_it_computes(
    rows: int, updates: int, tmp_path: Path
) -> None:
    """It copies its data and stores updates one by one; 16 products are computed in the time of one."""
    moved = rows * rows + rows * updates
    products = rows * rows * 64 / 16
    expected = moved / (moved + products)
    assert shares(rows, updates, tmp_path) == {"scatter_elements": pytest.approx(expected)}


def test_a_kernel_that_computes_few_numbers_has_no_share(tmp_path: Path) -> None:
    assert shares(64, 1, tmp_path) == {"scatter_elements": 0}
