"""The folder of a store: complete files, temporary files, damaged files, and errors of the disk."""

import contextlib
import errno
import os
from collections.abc import Iterator

from tvmflow.core.errors import StoreError
from tvmflow.core.files import sync, temporary_name

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)
# Another kind of file exists where a file or a folder is expected.
_OBSTRUCTED = (
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
)
# How often a file is written again when another run swept its temporary file.
_ATTEMPTS = 5


@contextlib.contextmanager
def disk_errors(root: str) -> Iterator[None]:
    """Translate errors of the disk that a user can act on.

    Args:
        root: The folder to name when the error names none.

    Raises:
        StoreError: when the disk is full, a path is not writable, or another kind of file is in the way.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            fix = "free some space, or choose another folder with --store DIR, and run again; everything finished so far is kept"
            raise StoreError(f"no space left on the disk of {root}", fix=fix) from error
        other_folder = "or choose another folder with --store or --dist"
        if error.errno in _NOT_PERMITTED:
            fix = f"make it writable for this user, {other_folder}"
            raise StoreError(f"{error.filename or root}: {error.strerror}", fix=fix) from error
        if error.errno in _OBSTRUCTED:
            path = error.filename2 or error.filename or root
            fix = f"move the file at that path away, {other_folder}"
            raise StoreError(f"{path}: {error.strerror}", fix=fix) from error
        raise


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or the cause of a StoreError, says that the disk has no space left."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    return isinstance(cause, OSError) and cause.errno in _NO_SPACE


def remove_tree(folder: str) -> None:
    """Remove a folder with everything in it, if it exists."""
    # importing shutil takes longer than all of an up-to-date run's work in the store
    import shutil

    if os.path.isdir(folder):
        # stored files are read-only, which does not stop their folder from removing them
        shutil.rmtree(folder, ignore_errors=True)


class StoreFolder:
    """The folder of a store.

    Attributes:
        root: Its path.
        damage: The paths of files that were damaged and set aside through this object.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.damage: list[str] = []

    def temporary_path(self) -> str:
        """Return an unused path in `tmp/`, on the disk of the store.

        Temporary files are in a folder of their own, not beside their targets: listing `actions/`
        or `cas/` then shows complete files alone, and the first of several runs removes what
        killed processes left by emptying that one folder.
        """
        os.makedirs(f"{self.root}/tmp", exist_ok=True)
        return f"{self.root}/tmp/{temporary_name()}"

    def write(self, data: bytes, target: str, *, flush: bool) -> None:
        """Write a file completely or not at all.

        Args:
            data: The content.
            target: The path; its folder is created where necessary.
            flush: Have file and folder on the disk before returning.

        Raises:
            OSError: when the disk is full or not writable.
        """
        for attempts_left in reversed(range(_ATTEMPTS)):
            temporary = self.temporary_path()
            try:
                with open(temporary, "wb") as stream:
                    stream.write(data)
                    if flush:
                        stream.flush()
                        os.fsync(stream.fileno())
                os.makedirs(os.path.dirname(target), exist_ok=True)
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

    def set_aside(self, path: str) -> None:
        """Move a damaged file to `damaged/`, for whoever wants to examine it."""
        self.damage.append(path)
        with contextlib.suppress(OSError):
            os.makedirs(f"{self.root}/damaged", exist_ok=True)
            os.replace(path, f"{self.root}/damaged/{os.path.basename(path)}")

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
