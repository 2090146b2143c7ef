"""Files that a recipe names: whether they exist, and the message when they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tvmflow.core.formatting import excerpt
from tvmflow.core.schema import MAX_PATH_LENGTH
from tvmflow.core.suggestions import did_you_mean


def is_file(path: Path) -> bool:
    """Return whether the file exists; a name that no file can have does not."""
    return _test(path, Path.is_file)


def missing_file_text(path: Path, *, suggest: bool = True) -> str:
    """Return the message for a file that does not exist, with the nearest name in its folder."""
    name = excerpt(str(path), MAX_PATH_LENGTH)
    if _test(path, Path.is_dir):
        return f"{name} is a folder, not a file"
    hint = did_you_mean(path.name, list_siblings(path)) if suggest else ""
    return f"there is no file {name}{hint}"


def list_siblings(path: Path) -> list[str]:
    """Return the names in the folder of this file, or none when the folder cannot be read."""
    try:
        return sorted(other.name for other in path.parent.iterdir())
    except (OSError, ValueError):
        return []


def _test(path: Path, predicate: Callable[[Path], bool]) -> bool:
    try:
        return predicate(path)
    except (OSError, ValueError):
        # It is not a name that a file can have, or it is in a folder that cannot be entered.
        return False
