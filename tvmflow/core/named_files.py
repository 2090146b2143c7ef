"""Checks and messages for the files that a recipe names."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from tvmflow.core.formatting import excerpt
from tvmflow.core.text import did_you_mean

_KINDS: Final[Mapping[Callable[[int], bool], str]] = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
_MAX_SHOWN: Final = 500
_MAX_PATH: Final = 1024
_MAX_PATH_PART: Final = 255
# Letters of every alphabet are allowed; characters with a meaning for a file system are not.
_FORBIDDEN_CHARACTERS: Final = re.compile(r'[\\:*?"<>|]')
# Windows reserves these device names in every folder, with any extension.
_DEVICE: Final = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?", re.I)


def is_file(path: Path) -> bool:
    """Return whether a path names a readable file; False for invalid names and inaccessible folders."""
    with contextlib.suppress(OSError, ValueError):
        return path.exists() and not obstacle(path)
    return False


def is_folder(path: Path) -> bool:
    """Return whether a path names a folder; False for invalid names."""
    with contextlib.suppress(OSError):
        return path.is_dir()
    return False


def obstacle(path: Path) -> str:
    """Return why an existing file cannot be read, or an empty string.

    Pipes and devices are not opened, because that could block.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for test, name in _KINDS.items() if test(mode)), "something else")
            return f"is {kind}, not a file"
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return _error_text(path, error)
    except ValueError:
        # The name is invalid, so no such file exists.
        return ""
    return ""


def _error_text(path: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "is a symbolic link that leads back to itself"
    with contextlib.suppress(OSError):
        if error.errno == errno.ENOENT and path.is_symlink():
            return f"is a symbolic link to {excerpt(str(path.readlink()))}, which does not exist"
    if error.errno == errno.ENOTDIR:
        parent = next((folder for folder in path.parents if folder.exists()), path.parent)
        return f"cannot exist: {excerpt(parent.name)} is not a folder"
    if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
        return ""
    return f"cannot be read: {error.strerror}"


def missing_file_text(path: Path, *, suggest: bool = True) -> str:
    """Return the message for a missing or unreadable file; `suggest` a similar name in its folder."""
    name = excerpt(str(path), _MAX_SHOWN)
    if problem := obstacle(path):
        return f"{name} {problem}"
    hint = did_you_mean(path.name, list_siblings(path)) if suggest else ""
    return f"there is no file {name}{hint}"


def list_siblings(path: Path) -> list[str]:
    """Return the names in the folder of a file, or none if the folder cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return sorted(other.name for other in path.parent.iterdir())
    return []


def find_invalid_name(names: Iterable[str]) -> str | None:
    """Return the first untrusted name that is unsafe as a file in a folder, or None.

    On some file system, an unsafe name leaves the folder, is a device, equals another name, or is below another file. A
    name with characters that reorder its display is unsafe, too.
    """
    known = list(names)
    files = Counter(map(_as_compared, known))
    folders: dict[str, str] = {}
    for name in known:
        parts = name.split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if (
            len(name) > _MAX_PATH
            or not name.isprintable()
            or _FORBIDDEN_CHARACTERS.search(name)
            or any(map(_is_invalid_part, parts))
            or files[_as_compared(name)] > 1
            or any(
                _as_compared(parent) in files
                or folders.setdefault(_as_compared(parent), parent) != parent
                for parent in parents
            )
        ):
            return name
    return None


def _as_compared(name: str) -> str:
    """Return a name as compared by file systems that ignore case and Unicode normalization."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _is_invalid_part(part: str) -> bool:
    # Windows drops trailing dots and spaces.
    is_cut = part != part.rstrip(". ")
    return not part or is_cut or len(part) > _MAX_PATH_PART or bool(_DEVICE.fullmatch(part))
