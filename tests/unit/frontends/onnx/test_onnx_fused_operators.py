"""Operators into which ONNX Runtime's optimizer fuses others agree with it, in models that it saved and alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from tests.support.kernels import outputs
from tests.support.onnx_models import Array, agree, draw, load, model, value
from tests.support.random_networks.judging import run_reference
from tvmflow.core.errors import ImportFailed
from tvmflow.frontends.onnx.operators import OPERATORS

OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
IMAGE = (1, 4, 9, 9)
ROWS = (2, 5, 16)
random = np.random.default_rng(0)
BYTES = random.integers(-128, 128, (16, 24), np.int8)
COLUMNS = draw(24, seed=1)
SCALES = np.abs(draw(24, seed=2)) / 100


def fused(
    operator: str,
    operands: list[str],
    weights: dict[str, Any],
    shape: tuple[int, ...] = ROWS,
    *,
    domain: str = "com.microsoft",
    results: tuple[str, ...] = ("y",),
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one node, which reads `x`."""
    node = helper.make_node(operator, operands, results, domain=domain, **attributes)
    constants = {name: np.asarray(weight) for name, weight in weights.items()}
    outputs = [value(name, None) for name in results if name]
    return model([node], [value("x", shape)], outputs, constants, opset_imports=OPSETS)


