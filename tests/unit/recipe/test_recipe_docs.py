"""The recipe reference is current, and what it shows works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.recipes import ROOT, problems_in, write
from tools.generate_reference import EXAMPLE, generated_files, recipe_page, recipe_reference
from tvmflow.planning.recipes import PipelineFile, load_pipeline, load_recipe
from tvmflow.recipe import InputSpec, Recipe

REMEDY = "run `make docs-reference`"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the files of the digits, for what the page shows."""
    (tmp_path / "models").mkdir()
    for name in (
        "digits-symbol.json",
        "digits-0010.params",
        "digits-test.npz",
        "digits-labels.txt",
    ):
        (tmp_path / "models" / name).touch()
    (tmp_path / "mobilenet.onnx").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(kind: str) -> list[str]:
    """What stands in fences of this kind on the page."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", recipe_page(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", list(generated_files()))
def test_the_generated_files_are_current(name: str) -> None:
    """They are what the generator writes for the present models."""
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == generated_files()[name], REMEDY


def test_the_recipes_on_the_page_are_valid(folder: Path) -> None:
    """The complete example and the shortest one load; the complete one has every section."""
    shortest, complete, pipeline = blocks("yaml")
    assert complete == EXAMPLE
    loaded = load_recipe(write(Path("digits.yaml"), complete)).recipe
    # only ONNX models can have custom operators; the page shows dynamic shapes in a comment; float models stay float
    assert loaded.model_fields_set == set(Recipe.model_fields) - {
        "operators",
        "dimensions",
        "state",
        "quantize",
    }
    assert loaded.inputs["data"].model_fields_set == set(InputSpec.model_fields) - {"value"}
    assert loaded.targets[2].threads == 8
    assert loaded.tune.trials == 64
    assert load_recipe(write(Path("mobilenet.yaml"), shortest)).recipe.name == "mobilenet"
    write(Path("nightly.yaml"), pipeline)
    assert load_pipeline("nightly.yaml").name == "nightly"


def test_the_messages_on_the_page_are_those_of_the_command(folder: Path) -> None:
    """The console block is the output of the command."""
    lines = blocks("console")[0].splitlines()[1:]
    text = """\
recipe: 1
name: digits
model:
  mxnet: {prefix: models/digits, epoch: 10}
inputs:
  data: {shape: 1x1x8x8}
targets:
  - hots
tune:
  trails: 64
"""
    path = write(Path("digits.yaml"), text)
    problems = [f"digits.yaml:{problem}" for problem in problems_in(path)]
    assert problems == [line.removeprefix("tvmflow: ") for line in lines]


def test_every_field_has_a_row() -> None:
    """Also those of pipelines; no type or default is written as in Python."""
    page = recipe_reference()
    for name in (*Recipe.model_fields, *InputSpec.model_fields, *PipelineFile.model_fields):
        assert f"\n| `{name}` | " in page
    for word in ("None", "True", "False", "{'", "anyOf", "int |", "str |"):
        assert word not in page
