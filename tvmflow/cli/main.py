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
from tvmflow.core import logs
from tvmflow.core.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, TvmflowError
from tvmflow.core.formatting import printable_lines


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; every error ends here, as a message."""
    try:
        invocation = parse(make_parser(argv), argv)
    except SystemExit as stop:
        return EXIT_USAGE if stop.code else EXIT_OK
    logs.configure(logs.level_for(invocation.verbosity))
    try:
        return invocation.run()
    except TvmflowError as error:
        print(f"tvmflow: {printable_lines(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("tvmflow: interrupted; finished stages are kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as bug:
        return _report_bug(bug)


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
