"""What MkDocs adds to the pages of docs/: pages from elsewhere, generated pages, and links that fit."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import history  # noqa: E402 - needs the path of the checkout

from tools.command_reference import commands_page  # noqa: E402
from tools.message_index import messages_page  # noqa: E402

_REPOSITORY: Final = "https://github.com/tvmflow/tvmflow/blob/main/"
_RAW: Final = "https://raw.githubusercontent.com/tvmflow/tvmflow/main/"
_PAGES: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "figures.md",
}
"""Files outside docs/ that are pages of the site."""

_MOVED: Final = {
    "howto/sizes.html": "dynamic-shapes.html",
    "operators.html": "custom-operators.html",
}
"""Former addresses of pages -> their present ones, relative to the former."""

_LINK: Final = re.compile(r"(\]\(|(?:src|href|srcset)=\")([^)\s\"]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files in docs/."""
    for path, name in _PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_with_links(text, path, "")))
    for name, address in _MOVED.items():
        redirect = f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">'
        files.append(File.generated(config, name, content=redirect))
    files.append(File.generated(config, "commands.md", content=commands_page()))
    files.append(File.generated(config, "messages.md", content=messages_page()))
    files.append(
        File.generated(config, "history.html", content=history.render(history.read_runs()))
    )
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Let links to files outside docs/ lead to pages of the site or to the repository."""
    name = page.file.src_uri
    if name in _PAGES.values():
        return markdown
    return _with_links(markdown, f"docs/{name}", posixpath.dirname(name))


def on_post_page(output: str, **_: object) -> str:
    """Name the search for screen readers."""
    return output.replace('role="dialog">', 'role="dialog" aria-label="Search">')


def _with_links(text: str, path: str, folder: str) -> str:
    """Return a text with the links of the site.

    Args:
        text: Markdown.
        path: Its file, from the root of the repository.
        folder: The folder of its page on the site.
    """
    base = posixpath.dirname(path)

    def replace(match: re.Match[str]) -> str:
        return match[1] + _link(match[2], base, folder)

    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)


def _link(link: str, base: str, folder: str) -> str:
    name, sign, anchor = link.partition("#")
    if name.startswith((_REPOSITORY, _RAW)):
        name = name.removeprefix(_REPOSITORY).removeprefix(_RAW)
    elif not name or ":" in name:
        return link
    else:
        name = posixpath.normpath(posixpath.join(base, name))
    page = _PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else "")
    if not page or (ROOT / name).is_dir():
        return f"{_REPOSITORY}{name}{sign}{anchor}"
    return posixpath.relpath(page, folder or ".") + sign + anchor
