"""docs/architecture.md shows the package as it is, and the layers that `make check` holds are those of the page."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.support.syntax_trees import parse_files

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "tvmflow"
PAGE: Final = (ROOT / "docs" / "architecture.md").read_text()
MOST_ROOMS: Final = 22
LONGEST_SUMMARY: Final = 100
FEW_ARGUMENTS: Final = 4


Trees = dict[Path, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Parse every module of the package once."""
    return parse_files(PACKAGE.rglob("*.py"))


def folders() -> set[str]:
    """Name every folder of the package."""
    return {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def layers() -> list[str]:
    """Name the layers that import-linter holds, the highest first."""
    config = (ROOT / "pyproject.toml").read_text()
    return re.findall(r'"(\w+)"', config.partition("layers = [")[2].partition("]")[0])


def test_every_folder_is_a_layer() -> None:
    assert folders() == set(layers())


def test_the_page_lists_the_layers_in_order() -> None:
    """The first code block has a line for each folder, the highest layer first."""
    block = PAGE.partition("```\n")[2].partition("```")[0]
    assert re.findall(r"^  (\w+)/ ", block, re.MULTILINE) == layers()


def test_the_top_of_the_package_fits_a_screen() -> None:
    rooms = {path.stem for path in PACKAGE.glob("*.py")} | folders()
    assert len(rooms) <= MOST_ROOMS, sorted(rooms)


def test_every_path_on_the_page_exists() -> None:
    """Whoever follows a path from the page finds a file."""
    paths = re.findall(
        r"`((?:tvmflow|docs|tests|tools|pipelines|recipes|benchmarks)/[\w./]+)`", PAGE
    )
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_folder_says_what_it_owns(trees: Trees) -> None:
    """The first docstring of a folder is its description."""
    silent = [
        path.relative_to(ROOT)
        for path, tree in trees.items()
        if path.name == "__init__.py" and not ast.get_docstring(tree)
    ]
    assert silent == []


def test_no_folder_imports_private_modules_of_another(trees: Trees) -> None:
    """An underscore means that nothing outside the folder imports a module; imports inside functions count."""
    imported = []
    for path, tree in trees.items():
        folder = ".".join(path.parent.relative_to(ROOT).parts)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "tvmflow"
            ):
                continue
            for name in [node.module or "", *(f"{node.module}.{name.name}" for name in node.names)]:
                owner, _, module = name.rpartition(".")
                is_module = (ROOT / f"{name.replace('.', '/')}.py").exists()
                if is_module and module.startswith("_") and not folder.startswith(owner):
                    imported.append(f"{path.relative_to(ROOT)} imports {name}")
    assert imported == []


def test_the_dask_cluster_is_a_plug_in(trees: Trees) -> None:
    """Only its entry point names it: no other module of the package imports it."""
    plugin = {"dask", "cluster_worker"}
    importers = {
        path.stem
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("tvmflow.executors")
        and plugin & {(node.module or "").rpartition(".")[2], *(name.name for name in node.names)}
    }
    assert importers <= plugin


def list_imported_first(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the packages that a module imports when it is imported."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from list_imported_first(node.orelse)
        elif isinstance(node, ast.If | ast.Try):
            yield from list_imported_first(node.body)


def test_modules_import_without_extras(trees: Trees) -> None:
    """What belongs to an extra, such as Pillow, is imported where it is used: the demo installs no extra but MXNet."""
    required = {
        re.split(r"[^\w-]", text, maxsplit=1)[0]
        for text in importlib.metadata.requires("tvmflow") or ()
        if "extra ==" not in text
    }
    # typing_extensions and pydantic_core come with pydantic
    allowed = {"tvmflow", "typing_extensions", "pydantic_core", *sys.stdlib_module_names}
    for package, distributions in importlib.metadata.packages_distributions().items():
        if required.intersection(map(str.lower, distributions)):
            allowed.add(package)
    others = {
        f"{path.relative_to(ROOT)} imports {package}"
        for path, tree in trees.items()
        for package in list_imported_first(tree.body)
        if package not in allowed
    }
    assert others == set()


def test_docstrings_have_short_summaries(trees: Trees) -> None:
    """The first line fits an editor and the output of `help`; more text follows below it."""
    long = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if len((ast.get_docstring(node) or "").partition("\n")[0]) > LONGEST_SUMMARY
    ]
    assert long == []


def find_value_types(trees: Trees) -> dict[str, list[str]]:
    """Return the fields of each NamedTuple of the package by its name, where only one has that name."""
    fields: dict[str, list[str]] = {}
    names: list[str] = []
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
                names.append(node.name)
                fields[node.name] = [
                    ast.unparse(part.target)
                    for part in node.body
                    if isinstance(part, ast.AnnAssign)
                ]
    return {name: own for name, own in fields.items() if names.count(name) == 1}


def test_values_of_many_fields_are_built_with_keywords(trees: Trees) -> None:
    """Five arguments without names are read in the wrong order sooner or later."""
    values = find_value_types(trees)
    assert len(values) > 300
    unnamed = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in values
        and len(node.args) >= FEW_ARGUMENTS + 1
        and not any(isinstance(argument, ast.Starred) for argument in node.args)
    ]
    assert unnamed == []
