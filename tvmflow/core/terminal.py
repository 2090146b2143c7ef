"""The terminal that a command writes to. Imports next to nothing: it is part of an up-to-date run."""

import os
import sys


def find_width() -> int | None:
    """Return the width that lines should fit into: `$COLUMNS`, or that of the terminal; None without one."""
    try:
        width = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        try:
            width = os.get_terminal_size(sys.stdout.fileno()).columns
        except (OSError, ValueError, AttributeError):
            width = 0
    return width if width > 0 else None
