"""Notes: small text files in the store that one run leaves for later runs.

The notes that a run believes are sealed: their first line is a digest of their text and of their
own name, so that no damaged note, and no other note under its name, is ever believed.
"""

import contextlib
import hashlib
import os

from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.errors import StoreError
from tvmflow.store.disk import StoreFolder

_HEADER = "tvmflow note "
_SEALED = frozenset({"delivered", "facts", "failures", "last", "pins", "spool", "stats"})
# Notes of earlier versions, on one line without a seal, are still believed here; others are made again.
_LASTING = frozenset({"last", "pins", "spool"})
_KEY_DIGITS = 64


class DamagedNote(ValueError):
    """The file of a note does not have the content that was written under its name."""


def seal(text: str, *names: str) -> str:
    """Return the content of the file of a note."""
    return f"{_HEADER}{_digest(text, names)}\n{text}"


def unseal(content: bytes, *names: str) -> str | None:
    """Return the text in the file of a note; None for an outdated one.

    Raises:
        DamagedNote: when it is not what was written under this name.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DamagedNote from error
    if names[0] not in _SEALED:
        return text
    header, _, body = text.partition("\n")
    if header == _HEADER + _digest(body, names):
        return body
    # a key that waited for its upload had no text
    if "\n" in text or text.startswith(_HEADER[:3]) or (not text and len(names[-1]) != _KEY_DIGITS):
        raise DamagedNote
    return text if names[0] in _LASTING else None


def _digest(text: str, names: tuple[str, ...]) -> str:
    path = "/".join(name.replace("/", "+") for name in names)
    return hashlib.sha256(f"{path}\0{text}".encode()).hexdigest()


class Notes:
    """The notes of a store. A note has a path of one or more names; a `/` in a name becomes `+`."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder

    def read(self, *names: str) -> str | None:
        """Return the text of a note; None when there is none, or a damaged one, which is set aside."""
        content = self._folder.read(self.path(*names))
        if content is None:
            return None
        try:
            return unseal(content, *names)
        except DamagedNote:
            self._folder.set_aside(self.path(*names))
            return None

    def write(self, text: str, *names: str) -> None:
        """Write a note completely or not at all."""
        with disk_errors(self._folder.root):
            content = seal(text, *names) if names[0] in _SEALED else text
            self._folder.write(content.encode(), self.path(*names), flush=False)

    def keep(self, text: str, *names: str) -> None:
        """Write a note that only saves time, where the store can be written."""
        with contextlib.suppress(StoreError):
            self.write(text, *names)

    def list(self, *names: str) -> list[str]:
        """Return the names of the notes in a folder of notes, sorted."""
        try:
            return sorted(os.listdir(self.path(*names)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, *names: str) -> None:
        """Remove a note if it exists."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self.path(*names))

    def path(self, *names: str) -> str:
        """Return the path of a note, whether it exists or not."""
        return "/".join((self._folder.root, *(name.replace("/", "+") for name in names)))
