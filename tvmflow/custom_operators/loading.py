"""Runs the files of operators in a worker.

There is a time limit, and errors name file and line of the user's code.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.util
import logging
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, NamedTuple, TypeVar

from tvmflow.core.disk_errors import unreadable
from tvmflow.core.errors import RecipeError, StageError, TvmflowError
from tvmflow.core.formatting import excerpt, size_text
from tvmflow.core.named_files import is_file
from tvmflow.core.types import InputFile
from tvmflow.custom_operators.definition import (
    ADVICE,
    REGISTERED,
    Operator,
    OperatorError,
    standard_domain,
)

ROLE: Final = "operator:"
"""The prefix of the role of a file that a recipe names; the file's name follows."""

IMPORTED_ROLE: Final = "operator import:"
"""The prefix of the role of a module that such a file imports."""
_MAX_BYTES: Final = 1 << 20


class OperatorFiles(NamedTuple):
    """The files of a recipe's operators, and every path that was looked for, where one may appear later."""

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


_log = logging.getLogger(__name__)

_PYTHON: Final = ".py"
_LIMIT_S: Final = 120
_Result = TypeVar("_Result")


class Operators(NamedTuple):
    """The operators of a recipe in the order of their files, with the text of files of other languages."""

    operators: tuple[Operator, ...] = ()
    sources: Mapping[str, str] = {}
    paths: tuple[str, ...] = ()

    def find(self, domain: str, name: str, version: int) -> Operator | None:
        """Return the operator for a node: the newest that a version of its domain has; None if there is none."""
        fitting = [
            entry
            for entry in self.operators
            if (entry.domain, entry.name) == (standard_domain(domain), name)
            and entry.since_version <= version
        ]
        return max(fitting, key=lambda entry: entry.since_version, default=None)

    def call(self, entry: Operator, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a function of an operator's file.

        Raises:
            StageError: with file and line, whatever it raised.
        """
        what = "reference" if function is entry.reference else "implementation"
        with _explaining(self.paths, f"the {what} of the operator {entry}", entry.where):
            return function(*arguments)


def load_operators(files: Mapping[str, Path]) -> Operators:
    """Run the files of operators among a stage's files.

    Raises:
        StageError: when a file raises, does not end, or registers nothing.
    """
    listed = _by_name(files, ROLE)
    if not listed:
        return Operators()
    named = {name: path for name, path in listed.items() if name.endswith(_PYTHON)}
    modules = {
        name.removesuffix(_PYTHON): path
        for name, path in {**named, **_by_name(files, IMPORTED_ROLE)}.items()
    }
    paths = tuple(map(str, modules.values()))
    _prepare_imports(modules)
    for name, path in named.items():
        with _explaining(paths, f"the file of operators {path.name}", str(path)):
            importlib.import_module(name.removesuffix(_PYTHON))
    places = {entry.where.rpartition(":")[0] for entry in REGISTERED}
    silent = [path for path in named.values() if str(path) not in places]
    if silent or not named:
        raise StageError(
            f"{[*silent, *listed.values()][0]} registers no operator",
            fix=f"decorate a function in it with `@operator(NAME, domain=DOMAIN)` of tvmflow.custom_operators; {ADVICE}",
        )
    _log.debug("%d operators from %d files", len(REGISTERED), len(modules))
    sources = {name: _read_text(path) for name, path in listed.items() if name not in named}
    return Operators(tuple(REGISTERED), sources, paths)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise StageError(
            f"{path}:{line}: the file is not UTF-8 text", fix="save it in UTF-8"
        ) from None


def _by_name(files: Mapping[str, Path], role: str) -> dict[str, Path]:
    return {name.removeprefix(role): path for name, path in files.items() if name.startswith(role)}


def _prepare_imports(modules: Mapping[str, Path]) -> None:
    """Let these modules be imported, and no longer those of another recipe."""
    forget_operators()
    for name, path in modules.items():
        installed = importlib.util.find_spec(name)
        # the folder of the file may be on the import path itself
        if installed is not None and not _is_at(installed, path):
            raise StageError(
                f"{path} has the name of an installed module, '{name}'",
                fix="rename the file: other code would import it instead",
            )
    sys.meta_path.insert(0, _Finder(modules))


def operator_paths(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the files of operators among a stage's files, as JSON for another process."""
    return {
        role: str(path.absolute())
        for role, path in files.items()
        if role.startswith((ROLE, IMPORTED_ROLE))
    }


def forget_operators() -> None:
    """Leave no operator, and no module of a recipe, in this process."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Finder)]:
        sys.meta_path.remove(finder)
        for name in finder.modules:
            sys.modules.pop(name, None)
    REGISTERED.clear()


def _is_at(spec: ModuleSpec, path: Path) -> bool:
    return bool(spec.origin) and Path(str(spec.origin)).resolve() == path.resolve()


def prepare_calls(scratch: Path) -> Path:
    """Return an empty folder for calls that a reference records: models of one node with its arrays."""
    folder = calls_folder(scratch)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def calls_folder(scratch: Path) -> Path:
    """Return the folder of recorded calls below that of a reference."""
    return scratch / "calls"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the files of a recipe's operators, and none beside them."""

    def __init__(self, modules: Mapping[str, Path]) -> None:
        self.modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        return importlib.util.spec_from_file_location(fullname, self.modules[fullname], loader=self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None, which selects Python's default module creation."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.get_code(module.__name__), module.__dict__)

    def get_code(self, fullname: str) -> CodeType:
        path = self.modules[fullname]
        return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)


class _TimedOut(BaseException):
    """A user's code does not end. It is no `Exception`, which that code may catch."""


@contextmanager
def _explaining(paths: Sequence[str], what: str, where: str) -> Iterator[None]:
    """Turn every error of a user's code into one that names file and line."""
    try:
        with _time_limit():
            yield
    except TvmflowError:
        raise
    except (Exception, SystemExit, _TimedOut) as error:
        _log.debug("%s failed", what, exc_info=True)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"{frame.filename}:{frame.lineno}" for frame in frames if frame.filename in paths]
        if isinstance(error, SyntaxError) and error.filename in paths:
            lines.append(f"{error.filename}:{error.lineno}")
        if isinstance(error, _TimedOut):
            text = f"it does not end: it was stopped after {_LIMIT_S} s"
        elif isinstance(error, OperatorError):
            text = str(error)
        else:
            text = f"{type(error).__name__}: {excerpt(str(error), 300)}"
        raise StageError(
            f"{lines[-1] if lines else where}: {what} failed: {text}",
            fix=f"correct it; {ADVICE}. The log has the whole traceback at debug level",
        ) from error


@contextmanager
def _time_limit() -> Iterator[None]:
    """Raise `_TimedOut` in the block when it takes too long, where a signal can do that."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(_: int, __: FrameType | None) -> None:
        raise _TimedOut

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
