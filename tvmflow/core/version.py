"""The version of tvmflow and its documentation. Imports nothing: it is part of an up-to-date run."""

VERSION = "0.1.0"

# An installed package has no `docs` folder that a message could name.
_PAGES = "https://github.com/tvmflow/tvmflow/blob/main/docs"
_FILES = "https://raw.githubusercontent.com/tvmflow/tvmflow/main/docs"


def page_url(name: str) -> str:
    """Return the address of a page of the documentation, such as `remote` for docs/remote.md."""
    return f"{_PAGES}/{name}.md"


def schema_url(name: str) -> str:
    """Return the address of a JSON Schema, such as `recipe` for docs/recipe.schema.json; its `$id`, too."""
    return f"{_FILES}/{name}.schema.json"
