"""Exceptions that no command expects: a problem of the environment, or a bug. Details go to a file."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Final

from tvmflow.core import disk_errors
from tvmflow.core.errors import EXIT_BUG, EnvironmentProblem, TvmflowError
from tvmflow.core.formatting import printable_lines

# How Python has a byte of a file's name that is no UTF-8 in a text.
_FOREIGN_BYTE: Final = re.compile("[\udc80-\udcff]")
_SHOWN: Final = 40


def explain(error: Exception) -> TvmflowError | None:
    """Return the problem of the environment that an error is about; None when it is a bug."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        text, fix = "the current folder no longer exists", "change to another folder, and run again"
        return EnvironmentProblem(text, fix=fix)
    if isinstance(error, OSError):
        return disk_errors.explain(error, folder)
    if isinstance(error, UnicodeEncodeError) and _FOREIGN_BYTE.search(error.object):
        text = f"the name of a file or folder is not UTF-8: {_excerpt(error)}"
        return EnvironmentProblem(text, fix="rename it, or work in another folder")
    # libraries have errors of their own for a full disk
    return disk_errors.find_disk_problem([folder], str(error))


def _excerpt(error: UnicodeEncodeError) -> str:
    """Return the path around the first byte that is no UTF-8, which Python has as a surrogate."""
    around = error.object[max(0, error.start - _SHOWN) : error.end + _SHOWN]
    return repr(around)


def report(bug: Exception) -> int:
    """Report an unexpected exception, with the traceback in a file, and return the exit code."""
    name = f"tvmflow-bug-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    details = "".join(traceback.format_exception(bug))
    try:
        path = Path(tempfile.gettempdir(), name)
        path.write_text(details, encoding="utf-8", errors="backslashreplace")
        place = f"the details are in {path}"
    except OSError:
        place = f"the details could not be saved:\n{details}"
    text = f"a bug in tvmflow: {type(bug).__name__}: {bug}\n  {place}"
    sys.stderr.write(f"tvmflow: {printable_lines(text)}\n")
    return EXIT_BUG
