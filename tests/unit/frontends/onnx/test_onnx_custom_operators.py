"""Operators of a recipe in an ONNX model: implemented by tensor expressions, TIR, or operators of Relax."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.mxnet_runs import compute
from tests.support.onnx_models import draw, model, save, specs, value
from tvmflow.core.errors import StageError
from tvmflow.custom_operators.loading import forget_operators
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel

frontend = FRONTENDS["onnx"]

HEAD = "from tvmflow.custom_operators import Tensor, operator\n@operator('Swish', domain='org.example')\n"
RELAX = """\
def swish(node, x):
    from tvm import relax
    beta = relax.const(node.attributes["beta"], "float32")
    return relax.op.multiply(x, relax.op.sigmoid(relax.op.multiply(beta, x)))
"""
TE = """\
def swish(node, x):
    from tvm import te, tirx
    beta = node.attributes["beta"]
    def compute(x):
        return te.compute(x.shape, lambda *i: x(*i) * tirx.sigmoid(x(*i) * tirx.const(beta, "float32")))
    return node.te(compute, x{schedule})
"""
SCHEDULE = """
def split(schedule):
    block = schedule.get_sblock("compute")
    loop = schedule.fuse(*schedule.get_loops(block))
    schedule.vectorize(schedule.split(loop, [None, 4])[1])
"""
TIR = """\
def swish(node, x):
    from tvm.script import tirx as T
    [(rows, columns), _] = node.inputs[0]
    beta = node.attributes["beta"]
    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer((rows, columns), "float32"), y: T.Buffer((rows, columns), "float32")):
        for i, j in T.grid(rows, columns):
            y[i, j] = x[i, j] * T.sigmoid(x[i, j] * T.float32(beta))
    return node.tir(kernel, x)
"""


@pytest.fixture(autouse=True)
def forget_modules() -> Iterator[None]:
    """Leave the process as it was."""
    yield
    forget_operators()


def swish_model() -> onnx.ModelProto:
    """A model that needs the shape of the operator's result for the one of its own."""
    nodes = [
        helper.make_node("Relu", ["x"], ["positive"]),
        helper.make_node("Swish", ["positive"], ["s"], name="act", domain="org.example", beta=1.5),
        helper.make_node("Shape", ["s"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
        helper.make_node("Add", ["s", "zeros"], ["y"]),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("org.example", 1)]
    return model(nodes, [value("x", (3, 8))], [value("y", None)], opset_imports=opsets)


def load(folder: Path, text: str, made: onnx.ModelProto | None = None) -> LoadedModel:
    path = folder / "own_swish.py"
    path.write_text(text)
    files = save(made or swish_model(), folder)
    return frontend.load({**files, "operator:own_swish.py": path}, ())


@pytest.mark.parametrize(
    "text",
    [
        HEAD + RELAX,
        HEAD + TE.format(schedule=""),
        SCHEDULE + HEAD + TE.format(schedule=", schedule=split"),
        HEAD + TIR,
    ],
    ids=["relax", "te", "schedule", "tir"],
)
def test_each_kind_of_implementation_computes_its_operator(tmp_path: Path, text: str) -> None:
    feed = {"x": draw(3, 8)}
    loaded = load(tmp_path, text)
    assert loaded.outputs[0].shape == (3, 8)
    positive = np.maximum(feed["x"], 0)
    [result] = compute(loaded, feed)
    np.testing.assert_allclose(result, positive / (1 + np.exp(-1.5 * positive)), rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return []",
            r"own_swish.py:2: the operator Swish \(org.example\) \(node 'act'\) returns 0 results for 1 outputs",
        ),
        ("return 3", r"returns no tensor for 's'"),
        (
            "from tvm import relax; return relax.op.astype(x, 'float16')",
            r"returns float16 for 's', which is float32 in the model",
        ),
        (
            "return node.c('pool.c', 'f', x, outputs=[])",
            r"own_swish.py:4: .*'pool.c' is not in `operators`",
        ),
        ("return node.tir(None, x)", r"own_swish.py:4: .*AttributeError"),
        ("return x + y", r"own_swish.py:4: .*NameError: name 'y' is not defined"),
    ],
)
def test_a_result_that_does_not_fit_is_refused(tmp_path: Path, body: str, message: str) -> None:
    made = swish_model()
    made.graph.value_info.append(value("s", (3, 8)))
    with pytest.raises(StageError, match=message):
        load(tmp_path, f"{HEAD}def swish(node, x):\n    {body}\n", made)


def test_a_kernel_for_other_shapes_is_refused(tmp_path: Path) -> None:
    text = HEAD + TIR.replace("[(rows, columns), _] = node.inputs[0]", "rows, columns = 2, 2")
    message = r"parameter 0 of its kernel is float32 \[2, 2\], and the tensor is float32 \[3, 8\]"
    with pytest.raises(StageError, match=message):
        load(tmp_path, text)


def test_an_operator_of_the_standard_can_be_implemented(tmp_path: Path) -> None:
    """Its implementation takes the place of TVM's."""
    made = model([helper.make_node("Neg", ["x"], ["y"])], [value("x", (4,))], [value("y", None)])
    text = "from tvmflow.custom_operators import operator\n@operator('Neg', domain='')\ndef neg(node, x):\n    return x - x\n"
    feed = {"x": draw(4)}
    [result] = compute(load(tmp_path, text, made), feed)
    np.testing.assert_array_equal(result, np.zeros(4, np.float32))


def test_an_operator_in_a_function_of_the_model_is_found(tmp_path: Path) -> None:
    """Functions are inlined, with what is in them."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("org.example", 1)]
    body = [helper.make_node("Swish", ["a"], ["b"], domain="org.example", beta=1.5)]
    function = helper.make_function("org.inner", "Twice", ["a"], ["b"], body, opsets)
    made = model(
        [helper.make_node("Twice", ["x"], ["y"], domain="org.inner")],
        [value("x", (3, 8))],
        [value("y", None)],
        opset_imports=[*opsets, helper.make_opsetid("org.inner", 1)],
        functions=[function],
    )
    feed = {"x": draw(3, 8)}
    [result] = compute(load(tmp_path, HEAD + RELAX, made), feed)
    np.testing.assert_allclose(result, feed["x"] / (1 + np.exp(-1.5 * feed["x"])), rtol=1e-5)


def test_the_refusal_of_an_unknown_operator_shows_how_to_implement_it(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"TVM has no operator org.example.Swish") as caught:
        frontend.load(save(swish_model(), tmp_path), specs({"x": draw(3, 8)}))
    assert "@operator('Swish', domain='org.example')" in caught.value.fix
    assert "docs/custom-operators.md" in caught.value.fix
