"""Weights of 4 bits and of blocks agree with ONNX Runtime, stay in their bits, and refuse what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.helper import make_node as node

from tests.support.kernels import DOT_TARGETS, FAST, LEVELS, dot_target, kernels_of, level, outputs
from tests.support.onnx_models import Array, draw, load, model, value
from tests.support.seeds import seeds
from tvmflow.compiler import lowering
from tvmflow.core.errors import ImportFailed
from tvmflow.frontends.onnx._block_quantized import convert_block_quantized
from tvmflow.targets.tvm_target import make_target

TARGETS: dict[str, Callable[[], dict[str, Any]]] = {
    **{flag: lambda flag=flag: dot_target(flag) for flag in DOT_TARGETS},  # type: ignore[misc]
    **{mcpu: lambda mcpu=mcpu: level(mcpu) for mcpu in LEVELS},  # type: ignore[misc]
}
OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
SEEDS = seeds(4, 12, 40)


def product(
    random: np.random.Generator,
    rows: tuple[int, ...] = (1,),
    depth: int = 64,
    columns: int = 48,
    *,
    bits: int = 4,
    block: int = 32,
    zeros: str = "none",
    has_bias: bool = False,
    dtype: str = "float32",
    **attributes: int,
) -> onnx.ModelProto:
    """Return a `MatMulNBits` of `x`."""
    groups = -(-depth // block)
    size = block * bits // 8
    constants: dict[str, Array] = {
        "w": random.integers(0, 256, (columns, groups, size)).astype(np.uint8),
        "s": random.uniform(0.5, 1.5, columns * groups).astype(dtype) / np.asarray(16, dtype),
    }
    operands = ["x", "w", "s"]
    if zeros == "packed":
        count = columns * -(-groups * bits // 8)
        constants["z"] = random.integers(0, 256, count).astype(np.uint8)
    elif zeros == "float":
        constants["z"] = random.uniform(3, 12, columns * groups).astype(dtype)
    if zeros != "none":
        operands.append("z")
    if has_bias:
        constants["b"] = random.normal(size=columns).astype(dtype)
        operands = [*(operands if zeros != "none" else [*operands, ""]), "", "b"]
    attributes = {"K": depth, "N": columns, "bits": bits, "block_size": block, **attributes}
    nodes = [node("MatMulNBits", operands, ["y"], domain="com.microsoft", **attributes)]
    shape = (*rows, depth)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    data, result = (
        helper.make_tensor_value_info(name, kind, dims)
        for name, dims in (("x", shape), ("y", (*rows, columns)))
    )
    return model(nodes, [data], [result], constants, opset_imports=OPSETS)


def run_exactly(made: onnx.ModelProto, data: Array) -> list[Array]:
    """Return ONNX Runtime's results without its fusions, which round data to int8."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    results: list[Array] = session.run(None, {"x": data})
    return results


