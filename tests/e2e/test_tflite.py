"""TFLite files, from a recipe to a library that agrees with LiteRT; without LiteRT, what the command says."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import tvmflow
from tests.support.kernels import outputs as compute
from tests.support.onnx_models import specs
from tests.support.project import Project
from tests.support.tflite_models import Quantized, TfliteBuilder, invoke, open_litert, run_litert
from tests.unit.frontends.tflite.tflite_cases import RELU, TANH, Draw, make
from tvmflow.core import packages
from tvmflow.frontends import FRONTENDS

frontend = FRONTENDS["tflite"]

HAS_LITERT = importlib.util.find_spec("ai_edge_litert")
with_litert = pytest.mark.skipif(
    not HAS_LITERT, reason="LiteRT is not installed (pip install 'tvmflow[tflite]')"
)
MODELS: Final = os.environ.get("TVMFLOW_TEST_MODELS", "")
RECIPE = """\
recipe: 1
name: net
model: {{tflite: net.tflite}}
inputs: {inputs}
targets: [host]
outputs: [bundle]
verify: {{repeat: 2}}
tune: {{trials: 0}}
"""


def run(project: Project, inputs: str) -> dict[str, Any]:
    """Build `net.tflite`; return the measurements that are delivered beside its library."""
    (project.folder / "tiny.yaml").write_text(RECIPE.format(inputs=inputs))
    ran = project.run()
    assert ran.code == 0, ran.out + ran.err
    assert project.run().ran == []
    document: dict[str, Any] = json.loads(
        (project.folder / "dist/net/host/measurements.json").read_text()
    )
    return document


@pytest.mark.tflite
@with_litert
@pytest.mark.slow
def test_a_recipe_from_a_quantized_file_to_a_verified_library(project: Project) -> None:
    """With LiteRT's version and latency in the report; a second run does nothing."""
    case = make("a quantized net", 3)
    (project.folder / "net.tflite").write_bytes(case.data)
    [(name, value)] = case.feed.items()
    verdict = run(project, f"{{{name}: {{shape: {list(value.shape)}}}}}")
    assert verdict["reference"] == f"LiteRT {packages.find_package('ai-edge-litert').version}"
    assert verdict["latency"]["reference"]["median"] > 0


@pytest.mark.tflite
@with_litert
@pytest.mark.slow
def test_a_file_with_a_dynamic_batch_is_verified_at_many_sizes(project: Project) -> None:
    """Image sizes are open too; `plan` offers the dimensions that the file leaves open."""
    draw = Draw(3)
    model = draw.model
    x = model.input("images", (-1, -1, -1, 3))
    window: dict[str, Any] = {"StrideH": 2, "StrideW": 2, "FusedActivationFunction": RELU}
    y = model.result(
        "CONV_2D", [x, draw.weights(24, 3, 3, 3), draw.weights(24)], 4, "Conv2D", **window
    )
    fields: dict[str, Any] = {"StrideH": 1, "StrideW": 1, "DepthMultiplier": 1}
    y = model.result(
        "DEPTHWISE_CONV_2D",
        [y, draw.weights(1, 3, 3, 24), draw.weights(24)],
        4,
        "DepthwiseConv2D",
        **fields,
    )
    y = model.result("MEAN", [y, model.integers([1, 2])], 2, "Reducer", KeepDims=False)
    y = model.result("FULLY_CONNECTED", [y, draw.weights(10, 24), -1], 2, "FullyConnected")
    y = model.result("SOFTMAX", [y], 2, "Softmax", Beta=1.0)
    (project.folder / "net.tflite").write_bytes(model.build(y))
    (project.folder / "tiny.yaml").write_text(RECIPE.format(inputs="{}"))
    offered = project.tvmflow("plan", "tiny.yaml")
    assert "batch: {max: SIZE}" in offered.err and "images: {shape: [batch, images_1" in offered.err
    sizes = (
        "{b: {max: 5}, h: {min: 8, max: 40, multiple_of: 2}, w: {min: 8, max: 40, multiple_of: 2}}"
    )
    measured = run(project, f"{{images: {{shape: [b, h, w, 3]}}}}\ndimensions: {sizes}")
    assert measured["passed"] and len(measured["sizes"]) == 8


