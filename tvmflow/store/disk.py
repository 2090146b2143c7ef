"""The folder of a store: complete files, temporary files, and damaged files."""

import contextlib
import os

from tvmflow.core.files import sync, temporary_name

# How often a file is written again when another run swept its temporary file.
_ATTEMPTS = 5


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
