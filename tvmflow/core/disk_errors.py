"""Errors of disks and limits as messages: the full or unusable place, its file system, and the fix."""

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
# A write that fails for want of space fills the free space, up to a block that its file cannot use.
_FULL_BYTES: Final = 256 << 10
_UNKNOWN_BYTES: Final = 1 << 62
# The space that downloads leave free; less on a small disk.
_RESERVED_BYTES: Final = 64 << 20
_NETWORK_KINDS: Final = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p afs ceph glusterfs fuse.glusterfs fuse.sshfs lustre beegfs".split()
)


class FileSystem(NamedTuple):
    """A mounted file system: 0 and empty text where the system does not describe it.

    `free` bytes and `free_inodes` files can still be written by this user. With `is_noexec`, it runs no programs and
    loads no libraries.
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
        """No further file can be created, whatever space there is."""
        return bool(self.inodes) and not self.free_inodes

    @property
    def is_full(self) -> bool:
        """Hardly a byte, or no further file, can be written."""
        return self.free < _FULL_BYTES or self.lacks_inodes

    @property
    def spare(self) -> int:
        """The bytes that may be downloaded to it: a reserve stays for all else that is written."""
        return self.free - min(_RESERVED_BYTES, self.size // 20)

    @property
    def is_network(self) -> bool:
        """Its files are on another machine."""
        return self.kind in _NETWORK_KINDS

    def __str__(self) -> str:
        """Return its mount point and free space, for a message."""
        name = f"{self.kind} at {self.mount_point}" if self.kind else self.mount_point
        if self.lacks_inodes:
            return f"{name}, all of its {count_text(self.inodes, 'file')} in use"
        if not self.size:
            return f"{name}, which does not say what is free"
        return f"{name}, {size_text(self.free)} of {size_text(self.size)} free"


def find_file_system(path: str | os.PathLike[str]) -> FileSystem:
    """Return the file system of a path, or of the nearest folder above it that exists and answers."""
    # where the system, or its sandbox, has no information about file systems
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
        # a file system that does not know its own size takes any number of bytes
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
    """Return where the file system of a real path is mounted, and its type where Linux says it."""
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
        # of several at one place, the last one covers the others
        if is_above and len(mount_point) >= len(mount[0]):
            mount = (mount_point, source.split(" ")[0])
    return mount


# ---------------------------------------------------------------- errors

_OTHER_FOLDER: Final = "or choose another folder with --store or --dist"
_KEPT: Final = "and run again; everything finished so far is kept"
_WRITABLE: Final = f"let this user read and write it, {_OTHER_FOLDER}"
# Another kind of file exists where a file or a folder is expected.
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
"""The number of an error that a user can act on -> how. All others are bugs, or belong to whoever knows more."""

# The dynamic loader's message about a library on a file system that is mounted noexec.
_NO_MAPPING: Final = "failed to map segment from shared object"
# Messages of other programs and libraries about such an error, without its number.
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
    """Standard output cannot be written: no file or folder of tvmflow is the cause."""


@contextlib.contextmanager
def disk_errors(place: str | os.PathLike[str], *, needed: int = 0) -> Iterator[None]:
    """Translate errors of the disk that a user can act on to StoreError, as `explain` does.

    The file or folder `place` is named where the error names none; `needed` is how many bytes are to be written.
    """
    try:
        yield
    except OSError as error:
        problem = explain(error, place, needed=needed)
        if problem is None:
            raise
        raise problem from error


def explain(error: OSError, place: str | os.PathLike[str], *, needed: int = 0) -> StoreError | None:
    """Return the StoreError that `disk_errors` raises for an OSError; None if users cannot act on it."""
    if isinstance(error, OutputError):
        return None
    named = [name for name in (error.filename2, error.filename) if isinstance(name, str)]
    path = named[0] if named else os.fspath(place)
    if error.errno in _FULL:
        # the place first: of a file that is written aside, nobody knows the name
        outputs = [f"/proc/self/fd/{number}" for number in (1, 2)]
        files = [os.path.realpath(link) for link in outputs if os.path.isfile(link)]
        places = [os.fspath(place), path, *files, _temporary_folder()]
        return _full_disk(error.errno, places, needed)
    if error.errno == errno.EAGAIN:
        return StoreError(_NO_PROCESSES, fix=_MORE_PROCESSES)
    # other invalid arguments are mistakes in a call
    if error.errno not in _FIXES or (error.errno == errno.EINVAL and not named):
        return None
    shown = shortest_path(path)
    if error.errno in _REFUSED and not os.path.lexists(path):
        shown = _nearest_folder(path)
    return StoreError(f"{shown}: {error.strerror}", fix=_FIXES[error.errno])


def unreadable(where: str, error: OSError) -> TvmflowError:
    """Return the problem of an unreadable file of a recipe: a mistake in the recipe, or a system failure.

    `where` is its position in the recipe, and the file.
    """
    problem = explain(error, where) if error.errno in _SYSTEM else None
    return problem or RecipeError(f"{where}: {error.strerror}")


_FIX_FOLDER: Final = "choose a folder on a disk; --store and --dist name those of a run"


def make_folder(path: str | os.PathLike[str], fix: str = _FIX_FOLDER) -> None:
    """Create a folder and its parents; `fix` is for file systems that allow none, such as /proc."""
    with disk_errors(path):
        try:
            os.makedirs(path, exist_ok=True)
        except FileNotFoundError as error:
            raise _not_creatable(path, error, fix) from error


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Check that files can be written to a folder, which need not exist yet; nothing is left there."""
    import tempfile

    place = _nearest_folder(os.fspath(folder))
    with disk_errors(folder):
        if not os.path.isdir(place):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), place)
        try:
            # permissions alone do not decide: root needs none, and a read-only file system refuses everybody
            tempfile.TemporaryFile(dir=place).close()
        except FileNotFoundError as error:
            raise _not_creatable(folder, error, _FIX_FOLDER) from error


