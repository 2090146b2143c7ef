"""The folder of a store: complete files, temporary files, and damaged files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat

from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.errors import StoreError
from tvmflow.core.file_locks import open_lock_file
from tvmflow.core.files import flush_file, read_regular, sync, temporary_name

# What reading answers for a folder, a pipe, a circle of links, a bad sector.
_UNREADABLE = (errno.EISDIR, errno.ENXIO, errno.ELOOP, errno.EIO)
# How often a file is written again when another run swept its temporary file.
_ATTEMPTS = 5


def is_damage(error: OSError, path: str) -> bool:
    """Return whether an error of reading says that a file is damaged, and not that the system fails.

    Another user's file, which this process may not read, is not damaged.
    """
    if error.errno in (errno.EACCES, errno.EPERM):
        with contextlib.suppress(OSError):
            return os.lstat(path).st_uid == os.geteuid()
    return error.errno in _UNREADABLE


def remove_tree(folder: str) -> None:
    """Remove a folder with everything in it, if it exists."""
    # importing shutil takes longer than all of an up-to-date run's work in the store
    import shutil

    if os.path.isdir(folder):
        # stored files are read-only, which does not stop their folder from removing them
        shutil.rmtree(folder, ignore_errors=True)


class StoreFolder:
    """The folder of a store, and what was damaged and `moved` aside through this object, and where to."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.moved: list[tuple[str, str]] = []

    def read(self, path: str) -> bytes | None:
        """Return the content of a file; None when there is none, or none that can be read: that is set aside.

        Raises:
            OSError: when this process may not read it, or the system fails.
        """
        try:
            return read_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if not is_damage(error, path):
                raise
        self.set_aside(path)
        return None

    def make_folder(self, path: str) -> None:
        """Make a folder in the store; whatever else is in its place is set aside."""
        try:
            os.makedirs(path, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            names = os.path.relpath(path, self.root).split("/")
            parents = ["/".join((self.root, *names[: end + 1])) for end in range(len(names))]
            for parent in parents:
                if os.path.lexists(parent) and not os.path.isdir(parent):
                    self.set_aside(parent)
            os.makedirs(path, exist_ok=True)

    def make_way(self, path: str) -> None:
        """Make the folder of a file that is to be written, and set aside what is there and no regular file."""
        self.make_folder(os.path.dirname(path))
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(path).st_mode):
                self.set_aside(path)

    def open_lock(self, path: str) -> int:
        """Return a descriptor of a lock file in the store, made if it is not there."""
        # Asked once: whoever holds the lock may remove the file at any time, which is not damage.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISREG(os.lstat(path).st_mode) and not os.path.isfile(path):
                self.set_aside(path)
        try:
            return open_lock_file(path)
        except PermissionError:
            # a process that holds the lock keeps it, because the file stays and only its permissions are restored
            if os.lstat(path).st_uid != os.geteuid():
                raise
            with contextlib.suppress(OSError):
                os.chmod(path, 0o644)
        return open_lock_file(path)

    def temporary_path(self) -> str:
        """Return an unused path in `tmp/`, on the disk of the store.

        Temporary files are in a folder of their own, not beside their targets: listing `actions/`
        or `cas/` then shows only complete files, and the first of several runs removes what
        killed processes left by emptying that one folder.
        """
        self.make_folder(f"{self.root}/tmp")
        return f"{self.root}/tmp/{temporary_name()}"

    def write(self, data: bytes, target: str, *, flush: bool) -> None:
        """Write a file completely or not at all; with `flush`, it is on the disk before this returns."""
        for attempts_left in reversed(range(_ATTEMPTS)):
            temporary = self.temporary_path()
            try:
                with open(temporary, "wb") as stream:
                    stream.write(data)
                    if flush:
                        stream.flush()
                        flush_file(stream.fileno())
                self.make_way(target)
                os.replace(temporary, target)
                break
            except FileNotFoundError:
                # a run that began meanwhile swept it as the leftover of a killed process
                if not attempts_left:
                    raise
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        if flush:
            sync(os.path.dirname(target))

    def set_aside(self, path: str) -> str:
        """Move something damaged to `damaged/`, for whoever wants to examine it, and return where it is then."""
        folder = f"{self.root}/damaged"
        moved = f"{folder}/{os.path.basename(path)}"
        with contextlib.suppress(OSError):
            if os.path.lexists(folder) and not os.path.isdir(folder):
                displaced = f"{self.root}/{temporary_name()}"
                os.replace(folder, displaced)
                os.makedirs(folder)
                os.replace(displaced, f"{folder}/damaged")
            os.makedirs(folder, exist_ok=True)
            if os.path.lexists(moved):
                moved = f"{moved}.{temporary_name()}"
            os.replace(path, moved)
        self.moved.append((path, moved))
        return moved

    def sweep(self) -> None:
        """Remove what killed processes left in `tmp/` and `runs/`. No run may be using the store."""
        for folder in (f"{self.root}/tmp", f"{self.root}/runs"):
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                with contextlib.suppress(OSError):
                    path = f"{folder}/{name}"
                    if os.path.isdir(path):
                        remove_tree(path)
                    else:
                        os.unlink(path)


_HEADER = "tvmflow note "
_SEALED = frozenset({"delivered", "facts", "failures", "last", "pins", "spool", "stats"})


class DamagedNote(ValueError):
    """The file of a note does not have the content that was written under its name."""


def seal(text: str, *names: str) -> str:
    """Return the content of the file of a note."""
    return f"{_HEADER}{_digest(text, names)}\n{text}"


def unseal(content: bytes, *names: str) -> str:
    """Return the text in the file of a note.

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
    if header != _HEADER + _digest(body, names):
        raise DamagedNote
    return body


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
