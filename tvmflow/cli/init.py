"""Recipes for models without one, and for editors: `tvmflow init`, `build` and `schema`."""

from __future__ import annotations

import contextlib
import json
import re
import sys
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
from tvmflow.cli.options import Options, argument, flag, minutes, option, shape
from tvmflow.cli.output import check_output_file, print_notes, write_file
from tvmflow.cli.run import RunOptions, run
from tvmflow.core.disk_errors import disk_errors, make_folder
from tvmflow.core.errors import EXIT_OK, UsageError
from tvmflow.core.files import write_atomically
from tvmflow.core.formatting import printable, size_text
from tvmflow.core.generated_text import shell_word
from tvmflow.core.project import TABLE_FILE, find_project, shortest_path

if TYPE_CHECKING:
    from tvmflow.planning.new_recipe import Model, NewRecipe
    from tvmflow.store.local import LocalStore


class SchemaOptions(Options):
    """Print the JSON Schema of recipes, or with --pipeline of pipelines, for editors.

    Examples:
        tvmflow schema --output recipe.schema.json
        # then, as the first line of a recipe, for editors with yaml-language-server
        # yaml-language-server: $schema=recipe.schema.json
    """

    pipeline: bool = flag("the schema of pipelines, not of recipes")
    output: Path | None = option("FILE", "write the schema to this file")


def schema(options: SchemaOptions) -> int:
    from tvmflow.planning.recipes import pipeline_schema
    from tvmflow.recipe import json_schema

    content = pipeline_schema() if options.pipeline else json_schema()
    text = json.dumps(content, indent=2) + "\n"
    if options.output:
        write_file(options.output, text)
    else:
        sys.stdout.write(text)
    return EXIT_OK


class ModelOptions(Options):
    """A model, and the requested builds."""

    model: str = argument(
        "MODEL",
        "an ONNX or TFLite file, an archive of torch.export (.pt2), PREFIX-symbol.json, or a URL",
    )
    targets: tuple[str, ...] = option(
        "T", "build for this target (may be repeated; this machine)", default=(), name="--target"
    )
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = option(
        "NAME=SIZES",
        "the shape of an input, such as data=1,3,224,224 (may be repeated)",
        default=(),
        name="--shape",
        type=shape,
    )
    minutes: float | None = option(
        "M", "minutes to search for faster kernels; 0: no search", type=minutes
    )

    def command(self, name: str) -> str:
        """Return the command line of another command with the same options."""
        words = [name, self.model]
        words += [word for target in self.targets for word in ("--target", target)]
        for input_name, sizes in self.shapes:
            words += ["--shape", f"{input_name}={','.join(map(str, sizes))}"]
        words += [] if self.minutes is None else ["--minutes", f"{self.minutes:g}"]
        return f"tvmflow {' '.join(map(shell_word, words))}"


class InitOptions(Options):
    """Write the recipe of a model.

    Inputs come from the model. All other fields have their defaults, with comments on what you can change.

    Examples:
        # NAME.tvmflow.yaml in the current folder
        tvmflow init model.onnx
        # sizes of dynamic dimensions; for another machine, too
        tvmflow init model.onnx --shape data=1,3,224,224 --target host --target cortex-a72
        # one library for all sizes of dynamic dimensions
        tvmflow init model.onnx --open
        # int8 instead of float32
        tvmflow init model.onnx --quantize
        # print the recipe instead of writing a file
        tvmflow init model.onnx --stdout
        # a PyTorch model: runs `make` of nets/small.py, which returns (module, example inputs)
        tvmflow init nets.small:make --archive small.pt2
    """

    model: ModelOptions
    output: Path | None = option("FILE", "the recipe to write (NAME.tvmflow.yaml in this folder)")
    archive: Path | None = option(
        "FILE",
        "export a PyTorch model with torch.export to FILE (.pt2); MODEL is then PACKAGE.MODULE:FUNCTION, "
        "whose code runs and returns (module, example inputs)",
    )
    open: bool = flag("keep dynamic dimensions: one library for all sizes")
    quantize: bool = flag("convert a float model to int8: adds the section `quantize`")
    stdout: bool = flag("print the recipe instead of writing a file")
    force: bool = flag("overwrite an existing recipe")
    store: StoreOption = store_option()
    verbosity: int


_ARCHIVE_SUFFIX: Final = ".pt2"
_TABLE: Final = """\
# The root of a project: tvmflow keeps results in `store` and delivers files to `dist`, however deep one stands.
# store = "cache"
# dist = "dist"
# releases = "releases"
"""


