"""C libraries of models whose graphs are no straight line."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.c_library import CLibrary
from tests.support.project import Project


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
    ]
    inputs = [
        helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [1, 9, 4]),
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 2, 9]),
    ]
    outputs = [helper.make_tensor_value_info("kept", TensorProto.INT64, ["n", 3])]
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
    assert "which the kernel all_class_non_max_suppression calls" in message
    assert not project.trials()
    (project.folder / "tiny.yaml").write_text(recipe.replace("OUTPUT", "bundle"))
    assert project.run("--until", "build").code == 0
