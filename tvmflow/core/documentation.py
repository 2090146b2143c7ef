"""Where the documentation is: an installed package has no `docs` folder that a message could name."""

from __future__ import annotations

from typing import Final

_PAGES: Final = "https://github.com/tvmflow/tvmflow/blob/main/docs"
_FILES: Final = "https://raw.githubusercontent.com/tvmflow/tvmflow/main/docs"


def page_url(name: str) -> str:
    """Return the address of a page of the documentation, such as `remote` for docs/remote.md."""
    return f"{_PAGES}/{name}.md"


def schema_url(name: str) -> str:
    """Return the address of a JSON Schema, such as `recipe` for docs/recipe.schema.json; its `$id`, too."""
    return f"{_FILES}/{name}.schema.json"
