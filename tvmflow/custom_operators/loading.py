"""Loader of operator files, with a time limit; errors name file and line of the user's code."""

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
"""Role prefix of a file that a recipe lists; the file's name follows."""

IMPORTED_ROLE: Final = "operator import:"
"""Role prefix of a module that such a file imports."""
_MAX_BYTES: Final = 1 << 20


class OperatorFiles(NamedTuple):
    """The operator files of a recipe, and all paths that were searched for imported modules."""

    files: tuple[InputFile, ...] = ()
    candidates: tuple[Path, ...] = ()


def list_operator_files(
    names: Sequence[str], base: Path, where: Callable[..., str]
) -> OperatorFiles:
    """Return the operator files `names` in the folder `base`, and the modules that they import from there.

    `where` returns the position of an entry in the recipe.

    Raises:
        RecipeError: if a file is not Python, or two files have the same name.
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
    prefix, fix = f"{position}: operators: ", "correct the file"
    try:
        text = path.read_bytes()
        if len(text) > _MAX_BYTES:
            problem = f"{path} is larger than {size_text(_MAX_BYTES)}"
            raise RecipeError(f"{prefix}{problem}", fix="divide it into several modules")
        tree = ast.parse(text, str(path))
    except OSError as error:
        raise unreadable(f"{prefix}{path}", error) from error
    except SyntaxError as error:
        line = f"{path}:{error.lineno}" if error.lineno else str(path)
        raise RecipeError(f"{prefix}{line}: {error.msg}", fix=fix) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise RecipeError(f"{prefix}{path} is not Python: {error}", fix=fix) from None
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
    """The operators of a recipe in the order of their files; `sources` holds the text of C files."""

    operators: tuple[Operator, ...] = ()
    sources: Mapping[str, str] = {}
    paths: tuple[str, ...] = ()

    def find(self, domain: str, name: str, version: int) -> Operator | None:
        """Return the newest operator that implements a node's name, domain and opset version, or None."""
        fitting = [
            entry
            for entry in self.operators
            if (entry.domain, entry.name) == (standard_domain(domain), name)
            and entry.since_version <= version
        ]
        return max(fitting, key=lambda entry: entry.since_version, default=None)

    def call(self, entry: Operator, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a function of an operator file; raise its errors as StageError with file and line."""
        what = "reference" if function is entry.reference else "implementation"
        with _explaining(self.paths, f"the {what} of the operator {entry}", entry.where):
            return function(*arguments)


def load_operators(files: Mapping[str, Path]) -> Operators:
    """Run the operator files of a stage; StageError if one raises, does not end, or registers nothing."""
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
    registering = {entry.where.rpartition(":")[0] for entry in REGISTERED}
    silent = [path for path in named.values() if str(path) not in registering]
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
    """Make the modules of a recipe importable, and forget those of earlier recipes."""
    forget_operators()
    for name, path in modules.items():
        installed = importlib.util.find_spec(name)
        origin = installed and installed.origin
        # The file's folder may be on the import path already.
        is_same = bool(origin) and Path(str(origin)).resolve() == path.resolve()
        if installed is not None and not is_same:
            raise StageError(
                f"{path} has the name of an installed module, '{name}'",
                fix="rename the file: other code would import it instead",
            )
    sys.meta_path.insert(0, _Finder(modules))


def operator_paths(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the operator files of a stage as JSON for another process."""
    return {
        role: str(path.absolute())
        for role, path in files.items()
        if role.startswith((ROLE, IMPORTED_ROLE))
    }


def forget_operators() -> None:
    """Remove all operators and modules of recipes from this process."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Finder)]:
        sys.meta_path.remove(finder)
        for name in finder.modules:
            sys.modules.pop(name, None)
    REGISTERED.clear()


def prepare_calls(scratch: Path) -> Path:
    """Return an empty folder for a reference's recorded calls: single-node models with their arrays."""
    folder = calls_folder(scratch)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def calls_folder(scratch: Path) -> Path:
    """Return the folder of recorded calls in a reference's scratch folder."""
    return scratch / "calls"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer of a recipe's operator modules only."""

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
    """A user's code does not end. A BaseException, because user code may catch `Exception`."""


@contextmanager
def _explaining(paths: Sequence[str], what: str, where: str) -> Iterator[None]:
    """Translate errors of user code to StageError with file and line."""
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
    """Raise `_TimedOut` in the block after the time limit, if this thread can receive signals."""
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