def check(
    made: onnx.ModelProto, folder: Path, target: dict[str, Any], data: Array, atol: float = 3e-6
) -> Any:
    """Check that a model computes what ONNX Runtime computes, relative to the largest number."""
    made.ir_version = 10
    loaded = load(made, folder, {"x": data})
    [actual] = outputs(loaded, {"x": data}, target)
    [expected] = run_exactly(made, data)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    largest = float(np.abs(expected.astype(np.float64)).max()) or 1.0
    np.testing.assert_allclose(actual / largest, expected / largest, rtol=0, atol=atol)
    return loaded


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", SEEDS)
def test_products_agree_with_onnxruntime(seed: int, target: str, tmp_path: Path) -> None:
    """Of 4 and 8 bits, any rows, blocks and zero points."""
    random = np.random.default_rng(seed)
    rows = tuple(int(n) for n in random.choice([1, 2, 3, 7, 13], int(random.integers(1, 3))))
    bits, block = int(random.choice([4, 4, 8])), int(random.choice([16, 32, 64, 128, 256]))
    depth, columns = (int(n) for n in random.choice([16, 40, 64, 72, 200, 256], 2))
    # ONNX Runtime has no others of 8 bits
    zeros = str(random.choice(["none", "packed", "float"][: 3 if bits == 4 else 2]))
    has_bias = bool(random.integers(2))
    made = product(
        random, rows, depth, columns, bits=bits, block=block, zeros=zeros, has_bias=has_bias
    )
    data = draw(*rows, depth, seed=seed) + np.float32(random.choice([0, 3]))
    check(made, tmp_path, TARGETS[target](), data, 1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_data_that_may_be_rounded_are_as_exact_as_onnxruntime_is(
    target: str, tmp_path: Path
) -> None:
    made = product(np.random.default_rng(3), (5,), 256, 80, accuracy_level=4)
    check(made, tmp_path, TARGETS[target](), draw(5, 256), 2e-2)


def test_float16_agrees_with_onnxruntime(tmp_path: Path) -> None:
    made = product(np.random.default_rng(3), (2,), 64, 33, dtype="float16", has_bias=True)
    check(made, tmp_path, level("x86-64-v4"), draw(2, 64).astype(np.float16), 2e-3)


def dequantized(
    random: np.random.Generator,
    dtype: str,
    shape: tuple[int, ...],
    *,
    axis: int,
    block: int,
    has_zeros: bool,
    reader: str,
    **attributes: int,
) -> onnx.ModelProto:
    """Return a model that reads dequantized weights: `MatMul`, `Gemm`, or `Gather` of integers in `x`."""
    kind = getattr(TensorProto, dtype.upper())
    numpy_type = np.dtype(getattr(ml_dtypes, dtype, dtype))
    low, high = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128), "uint8": (0, 256)}[dtype]

    def integers(*sizes: int) -> onnx.TensorProto:
        array = random.integers(low, high, sizes).astype(numpy_type)
        tensor = numpy_helper.from_array(array)
        assert tensor.data_type == kind
        return tensor

    sizes = list(shape)
    if block:
        sizes[axis] = -(-shape[axis] // block)
    else:
        sizes = [shape[axis]] if axis >= 0 else []
    weights, zeros = integers(*shape), integers(*sizes)
    weights.name, zeros.name = "w", "z"
    nodes = [
        node(
            "DequantizeLinear",
            ["w", "s", *(["z"] if has_zeros else [])],
            ["real"],
            axis=max(axis, 0),
            **({"block_size": block} if block else {}),
        ),
        node(reader, ["real", "x"] if reader == "Gather" else ["x", "real"], ["y"], **attributes),
    ]
    data = value("x", (5,), "int64")
    if reader != "Gather":
        data = value("x", (3, shape[1] if attributes.get("transB") else shape[0]))
    scales = random.uniform(0.01, 0.1, sizes).astype(np.float32)
    made = model(nodes, [data], [value("y", None)], {"s": scales}, opset_imports=OPSETS)
    made.graph.initializer.extend([weights, zeros] if has_zeros else [weights])
    return made


@pytest.mark.parametrize("reader", ["MatMul", "Gemm", "transposed", "Gather"])
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint8"])
@pytest.mark.parametrize("block", [0, 16, 24])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_dequantized_weights_agree_with_onnxruntime(
    reader: str, dtype: str, block: int, has_zeros: bool, tmp_path: Path
) -> None:
    """In blocks along either axis, or with a scale for each row or column."""
    random = np.random.default_rng(5)
    attributes = {"transB": 1} if reader == "transposed" else {}
    along_rows = reader in ("transposed", "Gather")
    axis = int(along_rows) if block else 1 - int(along_rows)
    name = "Gemm" if reader == "transposed" else reader
    made = dequantized(
        random,
        dtype,
        (48, 56),
        axis=axis,
        block=block,
        has_zeros=has_zeros,
        reader=name,
        **attributes,
    )
    if reader == "Gather":
        data = np.array([0, 47, 3, 3, 20], np.int64)
    else:
        data = draw(3, 56 if along_rows else 48)
    loaded = check(made, tmp_path, level("x86-64-v4"), data)
    kernels = " ".join(kernels_of(loaded.mod, level("x86-64-v4")))
    if block or dtype.endswith("int4"):
        assert ("grouped_take" if reader == "Gather" else "grouped_matmul") in kernels


def test_library_holds_weights_in_their_bits_once(tmp_path: Path) -> None:
    """Also where two products read them: a library of float32 would have eight times as many bytes."""
    random = np.random.default_rng(0)
    made = product(random, (1,), 256, 256)
    second = onnx.NodeProto()
    second.CopyFrom(made.graph.node[0])
    second.input[0], second.output[0] = "y", "second"
    made.graph.node.append(second)
    made.graph.output[0].name = "second"
    loaded = load(made, tmp_path)
    lowered = lowering.lower(loaded.mod, make_target(level("x86-64-v4")), FAST)
    size = sum(array.nbytes for array in lowered.compute_weights(loaded.params))
    assert size == 256 * 256 // 2 + 256 * 8 * 4


REFUSALS: dict[str, tuple[Callable[[onnx.ModelProto], Any], str]] = {
    "computed": (lambda made: made.graph.initializer.pop(0), "its B must be a constant"),
    "short": (
        lambda made: made.graph.initializer[0].CopyFrom(
            numpy_helper.from_array(np.zeros((48, 1, 16), np.uint8), "w")
        ),
        "B has 768 elements, and the other sizes need 1,536",
    ),
    "floats": (
        lambda made: made.graph.initializer[0].CopyFrom(
            numpy_helper.from_array(np.zeros((48, 2, 16), np.float32), "w")
        ),
        "B is float32, and must be uint8",
    ),
    "scales": (
        lambda made: made.graph.initializer[1].CopyFrom(
            numpy_helper.from_array(np.zeros(7, np.float32), "s")
        ),
        "scales has 7 elements, and the other sizes need 96",
    ),
    "block": (
        lambda made: _set(made, block_size=24),
        "block_size is 24, and must be a power of two",
    ),
    "negative": (lambda made: _set(made, block_size=-32), "block_size is -32"),
    "huge": (lambda made: _set(made, N=1 << 40), "N is 1099511627776"),
    "bits": (lambda made: _set(made, bits=3), "weights of 3 bits are not supported"),
    "prepacked": (lambda made: _set(made, weight_prepacked=1), "packed for one machine"),
    "order": (
        lambda made: made.graph.node[0].input.extend(["", "s"]),
        "g_idx, an order of its own for the weights, is not supported",
    ),
}


def _set(made: onnx.ModelProto, **attributes: int) -> None:
    for name, number in attributes.items():
        kept = [a for a in made.graph.node[0].attribute if a.name != name]
        del made.graph.node[0].attribute[:]
        made.graph.node[0].attribute.extend([*kept, helper.make_attribute(name, number)])


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    spoil, message = REFUSALS[case]
    made = product(np.random.default_rng(0))
    if case == "computed":
        made.graph.input.append(helper.make_tensor_value_info("w", TensorProto.UINT8, (48, 2, 16)))
    spoil(made)
    with pytest.raises(ImportFailed, match=message):
        load(made, tmp_path)


def test_scales_of_other_blocks_are_refused(tmp_path: Path) -> None:
    made = dequantized(
        np.random.default_rng(0),
        "int4",
        (48, 56),
        axis=0,
        block=16,
        has_zeros=False,
        reader="MatMul",
    )
    attribute = next(a for a in made.graph.node[0].attribute if a.name == "block_size")
    attribute.i = 32
    with pytest.raises(ImportFailed, match=r"needs scales \[2, 56\] here, and it has \[3, 56\]"):
        load(made, tmp_path)


@pytest.mark.parametrize("reader", ["MatMul", "Gather"])
def test_a_block_may_be_longer_than_a_row(reader: str, tmp_path: Path) -> None:
    """It takes the memory of the row, however long a file says that it is."""
    test_dequantized_weights_agree_with_onnxruntime(reader, "int4", 1 << 30, True, tmp_path)


def test_nodes_that_share_a_weight_share_what_it_becomes() -> None:
    """A small file becomes no large one, and each node is looked at once; constants of the model keep their names."""
    random = np.random.default_rng(0)
    made = dequantized(random, "int4", (48, 56), axis=0, block=16, has_zeros=True, reader="MatMul")
    taken = numpy_helper.from_array(np.zeros(3, np.float32), "real/packed-56x3x8")
    made.graph.initializer.append(taken)
    made.graph.output.append(value(taken.name, [3]))
    for number in range(2000):
        made.graph.node.add().CopyFrom(made.graph.node[0])
        made.graph.node[-1].output[0] = f"w{number}"
        made.graph.node.append(node("MatMul", ["x", f"w{number}"], [f"y{number}"]))
    converted = convert_block_quantized(made).graph
    read = {name for node in converted.node for name in node.input} | {taken.name}
    sizes = {t.name: [*t.dims] for t in converted.initializer if t.name in read}
    assert sizes == {
        "real/packed-56x3x8": [3],
        "real/packed-56x3x8_": [56, 3, 8],
        "real/scales-56x3": [56, 3],
        "real/zeros-56x3": [56, 3],
    }
