"""Where the documentation is: an installed package has no `docs` folder that a message could name."""

from __future__ import annotations

from typing import Final

_PAGES: Final = "https://github.com/tvmflow/tvmflow/blob/main/docs"


def page_url(name: str) -> str:
    """Return the address of a page of the documentation, such as `remote` for docs/remote.md."""
    return f"{_PAGES}/{name}.md"
