"""Dynamically quantized models use int8 dot products, agree with ONNX Runtime, and keep their weights in bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx.helper import make_node as node
from tvm import relax

from tests.support.kernels import DOT_TARGETS, FAST, dot_target, kernels_of, level, outputs
from tests.support.onnx_models import draw, load, model, open_session, value
from tests.support.seeds import seeds
from tvmflow.compiler import lowering, schedules
from tvmflow.frontends.base import LoadedModel
from tvmflow.targets.tvm_target import make_target

Array = np.ndarray[Any, Any]
Target = Callable[[], dict[str, Any]]

TARGETS: dict[str, Target] = {
    **{flag: lambda flag=flag: dot_target(flag) for flag in DOT_TARGETS},  # type: ignore[misc]
    "no_dot_products": lambda: level("x86-64-v3"),
}
SEEDS = seeds(4, 19, 60)


def quantized(
    operator: str, shape: tuple[int, ...], weights: Array, zeros: Array | None, **attributes: Any
) -> onnx.ModelProto:
    """Return a product as `onnxruntime.quantization.quantize_dynamic` writes it, with a scale and a function behind it.

    The function is p·tanh(p): ONNX Runtime's sigmoid is inexact where it is near 0, which is all of some results.
    """
    constants: dict[str, Array] = {"w": weights, "ws": np.asarray(0.01, np.float32)}
    operands = ["q", "w", "z"]
    if zeros is not None:
        constants["wz"] = zeros
        operands.append("wz")
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        node(operator, operands, ["i"], **attributes),
        node("Cast", ["i"], ["f"], to=onnx.TensorProto.FLOAT),
        node("Mul", ["s", "ws"], ["scale"]),
        node("Mul", ["f", "scale"], ["p"]),
        node("Tanh", ["p"], ["g"]),
        node("Mul", ["p", "g"], ["y"]),
    ]
    return model(nodes, [value("x", shape)], [value("y", None)], constants)


def bytes_of(random: np.random.Generator, dtype: str, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max + 1, shape).astype(dtype)


def matrix_product(random: np.random.Generator) -> onnx.ModelProto:
    """Return a product with zero points of the weights that are left out, 0, in the middle, odd, or one a column."""
    rows = [int(n) for n in random.choice([1, 2, 7, 13, 37], int(random.integers(1, 3)))]
    depth, columns = (int(n) for n in random.choice([1, 4, 12, 31, 64, 96, 130], 2))
    dtype = str(random.choice(["int8", "uint8"]))
    middle = np.asarray(128 if dtype == "uint8" else 0, dtype)
    zeros = [None, np.zeros((), dtype), middle, np.asarray(9, dtype)]
    zeros += [np.zeros(columns, dtype), bytes_of(random, dtype, columns)]
    choice = zeros[int(random.integers(len(zeros)))]
    weights = bytes_of(random, dtype, depth, columns)
    return quantized("MatMulInteger", (*rows, depth), weights, choice)


def convolution(random: np.random.Generator) -> onnx.ModelProto:
    """Return a convolution of one to three axes: grouped, depthwise, dilated, padded unevenly."""
    rank = int(random.integers(1, 4))
    groups = int(random.choice([1, 1, 2, 5, 16]))
    inputs = groups * int(random.choice([1, 3, 8, 20]))
    results = groups * int(random.choice([1, 2, 9, 16]))
    dtype = str(random.choice(["int8", "uint8"]))
    zero = int(random.choice([0, 128 if dtype == "uint8" else 0, 3]))
    kernel = [int(n) for n in random.integers(1, 4, rank)]
    attributes = {
        "strides": [int(n) for n in random.integers(1, 3, rank)],
        "dilations": [int(n) for n in random.integers(1, 3, rank)],
        "group": groups,
    }
    padding = str(random.choice(["pads", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if padding == "pads":
        attributes["pads"] = [int(n) for n in random.integers(0, 3, 2 * rank)]
    else:
        # with dilation, ONNX Runtime refuses these
        attributes |= {"auto_pad": padding, "dilations": [1] * rank}
    size = [int(n) for n in random.choice([5, 7, 10, 13], rank)]
    weights = bytes_of(random, dtype, results, inputs // groups, *kernel)
    shape = (int(random.integers(1, 3)), inputs, *size)
    return quantized("ConvInteger", shape, weights, np.asarray(zero, dtype), **attributes)


def check(made: onnx.ModelProto, folder: Path, target: dict[str, Any], data: Array) -> LoadedModel:
    """Check that a model computes what ONNX Runtime computes."""
    loaded = load(made, folder, {"x": data})
    [actual] = outputs(loaded, {"x": data}, target)
    [expected] = open_session(made).run(None, {"x": data})
    largest = float(np.abs(expected).max()) or 1.0
    np.testing.assert_allclose(actual / largest, expected / largest, rtol=0, atol=1e-5)
    return loaded


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", [matrix_product, convolution])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_products_agree_with_onnxruntime(
    seed: int, kind: Any, target: str, tmp_path: Path
) -> None:
    random = np.random.default_rng(seed)
    made = kind(random)
    shape = [axis.dim_value for axis in made.graph.input[0].type.tensor_type.shape.dim]
    data = (draw(*shape, seed=seed) + random.choice([-2, 0, 2])).astype(np.float32)
    check(made, tmp_path, TARGETS[target](), data)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fill", [0.0, 1.0, -3.0, 1e-40, 1e30])
def test_data_of_one_value_agree_with_onnxruntime(fill: float, target: str, tmp_path: Path) -> None:
    """Their range is that from 0, and nothing at all if they are 0."""
    weights = bytes_of(np.random.default_rng(0), "int8", 16, 32)
    made = quantized("MatMulInteger", (3, 16), weights, None)
    check(made, tmp_path, TARGETS[target](), np.full((3, 16), fill, np.float32))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("operator", ["MatMulInteger", "ConvInteger"])
def test_bytes_are_multiplied_and_weights_stay_bytes(
    operator: str, dtype: str, tmp_path: Path
) -> None:
    shape, size = (
        ((64, 96), (1, 7, 64)) if operator == "MatMulInteger" else ((32, 16, 3), (1, 16, 20))
    )
    weights = bytes_of(np.random.default_rng(0), dtype, *shape)
    zeros = np.asarray(128 if dtype == "uint8" else 0, dtype)
    target = dot_target("avx512_vnni")
    loaded = check(quantized(operator, size, weights, zeros), tmp_path, target, draw(*size))
    names = kernels_of(loaded.mod, target)
    assert sum("quantized_" in name for name in names) == 1, names
    assert {str(array.dtype) for array in loaded.params.values()} == {dtype, "float32"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("depth", "columns"), [(3072, 32), (3071, 32), (3072, 5)])
def test_weights_near_their_zero_point_keep_their_digits(
    depth: int, columns: int, target: str, tmp_path: Path
) -> None:
    """Sums of the bytes themselves would be a hundred times as large as those of the differences."""
    random = np.random.default_rng(0)
    weights = {
        "w": random.integers(18, 24, (depth, columns), "uint8"),
        "z": np.asarray(0, np.uint8),
        "wz": np.asarray(20, np.uint8),
    }
    nodes = [
        node("MatMulInteger", ["x", "w", "z", "wz"], ["i"]),
        node("Cast", ["i"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    made = model(nodes, [value("x", (4, depth), "uint8")], [value("y", None)], weights)
    feed = {"x": random.integers(200, 256, (4, depth), "uint8")}
    [actual] = outputs(load(made, tmp_path, feed), feed, TARGETS[target]())
    [expected] = open_session(made).run(None, feed)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "shift", [0.5, 7.0, 300.0, np.arange(48.0), np.arange(64.0)[:, None]], ids=str
)
def test_only_integers_of_columns_are_subtracted_from_sums(shift: Any) -> None:
    """Of a module that no frontend makes: whatever is subtracted from weights, results are right."""
    random = np.random.default_rng(0)
    weights = random.integers(-20, 20, (64, 48), "int8")
    data = random.integers(0, 255, (5, 64), "uint8")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((5, 64), "uint8"))
    w = relax.Var("w", relax.TensorType((64, 48), "int8"))
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            scale, zero = relax.const(0.05, "float32"), relax.const(128, "uint8")
            real = builder.emit(relax.op.dequantize(x, scale, zero))
            wide = builder.emit(relax.op.astype(w, "float32"))
            shifted = builder.emit(relax.op.subtract(wide, relax.const(np.float32(shift))))
            result = builder.emit_output(relax.op.matmul(real, shifted))
        builder.emit_func_output(result)
    library = (
        lowering.lower(builder.get(), make_target(dot_target("avx512_vnni")), FAST)
        .schedule_untuned({"w": weights}, dot_target("avx512_vnni"), 1)
        .compile()
    )
    actual = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(data)).numpy()
    expected = (data.astype(np.float64) - 128) * 0.05 @ (weights - shift)
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("columns", [8, 16, 17, 24, 31, 40, 97])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_products_of_any_width_have_tiles(rows: int, columns: int, tmp_path: Path) -> None:
    """Columns that fill no vector are cut off in the registers."""
    weights = bytes_of(np.random.default_rng(0), "int8", 64, columns)
    target, data = dot_target("avx512_vnni"), draw(rows, 64)
    made = quantized("MatMulInteger", (rows, 64), weights, None)
    loaded = check(made, tmp_path, target, data)
    lowered = lowering.lower(loaded.mod, make_target(target), FAST).mod
    rules = schedules.schedule_untuned(lowered, target, 1).rules
    products = {name: rule for name, rule in rules.items() if "quantized_dense" in name}
    assert list(products.values()) == ["register_tiles"], rules


def test_products_with_one_quantized_tensor_convert_it_once(tmp_path: Path) -> None:
    """Queries, keys and values of a transformer are products of the same data."""
    random, names = np.random.default_rng(0), ("a", "b", "c")
    weights: dict[str, Array] = {name: bytes_of(random, "int8", 32, 48) for name in names}
    nodes = [node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])]
    for name in names:
        nodes += [
            node("MatMulInteger", ["q", name, "z"], [f"{name}i"]),
            node("Cast", [f"{name}i"], [f"{name}f"], to=onnx.TensorProto.FLOAT),
            node("Mul", [f"{name}f", "s"], [f"{name}y"]),
        ]
    results = [value(f"{name}y", None) for name in names]
    loaded = load(model(nodes, [value("x", (1, 9, 32))], results, weights), tmp_path)
    kernels = kernels_of(loaded.mod, level("x86-64-v3"))
    assert sum("dequantize" in name for name in kernels) == 1, kernels


@pytest.mark.parametrize("operator", ["MatMulInteger", "ConvInteger"])
def test_sums_that_nothing_converts_stay_exact(operator: str, tmp_path: Path) -> None:
    """An output of int32 is what the model defines, beyond 2²⁴ too."""
    depth = 2000
    shape, size = (
        ((depth, 8), (4, depth)) if operator == "MatMulInteger" else ((8, depth, 1), (1, depth, 4))
    )
    random = np.random.default_rng(0)
    made = model(
        [node(operator, ["x", "w"], ["y"])],
        [value("x", size, "uint8")],
        [value("y", None, "int32")],
        {"w": random.integers(100, 128, shape, "int8")},
    )
    feed = {"x": random.integers(200, 256, size, "uint8")}
    loaded = load(made, tmp_path, feed)
    [actual] = outputs(loaded, feed)
    [expected] = open_session(made).run(None, feed)
    assert expected.max() > 1 << 24
    np.testing.assert_array_equal(actual, expected)