def init(options: InitOptions) -> int:
    from tvmflow.planning.new_recipe import SUFFIX, Choices, name_of, write_recipe
    from tvmflow.store.addresses import is_address

    chosen = options.model
    if options.archive is not None:
        chosen = ModelOptions(**{**vars(chosen), "model": str(options.archive)})
    folder = options.output.parent if options.output else Path()
    path = options.output or Path(f"{name_of(chosen.model)}{SUFFIX}")
    if path.exists() and not options.force and not options.stdout:
        fix = "replace it with --force, or write another file with --output"
        raise UsageError(f"{path} exists", fix=fix)
    if not options.stdout:
        check_output_file(path, [chosen.model])
    if options.archive is not None:
        _write_archive(options.model.model, options.archive, replace=options.force)
    # only a model at an address is downloaded, into a store that other commands take for one
    is_downloaded = is_address(chosen.model)
    store = options.store.open() if is_downloaded else options.store.locate()
    picked = Choices(chosen.targets, dict(chosen.shapes), chosen.minutes)
    picked = picked._replace(is_dynamic=options.open, is_quantized=options.quantize)
    recipe = write_recipe(read_model(chosen, folder, store), picked)
    if options.stdout:
        sys.stdout.write(recipe.text)
        return EXIT_OK
    write_file(path, recipe.text)
    print_notes(options, f"{path}: the recipe of {chosen.model}", *_mark_root(folder))
    print_notes(options, *recipe.describe_batch())
    print_notes(options, "", *_describe_next(path, recipe, is_dynamic=options.open))
    return EXIT_OK


def _write_archive(factory: str, path: Path, *, replace: bool) -> None:
    from tvmflow.frontends.pytorch import export_factory, is_factory

    if not is_factory(factory):
        raise UsageError(
            f"--archive is for a PyTorch model that Python code makes, and {factory} is not a PACKAGE.MODULE:FUNCTION",
            fix="leave --archive out for a model that is a file",
        )
    if path.suffix != _ARCHIVE_SUFFIX:
        fix = f"write --archive {path.with_suffix(_ARCHIVE_SUFFIX)}"
        raise UsageError(f"--archive {path}: the name does not end in {_ARCHIVE_SUFFIX}", fix=fix)
    if path.exists() and not replace:
        raise UsageError(f"{path} exists", fix="replace it with --force, or write another file")
    make_folder(path.parent)
    with disk_errors(path):
        version = export_factory(factory, path)
    size = size_text(path.stat().st_size)
    text = f"{path}: what {factory} returns, exported by PyTorch {version} ({size})"
    sys.stderr.write(f"{printable(text)}\n")


def read_model(options: ModelOptions, folder: Path, store: LocalStore) -> Model:
    """Return a recipe's content about a model in a folder."""
    from tvmflow.engine.progress import DownloadLine
    from tvmflow.planning.new_recipe import inspect_model
    from tvmflow.store.source_files import SourceFiles

    return inspect_model(options.model, folder, SourceFiles(store, DownloadLine()))


def _mark_root(folder: Path) -> list[str]:
    """Mark the current folder as the root of a project if there is none; return a note about it."""
    project = find_project()
    if project.marker or folder != Path():
        return []
    with disk_errors(TABLE_FILE):
        write_atomically(Path(TABLE_FILE), _TABLE)
    place = "this folder is now the root of a project: results are in cache/, libraries in dist/"
    return [f"{TABLE_FILE}: {place}"]


def _describe_next(path: Path, recipe: NewRecipe, *, is_dynamic: bool) -> list[str]:
    word, dist = shell_word(str(path)), shortest_path(find_project().dist)
    lines = [
        f"  tvmflow plan {word}   # what will be done",
        f"  tvmflow run {word}    # build, verify, deliver to {dist}",
    ]
    if not recipe.unsized_lines:
        return ["next:", *lines]
    place = f"in place of each SIZE ({path}:{recipe.unsized_lines[0]})"
    if is_dynamic:
        return [f"next: write the largest size {place}, then", *lines]
    return [
        f"next: write a number {place}, or keep them dynamic (init --open --force), then",
        *lines,
    ]


class BuildOptions(Options):
    """Build a model without a recipe: import, compile, verify and deliver it.

    The recipe is the one that `tvmflow init` would write. Without --minutes, nothing is tuned.

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
    from tvmflow.frontends.inputs import SIZE
    from tvmflow.planning.new_recipe import SUFFIX, Choices, write_recipe

    folder = Path(store.root, _FOLDER)
    chosen = options.model
    model = read_model(chosen, folder, store)
    picked = Choices(chosen.targets, dict(chosen.shapes), chosen.minutes or 0)
    recipe = write_recipe(model, picked)
    if recipe.unsized_lines:
        unsized_shapes = recipe.unsized_shapes.items()
        shapes = (f"--shape {shell_word(name)}={','.join(shape)}" for name, shape in unsized_shapes)
        fix = f"give them, with a number for each {SIZE}: {' '.join(shapes)}"
        raise UsageError(f"{chosen.model} has dynamic dimensions", fix=fix)
    if not options.output.json:
        print_notes(options.output, *recipe.describe_batch())
    path = folder / f"{model.name}{SUFFIX}"
    previous = None
    with contextlib.suppress(OSError, ValueError):
        previous = _MODEL.search(path.read_text(encoding="utf-8"))
    if previous and previous[0] not in recipe.text:
        print_notes(
            options.output,
            f"{chosen.model} replaces another model with the name {model.name}, even in dist: "
            "rename its file to keep both",
        )
    with disk_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, recipe.text)
    return path


COMMANDS: Final = {"init": init, "build": build, "schema": schema}
