"""What every frontend in the registry provides."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tvmflow.core import packages
from tvmflow.core.types import Json
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.frontend import Frontend
from tvmflow.recipe import ModelSource

each_frontend = pytest.mark.parametrize("name", FRONTENDS)
FUNCTIONS = (
    "find_missing_files",
    "files",
    "load",
    "reference",
    "reference_version",
)


@each_frontend
def test_it_has_the_functions_of_the_base_class(name: str) -> None:
    """Each with the same parameters, and a docstring."""
    frontend = FRONTENDS[name]
    assert isinstance(frontend, Frontend)
    assert name == frontend.KIND
    for function in FUNCTIONS:
        parameters = list(inspect.signature(getattr(Frontend, function)).parameters)[1:]
        offered = getattr(frontend, function)
        assert list(inspect.signature(offered).parameters) == parameters
        assert (offered.__doc__ or "").strip()


@each_frontend
def test_its_packages_are_installed(name: str) -> None:
    """Tools that enter the key of `import` must be installed to have an identity; extras may be missing."""
    for package in FRONTENDS[name].TOOLS:
        try:
            assert packages.identity(package)
        except packages.NotInstalled as problem:
            assert packages.is_extra(package)
            assert problem.fix == FRONTENDS[name].REFERENCE.install


@each_frontend
def test_its_reference_says_how_to_install_it(name: str) -> None:
    """Its name, its distributions and the command are what reports and `doctor` show."""
    reference = FRONTENDS[name].REFERENCE
    assert reference.name
    assert reference.tools
    assert reference.install.startswith("pip install ")


@each_frontend
def test_a_recipe_can_name_its_models(name: str) -> None:
    """All of its fields are fields of `model:`, optional and described, and one has its name."""
    fields = FRONTENDS[name].SOURCE.model_fields
    assert name in fields
    for field, info in fields.items():
        assert ModelSource.model_fields[field].description == info.description != ""
        assert info.default is None


@each_frontend
def test_it_finds_no_missing_file_in_other_models(name: str, tmp_path: Path) -> None:
    """The value of `model:` may be of another frontend, or wrong."""
    wrong: list[Json] = [None, 3, [1], {}]
    models = [{}, {"other": "a"}, *({name: value} for value in wrong)]
    for model in models:
        assert list(FRONTENDS[name].find_missing_files(model, tmp_path)) == []


TOY = """
import json, sys
from pathlib import Path
from types import SimpleNamespace

from pydantic import Field
from tvmflow import frontends
from tvmflow.core.errors import RecipeError
from tvmflow.core.named_files import is_file, missing_file_text
from tvmflow.frontends.base import MissingFile, ReferenceTraits, SourceFields


class ToySource(SourceFields):
    toy: str | None = Field(default=None, description="A model of toys.")
    bricks: int | None = Field(default=None, ge=1, description="Number of bricks.")


def find_missing_files(model, base):
    if isinstance(model.get("toy"), str) and not is_file(base / model["toy"]):
        yield MissingFile(("toy",), missing_file_text(base / model["toy"]))


frontends.FRONTENDS["toy"] = SimpleNamespace(
    NAME="Toy", KIND="toy", SOURCE=ToySource, TOOLS=("numpy",), REQUIRES_INPUTS=True,
    REFERENCE=ReferenceTraits("Toy", ("numpy",), "pip install toy", True),
    find_missing_files=find_missing_files,
)
from tvmflow.recipe import json_schema
from tvmflow.planning.recipes import load_recipe


def problems(text):
    path = Path("toy.yaml")
    path.write_text("recipe: 1\\nname: toy\\n" + text)
    try:
        return load_recipe(path).recipe.model.kind
    except RecipeError as error:
        return error.problems


Path("a.toy").touch()
inputs = "inputs: {x: {shape: [1]}}\\n"
print(json.dumps([
    problems("model: {toy: a.toy, bricks: 3}\\n" + inputs),
    problems("model: {toy: a.toy}\\n"),
    problems("model: {toy: b.toy, bricks: 0}\\n" + inputs),
    problems("model: {onnx: a.toy, bricks: 3}\\n"),
    list(json_schema()["$defs"]["ModelSource"]["properties"]),
]))
"""


def test_a_new_frontend_needs_only_its_line_in_the_registry(tmp_path: Path) -> None:
    """Recipes, messages and the schema know its fields; nothing else names frontends."""
    done = subprocess.run(
        [sys.executable, "-c", TOY], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [
        "toy",
        ["toy.yaml:1:1: inputs: a model of Toy needs the shapes of its inputs here"],
        [
            "toy.yaml:3:14: model.toy: there is no file b.toy; did you mean 'a.toy'?",
            "toy.yaml:3:29: model.bricks: must be at least 1",
        ],
        ["toy.yaml:3:30: model.bricks: is only allowed with toy"],
        ["files", "mxnet", "sha256", "onnx", "pytorch", "tflite", "toy", "bricks"],
    ]
