"""Exceptions that no command expects: a problem of the environment, or a bug, whose details go to a file."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tvmflow.core import disk_errors
from tvmflow.core.errors import EXIT_BUG, EnvironmentProblem, TvmflowError
from tvmflow.core.formatting import printable_lines


def explain(error: Exception) -> TvmflowError | None:
    """Return the problem of the environment that an error is about; None when it is a bug."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        text, fix = "the current folder no longer exists", "change to another folder, and run again"
        return EnvironmentProblem(text, fix=fix)
    if isinstance(error, OSError):
        return disk_errors.explain(error, folder)
    # libraries have errors of their own for a full disk
    return disk_errors.find_disk_problem([folder], str(error))


def report(bug: Exception) -> int:
    """Report an unexpected exception, with the traceback in a file, and return the exit code."""
    name = f"tvmflow-bug-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    details = "".join(traceback.format_exception(bug))
    try:
        path = Path(tempfile.gettempdir(), name)
        path.write_text(details, encoding="utf-8")
        place = f"the details are in {path}"
    except OSError:
        place = f"the details could not be saved:\n{details}"
    text = f"a bug in tvmflow: {type(bug).__name__}: {bug}\n  {place}"
    sys.stderr.write(f"tvmflow: {printable_lines(text)}\n")
    return EXIT_BUG
