"""A valid recipe to make mistakes in, and the files that it names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.support.source_files import empty_source_files
from tvmflow.core.errors import RecipeError
from tvmflow.frontends import FRONTENDS
from tvmflow.planning.prepare import read_recipe_signature
from tvmflow.planning.recipes import PlannedRecipe, load_recipe

ROOT = Path(__file__).resolve().parents[2]

RECIPE = """\
recipe: 1
name: net
model:
  onnx: m.onnx
inputs:
  data: {shape: [1, 3, 8, 8], dtype: float32}
targets:
  - host
tune:
  trials: 4
outputs: [bundle]
verify:
  data: data.npz
  rtol: 1.0e-3
pipeline: tune
"""
FILES = ("m.onnx", "net-symbol.json", "net-0003.params", "net-0010.params", "data.npz")


def edited(*edits: tuple[str, str], text: str = RECIPE) -> str:
    """Return the recipe with parts of its text replaced; each must exist."""
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


def lay_out(folder: Path) -> None:
    """Create the files that the recipe names; they may be empty, because a recipe is read without them."""
    for name in FILES:
        (folder / name).touch()


def write(path: Path, content: str | bytes) -> Path:
    """Write a recipe without translating line ends."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def input_problems(recipe: str, variant: str = "") -> list[str]:
    """Return what is wrong with the inputs of a recipe, by the header of its model.

    Raises:
        RecipeError: for anything else that is wrong.
    """
    loaded = load_recipe(write(Path("r.yaml"), recipe))
    source = loaded.recipe.model
    files = FRONTENDS[source.kind].files(
        source, Path(), partial(loaded.where, "model"), empty_source_files()
    )
    problems: list[str] = []
    read_recipe_signature(PlannedRecipe(loaded, (), (), files, variant), problems)
    return problems


def model_problems(fields: str) -> list[str]:
    """Return the problems of a recipe with these fields that planning finds in its model, and the remedy."""
    try:
        return input_problems(f"recipe: 1\nname: net\n{fields}")
    except RecipeError as error:
        assert error.exit_code == 2
        return [*error.problems, *filter(None, [error.fix])]


def problems_in(path: Path) -> list[str]:
    """Return the problems of a recipe, each without the name of the file at its start."""
    try:
        load_recipe(path)
    except RecipeError as error:
        assert error.exit_code == 2
        starts = {problem[: len(f"{path}:")] for problem in error.problems}
        assert starts == {f"{path}:"}
        return [problem.removeprefix(f"{path}:") for problem in error.problems]
    return []
