"""Quantized models: QuantizeLinear and DequantizeLinear around floating-point operators are taken, other forms refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper
from tvm import relax

from tests.support.kernels import FAST, host_level, kernels_of
from tests.support.mxnet_runs import compute
from tests.support.onnx_models import Array, agree, classifier, draw, load, model, quantized, value
from tvmflow.compiler import lowering
from tvmflow.core.errors import ImportFailed
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.base import LoadedModel
from tvmflow.stages.verify import comparison
from tvmflow.stages.verify.comparison import compare
from tvmflow.stages.verify.verdict import QUANTIZED
from tvmflow.targets.tvm_target import make_target

frontend = FRONTENDS["onnx"]

FEED = {"data": draw(1, 3, 8, 8, seed=5)}
node = helper.make_node


def reference(loaded: LoadedModel, folder: Path, feed: dict[str, Array]) -> Array:
    """What the reference gives for the model in a folder."""
    (scratch := folder / "scratch").mkdir()
    files = {"model": folder / "model.onnx"}
    with frontend.reference(
        files, loaded.inputs, loaded.outputs, threads=1, scratch=scratch
    ) as running:
        assert running.latency(feed, repeat=1, min_seconds=0)[0] > 0
        return running.run(feed)["prob"]


def agrees(actual: Array, expected: Array) -> bool:
    """As closely as a quantized model can."""
    tolerance = comparison.DEFAULTS[QUANTIZED]
    return bool(compare(actual, expected, tolerance)["passed"])


@pytest.mark.parametrize(("signed", "per_channel"), [(False, True), (False, False), (True, True)])
def test_a_quantized_model_agrees_with_the_reference(
    signed: bool, per_channel: bool, tmp_path: Path
) -> None:
    """Data of uint8 or int8, one scale for all weights or one for each channel, with 0 in their middle or not."""
    made = quantized(
        classifier(), tmp_path, signed=signed, per_channel=per_channel, symmetric=not signed
    )
    loaded = load(made, tmp_path)
    [actual] = compute(loaded, FEED)
    assert agrees(actual, reference(loaded, tmp_path, FEED))


def test_weights_stay_integers(tmp_path: Path) -> None:
    """Also in the library, where their scales are applied to sums."""
    weights = {
        "a": draw(16, 16, 1, 1),
        "b": draw(16, 1, 3, 3),
        "c": draw(96, 16, 1, 1),
        "d": draw(24, 96, 3, 3),
        "e": draw(24, 48),
        "f": draw(32, 48),
    }
    nodes = [
        node("Conv", ["data", "a"], ["t"]),
        node("Conv", ["t", "b"], ["u"], group=16),
        node("Conv", ["u", "c"], ["v"]),
        node("Conv", ["v", "d"], ["w"], pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["w"], ["x"]),
        node("Flatten", ["x"], ["y"]),
        node("MatMul", ["y", "e"], ["z"]),
        node("Gemm", ["z", "f"], ["prob"], transB=1),
    ]
    inputs, outputs = [value("data", [1, 16, 24, 24])], [value("prob", [1, 32])]
    made = quantized(model(nodes, inputs, outputs, weights), tmp_path)
    loaded = load(made, tmp_path)
    assert {str(array.dtype) for array in loaded.params.values()} == {"int8"}
    mod, target = loaded.mod, host_level()
    options = replace(FAST, winograd=0)
    lowered = lowering.lower(mod, make_target(target), options)
    folded = lowered.compute_weights(loaded.params)
    assert {str(item.dtype) for item in folded if item.ndim > 1} == {"int8"}
    names = kernels_of(mod, target, options)
    assert not [name for name in names if name.startswith("dequantize")]
    library = (
        lowering.lower(mod, make_target(target), options)
        .schedule_untuned(loaded.params, target, 1)
        .compile()
    )
    feed = {"data": draw(1, 16, 24, 24, seed=5)}
    actual = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(feed["data"]))
    assert agrees(actual.numpy(), reference(loaded, tmp_path, feed))


def test_rounding_stays_on_blocked_layouts(tmp_path: Path) -> None:
    """Between two convolutions the layout is kept: the first one rounds in registers."""
    weights = {"v": draw(16, 3, 3, 3), "w": draw(16, 16, 3, 3)}
    nodes = [node("Conv", ["data", "v"], ["c"]), node("Conv", ["c", "w"], ["d"])]
    made = model(nodes, [value("data", [1, 3, 8, 8])], [value("d", None)], weights)
    names = kernels_of(load(quantized(made, tmp_path), tmp_path).mod, host_level())
    assert sum("unpack" in name for name in names) == 1
    assert any("conv2d_NCHWc" in name and "rounded" in name for name in names)


@pytest.mark.parametrize("signed", [True, False])
def test_quantized_values_that_are_dequantized_at_once_are_rounded(
    signed: bool, tmp_path: Path
) -> None:
    """With the results of the way there and back: at both ends of the range, at ties, for large numbers and infinities."""
    ties = (np.arange(-300, 300, dtype=np.float32) + np.float32(0.5)) * np.float32(0.01)
    far = np.array([np.inf, -np.inf, 1e30, -1e30, 0, -0.0, 2.55, -1.28], np.float32)
    feed = {"data": np.concatenate([ties, far, draw(600, seed=3) * 2])}
    scales = {"s": np.float32(0.01), "z": (np.int8 if signed else np.uint8)(7)}
    weights = {name: np.asarray(item) for name, item in scales.items()}
    nodes = [
        node("QuantizeLinear", ["data", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    dtype = TensorProto.INT8 if signed else TensorProto.UINT8
    whole = helper.make_tensor_value_info("q", dtype, None)
    results = []
    for others in ([], [whole]):
        inputs, outputs = [value("data", [len(feed["data"])])], [value("y", None), *others]
        loaded = load(model(nodes, inputs, outputs, weights), tmp_path)
        names = kernels_of(loaded.mod, host_level())
        assert any("quantize" in name for name in names) == bool(others)
        results.append(compute(loaded, feed)[0])
    assert np.array_equal(results[0], results[1])


def every_operator() -> onnx.ModelProto:
    """Return a model of all operators that ONNX Runtime makes QOperators of."""
    weights = {
        "a": draw(16, 3, 3, 3),
        "bias": draw(16),
        "b": draw(16, 1, 3, 3, seed=1),
        "c": draw(24, 12, seed=2),
        "d": draw(10, 12, seed=3),
        "e": draw(10, seed=4),
    }
    nodes = [
        node("Conv", ["data", "a", "bias"], ["x1"], pads=[1] * 4),
        node("Sigmoid", ["x1"], ["x2"]),
        node("Mul", ["x1", "x2"], ["x3"]),
        node("Conv", ["x3", "b"], ["x4"], group=16, strides=[2, 2]),
        node("LeakyRelu", ["x4"], ["x5"], alpha=0.3),
        node("MaxPool", ["x5"], ["x6"], kernel_shape=[3, 3], pads=[1] * 4),
        node("Add", ["x5", "x6"], ["x7"]),
        node("AveragePool", ["x7"], ["x8"], kernel_shape=[3, 3], pads=[1] * 4),
        node("Concat", ["x7", "x8"], ["x9"], axis=1),
        node("GlobalAveragePool", ["x9"], ["x10"]),
        node("Flatten", ["x10"], ["x11"]),
        node("Slice", ["x11", "zero", "length", "one"], ["x12"]),
        node("MatMul", ["x12", "c"], ["x13"]),
        node("Gemm", ["x13", "d", "e"], ["x14"], transB=1),
        node("Softmax", ["x14"], ["prob"], axis=1),
    ]
    shapes = {
        name: np.array([size], np.int64) for name, size in (("zero", 0), ("length", 24), ("one", 1))
    }
    return model(nodes, [value("data", [1, 3, 8, 8])], [value("prob", [1, 10])], {**weights, **shapes})  # fmt: skip


@pytest.mark.parametrize(("signed", "per_channel"), [(False, True), (False, False), (True, True)])
def test_qoperators_agree_with_the_reference(
    signed: bool, per_channel: bool, tmp_path: Path
) -> None:
    """Convolutions, products, sums, activations and pooling; weights stay int8."""
    made = quantized(
        every_operator(), tmp_path, signed=signed, per_channel=per_channel, qoperators=True
    )
    operators = {node.op_type for node in made.graph.node}
    assert {
        *("QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearConv"),
        *("QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMatMul", "QLinearMul"),
        *("QLinearSigmoid", "QLinearSoftmax"),
    } <= operators
    loaded = load(made, tmp_path)
    assert sum(str(array.dtype) == "int8" for array in loaded.params.values()) == 4
    [actual] = compute(loaded, FEED)
    assert agrees(actual, reference(loaded, tmp_path, FEED))


@pytest.mark.parametrize("operator", ["QLinearConv", "QLinearMatMul"])
def test_integer_operators_are_rejected_by_name(operator: str, tmp_path: Path) -> None:
    """The fix names the supported format."""
    made = model(
        [node(operator, ["data"], ["y"], name="q")],
        [value("data", [1, 4], "uint8")],
        [value("y", None)],
    )
    with pytest.raises(ImportFailed, match=f"TVM has no operator {operator} \\(node 'q'\\)") as no:
        load(made, tmp_path)
    assert "QDQ" in no.value.fix


def test_padding_with_a_quantized_number(tmp_path: Path) -> None:
    """The quantizer puts a DequantizeLinear before each float, also before that which pads."""
    weights: dict[str, Array] = {
        "pads": np.array([0, 0, 1, 2, 0, 0, 2, 1], np.int64),
        "n": np.asarray(70, np.int8),
        "s": np.asarray(0.05, np.float32),
        "z": np.asarray(-10, np.int8),
    }
    nodes = [
        node("DequantizeLinear", ["n", "s", "z"], ["number"]),
        node("Pad", ["data", "pads", "number"], ["prob"]),
    ]
    made = model(nodes, [value("data", [1, 3, 8, 8])], [value("prob", None)], weights)
    agree(made, tmp_path, FEED)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_number_of_eight_bits_that_is_no_integer(dtype: str, tmp_path: Path) -> None:
    number = np.asarray(0.4375, getattr(ml_dtypes, dtype))
    nodes = [
        node("DequantizeLinear", ["n", "s"], ["number"]),
        node("Add", ["data", "number"], ["prob"]),
    ]
    weights = {"n": number, "s": np.asarray(2, np.float32)}
    shape = [1, 3, 8, 8]
    made = model(nodes, [value("data", shape)], [value("prob", None)], weights, opset=21)
    [actual] = compute(load(made, tmp_path), FEED)
    np.testing.assert_array_equal(actual, FEED["data"] + np.float32(0.875))


def test_a_number_in_another_type_than_its_scale(tmp_path: Path) -> None:
    nodes = [
        node("DequantizeLinear", ["n", "s"], ["number"], output_dtype=TensorProto.FLOAT16),
        node("Cast", ["data"], ["half"], to=TensorProto.FLOAT16),
        node("Mul", ["half", "number"], ["product"]),
        node("Cast", ["product"], ["prob"], to=TensorProto.FLOAT),
    ]
    weights: dict[str, Array] = {"n": np.asarray(5, np.int8), "s": np.asarray(0.5, np.float32)}
    shape = [1, 3, 8, 8]
    made = model(nodes, [value("data", shape)], [value("prob", None)], weights, opset=23)
    [actual] = compute(load(made, tmp_path), FEED)
    np.testing.assert_allclose(actual, FEED["data"] * 2.5, rtol=2e-3)


def test_a_number_that_is_large_before_its_scale(tmp_path: Path) -> None:
    """A difference of 100,000 is not a float16."""
    nodes = [
        node("DequantizeLinear", ["n", "s"], ["number"]),
        node("Cast", ["number"], ["real"], to=TensorProto.FLOAT),
        node("Add", ["data", "real"], ["prob"]),
    ]
    weights: dict[str, Array] = {
        "n": np.asarray(100_000, np.int32),
        "s": np.asarray(1e-3, np.float16),
    }
    shape = [1, 3, 8, 8]
    made = model(nodes, [value("data", shape)], [value("prob", None)], weights, opset=19)
    [actual] = compute(load(made, tmp_path), FEED)
    np.testing.assert_allclose(actual, FEED["data"] + 100.06, rtol=1e-3)
