"""Which branches of a model inputs take, by ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from tests.support.onnx_models import open_session
from tvmflow.frontends.onnx._exercises import observe_model

HALF = {"negative inputs": 0.5, "positive inputs": 0.25}
# x is -4, -1, 0, 2 and b true, false, false, false
OPERATORS = {
    "y = Relu(x)": ("Relu", HALF),
    "y = PRelu(x, s)": ("PRelu", HALF),
    "y = Abs(x)": ("Abs", HALF),
    "y = Selu(x)": ("Selu", HALF),
    "y = my.act(x)": ("LeakyRelu", HALF),
    "y = ThresholdedRelu<alpha=1.5>(x)": (
        "ThresholdedRelu",
        {"inputs below 1.5": 0.75, "inputs above 1.5": 0.25},
    ),
    "y = HardSwish(x)": (
        "HardSwish",
        {"inputs below -3": 0.25, "inputs above 3": 0.0, "inputs between its bounds": 0.75},
    ),
    "y = HardSigmoid<alpha=0.5, beta=0.5>(x)": (
        "HardSigmoid",
        {"inputs below -1": 0.25, "inputs above 1": 0.25, "inputs between its bounds": 0.5},
    ),
    "y = Clip(x, s)": (
        "Clip",
        {"inputs below its minimum": 0.5, "inputs within its bound": 0.5},
    ),
    "y = Clip(x, , t)": (
        "Clip",
        {"inputs above its maximum": 0.25, "inputs within its bound": 0.75},
    ),
    "y = Clip(x, s, t)": (
        "Clip",
        {
            "inputs below its minimum": 0.5,
            "inputs above its maximum": 0.25,
            "inputs between its bounds": 0.25,
        },
    ),
    "y = Max(s, x)": ("Max", {"inputs below its bound": 0.5, "inputs above its bound": 0.5}),
    "y = Where(b, x, s)": ("Where", {"true": 0.25, "false": 0.75}),
    "a = ReduceMax<keepdims=0>(x) c = Greater(a, t) y = If (c) <then_branch = t1 () => (o) { o = Neg(x) }, else_branch = e () => (o) { o = Exp(x) }>": (
        "If",
        {"true": 1.0, "false": 0.0},
    ),
}
# what inputs do not decide tells nothing of inputs
CONSTANT = {
    "h = Shape(x) d = Equal(h, h) e = Expand(s, h) n = Relu(e) y = Add(x, n)",
    "n = Relu(s) y = Add(x, n)",
    "y = Max(x, x)",
    "y = Sigmoid(x)",
}


def observe(body: str, x: list[float]) -> dict[str, tuple[str, dict[str, float]]]:
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20, "my" : 1]> g (float[4] x, bool[4] b) => (float[4] y) {{
        s = Constant<value = float {{-0.5}}>() t = Constant<value = float {{1.0}}>() {body} }}
        <domain: "my", opset_import: ["" : 20]> act (x) => (y) {{ y = LeakyRelu(x) }}"""
    )
    observed = observe_model(made, made)
    feed = {"x": np.array(x, np.float32), "b": np.array([True, False, False, False])}
    results = open_session(observed.model).run(observed.outputs, feed) if observed.nodes else []
    nodes = observed.read(dict(zip(observed.outputs, results, strict=True)))
    return {node: (operator, dict(branches)) for node, operator, branches in nodes}


@pytest.mark.parametrize("body", OPERATORS)
def test_shares_of_branches(body: str) -> None:
    assert observe(body, [-4, -1, 0, 2]) == {"y": OPERATORS[body]}


@pytest.mark.parametrize("body", sorted(CONSTANT))
def test_what_inputs_do_not_decide_is_not_observed(body: str) -> None:
    assert observe(body, [-4, -1, 0, 2]) == {}
