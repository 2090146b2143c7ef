"""C libraries of models whose graphs are not a straight line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.c_library import BuiltTwice, CLibrary
from tests.support.kernels import LEVELS_HERE, host_level, level
from tests.support.onnx_models import load
from tests.support.project import Project
from tests.support.random_networks import draw_network


def write_branches(project: Project) -> None:
    """A model with an If, an output of a view, one output twice, an input and a constant as outputs."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.normal(size=(6, 6)).astype("float32"), "weight")
    constant = numpy_helper.from_array(np.arange(5, dtype="int64"), "constant")
    shape = numpy_helper.from_array(np.array([3, 4]), "shape")

    def branch(name: str, operator: str) -> onnx.GraphProto:
        value = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [2, 6])
        nodes = [
            helper.make_node(operator, ["product"], [f"{name}_in"]),
            helper.make_node("Add", [f"{name}_in", "data"], [f"{name}_out"]),
        ]
        return helper.make_graph(nodes, name, [], [value])

    nodes = [
        helper.make_node("MatMul", ["data", "weight"], ["product"]),
        helper.make_node(
            "If",
            ["flag"],
            ["chosen"],
            then_branch=branch("yes", "Relu"),
            else_branch=branch("no", "Neg"),
        ),
        helper.make_node("Reshape", ["chosen", "shape"], ["view"]),
        helper.make_node("Exp", ["chosen"], ["grown"]),
        helper.make_node("Identity", ["data"], ["same"]),
        helper.make_node("Identity", ["constant"], ["numbers"]),
    ]
    outputs = [
        helper.make_tensor_value_info("view", TensorProto.FLOAT, [3, 4]),
        helper.make_tensor_value_info("grown", TensorProto.FLOAT, [2, 6]),
        helper.make_tensor_value_info("chosen", TensorProto.FLOAT, [2, 6]),
        helper.make_tensor_value_info("same", TensorProto.FLOAT, [2, 6]),
        helper.make_tensor_value_info("numbers", TensorProto.INT64, [5]),
    ]
    inputs = [
        helper.make_tensor_value_info("data", TensorProto.FLOAT, [2, 6]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
    ]
    graph = helper.make_graph(nodes, "branches", inputs, outputs, [weight, constant, shape])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, str(project.folder / "tiny.onnx"))


@pytest.mark.slow
def test_branches_views_and_repeated_outputs(project: Project) -> None:
    """Both branches of an If, and outputs that are views, inputs, constants or each other, are right."""
    import onnxruntime

    write_branches(project)
    (project.folder / "recipe.yaml").write_text(
        "recipe: 1\nname: tiny\nmodel: {onnx: tiny.onnx}\n"
        "inputs: {data: {shape: [2, 6]}, flag: {shape: [], dtype: bool}}\n"
        "targets: [host]\ntune: {trials: 0}\noutputs: [c-library]\n"
    )
    run = project.tvmflow("run", "recipe.yaml")
    assert run.code == 0
    folder = project.folder / "dist/tiny/host/tiny-c-library"
    library = CLibrary(folder / "libtiny.so", "tiny")
    session = onnxruntime.InferenceSession(str(project.folder / "tiny.onnx"))
    data = np.random.default_rng(1).normal(size=(2, 6)).astype("float32")
    for flag in (True, False, True):
        feed = {"data": data, "flag": np.array(flag)}
        for offset in (0, 1 * 8):
            results = library.run(feed, outputs=5, offset=offset)
            for result, expected in zip(results, session.run(None, feed), strict=True):
                np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_model_that_needs_the_runtime_is_refused_before_it_is_tuned(project: Project) -> None:
    """With the function that it needs and with what to do; all other outputs are built."""
    limits = [numpy_helper.from_array(np.array([3]), "count")]
    limits += [
        numpy_helper.from_array(np.array([0.5], "float32"), name) for name in ("iou", "score")
    ]
    names = ["grown", "scores", "count", "iou", "score"]
    nodes = [
        helper.make_node("Exp", ["boxes"], ["grown"]),
        helper.make_node("NonMaxSuppression", names, ["kept"]),
        helper.make_node("ReduceSum", ["kept"], ["sum"]),
    ]
    inputs = [
        helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [1, 9, 4]),
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 2, 9]),
    ]
    outputs = [helper.make_tensor_value_info("sum", TensorProto.INT64, [1, 1])]
    graph = helper.make_graph(nodes, "best", inputs, outputs, limits)
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, str(project.folder / "tiny.onnx"))
    recipe = (
        "recipe: 1\nname: tiny\nmodel: {onnx: tiny.onnx}\n"
        "inputs: {boxes: {shape: [1, 9, 4]}, scores: {shape: [1, 2, 9]}}\n"
        "targets: [host]\ntune: {trials: 4}\noutputs: [OUTPUT]\n"
    )
    (project.folder / "tiny.yaml").write_text(recipe.replace("OUTPUT", "c-library"))
    refused = project.run()
    assert refused.code == 1 and refused.outcome("extract_tasks/host") == "failed"
    message = refused.stages["extract_tasks/host"]["message"]
    assert "sizes that are known only when it runs, which sum needs" in message
    assert not project.trials()
    (project.folder / "tiny.yaml").write_text(
        recipe.replace("OUTPUT", "bundle").replace("trials: 4", "trials: 0")
    )
    built = project.tvmflow("run", "tiny.yaml", "--until", "build", "-v")
    assert built.code == 0
    assert "runs on TVM's virtual machine (runtime: vm), which it needs for" in built.out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(24), 48, 94])
def test_random_networks_compute_what_the_virtual_machine_does(seed: int, tmp_path: Path) -> None:
    """Bit by bit, with every ISA level of this machine."""
    made, feed = draw_network(seed)
    target = level(LEVELS_HERE[seed % len(LEVELS_HERE)])
    outputs, expected = BuiltTwice.build(load(made, tmp_path, feed), target, tmp_path).run(feed)
    for output, reference in zip(outputs, expected, strict=True):
        assert output.tobytes() == reference.tobytes()


def make_casts(size: int) -> onnx.ModelProto:
    """A model that casts float64 to float16, and on to float32 and integers."""
    kinds = {"half": TensorProto.FLOAT16, "single": TensorProto.FLOAT, "long": TensorProto.INT64}
    nodes = [
        helper.make_node("Cast", ["half" if name != "half" else "data"], [name], to=kind)
        for name, kind in kinds.items()
    ]
    outputs = [helper.make_tensor_value_info(name, kind, [size]) for name, kind in kinds.items()]
    inputs = [helper.make_tensor_value_info("data", TensorProto.DOUBLE, [size])]
    graph = helper.make_graph(nodes, "casts", inputs, outputs)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.slow
def test_float16_of_float64_is_rounded_once(tmp_path: Path) -> None:
    """Without a function that only recent systems have: every float16, and the numbers around every tie."""
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)
    half = np.sort(half[np.isfinite(half)])
    ties = (half[1:] + half[:-1]) / 2
    around = [np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)]
    extremes = [np.inf, -np.inf, 1e300, -1e300, 5e-324, 65519.999999999, 65520.0]
    data = np.concatenate([half, ties, *around, extremes])
    model = load(make_casts(len(data)), tmp_path, {"data": data})
    built = BuiltTwice.build(model, host_level(), tmp_path)
    rounded = built.run({"data": data})[0][0]
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(
            rounded.view(np.uint16), data.astype(np.float16).view(np.uint16)
        )
    undefined = subprocess.run(["nm", "-D", "-u", built.library], capture_output=True, text=True)
    assert "hf" not in undefined.stdout and "h2f" not in undefined.stdout
