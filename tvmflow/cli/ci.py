"""`tvmflow ci`: what brings a project's recipes to a CI service, with the caches that it needs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.cli.options import Options, argument, flag, option
from tvmflow.core.errors import EXIT_OK, UsageError
from tvmflow.core.generated_text import shell_word, yaml_key
from tvmflow.core.project import find_project, list_packaged_paths
from tvmflow.core.version import VERSION

if TYPE_CHECKING:
    from tvmflow.planning.recipes import LoadedRecipe

_GITHUB: Final = """\
# Written by `tvmflow ci github`; change what you like.
name: models
on:
  push:
    branches: [main, master]
  pull_request:
permissions:
  actions: read
  contents: read
  pull-requests: write
jobs:
  models:
    runs-on: ubuntu-24.04
    steps:
      - uses: actions/checkout@v4
      - uses: tvmflow/tvmflow@v{version}
        with:
          recipes: |
{recipes}
          options: {options}
{extras}          dist: {dist}
      - uses: actions/upload-artifact@v4
        with: {{name: libraries, path: {dist}}}
"""
_GITLAB: Final = "# Written by `tvmflow ci gitlab`; change what you like.\n"
_PLACES: Final = {"github": ".github/workflows/models.yml", "gitlab": ".gitlab-ci.yml"}
_INPUT: Final = re.compile(r"\$\[\[ inputs\.(\w+) \]\]")
_COMPONENT: Final = "templates/tvmflow.yml"
_EXTRA: Final = re.compile(r"tvmflow\[(\w+)\]")


class _CiOptions(Options):
    recipes: tuple[str, ...] = argument("RECIPE", "a recipe, or a pipeline that names recipes", "+")
    output: Path | None = option("FILE", "the file to write (where the service looks for it)")
    stdout: bool = flag("print the file, and write none")
    force: bool = flag("replace a file that exists")
    verbosity: int


class GithubOptions(_CiOptions):
    """Write a workflow of GitHub Actions that runs recipes.

    Its action caches the store, keeps trials as an artifact, writes a summary, and comments on a pull
    request how its libraries compare with those of the target branch.

    Examples:
        tvmflow ci github pipelines/release.yaml
        tvmflow ci github net.tvmflow.yaml --stdout
    """


class GitlabOptions(_CiOptions):
    """Write a job of GitLab CI that runs recipes.

    It caches the store, keeps trials as an artifact, reports stages as tests, and compares the libraries of a
    merge request with those of the target branch.

    Examples:
        tvmflow ci gitlab pipelines/release.yaml
    """


def github(options: GithubOptions) -> int:
    job = _read(options.recipes)
    text = _GITHUB.format(
        version=VERSION,
        recipes="\n".join(f"            {recipe}" for recipe in job.recipes),
        options=yaml_key(job.options),
        extras=f"          extras: {','.join(job.extras)}\n" if job.extras else "",
        dist=yaml_key(job.dist),
    )
    return _write("github", text, options)


def gitlab(options: GitlabOptions) -> int:
    job = _read(options.recipes)
    component = next(filter(Path.is_file, map(Path, list_packaged_paths(_COMPONENT))))
    header, _, text = component.read_text(encoding="utf-8").partition("\n---\n")
    inputs = {
        **dict(re.findall(r'^    (\w+): \{default: "([^"]*)"', header, re.MULTILINE)),
        "recipes": " ".join(map(shell_word, job.recipes)),
        "options": job.options,
        "dist": shell_word(job.dist),
    }
    if job.extras:
        inputs["package"] = f"'tvmflow[{','.join(job.extras)}]'"
    return _write("gitlab", _GITLAB + _INPUT.sub(lambda name: inputs[name[1]], text), options)


COMMANDS: Final = {"ci": {"github": github, "gitlab": gitlab}}


class _Job(NamedTuple):
    """Recipes as a CI service runs them.

    Attributes:
        recipes: Their paths from the root of the project.
        extras: The extras of tvmflow that they need.
        options: The options of `run`: what a lock file records is enforced.
        dist: The folder of delivered files.
    """

    recipes: tuple[str, ...]
    extras: tuple[str, ...]
    options: str
    dist: str


def _read(files: tuple[str, ...]) -> _Job:
    """Return some recipes, or one pipeline, as a service runs them.

    Raises:
        RecipeError: A recipe or pipeline is wrong.
        UsageError: One lies outside the project, or its path cannot be written into the file of a service.
    """
    from tvmflow.core.project import find_project, shortest_path
    from tvmflow.planning.prepare import RunRequest, load_request
    from tvmflow.recipe.lock_file import lock_path

    loaded, _ = load_request(RunRequest(recipes=files))
    project = find_project()
    recipes = tuple(_find_in_project(file, Path(project.root)) for file in files)
    is_locked = len(recipes) == 1 and Path(project.root, lock_path(recipes)).is_file()
    return _Job(
        recipes,
        tuple(sorted(set(_list_extras(loaded)))),
        "--locked --keep-going" if is_locked else "--keep-going",
        _check_path(
            shortest_path(project.dist),
            "delivered files",
            "name another folder in tvmflow.toml: dist",
        ),
    )


def _find_in_project(file: str, root: Path) -> str:
    """Return the path of a file from the root of its project, as a service can read it."""
    try:
        path = Path(file).resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise UsageError(
            f"{file} is not in the project {root}: a CI service has nothing but the project",
            fix="copy it into the project",
        ) from None
    return _check_path(path, "a recipe", f"rename {file} or its folder")


def _check_path(path: str, what: str, fix: str) -> str:
    """Return a path that means the same in the file of every CI service.

    Services split lists at white space, and replace what looks like a variable, an expression or a
    pattern; commands read what begins with - as an option.

    Raises:
        UsageError: It has other characters.
    """
    if not re.fullmatch(r"[\w./+@][\w./+@-]*", path):
        raise UsageError(
            f"{path}: only letters, digits and ./_+@- can be in the path of {what} for a CI service, and it cannot begin with -",
            fix=fix,
        )
    return path


def _list_extras(recipes: Iterable[LoadedRecipe]) -> Iterator[str]:
    from tvmflow.frontends import FRONTENDS
    from tvmflow.stages.image_data import is_image_data
    from tvmflow.store.addresses import is_address

    for loaded in recipes:
        recipe = loaded.recipe
        frontend = FRONTENDS[recipe.model.kind]
        yield from _EXTRA.findall(frontend.REFERENCE.install)
        data = recipe.verify.data
        if data and not is_address(data) and is_image_data(data, loaded.path.parent / data):
            yield "images"


def _write(service: str, text: str, options: _CiOptions) -> int:
    from tvmflow.cli.output import check_output_file, print_notes, write_file

    if options.stdout:
        sys.stdout.write(text)
        return EXIT_OK
    path = options.output or Path(find_project().root, _PLACES[service])
    if path.exists() and not options.force:
        raise UsageError(
            f"{path} exists",
            fix="see what would be written with --stdout, replace the file with --force, or write "
            "another one with --output",
        )
    check_output_file(path, options.recipes)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text)
    print_notes(options, f"{path}: commit it, and {service} runs {' '.join(options.recipes)}")
    return EXIT_OK
