"""Notes: small text files in the store that one run leaves for later runs."""

import contextlib
import os

from tvmflow.core.disk_errors import disk_errors
from tvmflow.store.disk import StoreFolder


class Notes:
    """The notes of a store. A note has a path of one or more names; a `/` in a name becomes `+`."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder

    def read(self, *names: str) -> str | None:
        """Return the text of a note; None when there is none, or it is not text."""
        try:
            with open(self.path(*names), encoding="utf-8") as stream:
                return stream.read()
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None

    def write(self, text: str, *names: str) -> None:
        """Write a note completely or not at all.

        Raises:
            StoreError: when the disk is full or not writable.
        """
        with disk_errors(self._folder.root):
            self._folder.write(text.encode(), self.path(*names), flush=False)

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