def _not_creatable(path: str | os.PathLike[str], error: FileNotFoundError, fix: str) -> StoreError:
    """Return the problem of a path that cannot be created: its file system, such as /proc, says ENOENT."""
    what = f"{shortest_path(os.fspath(path))} cannot be created: {error.strerror}"
    return StoreError(what, fix=fix)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or the cause of a StoreError, says that the disk has no space left."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    return isinstance(cause, OSError) and cause.errno in _FULL


def is_unwritable(error: StoreError) -> bool:
    """Return whether an error says that a disk is full, or that this user may not write there."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (*_FULL, *_REFUSED)


def find_disk_problem(
    places: Iterable[str | os.PathLike[str]], text: str = ""
) -> StoreError | None:
    """Return the problem of the disk that made a program or a library fail; None when it was another one.

    A linker, TVM or safetensors report a full disk in their own words, or crash. Their output is searched for the
    system's words, and the disks that they write to are checked.
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
    """Check that a folder has `needed` bytes free for a download, and a reserve; StoreError otherwise."""
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
    """Return the nearest existing folder above a path: a missing path has no permissions."""
    while not os.path.lexists(path):
        path = os.path.dirname(os.path.abspath(path))
    return path


def _fullest(paths: list[str]) -> str:
    """Return the first path whose disk is full, else the first one."""
    return next((path for path in paths if find_file_system(path).is_full), paths[0])


def describe_output() -> str:
    """Return where standard output goes: a file and its file system; nothing for a terminal or a pipe."""
    path = os.path.realpath("/proc/self/fd/1")
    return f" to {shortest_path(path)} ({find_file_system(path)})" if os.path.isfile(path) else ""


def _temporary_folder() -> str:
    import tempfile

    chosen = os.environ.get("TMPDIR", "")
    # on a full disk it would not be chosen any more
    if tempfile.tempdir is None and os.path.isdir(chosen):
        return chosen
    try:
        return tempfile.gettempdir()
    except OSError:
        # none of the usual folders can be written
        return "/tmp"
