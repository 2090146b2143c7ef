"""A model whose rows each call chooses: one library, verified at many sizes, and what changes run again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import tvmflow
from tests.support import caches, exports
from tests.support.mxnet_runs import generate
from tests.support.project import Project

DIMENSIONS = "dimensions:\n  rows: {min: 1, max: 40, tune_at: [16]}\ninputs:"


def check_project(folder: Path) -> None:
    """Compare the tool of the C++ project with Python, at several sizes."""
    program = exports.program_of(folder / "tiny-cpp", folder.parent / "run")
    module = tvmflow.load(folder / "tiny.tvmflow")
    [given] = module.inputs
    for rows in (37, 1, 40):
        shape = (rows, *given.shape[1:])
        values = np.random.default_rng(rows).standard_normal(shape).astype(given.dtype)
        np.savez(folder.parent / "in.npz", **{given.name: values})
        words = [program, folder.parent / "in.npz", folder.parent / "out.npz"]
        subprocess.run(words, check=True)
        with np.load(folder.parent / "out.npz") as arrays:
            expected = module.run({given.name: values})["scores"]
            np.testing.assert_array_equal(arrays["scores"], expected, strict=True)


MXNET = """\
recipe: 1
name: tiny
model: {{mxnet: {{prefix: {name}, epoch: 0}}}}
dimensions: {dimensions}
inputs: {inputs}
targets: [host]
tune: {{trials: 0}}
verify: {{repeat: 2}}
"""
EVEN = "{min: 8, max: 40, multiple_of: 2}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dimensions", "inputs"),
    [
        # near a limit of overlap, one box more or less is right; with pixels, none is near
        ("ssd", "{batch: {max: 4}}", "{data: {shape: [batch, 3, 64, 64], range: [0, 1]}}"),
        ("encoder", "{b: {max: 3}, n: {max: 40}}", "{data: {shape: [b, n], range: [0, 49]}}"),
        (
            "segmentation",
            f"{{b: {{max: 3}}, h: {EVEN}, w: {EVEN}}}",
            "{data: {shape: [b, 3, h, w]}}",
        ),
    ],
)
def test_checkpoints_with_dynamic_shapes_are_verified_against_mxnet(
    project: Project, name: str, dimensions: str, inputs: str
) -> None:
    """A detector, an encoder of texts, and a network from image to image."""
    generate(project.folder, name)
    recipe = MXNET.format(name=name, dimensions=dimensions, inputs=inputs)
    (project.folder / "tiny.yaml").write_text(recipe)
    done = project.run()
    assert done.code == 0, done.err
    measured = json.loads((project.folder / "dist/tiny/host/measurements.json").read_text())
    assert measured["reference"].startswith("MXNet") and measured["passed"]
    assert len(measured["sizes"]) >= 4


@pytest.fixture
def open_project(project: Project) -> Project:
    """A project whose model has a dynamic number of rows."""
    project.write_products("rows")
    project.edit_recipe("inputs:", DIMENSIONS)
    project.edit_recipe("[shared-library, bundle]", "[bundle, cpp]")
    project.edit_recipe("verify: {", "verify: {compare: [fixed], ")
    return project


@pytest.mark.slow
def test_a_library_with_dynamic_shapes_is_verified_at_many_and_run_at_others(
    open_project: Project,
) -> None:
    """Each size is in the measurements and in the summary; `run-model` takes any in the range."""
    project = open_project
    first = project.run()
    assert first.code == 0, first.err
    measured = json.loads((project.folder / "dist/tiny/host/measurements.json").read_text())
    sizes = {entry["sizes"]["rows"]: entry for entry in measured["sizes"]}
    assert {1, 16, 40} < set(sizes) and len(sizes) == 8
    assert all(entry["passed"] and entry["latency_s"] > 0 for entry in sizes.values())
    assert all(entry["reference_latency_s"] > 0 for entry in sizes.values())
    assert all(entry["fixed_speedup"]["median"] > 0 for entry in sizes.values())
    assert measured["at"] == {"rows": 16}
    verdict = json.loads((project.folder / "dist/tiny/host/verify.json").read_text())
    assert verdict["sizes"][0] == {"sizes": {"rows": 1}, "passed": True}
    (build,) = first.events[-1]["builds"]
    assert [row["sizes"] for row in build["sizes"]] == [f"rows={n}" for n in sorted(sizes)]
    bundle = "dist/tiny/host/tiny.tvmflow"
    ran = project.tvmflow("run-model", bundle, "--size", "rows=37", "--json")
    assert ran.events[-1]["outputs"] == {"scores": [37, 128]}
    wrong = project.tvmflow("run-model", bundle, "--size", "rows=41")
    assert wrong.code == 2 and "its sizes are 1 to 40" in wrong.err
    check_project(project.folder / "dist/tiny/host")


@pytest.mark.slow
def test_another_range_builds_again_and_another_size_to_tune_at_imports_nothing(
    open_project: Project,
) -> None:
    """Results of earlier ranges stay."""
    project = open_project
    project.edit_recipe("[bundle, cpp]", "[bundle]")
    assert project.run().code == 0
    project.edit_recipe("tune_at: [16]", "tune_at: [8]")
    tuned = project.run()
    assert "import" not in tuned.ran and "verify/host" in tuned.ran, tuned.ran
    project.edit_recipe("max: 40", "max: 48")
    wider = project.run()
    assert {"import", "build/host", "verify/host"} <= set(wider.ran), wider.ran
    assert wider.stages["import"]["reason"].startswith("import.dimensions.rows.max 40 -> 48")
    project.edit_recipe("max: 48", "max: 40")
    project.edit_recipe("tune_at: [8]", "tune_at: [16]")
    assert project.run().ran == [], "the first results are still there"


@pytest.mark.slow
def test_each_level_of_one_library_is_verified_at_dynamic_shapes(open_project: Project) -> None:
    """Levels share weights and dimensions; one that is forced takes any size of their range."""
    project = open_project
    project.edit_recipe("[bundle, cpp]", "[bundle]")
    project.edit_recipe("  - host", "  - {name: any, levels: [x86-64-v2, x86-64-v3]}")
    first = project.run()
    assert first.code == 0, first.out + first.err
    folder = project.folder / "dist/tiny/any"
    levels = json.loads((folder / "measurements.json").read_text())["levels"]
    assert [level["outputs"]["scores"]["passed"] for level in levels.values()] == [True, True]
    verdict = json.loads((folder / "verify.json").read_text())
    assert len(verdict["sizes"]) > 2 and all(size["passed"] for size in verdict["sizes"])
    project.environment["TINY_LEVEL"] = "x86-64-v2"
    ran = project.tvmflow("run-model", str(folder / "tiny.tvmflow"), "--size", "rows=37", "--json")
    assert ran.events[-1]["outputs"] == {"scores": [37, 128]}


@pytest.mark.slow
def test_a_cache_may_be_empty_and_the_size_of_a_mask_may_be_a_sum(project: Project) -> None:
    """A decoder's step with a KV cache, from an empty one on: each call returns the cache for the next."""
    weights = caches.write_cached_attention(project.folder / "cached.onnx")
    (project.folder / "tiny.yaml").write_text(caches.RECIPE)
    done = project.run()
    assert done.code == 0, done.out + done.err
    folder = project.folder / "dist/cached/host"
    verdict = json.loads((folder / "verify.json").read_text())
    assert {"past": 0, "seq": 1} in [entry["sizes"] for entry in verdict["sizes"]]
    rng = np.random.default_rng(1)
    module = tvmflow.load(folder / "cached.tvmflow")
    empty = np.zeros((1, caches.HEADS, 0, caches.DEPTH), np.float32)
    past = (empty, empty)
    for seq in (5, 1, 1, 12, 3):
        x = rng.standard_normal((1, seq, caches.WIDTH)).astype(np.float32)
        mask = np.ones((1, past[0].shape[2] + seq), np.float32)
        mask[0, 0] = 0
        found = module.run({"x": x, "mask": mask, "past_key": past[0], "past_value": past[1]})
        expected = caches.attend(weights, x, mask, past)
        names = ("y", "present_key", "present_value")
        for name, array in zip(names, expected, strict=True):
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)
        past = (found["present_key"], found["present_value"])
    with pytest.raises(
        tvmflow.TvmflowError, match=r"size 1 of input 'mask' is 3, and past \+ seq is 23"
    ):
        module.run({"x": x[:, :1], "mask": mask[:, :3], "past_key": past[0], "past_value": past[1]})