CASES = {
    "product": fused("FusedMatMul", ["x", "w"], {"w": draw(16, 24)}, alpha=0.3),
    "transposed": fused("FusedMatMul", ["x", "w"], {"w": draw(24, 16)}, transB=1),
    "both": fused("FusedMatMul", ["x", "w"], {"w": draw(2, 7, 5)}, transA=1, transB=1),
    "batch": fused("FusedMatMul", ["x", "w"], {"w": draw(5, 16, 3)}, transBatchA=1),
    "batch_and_both": fused(
        "FusedMatMul", ["x", "w"], {"w": draw(3, 2, 5)}, transA=1, transBatchB=1, transB=1
    ),
    "gemm": fused(
        "FusedGemm",
        ["x", "w", "b"],
        {"w": draw(24, 16), "b": COLUMNS},
        (5, 16),
        transB=1,
        alpha=0.5,
        activation="LeakyRelu",
        activation_alpha=0.2,
    ),
    "scaled_tanh": fused(
        "FusedGemm",
        ["x", "w"],
        {"w": draw(16, 24)},
        (5, 16),
        activation="ScaledTanh",
        activation_alpha=0.7,
        activation_beta=0.4,
    ),
    "softplus": fused(
        "FusedGemm",
        ["x", "w", "b"],
        {"w": draw(16, 24), "b": COLUMNS},
        (5, 16),
        activation="ParametricSoftplus",
        activation_alpha=0.7,
        activation_beta=0.4,
    ),
    "relu": fused(
        "FusedConv", ["x", "w"], {"w": draw(8, 4, 3, 3)}, IMAGE, pads=[1] * 4, activation="Relu"
    ),
    "clip": fused(
        "FusedConv",
        ["x", "w", "b", "z"],
        {"w": draw(8, 4, 1, 1), "b": draw(8), "z": draw(1, 8, 9, 9)},
        IMAGE,
        activation="Clip",
        activation_params=[-0.5, 1.0],
    ),
    "hard_sigmoid": fused(
        "FusedConv",
        ["x", "w"],
        {"w": draw(4, 1, 3, 3)},
        IMAGE,
        group=4,
        activation="HardSigmoid",
        activation_params=[0.3, 0.4],
    ),
    "plain_convolution": fused("FusedConv", ["x", "w"], {"w": draw(8, 4, 3, 3)}, IMAGE),
    "gelu": fused("QuickGelu", ["x"], {}),
    "sharp_gelu": fused("QuickGelu", ["x"], {}, alpha=3.0),
    "norm": fused(
        "SimplifiedLayerNormalization", ["x", "g"], {"g": draw(16)}, domain="", epsilon=1e-3
    ),
    "norm_of_axes": fused(
        "SimplifiedLayerNormalization",
        ["x", "g"],
        {"g": draw(5, 16)},
        domain="",
        axis=1,
        results=("y", "inverse"),
    ),
    "skip_norm": fused(
        "SkipSimplifiedLayerNormalization",
        ["x", "s", "g"],
        {"s": draw(*ROWS), "g": draw(16)},
        results=("y", "", "", "sum"),
    ),
    "skip_norm_with_bias": fused(
        "SkipSimplifiedLayerNormalization",
        ["x", "s", "g", "b"],
        {"s": draw(*ROWS), "g": draw(16), "b": draw(16)},
        results=("y", "", "", "sum"),
    ),
    "quantized": fused("DynamicQuantizeMatMul", ["x", "w", "s"], {"w": BYTES, "s": SCALES}),
    "quantized_with_bias": fused(
        "DynamicQuantizeMatMul",
        ["x", "w", "s", "z", "b"],
        {"w": BYTES, "s": np.float32(0.01), "z": np.int8(0), "b": COLUMNS},
    ),
    "quantized_without_zero": fused(
        "DynamicQuantizeMatMul", ["x", "w", "s", "", "b"], {"w": BYTES, "s": SCALES, "b": COLUMNS}
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_operators_agree_with_onnxruntime(case: str, tmp_path: Path) -> None:
    made = CASES[case]
    shape = [axis.dim_value for axis in made.graph.input[0].type.tensor_type.shape.dim]
    agree(made, tmp_path, {"x": draw(*shape, seed=7)})


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize(
    ("operator", "domain", "attributes"),
    [
        ("FusedMatMul", "com.microsoft", {"alpha": 0.3}),
        ("QuickGelu", "com.microsoft", {}),
        ("SimplifiedLayerNormalization", "", {}),
    ],
)
def test_other_floats_agree_with_onnxruntime(
    operator: str, domain: str, attributes: dict[str, Any], dtype: type, tmp_path: Path
) -> None:
    """A second node reads what the first computes, whose type no inference knows. Squares of 400 are not float16."""
    name = np.dtype(dtype).name
    more = [] if operator == "QuickGelu" else ["w"]
    shape = (16, 16) if operator == "FusedMatMul" else (16,)
    weights: dict[str, Array] = {"w": (draw(*shape) / 4).astype(dtype)} if more else {}
    nodes = [
        helper.make_node(operator, ["x", *more], ["h"], domain=domain, **attributes),
        helper.make_node(operator, ["h", *more], ["y"], domain=domain, **attributes),
    ]
    made = model(
        nodes,
        [value("x", (3, 16), name)],
        [value("y", None, name)],
        weights,
        opset_imports=OPSETS,
    )
    data: Array = (400 * draw(3, 16)).astype(dtype)
    [actual] = outputs(load(made, tmp_path), {"x": data})
    [expected] = run_reference(made, {"x": data})
    assert actual.dtype == dtype
    bound = 2e-3 if dtype is np.float16 else 1e-10
    np.testing.assert_allclose(actual, expected, rtol=bound, atol=bound * np.abs(expected).max())


@pytest.mark.parametrize(("data", "scale"), [("float16", "float32"), ("float64", "float64")])
def test_norms_result_in_the_type_of_their_scale(data: str, scale: str, tmp_path: Path) -> None:
    """And in one of float32."""
    nodes = [
        helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["n", "inverse"]),
        helper.make_node("Add", ["n", "g"], ["y"]),
    ]
    made = model(
        nodes,
        [value("x", (3, 16), data)],
        [value("y", None, scale), value("inverse", None)],
        {"g": draw(16).astype(scale)},
        opset_imports=OPSETS,
    )
    feed: dict[str, Array] = {"x": (400 * draw(3, 16)).astype(data)}
    for actual, expected in zip(
        outputs(load(made, tmp_path), feed), run_reference(made, feed), strict=True
    ):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("opset", [14, 17])
def test_a_norm_whose_types_only_fused_operators_give(opset: int, tmp_path: Path) -> None:
    """Squares of float16 would be infinite."""
    nodes = [
        helper.make_node("FusedMatMul", ["x", "w"], ["m"], domain="com.microsoft"),
        helper.make_node("ReduceMax", ["m"], ["g"], axes=[0], keepdims=0),
        helper.make_node("SimplifiedLayerNormalization", ["m", "g"], ["y"]),
    ]
    versions = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    made = model(
        nodes,
        [value("x", (3, 16), "float16"), value("w", (16, 16), "float16")],
        [value("y", None, "float16")],
        opset_imports=versions,
    )
    feed: dict[str, Array] = {
        "x": (40 * draw(3, 16)).astype(np.float16),
        "w": (40 * draw(16, 16, seed=1)).astype(np.float16),
    }
    [actual] = outputs(load(made, tmp_path), feed)
    [expected] = run_reference(made, feed)
    np.testing.assert_allclose(actual, expected, rtol=5e-3, atol=5e-3 * np.abs(expected).max())


@pytest.mark.parametrize("opset", [14, 17])
def test_many_fused_operators_in_a_row(opset: int, tmp_path: Path) -> None:
    """Each gives the next its shape and type."""
    nodes, name = [], "x"
    for layer in range(24):
        nodes += [
            helper.make_node(
                "FusedMatMul", [name, name], [f"m{layer}"], domain="com.microsoft", transB=1
            ),
            helper.make_node("QuickGelu", [f"m{layer}"], [f"g{layer}"], domain="com.microsoft"),
            helper.make_node("Softmax", [f"g{layer}"], [f"s{layer}"]),
        ]
        name = f"s{layer}"
    versions = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    made = model(nodes, [value("x", (5, 5))], [value(name, None)], opset_imports=versions)
    agree(made, tmp_path, {"x": draw(5, 5)})


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_bytes_as_float_agree_with_onnxruntime(bias: bool, tmp_path: Path) -> None:
    operands = ["x", "w", "a", "s", "p", "z", *(["b"] if bias else [])]
    constants: dict[str, Array] = {
        **{"w": BYTES, "a": np.asarray(0.02, np.float32), "s": SCALES, "b": COLUMNS},
        **{"p": np.asarray(100, np.uint8), "z": np.zeros(24, np.int8)},
    }
    node = helper.make_node("MatMulIntegerToFloat", operands, ["y"], domain="com.microsoft")
    made = model(
        [node], [value("x", ROWS, "uint8")], [value("y", None)], constants, opset_imports=OPSETS
    )
    agree(made, tmp_path, {"x": random.integers(0, 256, ROWS, np.uint8)})


def test_a_model_that_onnxruntime_optimized_and_saved(tmp_path: Path) -> None:
    """Convolutions with activations, products with scales, and dynamic quantization, as its optimizer fuses them."""
    weights = {
        **{"c": draw(8, 4, 3, 3), "w": BYTES, "ws": np.asarray(0.01, np.float32)},
        **{"v": draw(24, 24), "half": np.asarray(0.5, np.float32), "b": COLUMNS},
        "rows": np.array([18, 16], np.int64),
    }
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "c"], ["c1"], pads=[1, 1, 1, 1], strides=[3, 3]),
        node("LeakyRelu", ["c1"], ["c2"], alpha=0.1),
        node("Reshape", ["c2", "rows"], ["r"]),
        node("DynamicQuantizeLinear", ["r"], ["q", "s", "z"]),
        node("MatMulInteger", ["q", "w", "z"], ["i"]),
        node("Cast", ["i"], ["f"], to=onnx.TensorProto.FLOAT),
        node("Mul", ["s", "ws"], ["scale"]),
        node("Mul", ["f", "scale"], ["p"]),
        node("Add", ["p", "b"], ["a"]),
        node("Transpose", ["a"], ["t"], perm=[1, 0]),
        node("MatMul", ["v", "t"], ["m"]),
        node("Mul", ["m", "half"], ["y"]),
    ]
    shape = (1, 4, 36, 9)
    plain = model(nodes, [value("x", shape)], [value("y", None)], weights)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(plain.SerializeToString(), options)
    optimized = onnx.load(tmp_path / "optimized.onnx")
    fused_here = {node.op_type for node in optimized.graph.node if node.domain == "com.microsoft"}
    assert fused_here >= {"FusedConv", "FusedMatMul"}
    assert fused_here & {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
    agree(optimized, tmp_path, {"x": draw(*shape)})


def test_every_fused_operator_is_tested() -> None:
    tested = {node.op_type for made in CASES.values() for node in made.graph.node}
    fused_operators = {name for name, entry in OPERATORS.items() if entry.format == "fused"}
    assert fused_operators - tested == {"MatMulIntegerToFloat", "TransposeMatMul"}


def test_what_is_not_rewritten_is_refused_by_name(tmp_path: Path) -> None:
    made = fused(
        "SkipSimplifiedLayerNormalization",
        ["x", "s", "g"],
        {"s": draw(*ROWS), "g": draw(16)},
        results=("y", "mean"),
    )
    with pytest.raises(ImportFailed, match="SkipSimplifiedLayerNormalization"):
        agree(made, tmp_path, {"x": draw(*ROWS)})
