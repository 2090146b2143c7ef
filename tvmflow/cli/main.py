"""The command line: how each command starts and ends."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tvmflow.cli.commands import make_parser
from tvmflow.cli.options import parse
from tvmflow.core import logs, termination
from tvmflow.core.disk_errors import explain, find_disk_problem
from tvmflow.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    EnvironmentProblem,
    Interrupted,
    TvmflowError,
)
from tvmflow.core.formatting import printable_lines


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; every error ends here, as a message."""
    try:
        invocation = parse(make_parser(argv), argv)
    except SystemExit as stop:
        return EXIT_USAGE if stop.code else EXIT_OK
    logs.configure(logs.level_for(invocation.verbosity))
    try:
        with termination.Unwinding():
            return invocation.run()
    except TvmflowError as error:
        return _report_problem(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        problem = _explain(error)
        if problem is None and not termination.signal_number():
            return _report_bug(error)
        return _report_problem(problem or Interrupted(str(error)))


def _report_problem(problem: TvmflowError) -> int:
    if termination.signal_number():
        # something that was cut off; the signal has been announced
        return EXIT_INTERRUPTED
    # raises when it is the output that cannot be written, which `__main__` reports
    sys.stdout.flush()
    print(f"tvmflow: {printable_lines(str(problem))}", file=sys.stderr)
    return problem.exit_code


def _explain(error: Exception) -> TvmflowError | None:
    """Return the problem of the environment that an error is about; None when it is a bug."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        text, fix = "the current folder no longer exists", "change to another folder, and run again"
        return EnvironmentProblem(text, fix=fix)
    if isinstance(error, OSError):
        return explain(error, folder)
    # libraries have errors of their own for a full disk
    return find_disk_problem([folder], str(error))


def _report_bug(bug: Exception) -> int:
    """Report an unexpected exception, with the traceback in a file, and return the exit code."""
    name = f"tvmflow-bug-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    path = Path(tempfile.gettempdir(), name)
    details = traceback.format_exc()
    try:
        path.write_text(details)
        place = f"the details are in {path}"
    except OSError:
        place = f"the details could not be saved:\n{details}"
    text = f"a bug in tvmflow: {type(bug).__name__}: {bug}\n  {place}"
    print(f"tvmflow: {printable_lines(text)}", file=sys.stderr)
    return EXIT_BUG
