"""`tvmflow ci`: write CI configuration that runs a project's recipes, with its caches."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.cli.options import Options, argument, flag, option
from tvmflow.cli.output import check_output_file, print_notes, write_file
from tvmflow.core.errors import EXIT_OK, UsageError
from tvmflow.core.generated_text import shell_word, yaml_key
from tvmflow.core.project import (
    DEFAULTS,
    REPOSITORY,
    find_project,
    list_packaged_paths,
    shortest_path,
)
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
{more}          dist: {dist}
      - uses: actions/upload-artifact@v4
        with: {{name: libraries, path: {libraries}}}
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
    job = _read(options)
    text = _GITHUB.format(
        version=VERSION,
        recipes="\n".join(f"            {recipe}" for recipe in job.recipes),
        options=yaml_key(job.options),
        more="".join(
            f"          {name}: {value}\n"
            for name, value in (
                ("extras", ",".join(job.extras)),
                ("folder", job.folder and yaml_key(job.folder)),
            )
            if value
        ),
        dist=yaml_key(job.dist),
        libraries=yaml_key(posixpath.normpath(posixpath.join(job.folder, job.dist))),
    )
    return _write("github", text, job, options)


def gitlab(options: GitlabOptions) -> int:
    job = _read(options)
    component = next(filter(Path.is_file, map(Path, list_packaged_paths(_COMPONENT))))
    header, _, text = component.read_text(encoding="utf-8").partition("\n---\n")
    inputs = {
        **dict(re.findall(r'^    (\w+): \{default: "([^"]*)"', header, re.MULTILINE)),
        "recipes": " ".join(map(shell_word, job.recipes)),
        "options": job.options,
        "folder": job.folder or ".",
        "dist": shell_word(job.dist),
    }
    if job.extras:
        inputs["package"] = f"'tvmflow[{','.join(job.extras)}]'"
    text = _GITLAB + _INPUT.sub(lambda name: inputs[name[1]], text)
    return _write("gitlab", text, job, options)


COMMANDS: Final = {"ci": {"github": github, "gitlab": gitlab}}


class _Job(NamedTuple):
    """The recipes and settings of a CI job.

    `folder`, the project's root, is relative to the git repository; recipes and `dist` are relative to `folder`.
    `options` are arguments of `tvmflow run` that enforce a lock file.
    """

    repository: Path
    folder: str
    recipes: tuple[str, ...]
    extras: tuple[str, ...]
    options: str
    dist: str


def _read(options: _CiOptions) -> _Job:
    from tvmflow.planning.prepare import RunRequest, load_request
    from tvmflow.recipe.lock_file import lock_path

    files = options.recipes
    loaded, _ = load_request(RunRequest(recipes=files))
    project = find_project()
    root = Path(project.root).resolve()
    repository = next(
        (folder for folder in (root, *root.parents) if os.path.lexists(folder / REPOSITORY)), root
    )
    folder = "" if root == repository else root.relative_to(repository).as_posix()
    dist, default = Path(project.dist).resolve(), root / DEFAULTS["dist"]
    if not dist.is_relative_to(repository):
        text = f"the service delivers to {default.name}: {dist} is outside of the repository"
        if not options.stdout:
            print_notes(options, text)
        dist = default
    recipes = tuple(_find_in_project(file, root) for file in files)
    is_locked = len(recipes) == 1 and Path(root, lock_path(recipes)).is_file()
    return _Job(
        repository=repository,
        folder=folder and _check_path(folder, "a project", "rename the folder"),
        recipes=recipes,
        extras=tuple(sorted(set(_list_extras(loaded)))),
        options="--locked --keep-going" if is_locked else "--keep-going",
        dist=_check_path(
            Path(os.path.relpath(dist, root)).as_posix(),
            "delivered files",
            "name another folder in tvmflow.toml: dist",
        ),
    )


def _find_in_project(file: str, root: Path) -> str:
    try:
        path = Path(file).resolve().relative_to(root).as_posix()
    except ValueError:
        raise UsageError(
            f"{file} is not in the project {root}: a CI service has nothing but the project",
            fix="copy it into the project",
        ) from None
    return _check_path(path, "a recipe", f"rename {file} or its folder")


def _check_path(path: str, what: str, fix: str) -> str:
    """Return a path; UsageError if a CI service or a command could misread it.

    Services split lists at white space and expand variables, expressions and patterns; commands read an initial - as an
    option.
    """
    if not re.fullmatch(r"[\w./+@][\w./+@-]*", path):
        raise UsageError(
            f"{path}: only letters, digits and ./_+@- can be in the path of {what} for a CI service, and it cannot begin with -",
            fix=fix,
        )
    return path


def _list_extras(recipes: Iterable[LoadedRecipe]) -> Iterator[str]:
    from tvmflow.core.packages import install_command
    from tvmflow.frontends import FRONTENDS
    from tvmflow.stages.images import is_image_data
    from tvmflow.store.addresses import is_address
    from tvmflow.targets.backends import backend_for

    for loaded in recipes:
        recipe = loaded.recipe
        yield from _EXTRA.findall(FRONTENDS[recipe.model.kind].REFERENCE.install)
        for target in recipe.targets:
            for build in target.build_targets().values():
                tools = backend_for(build.tvm_target() or {}).TOOLS
                yield from _EXTRA.findall(install_command(*tools)) if tools else ()
        forms = [recipe, *map(recipe.for_variant, recipe.variants)]
        forms += [form.for_target(target.name) for form in forms for target in form.targets]
        data = {form.verify.data for form in forms}
        data |= {form.quantize.data for form in forms if form.quantize}
        for name in filter(None, data):
            if not is_address(name) and is_image_data(name, loaded.path.parent / name):
                yield "images"


def _write(service: str, text: str, job: _Job, options: _CiOptions) -> int:
    if options.stdout:
        sys.stdout.write(text)
        return EXIT_OK
    place = Path(shortest_path(str(job.repository / _PLACES[service])))
    path = options.output or place
    if path.exists() and not options.force:
        fix = "see what would be written with --stdout, replace the file with --force, or write another one with --output"
        raise UsageError(f"{path} exists", fix=fix)
    check_output_file(path, options.recipes)
    write_file(path, text)
    at, expected = path.resolve(), place.resolve()
    # GitHub reads every file in the folder of workflows.
    is_read = at == expected or (service == "github" and at.parent == expected.parent)
    when = "commit it, and" if is_read else f"{service} reads only {place}: with this text there,"
    print_notes(options, f"{path}: {when} {service} runs {' '.join(options.recipes)}")
    return EXIT_OK
