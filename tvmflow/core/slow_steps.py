"""Lines on a terminal about steps that are slow the first time: what the user is waiting for."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Final

_log = logging.getLogger(__name__)

IDENTITY_WAIT: Final = "reading the files of {}: a few seconds, once for each version"
"""The text about a package whose files are hashed."""

# A shorter wait needs no explanation.
_PATIENCE_S: Final = 1.0


@contextlib.contextmanager
def explain_wait(text: str) -> Iterator[None]:
    """Say on a terminal what the block does once it has taken a second; the line is removed at its end.

    With `-q`, which logs errors alone, nothing is said.

    The text says about how long it takes, too.
    """
    if not (_log.isEnabledFor(logging.WARNING) and sys.stderr.isatty()):
        yield
        return
    is_shown = threading.Event()

    def show() -> None:
        is_shown.set()
        _write(f"\r\x1b[K{text} …")

    timer = threading.Timer(_PATIENCE_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if is_shown.is_set():
            _write("\r\x1b[K")


def _write(text: str) -> None:
    # a terminal that is gone is nobody's problem here
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
