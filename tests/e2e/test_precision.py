"""Float16 weights and quantized models, through the real command."""

from __future__ import annotations

import json
from typing import Any

import onnx
import pytest

from tests.support.onnx_models import quantized
from tests.support.project import Project


def verdict(project: Project, target: str) -> dict[str, Any]:
    path = project.folder / "dist/tiny" / target / "measurements.json"
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.nightly
@pytest.mark.slow
def test_precision_for_one_target_and_then_another_model(project: Project) -> None:
    """Each target has the tolerance of its precision, and `explain` names it; the recipe's own tolerance has priority."""
    project.write_recipe(
        targets=["host", "{name: half, preset: host, kernels: {precision: mixed}}"]
    )
    project.edit_recipe(", rtol: 1.0e-3, atol: 1.0e-4", "")
    assert project.tvmflow("run", "tiny.yaml", "--json").code == 0
    half = {"for": "float16", "rtol": 0.01, "of_largest": 10 / 2**11, "rms": 10 / 2**11}
    assert verdict(project, "host")["tolerance"]["for"] == "float32"
    assert half.items() <= verdict(project, "half")["tolerance"].items()
    explanation = project.tvmflow("explain", "tiny.yaml", "verify/half").out
    assert (
        "outputs may differ by atol 6e-07, or 0.49% of an output's largest value where that is more, and rtol 0.01 "
        "(the model computes in float16, entirely or in part)"
    ) in explanation

    path = project.folder / "tiny.onnx"
    onnx.save(quantized(onnx.load(path), project.folder), path)
    project.edit_recipe("samples: 2", "samples: 2, atol: 0.25")
    assert project.tvmflow("run", "tiny.yaml", "--json").code == 0
    for target in ("host", "half"):
        content = verdict(project, target)
        own = {"for": "quantized", "rtol": 0.01, "atol": 0.25, "of_largest": 0.0, "rms": None}
        assert own.items() <= content["tolerance"].items()
        assert content["outputs"]["scores"]["atol"] == 0.25


@pytest.mark.slow
def test_two_precisions_as_variants_of_one_recipe(project: Project) -> None:
    """Imported once, delivered under the names of the variants, and compared at the end, also from the saved answer."""
    project.edit_recipe(
        "targets:",
        "variants:\n  full: {}\n  half: {kernels: {precision: mixed}, verify: {rtol: 0.02}}\ntargets:",
    )
    project.edit_recipe("tune:", "pipeline: compile\ntune:")
    done = project.tvmflow("run", "tiny.yaml", "--json")
    assert done.code == 0, done.out + done.err
    finished = done.events[-1]
    outcomes = {stage["stage_id"]: stage["outcome"] for stage in finished["stages"]}
    assert [outcomes[f"tiny-{name}:import"] for name in ("full", "half")] == ["ran", "hit"]
    assert [outcomes[f"tiny-{name}:build/host"] for name in ("full", "half")] == ["ran", "ran"]
    for name in ("full", "half"):
        assert f"dist/tiny-{name}/host/tiny-{name}.so" in finished["delivered"]
        assert (project.folder / f"dist/tiny-{name}/host/tiny-{name}.tvmflow").is_file()
    path = project.folder / "dist/tiny-half/host/measurements.json"
    assert json.loads(path.read_text())["tolerance"]["rtol"] == 0.02

    full, half = finished["compared_libraries"]
    assert (full["recipe"], full["variant"], full["target"]) == ("tiny-full", "full", "host")
    assert full["group"] == half["group"]
    assert full["max_abs_error"] < half["max_abs_error"]
    assert full["is_pareto_optimal"]
    for _ in range(2):
        text = project.tvmflow("run", "tiny.yaml").out
        [row] = [line for line in text.splitlines() if line.startswith("tiny-full/host ")]
        assert row.endswith("Pareto-optimal"), text
    only = project.tvmflow("run", "tiny.yaml", "--variant", "half").out
    assert "tiny-half/host" in only
    assert "Pareto-optimal" not in only
