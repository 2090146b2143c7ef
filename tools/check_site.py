"""Checks that the pages of the built site load nothing from elsewhere: `python tools/check_site.py site`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

_ELEMENT: Final = re.compile(
    r"<(?!a\b)[a-z][^>]*?\b(?:src|href|srcset|poster|data|action)=[\"']?((?:https?:)?//[^\"'\s>]+)",
    re.IGNORECASE,
)
_STYLE: Final = re.compile(r"(?:url\(|@import\s)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)
_FETCHING: Final = re.compile(r'data-md-component="source"|class="mermaid"')
"""Elements for which the theme's script asks a server."""


def external_requests(text: str) -> list[str]:
    """Return the addresses that a browser would ask when it shows a page or uses a style sheet."""
    return [*_ELEMENT.findall(text), *_STYLE.findall(text), *_FETCHING.findall(text)]


def main(folder: Path) -> int:
    """Print what the pages would load from elsewhere, and return the exit code."""
    if not folder.is_dir():
        print(f"there is no site in {folder}: build it with `make docs`")
        return 1
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in (".html", ".css", ".svg")]
    problems = [
        f"{path}: {address}"
        for path in paths
        for address in external_requests(path.read_text(encoding="utf-8"))
    ]
    print("\n".join(problems) or f"{len(paths)} files, which load nothing from elsewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
