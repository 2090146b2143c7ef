"""One word for each idea: the code, its messages and its docs use the words of docs/glossary.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.support.syntax_trees import parse_files

ROOT: Final = Path(__file__).resolve().parents[2]
GLOSSARY: Final = ROOT / "docs" / "glossary.md"
CODE: Final = sorted(
    path for folder in ("tvmflow", "tests", "tools", "benchmarks", "pipelines", "recipes")
    for path in (ROOT / folder).rglob("*.py")
    if path != Path(__file__).resolve()
)  # fmt: skip
PAGES: Final = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "tvmflow").rglob("*.md"),
        *(ROOT / "pipelines").glob("*.yaml"),
        *(ROOT / "recipes").glob("*.yaml"),
        *(path for kind in ("cc", "h", "hpp", "cpp") for path in (ROOT / "tvmflow").rglob(f"*.{kind}")),
    ]
)  # fmt: skip

REPLACED: Final = {
    "abilities": "capabilities",
    "breaker": "circuit breaker",
    "farm": "device pool",
    "misfit": "incompatibility",
    "nursery": "fork server",
    "road": "lowering pipeline",
    "tier": "remote connection",
    "trail": "lineage",
}
"""Old names of ideas, each with the glossary's term. Other words of English are free to use."""

MAYBE_OLD: Final = re.compile(
    rf"(?:(?<![A-Za-z0-9])|(?<=[a-z0-9])(?=[A-Z]))(?i:{'|'.join(REPLACED)})(?i:s?)(?![a-z0-9])"
)
"""Every identifier that has one matches this, and some that have none."""

WITH: Final = {"breaker": "circuit"}
"""… unless this word stands before them."""

OLD_TERMS: Final = re.compile(r"nursery|\bmisfit|\bfarm of|one road to", re.IGNORECASE)
"""Those that text may not use either."""


class Occurrence(NamedTuple):
    """A word where it should not be."""

    place: str
    text: str


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Give every name that a module binds, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def words_in(name: str) -> list[str]:
    """Split an identifier: `RemoteCacheClient` and `remote_cache_client` alike."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word.lower() for word in spaced.split("_") if word]


def has_old_word(name: str) -> bool:
    """Tell whether an identifier, or a part of it, is a word that the glossary replaced."""
    words = words_in(name)
    return any(
        word.removesuffix("s") in REPLACED or word in REPLACED
        for index, word in enumerate(words)
        if WITH.get(word) != (words[index - 1] if index else "")
    )


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@pytest.mark.parametrize(
    ("name", "is_old"),
    [
        *[("Nursery", True), ("fork_server", False), ("CircuitBreaker", False), ("breaker", True)],
        *[("the_roads", True), ("TIER", True), ("ownTrail", True), ("frontier", False)],
    ],
)
def test_old_words_are_recognized_in_identifiers(name: str, is_old: bool) -> None:
    assert has_old_word(name) is is_old
    assert MAYBE_OLD.search(f"x = {name}(1)") or not is_old


def test_old_words_have_a_term_in_the_glossary() -> None:
    """A word is old only where the glossary has another one for the idea."""
    terms = re.findall(r"^\| ([^|]+) \|", GLOSSARY.read_text(), re.MULTILINE)
    assert set(REPLACED.values()) <= {term for row in terms for term in row.split(", ")}


def test_no_identifier_has_an_old_word() -> None:
    """Names of values, parameters, functions, classes and attributes."""
    # without the other files, this takes a tenth of the time
    paths = [path for path in CODE if MAYBE_OLD.search(path.read_text())]
    assert [
        Occurrence(place(path, line), name)
        for path, tree in parse_files(paths).items()
        for line, name in identifiers(tree)
        if has_old_word(name) and not name.startswith("test_")
    ] == []


def test_no_text_has_an_old_term() -> None:
    """Docstrings, messages, comments and pages."""
    assert [
        Occurrence(place(path, number), line.strip())
        for path in [*CODE, *PAGES]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OLD_TERMS.search(line)
    ] == []


QUESTION_WORDS: Final = frozenset("What Whether How Why Those Who Where When Which".split())


def test_no_docstring_opens_with_a_question_word() -> None:
    """A function is described in the imperative, a value by a noun phrase."""
    assert [
        Occurrence(place(path, node.lineno), text.splitlines()[0])
        for path, tree in parse_files((ROOT / "tvmflow").rglob("*.py"), *QUESTION_WORDS).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if (text := ast.get_docstring(node)) and text.split()[0] in QUESTION_WORDS
    ] == []
