"""Logging and status lines on stderr.

`TVMFLOW_LOG`, or `-v` and `-vv`, set the log level of the terminal. The log file of a stage has all levels.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, TextIO

from tvmflow.core.formatting import excerpt, printable, printable_lines

LEVEL_VARIABLE: Final = "TVMFLOW_LOG"
LEVELS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_log = logging.getLogger(__name__)

_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def level_for(verbosity: int) -> int:
    """Return the log level for a verbosity: -1 (`-q`), 0 ($TVMFLOW_LOG, or warning), 1 (`-v`), 2 (`-vv`)."""
    if verbosity == 0:
        return LEVELS.get(_named_level(), logging.WARNING)
    return {-1: logging.ERROR, 1: logging.INFO}.get(verbosity, logging.DEBUG)


def check_level() -> None:
    """Log a warning if `$TVMFLOW_LOG` is not a level."""
    name = _named_level()
    if name and name not in LEVELS:
        text = "$%s: '%s' is not a level (valid: %s); warning is used"
        _log.warning(text, LEVEL_VARIABLE, excerpt(name), ", ".join(LEVELS))


def _named_level() -> str:
    return os.environ.get(LEVEL_VARIABLE, "").strip().lower()


class _Formatter(logging.Formatter):
    """A formatter that escapes line breaks and control sequences; tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return printable_lines(super().formatException(ei))


def configure(level: int, stream: TextIO | None = None) -> None:
    """Send tvmflow's log records from `level` on to `stream` (by default stderr), and nowhere else."""
    logger = logging.getLogger("tvmflow")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


# ---------------------------------------------------------------- slow steps

IDENTITY_WAIT: Final = "reading the files of {}: a few seconds, once for each version"
"""The status text while the files of a package are hashed."""

# A shorter wait needs no explanation.
_PATIENCE_S: Final = 1.0


@contextlib.contextmanager
def explain_wait(text: str) -> Iterator[None]:
    """Show a text on a terminal if the block takes longer than a second; never with `-q`."""
    if not can_show_status():
        yield
        return
    is_shown = threading.Event()

    def show() -> None:
        is_shown.set()
        show_status(f"{text} …")

    timer = threading.Timer(_PATIENCE_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if is_shown.is_set():
            show_status("")


def can_show_status() -> bool:
    """Return whether stderr is a terminal, and `-q` is not set."""
    return _log.isEnabledFor(logging.WARNING) and sys.stderr.isatty()


def show_status(text: str) -> None:
    """Replace the last line on the terminal; an empty text removes the line."""
    # A closed terminal must not stop the work.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
