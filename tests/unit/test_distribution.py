"""The wheel of tvmflow carries what its users need, and refers to nothing that it lacks."""

from __future__ import annotations

import ast
import email
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.syntax_trees import parse_files

ROOT: Final = Path(__file__).resolve().parents[2]
REPOSITORY_FOLDERS: Final = re.compile(r"\b(?:docs|benchmarks|tests|recipes)/[\w-]+\.\w+")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel as its build backend makes it."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    [path] = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_it_has_licence_types_and_pipelines(wheel: zipfile.ZipFile) -> None:
    """A user of the package has its licence, type checkers its types, and recipes their pipelines."""
    names = {name.partition("/")[2] for name in wheel.namelist()}
    assert {
        "licenses/LICENSE",
        "py.typed",
        "pipelines/tune.yaml",
        "pipelines/compile.yaml",
    } <= names


def test_it_has_nothing_but_the_package(wheel: zipfile.ZipFile) -> None:
    """Tests, docs and their generators stay in the repository."""
    folders = {name.partition("/")[0] for name in wheel.namelist()}
    metadata = {folder for folder in folders if folder.endswith((".dist-info", ".data"))}
    assert folders - metadata == {"tvmflow"}


def test_its_description_has_absolute_links_alone(wheel: zipfile.ZipFile) -> None:
    """A package index shows the README without the repository around it."""
    [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    text = email.message_from_bytes(wheel.read(name)).get_payload()
    assert isinstance(text, str)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and [link for link in links if not link.startswith("https://")] == []


def test_no_message_names_a_file_that_it_lacks() -> None:
    """Text in the code, docstrings aside, names no file of the repository."""
    messages = []
    paths = (ROOT / "tvmflow").rglob("*.py")
    named = [path for path in paths if REPOSITORY_FOLDERS.search(path.read_text())]
    for path, tree in parse_files(named).items():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        messages += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and REPOSITORY_FOLDERS.search(node.value)
        ]
    assert messages == []
