"""New Python processes that import what this one would import.

`python -m` and `python -c` look into the current folder first, where a user's `numpy.py` or `onnx/`
would be imported in place of the package. A process that is started here gets the import path of
this one.
"""

import sys
from pathlib import Path


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as `python -m` does."""
    run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [*code_command(run), *arguments]


def code_command(code: str) -> list[str]:
    """Return the command that runs Python code as `python -c` does."""
    path = [str(Path(entry).absolute()) for entry in sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"]
