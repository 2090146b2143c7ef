"""`tvmflow build`: from a model to a verified library, without a recipe."""

from __future__ import annotations

import pytest

from tests.support.project import Project


@pytest.mark.slow
def test_a_model_is_built_without_a_recipe(project: Project) -> None:
    """Its recipe is in the store, and what `init` writes gives the same results."""
    built = project.tvmflow("build", "tiny.onnx")
    assert built.code == 0, built.err
    assert "  dist/tiny/host/: tiny.tvmflow, " in built.out
    assert "keep its recipe: tvmflow init tiny.onnx" in built.out
    assert (project.folder / "cache/recipes/tiny.tvmflow.yaml").is_file()
    again = project.tvmflow("build", "tiny.onnx")
    assert "up to date, nothing to run" in again.out, again.out
    assert project.tvmflow("init", "tiny.onnx", "--minutes", "0").code == 0
    kept = project.tvmflow("run", "tiny.tvmflow.yaml")
    assert "up to date, nothing to run" in kept.out, kept.out
    checked = project.tvmflow("cache", "verify")
    assert checked.code == 0, checked.out


@pytest.mark.nightly
@pytest.mark.slow
def test_another_model_of_the_same_name_is_said_to_replace_it(project: Project) -> None:
    built = project.tvmflow("build", "tiny.onnx")
    assert built.code == 0 and "replaces" not in built.out
    other = project.folder / "other"
    other.mkdir()
    (other / "tiny.onnx").write_bytes((project.folder / "tiny.onnx").read_bytes())
    replaced = project.tvmflow("build", "other/tiny.onnx")
    assert "other/tiny.onnx replaces another model with the name tiny" in replaced.out
    again = project.tvmflow("build", "other/tiny.onnx")
    assert again.code == 0 and "replaces" not in again.out