def _window(draw: Draw) -> int:
    """A dense layer over the last four chunks, in a variable that begins with values of the file."""
    model = draw.model
    x = model.input("chunk", (1, 8))
    past = model.handle("past", draw.normal(1, 24))
    before = model.read(past, (1, 24))
    window = model.result("CONCATENATION", [before, x], (1, 32), "Concatenation", Axis=1)
    ends = map(model.integers, ([0, 8], [1, 24]))
    model.assign(past, model.result("SLICE", [window, *ends], (1, 24), "Slice"))
    count = model.handle("count", np.asarray([[3.0]], np.float32))
    one = model.constant(np.asarray([[1.0]], np.float32))
    model.assign(count, model.result("ADD", [model.read(count, (1, 1)), one], (1, 1), "Add"))
    # read again after it was assigned, and one that is never assigned
    bias = model.read(model.handle("bias", draw.normal(1, 5)), (1, 5))
    y = model.result("FULLY_CONNECTED", [window, draw.weights(5, 32), -1], (1, 5), "FullyConnected")
    y = model.result("MUL", [y, model.read(count, (1, 1))], (1, 5), "Mul")
    return model.result("ADD", [y, bias], (1, 5), "Add")


def _recurrent(draw: Draw) -> int:
    """SVDF and an LSTM, which change variable tensors."""
    model = draw.model
    x = model.input("chunk", (1, 8))
    held = model.tensor((1, 30), name="memory", is_variable=True)
    weights = [draw.weights(6, 8), draw.weights(6, 5), draw.weights(3)]
    y = model.result("SVDF", [x, *weights, held], (1, 3), "SVDF", Rank=2)
    states = [model.tensor((1, 4), name=name, is_variable=True) for name in "hc"]
    gates = [draw.weights(4, width) for width in (3, 4) for _ in range(4)]
    operands = [y, *gates, -1, -1, -1, *(draw.weights(4) for _ in range(4)), -1, -1, *states]
    return model.result("LSTM", operands, (1, 4), "LSTM", FusedActivationFunction=TANH)


@pytest.mark.tflite
@with_litert
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_net", "states"), [(_window, ["past", "count"]), (_recurrent, ["memory", "h", "c"])]
)
def test_variables_are_states(
    project: Project, make_net: Callable[[Draw], int], states: list[str]
) -> None:
    """Each step computes what LiteRT does in the call of the same number, also after a reset."""
    draw = Draw(2)
    data = draw.model.build(make_net(draw))
    (project.folder / "net.tflite").write_bytes(data)
    assert run(project, "{}")["states"]["passed"]
    session = tvmflow.load(project.folder / "dist/net/host/net.tvmflow").session()
    assert list(session.states) == states
    for _ in range(2):
        feed = {"chunk": draw.normal(1, 8)}
        interpreter = open_litert(data, feed)
        for _ in range(9):
            [expected] = invoke(interpreter, feed)
            [result] = session.run(feed).values()
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
            feed = {"chunk": draw.normal(1, 8)}
        session.reset()


@pytest.mark.tflite
@with_litert
def test_inner_tensors_are_those_of_litert(tmp_path: Path) -> None:
    """By their names in the file, also where a delegate would compute several operators at once."""
    draw = Draw(0)
    x = draw.input(draw.normal(1, 6, 6, 3))
    operands = [x, draw.weights(4, 3, 3, 3), draw.weights(4)]
    inner = draw.model.tensor([1] * 4, name="inner")
    draw.model.add("CONV_2D", operands, [inner], "Conv2D", StrideH=1, StrideW=1)
    y = draw.model.result("LOGISTIC", [inner], 4)
    files = {"model": draw.model.save(tmp_path, y)}
    model = frontend.load(files, (), ("inner",))
    assert [spec.shape for spec in model.tensors] == [(1, 6, 6, 4)]
    with frontend.reference(
        files, model.inputs, model.outputs, tensors=model.tensors, threads=1, scratch=tmp_path
    ) as reference:
        expected = reference.run(draw.feed)
        assert min(reference.latency(draw.feed, repeat=2, min_seconds=0.01)) > 0
    for result, array in zip(compute(model, draw.feed), expected.values(), strict=True):
        np.testing.assert_allclose(result, array, rtol=1e-4, atol=1e-5)


