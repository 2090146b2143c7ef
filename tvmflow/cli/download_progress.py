"""The progress of a file that planning downloads, because its content names others."""

from __future__ import annotations

import logging
import sys

from tvmflow.core.formatting import printable, size_text
from tvmflow.engine.progress import download_text
from tvmflow.store.downloads import DownloadProgress

_log = logging.getLogger(__name__)


class DownloadLine:
    """Shows how much has arrived on a line of stderr, which goes at the end; in a file, the end alone.

    With `-q`, which logs errors alone, it shows nothing.
    """

    def __init__(self) -> None:
        self._complete = ""

    def __call__(self, progress: DownloadProgress) -> None:
        """Show the progress of a download; its end may be reported more than once."""
        if not _log.isEnabledFor(logging.WARNING):
            return
        is_complete = progress.done == progress.total
        if sys.stderr.isatty():
            text = printable(download_text(progress.done, progress.total, progress.url))
            sys.stderr.write("\r\x1b[K" if is_complete else f"\r\x1b[K{text}")
            sys.stderr.flush()
        elif is_complete and progress.url != self._complete:
            self._complete = progress.url
            text = printable(f"downloaded {progress.url} ({size_text(progress.total)})")
            sys.stderr.write(f"tvmflow: {text}\n")
