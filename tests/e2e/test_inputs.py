"""Inputs that the model tells, and inputs that are bound to a value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import tvmflow
from tests.support.onnx_models import draw, model, value
from tests.support.project import Project
from tests.support.shared import MODELS, needs_models

RECIPE = "recipe: 1\nname: net\nmodel: {onnx: net.onnx}\npipeline: compile\n"


def switched() -> onnx.ModelProto:
    """Return a model that doubles or negates its open input, by an integer input."""
    made = {"then": "Add", "else": "Sub"}
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(operator, ["zero" if name == "else" else "x", "x"], [name])],
            name, [], [value(name, None)],
        )
        for name, operator in made.items()
    }  # fmt: skip
    nodes = [
        helper.make_node("Equal", ["mode", "one"], ["is_one"]),
        helper.make_node("If", ["is_one"], ["y"], **branches),
    ]
    weights: dict[str, np.ndarray[Any, Any]] = {
        "one": np.array(1, np.int64),
        "zero": np.array([0], np.float32),
    }
    inputs = [value("x", ["time"]), value("mode", [], "int64")]
    return model(nodes, inputs, [value("y", None)], weights)


@pytest.mark.slow
def test_dynamic_shapes_are_printed_to_paste_and_values_leave_the_library(project: Project) -> None:
    """Two variants of one model, each with another value, agree with the framework, which gets it too."""
    (project.folder / "net.onnx").write_bytes(switched().SerializeToString())
    recipe = project.folder / "net.yaml"
    recipe.write_text(RECIPE)
    refused = [project.tvmflow(command, "net.yaml") for command in ("plan", "run")]
    for done in refused:
        assert (done.code, done.out) == (2, "")
        assert done.err == (
            "tvmflow: net.yaml:1:1: inputs: the model has dynamic dimensions; write this in the recipe, "
            "with a number for each SIZE:\n\n"
            "inputs:\n  x: {shape: [SIZE]}  # float32, [time]\n  mode: {shape: []}  # int64\n\n"
            "or, to let one library serve all sizes, write this, with the maximum for each SIZE:\n\n"
            "dimensions:\n  time: {max: SIZE}\n"
            "inputs:\n  x: {shape: [time]}  # float32, [time]\n  mode: {shape: []}  # int64\n"
        )
    np.savez(project.folder / "data.npz", x=draw(3))
    recipe.write_text(
        f"{RECIPE}inputs: {{x: {{shape: [3]}}}}\nverify: {{data: data.npz, repeat: 1}}\nvariants:\n"
        "  double: {inputs: {mode: {value: 1}}}\n  negative: {inputs: {mode: {value: 0}}}\n"
    )
    done = project.tvmflow("run", "net.yaml", "--json")
    assert done.code == 0, done.out + done.err
    for name, factor in (("double", 2), ("negative", -1)):
        folder = project.folder / f"dist/net-{name}/host"
        assert json.loads((folder / "verify.json").read_text())["passed"]
        library = tvmflow.load(folder / f"net-{name}.tvmflow")
        assert [spec.name for spec in library.inputs] == ["x"]
        np.testing.assert_array_equal(
            library.run(np.array([1, 2, 3], np.float32))["y"], [factor, 2 * factor, 3 * factor]
        )
    # the framework gets the constant that the library has in it; the file is that with the model's digest
    bundle = str(folder / "net-negative.tvmflow")
    done = project.tvmflow("run-model", bundle, "--compare", "onnxruntime", "--json")
    assert done.code == 0, done.out + done.err
    (compared,) = json.loads(done.out)["compared"]
    assert compared["outputs"]["y"]["agrees"] and compared["library_s"] > 0
    assert compared["model"] == str(project.folder / "net.onnx")
    changed = switched()
    changed.graph.node[1].attribute[0].g.node[0].op_type = "Mul"
    changed.graph.node[1].attribute[1].g.node[0].op_type = "Mul"
    (project.folder / "changed.onnx").write_bytes(changed.SerializeToString())
    done = project.tvmflow(
        "run-model", bundle, "--compare", "onnxruntime", "--model", "changed.onnx"
    )
    assert done.code == 3 and "y DIFFERS: largest difference" in done.out
    assert "it is not the file that the library was built from" in done.out


@pytest.mark.models
@pytest.mark.slow
@needs_models
@pytest.mark.parametrize(
    "name", ["silero_vad", "silero_vad_16k_op15", "silero_vad_half", "silero_vad_op18_ifless"]
)
def test_silero_with_its_sampling_rate_bound(name: str, project: Project) -> None:
    """A C library without `If`, which agrees with ONNX Runtime over 50 calls with the state fed back."""
    path = Path(MODELS, "silero", f"{name}.onnx")
    session = onnxruntime.InferenceSession(path)
    takes_rate = "sr" in {entry.name for entry in session.get_inputs()}
    (project.folder / "net.yaml").write_text(
        f"recipe: 1\nname: net\nmodel: {{onnx: {path}}}\nruntime: c\npipeline: compile\n"
        "inputs:\n  input: {shape: [1, 576]}\n  state: {shape: [2, 1, 128]}\n"
        + ("  sr: {value: 16000}\n" if takes_rate else "")
    )
    done = project.tvmflow("run", "net.yaml", "--json")
    assert done.code == 0, done.out + done.err
    library = tvmflow.load(project.folder / "dist/net/host/net.tvmflow")
    assert {spec.name for spec in library.inputs} == {"input", "state"}
    rate: dict[str, Any] = {"sr": np.array(16000, np.int64)} if takes_rate else {}
    rng = np.random.default_rng(0)
    state = expected_state = np.zeros((2, 1, 128), np.float32)
    for step in range(50):
        # speech is louder than silence: both occur
        samples = rng.normal(0, 0.02 + 0.3 * (step // 10 % 2), (1, 576)).astype(np.float32)
        result = library.run({"input": samples, "state": state})
        expected = session.run(None, {"input": samples, "state": expected_state, **rate})
        state, expected_state = result["stateN"], expected[1]
        np.testing.assert_allclose(result["output"], expected[0], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(state, expected_state, rtol=1e-3, atol=2e-5)
