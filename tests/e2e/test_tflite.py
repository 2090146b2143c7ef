"""TFLite files, from a recipe to a library that agrees with LiteRT; without LiteRT, what the command says."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.support.kernels import outputs as compute
from tests.support.project import Project
from tests.support.tflite_cases import Draw, make
from tests.support.tflite_models import TfliteBuilder
from tvmflow.core import packages
from tvmflow.frontends import tflite as frontend

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
