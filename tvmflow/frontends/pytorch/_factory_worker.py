"""Exports what a factory returns: `python -m tvmflow.frontends.pytorch._factory_worker REQUEST`.

The request is a JSON document: see `export`. The answer is a JSON file with the version of PyTorch,
or with `problem` and `reason` when there is no archive.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core.formatting import excerpt, last_line, quoted
from tvmflow.core.text import did_you_mean

_MAX_REASON: Final = 400


class InvalidFactory(Exception):
    """A factory, or what it returns, is not what it should be."""

    def __init__(self, problem: str, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


class Example(NamedTuple):
    """A module with the arguments of a call, by position and by name."""

    module: Any
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]


def find_factory(name: str) -> Callable[[], Any]:
    """Return the function `PACKAGE.MODULE:FUNCTION`.

    Raises:
        InvalidFactory: when it does not exist, or its module cannot be imported.
    """
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidFactory("module", f"there is no module {quoted(error.name)}") from error
        raise InvalidFactory("code", describe_error(error)) from error
    except (Exception, SystemExit) as error:
        raise InvalidFactory("code", describe_error(error)) from error
    factory = getattr(module, function, None)
    if not callable(factory):
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        text = f"the module has no function {quoted(function)}{did_you_mean(function, names)}"
        raise InvalidFactory("function", text)
    result: Callable[[], Any] = factory
    return result


def read_result(result: Any, module_type: type) -> Example:
    """Return what a factory returned as a module with the arguments of a call.

    Raises:
        InvalidFactory: when it is something else.
    """
    if not isinstance(result, tuple | list) or len(result) != 2:
        count = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        text = f"it did not return a module and its inputs, but: {type(result).__name__}{count}"
        raise InvalidFactory("result", text)
    module, inputs = result
    if not isinstance(module, module_type):
        text = f"the first value that it returned is not a torch.nn.Module, but: {type(module).__name__}"
        raise InvalidFactory("result", text)
    if isinstance(inputs, Mapping):
        return Example(module, (), inputs)
    return Example(module, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})


def describe_error(error: BaseException) -> str:
    """Return an error with the last line of the user's own code that it came from."""
    paths = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [
        (path.relative_to(Path.cwd()), line)
        for path, line in paths
        if path.is_relative_to(Path.cwd())
    ]
    place = " ({}:{})".format(*own[-1]) if own else ""
    return f"{type(error).__name__}: {last_line(error)}{place}"


def _export(request: Mapping[str, str]) -> dict[str, str]:
    """Write the archive, and return the answer."""
    try:
        import torch
        import torch.export
    except Exception as error:
        # a missing system library is an OSError
        return {"problem": "import", "reason": f"{type(error).__name__}: {error}"}
    # after PyTorch: no file of the user's takes the place of one of its modules
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory = find_factory(request["factory"])
        try:
            result = factory()
        except (Exception, SystemExit) as error:
            raise InvalidFactory("code", describe_error(error)) from error
        example = read_result(result, torch.nn.Module)
    except InvalidFactory as error:
        return {"problem": error.problem, "reason": str(error)}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                example.module.eval(), example.arguments, dict(example.named)
            )
    except Exception as error:
        # the first line is the reason, and what follows is advice
        [reason, *_] = [*filter(None, str(error).splitlines()), ""]
        return {
            "problem": "export",
            "reason": f"{type(error).__name__}: {excerpt(reason, _MAX_REASON)}",
        }
    # PyTorch ends the process where a file cannot be written
    content = io.BytesIO()
    torch.export.save(program, content)
    try:
        Path(request["archive"]).write_bytes(content.getbuffer())
    except OSError as error:
        return {"problem": "write", "reason": str(error.errno or 0)}
    return {"torch": str(torch.__version__)}


def main() -> None:
    """Answer the request on the command line."""
    request = json.loads(sys.argv[1])
    Path(request["answer"]).write_text(json.dumps(_export(request)))


if __name__ == "__main__":
    main()
