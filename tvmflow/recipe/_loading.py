"""From a file to a recipe, with all its mistakes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tvmflow.mistakes import check
from tvmflow.recipe._files import is_file, no_file
from tvmflow.recipe._model import MAX_EPOCH, checkpoint
from tvmflow.recipe._pipelines import Pipeline, load_pipeline, no_pipeline
from tvmflow.recipe._recipe import Recipe
from tvmflow.yaml_positions import Document, Loc, Problem, dotted, neighbours, read_yaml


class LoadedRecipe(NamedTuple):
    """A recipe, its pipeline, and where each part stands: `where("targets", 0)` gives `file:line:column`.

    `read` are the files that this was read from.
    """

    recipe: Recipe
    path: Path
    where: Callable[..., str]
    read: tuple[Path, ...]
    pipeline: Pipeline


def load_recipe(path: Path) -> LoadedRecipe:
    """The recipe in a file. Raises RecipeError with all its mistakes, each `file:line:column: field: what`."""
    document = read_yaml(path)
    recipe, problems = check(document, Recipe)
    problems += _missing_files(document)
    if recipe is None or problems:
        raise document.error(problems)
    pipeline = load_pipeline(recipe.pipeline, path.parent)
    return LoadedRecipe(recipe, path, document.where, (path, pipeline.path), pipeline)


def _missing_files(document: Document) -> Iterator[Problem]:
    """A problem for every file that the recipe names and that is not there.

    Looks at the document, not at a Recipe, so that it can be told along with other mistakes.
    """
    base = document.path.parent
    prefix, epoch = document.at("model", "mxnet", "prefix"), document.at("model", "mxnet", "epoch")
    if isinstance(prefix, str) and prefix and type(epoch) is int and 0 <= epoch <= MAX_EPOCH:
        yield from _missing_checkpoint(prefix, epoch, document)
    onnx = document.at("model", "onnx")
    if isinstance(onnx, str) and onnx and "://" not in onnx and not is_file(base / onnx):
        yield Problem(*document.place("model", "onnx"), f"model.onnx: {no_file(base / onnx)}")
    yield from _missing_data(document)
    pipeline = document.at("pipeline")
    if isinstance(pipeline, str) and pipeline:
        sentence = no_pipeline(pipeline, base)
        if sentence:
            yield Problem(*document.place("pipeline"), f"pipeline: {sentence}")


def _missing_data(document: Document) -> Iterator[Problem]:
    """The recipe's `verify.data`, and those of targets."""
    targets = document.at("targets")
    count = len(targets) if isinstance(targets, list) else 0
    parts: list[Loc] = [(), *(("targets", index) for index in range(count))]
    for part in parts:
        loc: Loc = (*part, "verify", "data")
        data, base = document.at(*loc), document.path.parent
        if isinstance(data, str) and data and not is_file(base / data):
            text = "data is not downloaded; name a file" if "://" in data else no_file(base / data)
            yield Problem(*document.place(*loc), f"{dotted(loc)}: {text}")


def _missing_checkpoint(prefix: str, epoch: int, document: Document) -> Iterator[Problem]:
    symbol, params = checkpoint(prefix, epoch, document.path.parent)
    if not is_file(symbol):
        place = document.place("model", "mxnet", "prefix")
        yield Problem(*place, f"model.mxnet.prefix: {no_file(symbol)}")
    elif not is_file(params):
        place = document.place("model", "mxnet", "epoch")
        yield Problem(*place, f"model.mxnet.epoch: {no_file(params, hint=False)}{_epochs(symbol)}")


def _epochs(symbol: Path) -> str:
    """The epochs that are there instead."""
    stem = symbol.name.removesuffix("symbol.json")
    ends = [name.removeprefix(stem) for name in neighbours(symbol) if name.startswith(stem)]
    numbers = [end.removesuffix(".params") for end in ends if end.endswith(".params")]
    epochs = [str(int(number)) for number in numbers if number.isascii() and number.isdigit()]
    return f" (epochs that are there: {', '.join(epochs) or 'none'})"
