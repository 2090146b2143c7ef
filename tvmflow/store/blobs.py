"""Blobs: the contents of files, each stored read-only under its sha256."""

import os
import stat

from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.files import hash_file, sync
from tvmflow.core.types import StoredFile
from tvmflow.store import leases
from tvmflow.store.disk import StoreFolder, is_damage


class DamagedBlob(Exception):
    """A missing blob, or one whose digest is not its name: it was set aside, and its stage must run again."""

    def __init__(self, digest: str, path: str) -> None:
        super().__init__(f"{path} does not have the digest {digest[:12]}…")
        self.digest = digest


class BlobStore:
    """The blobs of a store: `cas/ab/<sha256>`."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._verified: set[str] = set()

    def path(self, digest: str) -> str:
        """Return the path of a blob, whether it exists or not."""
        return f"{self._folder.root}/cas/{digest[:2]}/{digest}"

    def verified_path(self, digest: str) -> str:
        """Return the path of a blob whose content was read and has this digest.

        Raises:
            DamagedBlob: when the blob is missing, or has another digest; then it is set aside.
        """
        path = self.path(digest)
        if digest not in self._verified:
            try:
                actual = hash_file(path)
            except (FileNotFoundError, NotADirectoryError):
                raise DamagedBlob(digest, path) from None
            except OSError as error:
                if not is_damage(error, path):
                    raise
                actual = ""
            if actual != digest:
                self._folder.set_aside(path)
                raise DamagedBlob(digest, path)
            self._verified.add(digest)
        return path

    def is_present(self, file: StoredFile) -> bool:
        """Return whether the blob of a file exists with its size; one of another size is set aside."""
        path = self.path(file.digest)
        try:
            status = os.stat(path)
            if status.st_size == file.size and stat.S_ISREG(status.st_mode):
                return True
        except (FileNotFoundError, NotADirectoryError):
            # a link to nothing would keep the next run from writing the file
            if not os.path.islink(path):
                return False
        except OSError as error:
            if not is_damage(error, path):
                raise
        self._folder.set_aside(path)
        return False

    def add(self, path: str) -> str:
        """Move a file into the store and return its digest."""
        with disk_errors(self._folder.root):
            return self.add_file("", path).digest

    def add_file(self, name: str, path: str) -> StoredFile:
        """Move a file of an artifact into the store."""
        sync(path)
        digest, size = hash_file(path), os.stat(path).st_size
        target = self.path(digest)
        self._folder.make_way(target)
        with leases.use_lock(self._folder.root):
            # also marks the blob as used from now on, by its change time
            os.chmod(path, 0o444)
            # replacing an equal file is harmless, and repairs one whose damage nobody noticed
            os.replace(path, target)
        sync(os.path.dirname(target))
        return StoredFile(name, digest, size)

    def mark_used(self, digest: str) -> bool:
        """Mark a blob as used, so that it stays at least until the run of the caller ends.

        Call this before publishing a result that names a blob which exists already.

        Returns:
            False when it is missing or another user's; then add the content again.
        """
        with leases.use_lock(self._folder.root):
            try:
                os.utime(self.path(digest))
            except (FileNotFoundError, PermissionError):
                return False
        return True

    def temporary_path(self) -> str:
        """Return a path for a new file on the disk of the store.

        A killed process leaves it to the next run, which removes it.
        """
        with disk_errors(self._folder.root):
            return self._folder.temporary_path()
