"""Pipelines: what their files may leave out, and the JSON Schemas with which editors read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.support.recipes import ROOT, write
from tools.generate_reference import catalog, editor_schema
from tvmflow.cli import main
from tvmflow.core.errors import RecipeError
from tvmflow.core.types import Json
from tvmflow.planning.recipes import load_pipeline, pipeline_schema
from tvmflow.recipe import json_schema
from tvmflow.recipe.yaml_files import read_yaml
from tvmflow.stages import pipeline_stages

FILES = sorted(path.relative_to(ROOT) for path in ROOT.glob("[rp]*es/*.yaml"))


def editor() -> Draft202012Validator:
    """What an editor checks a file `*.tvmflow.yaml` with."""
    schemas = (json_schema(), pipeline_schema(), editor_schema())
    for schema in schemas:
        Draft202012Validator.check_schema(schema)
    known: Registry[Any] = Registry().with_resources(
        [(schema["$id"], Resource.from_contents(schema)) for schema in schemas]
    )
    return Draft202012Validator(editor_schema(), registry=known)


def mistakes(document: Json) -> list[str]:
    return [error.message for error in editor().iter_errors(document)]


def test_a_pipeline_without_stages_runs_those_of_tune(tmp_path: Path) -> None:
    """A release needs no list of stages: recipes, version and gates are enough."""
    text = "pipeline: 1\nname: nightly\nrecipes: [net.yaml]\nrelease: {version: '1.0'}\n"
    write(tmp_path / "net.yaml", "recipe: 1\n")
    path = write(tmp_path / "nightly.yaml", text)
    assert load_pipeline(str(path)).stages == load_pipeline("tune").stages == pipeline_stages()


def test_an_empty_pipeline_says_how_to_start(tmp_path: Path) -> None:
    """With a line of pipelines, not of recipes."""
    path = write(tmp_path / "nightly.yaml", "# nothing yet")
    with pytest.raises(RecipeError, match="the file is empty") as caught:
        load_pipeline(str(path))
    assert caught.value.fix == "start with the line `pipeline: 1`"


def test_the_list_of_stages_is_not_empty(tmp_path: Path) -> None:
    """An empty list is a mistake, not the default."""
    path = write(tmp_path / "nightly.yaml", "pipeline: 1\nname: nightly\nstages: []\n")
    with pytest.raises(Exception, match=r"nightly\.yaml:3:\d+: stages: "):
        load_pipeline(str(path))


def test_a_limit_of_a_recipe_is_suggested_for_a_gate(tmp_path: Path) -> None:
    """Also where its name is not quite that of the recipe's field."""
    text = (
        "pipeline: 1\nname: n\nrelease: {version: '1', gates: {max_latency_ms: 50, max_size: 1}}\n"
    )
    path = write(tmp_path / "nightly.yaml", text)
    with pytest.raises(RecipeError) as caught:
        load_pipeline(str(path))
    assert [problem.partition("gates.")[2] for problem in caught.value.problems] == [
        "max_latency_ms: unknown field; did you mean 'max_latency' under verify of a recipe?",
        "max_size: belongs under verify of a recipe",
    ]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_shipped_files_fit_the_schema(path: Path) -> None:
    """One schema tells recipes from pipelines."""
    assert mistakes(read_yaml(ROOT / path).value) == []


def test_an_editor_shows_mistakes_in_both_kinds_of_files() -> None:
    """The messages are about the kind of file, not about both."""
    recipe = {"recipe": 1, "name": "net", "model": {"onnx": "net.onnx"}, "trials": 3}
    assert mistakes(recipe) == ["Additional properties are not allowed ('trials' was unexpected)"]
    assert mistakes({"pipeline": 1, "name": "net", "targets": ["hots"]}) != []
    assert mistakes({"pipeline": 1, "name": "net", "targets": ["host"]}) == []


def test_the_schema_of_pipelines_describes_every_field() -> None:
    """Each field has a description, and the schema has a name and a dialect."""
    schema = pipeline_schema()
    assert schema["$id"].endswith("/docs/pipeline.schema.json")
    assert schema["required"] == ["pipeline", "name"]
    for part in (schema, *schema["$defs"].values()):
        for name, field in part["properties"].items():
            assert field["description"].endswith("."), name


def test_the_catalog_names_the_schema_of_both() -> None:
    """Its address is the `$id` of the schema."""
    (entry,) = catalog()["schemas"]
    assert entry["url"] == editor_schema()["$id"]
    assert "*.tvmflow.yaml" in entry["fileMatch"]


def test_the_command_prints_and_writes_schemas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of recipes, and with --pipeline of pipelines; a file in the way is an error with its path."""
    assert main.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(json_schema()))
    target = tmp_path / "schemas" / "pipeline.schema.json"
    assert main.main(["schema", "--pipeline", "--output", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(target.read_text()) == json.loads(json.dumps(pipeline_schema()))
    assert main.main(["schema", "--output", str(target / "file")]) == 4
    assert str(target) in capsys.readouterr().err
