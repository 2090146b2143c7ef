"""The files of operators, for planning.

They are those that a recipe names, and the modules beside them that they import.

Nothing here runs their code. A worker imports from these files alone (see `_loading`), so a module
that is not listed here cannot shape a result.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.disk_errors import unreadable
from tvmflow.core.errors import RecipeError
from tvmflow.core.formatting import size_text
from tvmflow.core.named_files import is_file
from tvmflow.core.types import InputFile

ROLE: Final = "operator:"
"""The prefix of the role of a file that a recipe names; the file's name follows."""

IMPORTED_ROLE: Final = "operator import:"
"""The prefix of the role of a module that such a file imports."""

_PYTHON: Final = ".py"
_MAX_BYTES: Final = 1 << 20


class OperatorFiles(NamedTuple):
    """The files of a recipe's operators.

    Attributes:
        files: The files.
        candidates: Every path that was looked for: a module may appear there later.
    """

    files: tuple[InputFile, ...] = ()
    candidates: tuple[Path, ...] = ()


def list_operator_files(
    names: Sequence[str], base: Path, where: Callable[..., str]
) -> OperatorFiles:
    """Return the files that a recipe names, each followed by the modules that it imports from its folder.

    `where` returns the position of an entry in the recipe, from whose folder `base` the paths start.

    Raises:
        RecipeError: when a file is not Python, or two files of one name differ in place.
    """
    files: dict[str, InputFile] = {}
    candidates: list[Path] = []
    waiting = [(index, base / name, ROLE) for index, name in enumerate(names)]
    while waiting:
        index, path, role = waiting.pop(0)
        known = files.get(path.name)
        if known and (role == ROLE or Path(known.path).resolve() != path.resolve()):
            raise RecipeError(
                f"{where(index)}: operators.{index}: {path} has the name of {known.path}",
                fix="name each file once, and give files in several folders names of their own",
            )
        if known:
            continue
        files[path.name] = InputFile(f"{role}{path.name}", str(path), where(index))
        if path.suffix == _PYTHON:
            if "." in path.stem:
                raise RecipeError(
                    f"{where(index)}: operators.{index}: Python cannot import {path}, whose name has two dots",
                    fix=f"rename it, for example {path.stem.replace('.', '_')}{_PYTHON}",
                )
            modules = _imported_modules(path, where(index))
            neighbors = [path.with_name(f"{module}{_PYTHON}") for module in modules]
            candidates += neighbors
            waiting += [(index, other, IMPORTED_ROLE) for other in neighbors if is_file(other)]
    return OperatorFiles(tuple(files.values()), tuple(candidates))


def _imported_modules(path: Path, position: str) -> list[str]:
    """Return the first parts of the names of all modules that a file imports, in order."""
    try:
        text = path.read_bytes()
        if len(text) > _MAX_BYTES:
            raise RecipeError(
                f"{position}: operators: {path} is larger than {size_text(_MAX_BYTES)}",
                fix="divide it into several modules",
            )
        tree = ast.parse(text, str(path))
    except OSError as error:
        raise unreadable(f"{position}: operators: {path}", error) from error
    except SyntaxError as error:
        line = f"{path}:{error.lineno}" if error.lineno else str(path)
        raise RecipeError(
            f"{position}: operators: {line}: {error.msg}", fix="correct the file"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise RecipeError(
            f"{position}: operators: {path} is not Python: {error}", fix="correct the file"
        ) from None
    return list(dict.fromkeys(_list_imports(tree)))


def _list_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
