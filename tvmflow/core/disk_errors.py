"""Messages for errors of disks and system limits, with the path, its file system, and a fix."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from tvmflow.core.errors import RecipeError, StoreError, TvmflowError
from tvmflow.core.formatting import count_text, size_text
from tvmflow.core.project import shortest_path

# ---------------------------------------------------------------- file systems

_MOUNTS: Final = "/proc/self/mountinfo"
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")
# A failed write may leave a little free space, which its file could not use.
_FULL_BYTES: Final = 256 << 10
_UNKNOWN_BYTES: Final = 1 << 62
# Downloads leave this much space free, or less on a small disk.
_RESERVED_BYTES: Final = 64 << 20
_NETWORK_KINDS: Final = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p afs ceph glusterfs fuse.glusterfs fuse.sshfs lustre beegfs".split()
)


class FileSystem(NamedTuple):
    """A mounted file system; unknown fields are 0 or empty.

    This user can still write `free` bytes and `free_inodes` files. `is_noexec`: it is mounted with `noexec`.
    """

    mount_point: str
    kind: str
    size: int
    free: int
    inodes: int
    free_inodes: int
    is_noexec: bool

    @property
    def lacks_inodes(self) -> bool:
        """True if no further file can be created."""
        return bool(self.inodes) and not self.free_inodes

    @property
    def is_full(self) -> bool:
        """True if almost no bytes, or no further file, can be written."""
        return self.free < _FULL_BYTES or self.lacks_inodes

    @property
    def spare(self) -> int:
        """The number of bytes available for downloads; a reserve is kept for other writes."""
        return self.free - min(_RESERVED_BYTES, self.size // 20)

    @property
    def is_network(self) -> bool:
        """True if its files are on another machine."""
        return self.kind in _NETWORK_KINDS

    def __str__(self) -> str:
        """Return its mount point and free space, for a message."""
        name = f"{self.kind} at {self.mount_point}" if self.kind else self.mount_point
        if self.lacks_inodes:
            return f"{name}, all of its {count_text(self.inodes, 'file')} in use"
        if not self.size:
            return f"{name}, free space unknown"
        return f"{name}, {size_text(self.free)} of {size_text(self.size)} free"


def find_file_system(path: str | os.PathLike[str]) -> FileSystem:
    """Return the file system of a path, or of the nearest accessible folder above it."""
    # The defaults are for systems and sandboxes without `statvfs`.
    place, status = os.sep, os.statvfs_result([0] * 10)
    for folder in _list_folders(os.path.realpath(path)):
        with contextlib.suppress(OSError):
            place, status = folder, os.statvfs(folder)
            break
    is_root = os.geteuid() == 0
    mount_point, kind = _find_mount(place)
    free = (status.f_bfree if is_root else status.f_bavail) * status.f_frsize
    return FileSystem(
        mount_point=mount_point,
        kind=kind,
        size=status.f_blocks * status.f_frsize,
        # A file system that does not report its size is assumed to have space.
        free=free if status.f_blocks else _UNKNOWN_BYTES,
        inodes=status.f_files,
        free_inodes=status.f_ffree if is_root else status.f_favail,
        is_noexec=bool(status.f_flag & getattr(os, "ST_NOEXEC", 0)),
    )


def _list_folders(path: str) -> Iterator[str]:
    yield path
    while (folder := os.path.dirname(path)) != path:
        yield folder
        path = folder


def _find_mount(place: str) -> tuple[str, str]:
    """Return the mount point of a real path, and its file system's type if Linux reports it."""
    mount = ("/", "")
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return next(filter(os.path.ismount, _list_folders(place))), ""
    for line in lines:
        fields, _, source = line.partition(" - ")
        mount_point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields.split(" ")[4])
        is_above = place == mount_point or place.startswith(mount_point.rstrip("/") + "/")
        # Of several mounts at one path, the last one is visible.
        if is_above and len(mount_point) >= len(mount[0]):
            mount = (mount_point, source.split(" ")[0])
    return mount


# ---------------------------------------------------------------- errors

