"""`tvmflow build`: a model without a recipe of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import (
    ExecutionOptions,
    LockOptions,
    OutputOptions,
    RecipeOptions,
    StoreOption,
    store_option,
)
from tvmflow.cli.init import ModelOptions
from tvmflow.cli.options import Options
from tvmflow.cli.run import RunOptions
from tvmflow.core.errors import EXIT_OK, UsageError
from tvmflow.core.generated_text import shell_word

if TYPE_CHECKING:
    from tvmflow.planning.new_recipe import NewRecipe
    from tvmflow.store.local import LocalStore


class BuildOptions(Options):
    """Build a model without a recipe: import, compile, verify and deliver it.

    The recipe is that of `tvmflow init`, which keeps it; without --minutes, nothing is tuned.

    Examples:
        # for this machine
        tvmflow build model.onnx
        # search for faster kernels for ten minutes
        tvmflow build model.onnx --minutes 10
        # sizes that the model leaves open
        tvmflow build model.onnx --shape data=1,3,224,224
    """

    model: ModelOptions
    execution: ExecutionOptions
    output: OutputOptions
    store: StoreOption = store_option()
    argv: tuple[str, ...]


_FOLDER: Final = "recipes"
_MODEL: Final = re.compile(r"^model:\n(?:  .*\n)+", re.MULTILINE)


def build(options: BuildOptions) -> int:
    from tvmflow.cli.output import print_notes
    from tvmflow.cli.run import run
    from tvmflow.core.project import shortest_path

    store = options.store.open()
    path = _write_recipe(options, store)
    code = run(
        RunOptions(
            store=options.store,
            recipes=RecipeOptions(recipes=(shortest_path(str(path)),)),
            execution=options.execution,
            lock=LockOptions(),
            output=options.output,
            argv=options.argv,
        )
    )
    if code == EXIT_OK and not options.output.json:
        print_notes(options.output, "", f"keep its recipe: {options.model.command('init')}")
        if not options.model.minutes:
            print_notes(options.output, "search for faster kernels: add --minutes 10")
    return code


def _write_recipe(options: BuildOptions, store: LocalStore) -> Path:
    """Write the recipe into the store, where other commands can name it, and return its path."""
    from tvmflow.cli.init import choices, read_model
    from tvmflow.cli.output import print_notes
    from tvmflow.core.disk_errors import disk_errors
    from tvmflow.core.files import write_atomically
    from tvmflow.planning.new_recipe import SUFFIX, write_recipe

    folder = Path(store.root, _FOLDER)
    model = read_model(options.model, folder, store)
    recipe = write_recipe(
        model, choices(options.model)._replace(minutes=options.model.minutes or 0)
    )
    if recipe.open_lines:
        raise _open_sizes_error(options.model, recipe)
    if not options.output.json:
        print_notes(options.output, *recipe.describe_batch())
    path = folder / f"{model.name}{SUFFIX}"
    if _names_another_model(path, recipe.text):
        print_notes(
            options.output,
            f"{options.model.model} replaces another model with the name {model.name}, also in dist: "
            "rename its file to keep both",
        )
    with disk_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, recipe.text)
    return path


def _names_another_model(path: Path, text: str) -> bool:
    """Return whether there is a recipe already, with another model than in a text."""
    try:
        previous = _MODEL.search(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return previous is not None and previous[0] not in text


def _open_sizes_error(options: ModelOptions, recipe: NewRecipe) -> UsageError:
    """Return the error for a model that leaves sizes open, with the options that set them."""
    from tvmflow.frontends.inputs import SIZE

    shapes = [
        f"--shape {shell_word(name)}={','.join(shape)}"
        for name, shape in recipe.open_shapes.items()
    ]
    return UsageError(
        f"{options.model} leaves sizes of its inputs open",
        fix=f"give them, with a number for each {SIZE}: {' '.join(shapes)}",
    )


COMMANDS: Final = {"build": build}