HYBRID: Final[dict[str, tuple[Any, ...]]] = {
    "FULLY_CONNECTED": ((3, 32), (40, 32), 0, "FullyConnected"),
    "CONV_2D": ((1, 9, 9, 16), (32, 3, 3, 16), 0, "Conv2D"),
    "DEPTHWISE_CONV_2D": ((1, 9, 9, 16), (1, 3, 3, 16), 3, "DepthwiseConv2D"),
    "BATCH_MATMUL": ((2, 5, 7), (2, 7, 6), None, "BatchMatMul"),
    "TRANSPOSE_CONV": ((1, 5, 5, 8), (4, 2, 2, 8), 0, "TransposeConv"),
}


@pytest.mark.tflite
@pytest.mark.slow
@with_litert
@pytest.mark.parametrize("operator", HYBRID)
def test_integer_weights_of_float_data(operator: str, tmp_path: Path) -> None:
    """The library computes what LiteRT computes with these weights in float32; LiteRT itself rounds the data."""
    shape, sizes, axis, options = HYBRID[operator]
    draw = Draw(1)
    x = draw.data(*shape)
    count = 1 if axis is None else sizes[axis]
    scales = (draw.random.random(count) * 0.01 + 0.002).astype(np.float32)
    integers = draw.random.integers(-127, 128, sizes)
    weights = draw.model.constant(
        integers, "int8", Quantized(scales, [0] * count, 0 if axis is None else axis)
    )
    operands, result = [x, weights], [1] * len(shape)
    fields: dict[str, Any] = {}
    if operator == "TRANSPOSE_CONV":
        result = [1, 10, 10, 4]
        operands = [draw.model.integers(result), weights, x]
    elif "CONV" in operator:
        operands.append(draw.weights(sizes[axis or 0]))
    if "CONV" in operator:
        stride = 2 if operator == "TRANSPOSE_CONV" else 1
        fields = {"StrideH": stride, "StrideW": stride}
    y = draw.model.result(operator, operands, result, options, **fields)
    files = {"model": draw.model.save(tmp_path, y)}
    model = frontend.load(files, specs(draw.feed))
    assert "int8" in {str(array.dtype) for array in model.params.values()}
    [actual] = compute(model, draw.feed)
    with frontend.reference(
        files, model.inputs, model.outputs, threads=1, scratch=tmp_path
    ) as reference:
        [expected] = reference.run(draw.feed).values()
        assert "for the weights of 1 operator in float32" in reference.note
        assert min(reference.latency(draw.feed, repeat=2, min_seconds=0.01)) > 0
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)
    [rounded] = run_litert(files["model"].read_bytes(), draw.feed)
    assert 1e-3 < np.abs(rounded - actual).max() < 0.05 * np.abs(actual).max()


@pytest.mark.models
@pytest.mark.tflite
@pytest.mark.slow
@with_litert
@pytest.mark.skipif(not MODELS, reason="TVMFLOW_TEST_MODELS names no folder of models")
def test_ultraface_agrees_with_litert(project: Project) -> None:
    """A published detector whose shapes are computed by operators, and placeholders in the file."""
    path = Path(MODELS) / "ultraface/version-slim-320_without_postprocessing.tflite"
    shutil.copy(path, project.folder / "net.tflite")
    verdict = run(project, "{input_1: {shape: [1, 240, 320, 3]}}")
    assert verdict["passed"]


@pytest.mark.skipif(bool(HAS_LITERT), reason="LiteRT is installed")
def test_a_plan_without_litert_says_what_to_install(project: Project) -> None:
    """Before anything runs; without the comparison, LiteRT is not needed."""
    model = TfliteBuilder()
    y = model.result("RELU", [model.input("x", (2, 3))], 2)
    (project.folder / "net.tflite").write_bytes(model.build(y))
    (project.folder / "tiny.yaml").write_text(RECIPE.format(inputs="{}"))
    ran = project.tvmflow("plan", "tiny.yaml")
    assert ran.code == 4
    assert "ai-edge-litert is not installed" in ran.err
    assert "fix: pip install 'tvmflow[tflite]'" in ran.err
    recipe = RECIPE.format(inputs="{}").replace("{repeat: 2}", "{against: none}")
    (project.folder / "tiny.yaml").write_text(recipe)
    assert project.tvmflow("plan", "tiny.yaml").code == 0
