"""Syntax trees of many source files, for tests of how the code is written."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable
from pathlib import Path


def parse_files(paths: Iterable[Path], *needles: str) -> dict[Path, ast.Module]:
    """Parse files, or of them those with one of the needles, in order.

    Trees are not garbage: to look for some among them takes three times as long as to parse.
    """
    texts = {path: path.read_text() for path in sorted(paths)}
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return {
            path: ast.parse(text)
            for path, text in texts.items()
            if not needles or any(needle in text for needle in needles)
        }
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
