"""What the documentation shows is what the commands print."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.pages import PAGES, Sandbox, blocks
from tests.support.seeds import one_of_many

LONG = ("releases.md", "locks.md")
"""Pages whose commands overlap with tests of their own."""
RUN = [
    one_of_many(page, page.name not in LONG)
    for page in PAGES
    if any(block.runs for block in blocks(page))
]
OWN_STORE = ("cache.md", "tutorial.md")
"""Pages whose outputs depend on what the store had before."""


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for most pages, so that what several of them build is built once."""
    return tmp_path_factory.mktemp("store")


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=str)
def test_the_commands_of_a_page_print_what_it_shows(
    page: Path, tmp_path: Path, shared_store: Path
) -> None:
    """All commands of a page run in order, in a folder with the recipes of the repository."""
    if "from tokenizers import" in page.read_text():
        for name in ("torch", "tokenizers"):
            if not importlib.util.find_spec(name):
                pytest.skip(f"the page needs the package {name}")
    sandbox = Sandbox(tmp_path, None if page.name in OWN_STORE else shared_store)
    problems = sandbox.run(page, timeout_s=300)
    assert not problems, "\n\n".join(problems)
