"""Einstein sums become matrix products with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import ModelProto, helper

from tests.support.kernels import FAST, host_level, kernels_of
from tests.support.onnx_models import agree, draw, load, model, value
from tvmflow.frontends.onnx.operators import rewrite_nodes

SIZES = {"b": 2, "g": 3, "h": 5, "i": 7, "j": 4, "d": 6, "k": 1}


def _einsum(equation: str, shapes: dict[str, tuple[int, ...]]) -> ModelProto:
    inputs = [value(name, shape) for name, shape in shapes.items()]
    node = helper.make_node("Einsum", list(shapes), ["y"], equation=equation)
    return model([node], inputs, [value("y", None)])


def _shapes(equation: str) -> dict[str, tuple[int, ...]]:
    operands = equation.replace(" ", "").partition("->")[0].split(",")
    return {f"x{n}": tuple(SIZES[label] for label in labels) for n, labels in enumerate(operands)}


@pytest.mark.parametrize(
    ("equation", "is_product"),
    [
        ("b g h i d, b g h j d -> b g h i j", True),
        ("bghij,bghjd->bghid", True),
        ("ij,jd->id", True),
        ("dj,ji->id", True),
        ("ib,bjd->djbi", True),
        ("bhid,hidj->bhj", True),
        ("bhid,hdij->bh", False),
        ("i,j->ij", True),
        ("i,i->i", True),
        ("bki,kj->bij", True),
        ("ij,jd->i", False),
        ("ii,id->id", False),
        ("bij->bji", False),
    ],
)
def test_sums_compute_what_onnx_runtime_does(
    equation: str, is_product: bool, tmp_path: Path
) -> None:
    """Products of two tensors have no einsum kernel; what is not a product keeps TVM's."""
    shapes = _shapes(equation)
    if equation == "ii,id->id":
        shapes["x0"] = (7, 7)
    feed = {name: draw(*shape, seed=len(name) + shape[0]) for name, shape in shapes.items()}
    made = _einsum(equation, shapes)
    agree(made, tmp_path, feed)
    names = kernels_of(load(made, tmp_path, feed).mod, host_level(), FAST)
    assert any("einsum" in name for name in names) != is_product


def test_sums_of_the_first_opset_with_them_are_products() -> None:
    """Opset 12 has no other rewrite; a model that cannot be converted may keep it."""
    made = _einsum("bik,bjk->bij", {"x0": (2, 3, 4), "x1": (2, 5, 4)})
    made.opset_import[0].version = 12
    assert [node.op_type for node in rewrite_nodes(made).graph.node] == ["Transpose", "MatMul"]
