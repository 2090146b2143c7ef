"""Archives of models that Python code makes: a factory runs, and its module is exported, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tvmflow.core.errors import EnvironmentProblem, ImportFailed, UsageError
from tvmflow.core.files import output_file
from tvmflow.core.processes import module_command
from tvmflow.core.slow_steps import explain_wait
from tvmflow.frontends._reference_process import worker_environment
from tvmflow.frontends.pytorch._export import INSTALL

_WORKER: Final = "tvmflow.frontends.pytorch._factory_worker"
_NAME: Final = r"[A-Za-z_]\w*"
_FACTORY: Final = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}", re.ASCII)
# What the process writes to standard output is for people: it goes where messages go.
_STANDARD_ERROR: Final = 2
_FIXES: Final[Mapping[str, str]] = {
    "module": "name it as `python -c 'import MODULE'` finds it from the current folder",
    "function": "name a function of MODULE that takes no arguments",
    "code": "run it by itself: `python -c 'import MODULE; MODULE.FUNCTION()'`",
    "result": "return (module, example inputs): a torch.nn.Module, and a tuple or dictionary of its arguments",
    "export": "see https://docs.pytorch.org/docs/stable/export.html for what torch.export takes",
}


def is_factory(text: str) -> bool:
    """Return whether a text has the form of a factory, `PACKAGE.MODULE:FUNCTION`."""
    return _FACTORY.fullmatch(text) is not None


def export_factory(factory: str, path: Path) -> str:
    """Call a factory, and write the archive of the module that it returns.

    Args:
        factory: `PACKAGE.MODULE:FUNCTION`; the current folder is searched first, as `python -c` does.
        path: The archive.

    Returns:
        The PyTorch that exported it.

    Raises:
        UsageError: when there is no such function, or it does not return a module with inputs.
        ImportFailed: when PyTorch cannot export the module.
        EnvironmentProblem: when PyTorch cannot be imported.
        OSError: when the archive cannot be written.
    """
    with (
        tempfile.TemporaryDirectory(prefix="tvmflow-") as folder,
        output_file(path) as temporary,
    ):
        answer_file = Path(folder, "answer.json")
        request = {"factory": factory, "archive": temporary, "answer": str(answer_file)}
        with explain_wait(f"calling {factory} and exporting its module: as long as PyTorch takes"):
            code = subprocess.run(
                module_command(_WORKER, json.dumps(request)),
                stdin=subprocess.DEVNULL,
                stdout=_STANDARD_ERROR,
                env=worker_environment({}),
                check=False,
            ).returncode
        if not answer_file.is_file():
            raise _error(factory, "code", f"its process ended with code {code}")
        answer = json.loads(answer_file.read_text())
        if "problem" in answer:
            if answer["problem"] == "write":
                number = int(answer["reason"])
                raise OSError(number, os.strerror(number), str(path))
            raise _error(factory, answer["problem"], answer["reason"])
        return str(answer["torch"])


def _error(factory: str, problem: str, reason: str) -> Exception:
    """Return the error for an answer of the worker."""
    if problem == "import":
        return EnvironmentProblem(f"PyTorch cannot be imported: {reason}", fix=INSTALL)
    module, _, function = factory.partition(":")
    fix = _FIXES[problem].replace("MODULE", module).replace("FUNCTION", function)
    if problem == "export":
        return ImportFailed(f"{factory}: torch.export cannot export the module: {reason}", fix=fix)
    return UsageError(f"{factory}: {reason}", fix=fix)
