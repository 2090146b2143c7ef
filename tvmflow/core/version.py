"""The version of tvmflow, and addresses of its documentation. Imports nothing, for fast runs."""

VERSION = "0.1.0"

# Messages use web addresses because an installed package has no `docs` folder.
_PAGES = "https://github.com/tvmflow/tvmflow/blob/main/docs"
_FILES = "https://raw.githubusercontent.com/tvmflow/tvmflow/main/docs"


def page_url(name: str) -> str:
    """Return the address of a page of the documentation, such as `remote` for docs/remote.md."""
    return f"{_PAGES}/{name}.md"


def schema_url(name: str) -> str:
    """Return the address and `$id` of a JSON Schema, such as `recipe` for docs/recipe.schema.json."""
    return f"{_FILES}/{name}.schema.json"