_OTHER_FOLDER: Final = "or choose another folder with --store or --dist"
_KEPT: Final = "and run again; everything finished so far is kept"
_WRITABLE: Final = f"let this user read and write it, {_OTHER_FOLDER}"
# A file of the wrong kind exists at the path.
_OBSTRUCTED: Final = f"move the file at that path away, {_OTHER_FOLDER}"
_FAILING: Final = f"the disk or the network behind it fails: see the system's log (dmesg), {_OTHER_FOLDER}, {_KEPT}"
_TOO_MANY: Final = "allow more open files (ulimit -n 4096), or run fewer stages at a time (--jobs)"
_NO_PROCESSES: Final = "the system starts no more processes or threads for this user"
_MORE_PROCESSES: Final = "end other programs, allow more processes (ulimit -u; a container has a limit of its own), or run fewer stages at a time (--jobs)"
_LOCAL_DISK: Final = "choose a folder on a local disk with --store or --dist"
_IN_USE: Final = f"end the program that uses it, {_OTHER_FOLDER}"

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_SYSTEM: Final = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE)
_REFUSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
_FIXES: Final[dict[int, str]] = {
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.EROFS: f"mount that file system writable, {_OTHER_FOLDER}",
    errno.EEXIST: _OBSTRUCTED,
    errno.EISDIR: "name a file, or move the folder at that path away",
    errno.ELOOP: _OBSTRUCTED,
    errno.ENOTDIR: _OBSTRUCTED,
    errno.ENOTEMPTY: _OBSTRUCTED,
    errno.ENXIO: _OBSTRUCTED,
    errno.ENAMETOOLONG: "use shorter names, or another folder with a shorter path (--store, --dist)",
    errno.EFBIG: "allow larger files (ulimit -f unlimited)",
    errno.EIO: _FAILING,
    errno.ENODEV: _FAILING,
    errno.ESTALE: _FAILING,
    errno.EMFILE: _TOO_MANY,
    errno.ENFILE: _TOO_MANY,
    errno.ENOLCK: _LOCAL_DISK,
    errno.ENOSYS: f"its file system cannot do that: {_LOCAL_DISK}",
    errno.EOPNOTSUPP: f"its file system cannot do that: {_LOCAL_DISK}",
    errno.EINVAL: f"its file system has no such files: {_LOCAL_DISK}",
    errno.EBUSY: _IN_USE,
    errno.ETXTBSY: _IN_USE,
}
"""Error number -> fix, for errors that a user can act on. Other errors are bugs or are handled by callers."""

# The dynamic loader's message about a library on a file system that is mounted noexec.
_NO_MAPPING: Final = "failed to map segment from shared object"
# Message of other programs and libraries -> the number of the disk error behind it.
_TEXTS: Final = {
    text: number
    for number in (*_FULL, errno.EROFS, errno.EIO, errno.EMFILE, errno.EFBIG)
    for text in (os.strerror(number), f"(os error {number})", f"[Errno {number}]")
} | {
    "NoSpaceLeft": errno.ENOSPC,
    "DiskQuota": errno.EDQUOT,
    "can't start new thread": errno.EAGAIN,
    os.strerror(errno.EAGAIN): errno.EAGAIN,
}


class OutputError(OSError):
    """Standard output cannot be written; the problem is not on a disk that tvmflow uses."""


@contextlib.contextmanager
def disk_errors(place: str | os.PathLike[str], *, needed: int = 0) -> Iterator[None]:
    """Translate disk errors that a user can act on to StoreError (see `explain`).

    The message names `place` if the error names no file. `needed` is the number of bytes to be written.
    """
    try:
        yield
    except OSError as error:
        problem = explain(error, place, needed=needed)
        if problem is None:
            raise
        raise problem from error


def explain(error: OSError, place: str | os.PathLike[str], *, needed: int = 0) -> StoreError | None:
    """Return the StoreError for an OSError, or None if users cannot act on the error."""
    if isinstance(error, OutputError):
        return None
    named = [name for name in (error.filename2, error.filename) if isinstance(name, str)]
    path = named[0] if named else os.fspath(place)
    if error.errno in _FULL:
        # `place` comes first, because users do not know the name of a temporary file.
        outputs = [f"/proc/self/fd/{number}" for number in (1, 2)]
        files = [os.path.realpath(link) for link in outputs if os.path.isfile(link)]
        places = [os.fspath(place), path, *files, _temporary_folder()]
        return _full_disk(error.errno, places, needed)
    if error.errno == errno.EAGAIN:
        return StoreError(_NO_PROCESSES, fix=_MORE_PROCESSES)
    # EINVAL without a file name is a mistake in a call.
    if error.errno not in _FIXES or (error.errno == errno.EINVAL and not named):
        return None
    shown = shortest_path(path)
    if error.errno in _REFUSED and not os.path.lexists(path):
        shown = _nearest_folder(path)
    return StoreError(f"{shown}: {error.strerror}", fix=_FIXES[error.errno])


def unreadable(where: str, error: OSError) -> TvmflowError:
    """Return the error for an unreadable file of a recipe: a mistake in the recipe, or a system failure.

    `where` is the position in the recipe, followed by the file.
    """
    problem = explain(error, where) if error.errno in _SYSTEM else None
    return problem or RecipeError(f"{where}: {error.strerror}")


