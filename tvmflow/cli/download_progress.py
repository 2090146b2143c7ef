"""The progress of a file that planning downloads, because its content names others."""

from __future__ import annotations

import sys

from tvmflow.core.formatting import printable
from tvmflow.engine.progress import download_text
from tvmflow.store.download_attempt import DownloadProgress


def show_download(progress: DownloadProgress) -> None:
    """Show how much has arrived on a line of stderr, which is removed at the end; elsewhere the end alone."""
    text = printable(download_text(progress.done, progress.total, progress.url))
    is_complete = progress.done == progress.total
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K" if is_complete else f"\r\x1b[K{text}")
        sys.stderr.flush()
    elif is_complete:
        sys.stderr.write(f"tvmflow: {text}\n")
