"""Files that a recipe names: whether they are there, and what to say when they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tvmflow.recipe._closed import MAX_PATH
from tvmflow.yaml_positions import nearest, neighbours, shown


def is_file(path: Path) -> bool:
    """Whether there is such a file, of whatever name."""
    return _holds(path, Path.is_file)


def _holds(path: Path, test: Callable[[Path], bool]) -> bool:
    try:
        return test(path)
    except (OSError, ValueError):
        # not a name that a file can have, or in a folder that cannot be entered
        return False


def no_file(path: Path, *, hint: bool = True) -> str:
    """What to say of a file that is not there, with the one of the nearest name."""
    name = shown(str(path), MAX_PATH)
    if _holds(path, Path.is_dir):
        return f"{name} is a folder, not a file"
    return f"there is no file {name}{nearest(path.name, neighbours(path)) if hint else ''}"
