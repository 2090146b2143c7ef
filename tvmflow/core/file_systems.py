"""File systems: what the operating system knows of the one that holds a path, and how full it is."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.formatting import count_text, size_text

_MOUNTS: Final = Path("/proc/self/mountinfo")
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")
# A write that fails for want of space fills what was free, up to a block that its file cannot use.
_FULL_BYTES: Final = 256 << 10
_UNKNOWN_BYTES: Final = 1 << 62
# What downloads leave free; less on a small disk.
_RESERVED_BYTES: Final = 64 << 20
_NETWORK_KINDS: Final = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p afs ceph glusterfs fuse.glusterfs fuse.sshfs lustre beegfs".split()
)


class FileSystem(NamedTuple):
    """A mounted file system.

    Attributes:
        mount_point: Where it is mounted.
        kind: Its type, such as `ext4` or `tmpfs`; empty where the system does not say.
        size: How many bytes it has; 0 where it does not say.
        free: How many bytes this user can write.
        inodes: How many files it can have; 0 where they are not limited.
        free_inodes: How many more files it can have.
        is_noexec: Nothing on it can be executed or loaded as a library.
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
        """Return where it is mounted and what is free, for a message."""
        name = f"{self.kind} at {self.mount_point}" if self.kind else self.mount_point
        if self.lacks_inodes:
            return f"{name}, all of its {count_text(self.inodes, 'file')} in use"
        if not self.size:
            return f"{name}, which does not say what is free"
        return f"{name}, {size_text(self.free)} of {size_text(self.size)} free"


def find_file_system(path: str | os.PathLike[str]) -> FileSystem:
    """Return the file system of a path, or of the nearest folder above it that exists and answers."""
    place, status = _find_status(Path(os.path.realpath(path)))
    is_root = os.geteuid() == 0
    mount_point, kind = _find_mount(str(place))
    return FileSystem(
        mount_point=mount_point,
        kind=kind,
        size=status.f_blocks * status.f_frsize,
        free=_find_free(status, is_root=is_root),
        inodes=status.f_files,
        free_inodes=status.f_ffree if is_root else status.f_favail,
        is_noexec=bool(status.f_flag & getattr(os, "ST_NOEXEC", 0)),
    )


def _find_free(status: os.statvfs_result, *, is_root: bool) -> int:
    """Return how many bytes can be written; of a file system that does not know its own size, any number."""
    if not status.f_blocks:
        return _UNKNOWN_BYTES
    return (status.f_bfree if is_root else status.f_bavail) * status.f_frsize


def _find_status(path: Path) -> tuple[Path, os.statvfs_result]:
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return folder, os.statvfs(folder)
    # the system, or its sandbox, tells nothing of file systems
    return Path("/"), os.statvfs_result([0] * 10)


def _find_mount(place: str) -> tuple[str, str]:
    """Return where the file system of a real path is mounted, and its type where Linux says it."""
    mount = ("/", "")
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        topmost = next(path for path in (Path(place), *Path(place).parents) if path.is_mount())
        return str(topmost), ""
    for line in lines:
        fields, _, source = line.partition(" - ")
        mount_point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields.split(" ")[4])
        is_above = place == mount_point or place.startswith(mount_point.rstrip("/") + "/")
        # of several at one place, the last one covers the others
        if is_above and len(mount_point) >= len(mount[0]):
            mount = (mount_point, source.split(" ")[0])
    return mount
