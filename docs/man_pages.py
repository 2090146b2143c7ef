"""Adds the man pages of all commands to the wheel, so that `man tvmflow` works where it is installed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManPages(BuildHookInterface):  # type: ignore[type-arg]
    """Writes the pages while a wheel is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the pages as files of the wheel."""
        sys.path.insert(0, self.root)
        from tvmflow.cli.man import all_pages

        self.folder = tempfile.TemporaryDirectory()
        for name, text in all_pages().items():
            path = Path(self.folder.name, name)
            path.write_text(text, encoding="utf-8")
            build_data["shared_data"][str(path)] = f"share/man/man1/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the pages once they are in the wheel."""
        self.folder.cleanup()
