"""`verify` through the real command: wrong libraries, outputs that tell nothing, and other runtimes beside the library."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from tests.e2e.faults import inject_fault, remove_fault
from tests.support.project import Project

DEFAULT_TOLERANCE = (", rtol: 1.0e-3, atol: 1.0e-4", "")


def measurements(project: Project) -> dict[str, Any]:
    path = project.folder / "dist/tiny/host/measurements.json"
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def scale_last_layer(project: Project, factor: float) -> None:
    """Multiply the weights of the last layer: all outputs become as much larger or smaller."""
    path = project.folder / "tiny.onnx"
    model = onnx.load(path)
    [dense] = [tensor for tensor in model.graph.initializer if tensor.name == "dense"]
    weights = numpy_helper.to_array(dense) * np.float32(factor)
    dense.CopyFrom(numpy_helper.from_array(weights, "dense"))
    onnx.save(model, path)


@pytest.mark.slow
def test_a_wrong_weight_is_found_however_small_the_outputs_are(project: Project) -> None:
    """Exit code 3: a library with one wrong weight, whose outputs are around 1e-13; the right one is delivered."""
    project.edit_recipe(*DEFAULT_TOLERANCE)
    scale_last_layer(project, 1e-13)
    inject_fault(project, "import_model", "wrong-weight")
    failed = project.run()
    report = failed.stages["verify/host"]
    assert (failed.code, report["outcome"]) == (3, "rejected")
    assert "elements are out of tolerance" in report["message"]
    assert not (project.folder / "dist/tiny/host/tiny.so").exists()

    remove_fault(project)
    project.forget_results()
    assert project.run().code == 0
    [output] = measurements(project)["outputs"].values()
    assert output["max_abs_error"] < output["atol"] < 1e-14
    assert output["error_of_largest"] < 1e-5
    assert output["cosine_similarity"] == pytest.approx(1)
    assert output["best_class_agreement"] == 1


# a model, and what is wrong in the model that its library is built from: only some inputs tell
PIECEWISE = """<ir_version: 10, opset_import: ["" : 20]> g (float[1,64] x) => (float[1,64] y) {
  a = LeakyRelu<alpha=0.1>(x) low = Constant<value = float {-1.5}>() high = Constant<value = float {20.0}>()
  zero = Constant<value = float {0.0}>() b = Clip(a, low, high) c = Less(x, zero) n = Neg(b) w = Where(c, b, n)
  s = ReduceSum<keepdims=0>(x) d = Greater(s, zero)
  y = If (d) <then_branch = t () => (float[1,64] o) { o = Exp(w) }, else_branch = e () => (float[1,64] o) { o = Abs(w) }> }"""
MUTANTS = {
    "the slope of negative inputs": ("alpha=0.1", "alpha=0.01"),
    "the branches of If": ("Exp(w)", "Abs(w)"),
    "the other branch of If": ("Abs(w)", "Exp(w)"),
    "the branches of Where": ("Where(c, b, n)", "Where(c, n, b)"),
    "a bound that only large inputs reach": ("{20.0}", "{30.0}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("title", MUTANTS)
def test_a_wrong_branch_is_found(title: str, project: Project) -> None:
    """A library that is wrong only for some inputs is rejected: the reference runs the right model."""
    old, new = MUTANTS[title]
    assert old in PIECEWISE
    for name, text in (("tiny", PIECEWISE), ("wrong", PIECEWISE.replace(old, new))):
        onnx.save(onnx.parser.parse_model(text), project.folder / f"{name}.onnx")
    project.edit_recipe("inputs:\n  data: {shape: [1, 3, 8, 8], dtype: float32}\n", "")
    project.edit_recipe(*DEFAULT_TOLERANCE)
    inject_fault(project, "import_model", "other-model", str(project.folder / "wrong.onnx"))
    failed = project.run()
    report = failed.stages["verify/host"]
    assert (failed.code, report["outcome"]) == (3, "rejected")


@pytest.mark.slow
def test_outputs_that_tell_nothing(project: Project) -> None:
    """By the default tolerance a network of zeros is rejected; by the recipe's own it has a warning."""
    scale_last_layer(project, 1e-13)
    done = project.tvmflow("run", "tiny.yaml")
    assert done.code == 0
    assert (
        "WARNING: output 'scores' is so small that zeros would pass for it (atol 0.0001): give inputs"
    ) in done.out
    verdict = json.loads((project.folder / "dist/tiny/host/verify.json").read_text())
    assert verdict["outputs"] == {"scores": {"passed": True, "undetected": "zeros"}}

    project.edit_recipe(*DEFAULT_TOLERANCE)
    scale_last_layer(project, 0)
    failed = project.run()
    assert failed.code == 3
    message = failed.stages["verify/host"]["message"]
    assert message.startswith("output 'scores' is 0 or below 1.2e-38 everywhere")
    assert "nothing is compared: give inputs that the model is made for" in message


@pytest.mark.slow
def test_other_runtimes_beside_the_library(project: Project) -> None:
    """Those that are installed, interleaved; one that is asked for by name and missing is an error of the recipe."""
    project.edit_recipe("samples: 2", "samples: 2, compare: auto")
    done = project.tvmflow("run", "tiny.yaml", "-v")
    assert done.code == 0
    compared = measurements(project)["compared"]
    assert list(compared) == ["onnxruntime", "openvino"]
    has_openvino = importlib.util.find_spec("openvino") is not None
    for runtime in compared.values():
        if runtime["name"] == "OpenVINO":
            assert not has_openvino
            line = "OpenVINO is not timed: it is not installed (pip install openvino)"
        else:
            assert runtime["latency"]["median"] > 0
            assert runtime["speedup"]["low"] <= runtime["speedup"]["high"]
            line = f"speedup over {runtime['name']} {runtime['speedup']['median']:.3g} ("
        assert line in done.out
    project.edit_recipe("compare: auto", "compare: [onnxruntime, pytorch]")
    failed = project.tvmflow("plan", "tiny.yaml")
    assert failed.code == 2
    assert "verify.compare.1: PyTorch runs PyTorch models, and this one is of ONNX" in failed.err