_FIX_FOLDER: Final = "choose a folder on a disk; --store and --dist name those of a run"


def make_folder(path: str | os.PathLike[str], fix: str = _FIX_FOLDER) -> None:
    """Create a folder and its parents; `fix` is for file systems without new folders, such as /proc."""
    with disk_errors(path):
        try:
            os.makedirs(path, exist_ok=True)
        except FileNotFoundError as error:
            raise _not_creatable(path, error, fix) from error


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Check that files can be written to a folder, or would be if it existed; leave no file there."""
    import tempfile

    place = _nearest_folder(os.fspath(folder))
    with disk_errors(folder):
        if not os.path.isdir(place):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place)
        try:
            # Permission bits do not apply to root, and do not show that a file system is read-only.
            tempfile.TemporaryFile(dir=place).close()
        except FileNotFoundError as error:
            raise _not_creatable(folder, error, _FIX_FOLDER) from error


def _not_creatable(path: str | os.PathLike[str], error: FileNotFoundError, fix: str) -> StoreError:
    """Return the error for a path where creation fails with ENOENT, as in /proc."""
    what = f"{shortest_path(os.fspath(path))} cannot be created: {error.strerror}"
    return StoreError(what, fix=fix)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or the cause of a StoreError, is a full disk or quota."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    return isinstance(cause, OSError) and cause.errno in _FULL


def is_unwritable(error: StoreError) -> bool:
    """Return whether the cause of an error is a full disk or a missing permission to write."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (*_FULL, *_REFUSED)


def find_disk_problem(
    places: Iterable[str | os.PathLike[str]], text: str = ""
) -> StoreError | None:
    """Return the disk error that made a program or library fail, or None for another cause.

    Linkers, TVM and safetensors report a full disk in their own words, or crash. Their output `text` is searched for
    known messages, and the disks of `places` are checked.
    """
    paths = [os.fspath(place) for place in (*places, _temporary_folder())]
    for words, number in _TEXTS.items():
        if words in text:
            return explain(OSError(number, os.strerror(number)), _fullest(paths))
    if _NO_MAPPING in text:
        for path in paths:
            if find_file_system(path).is_noexec:
                what = f"no library can be loaded from {path}: {find_file_system(path)} is mounted noexec"
                return StoreError(what, fix="set $TMPDIR to a folder on another file system")
    full = _fullest(paths)
    return _full_disk(errno.ENOSPC, [full], 0) if find_file_system(full).is_full else None


def check_free_space(place: str | os.PathLike[str], needed: int) -> None:
    """Raise StoreError unless a folder has `needed` bytes free for a download, beside the reserve."""
    file_system = find_file_system(os.fspath(place))
    if needed > file_system.spare:
        reserve = file_system.free - file_system.spare
        raise _full_disk(errno.ENOSPC, [os.fspath(place)], needed + reserve)


def _full_disk(number: int, paths: list[str], needed: int) -> StoreError:
    path = _fullest(paths)
    file_system = find_file_system(path)
    quota = ": the quota of this user is used up" if number == errno.EDQUOT else ""
    what = f"no space left{quota} on the disk of {shortest_path(path)} ({file_system})"
    missing = needed - file_system.free
    if missing > 0:
        what += f"; {size_text(needed)} are needed, {size_text(missing)} more"
    other = "choose another folder with --store DIR or --dist DIR"
    if path == _temporary_folder():
        other = "choose another folder for temporary files with $TMPDIR"
    return StoreError(what, fix=f"free some space there, or {other}, {_KEPT}")


def _nearest_folder(path: str) -> str:
    while not os.path.lexists(path):
        path = os.path.dirname(os.path.abspath(path))
    return path


def _fullest(paths: list[str]) -> str:
    """Return the first path whose disk is full, else the first one."""
    return next((path for path in paths if find_file_system(path).is_full), paths[0])


def describe_output() -> str:
    """Return the file behind standard output and its file system; empty for a terminal or a pipe."""
    path = os.path.realpath("/proc/self/fd/1")
    return f" to {shortest_path(path)} ({find_file_system(path)})" if os.path.isfile(path) else ""


def _temporary_folder() -> str:
    import tempfile

    chosen = os.environ.get("TMPDIR", "")
    # `gettempdir` would skip a folder on a full disk.
    if tempfile.tempdir is None and os.path.isdir(chosen):
        return chosen
    try:
        return tempfile.gettempdir()
    except OSError:
        # No usual folder for temporary files is writable.
        return "/tmp"
