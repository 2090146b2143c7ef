"""Atomic file writes, reads of regular files, and file digests."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from io import FileIO

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from typing import BinaryIO

RACY_NS = 2_000_000_000
"""Nanoseconds in which a second write may leave a file's timestamps unchanged on a coarse clock ("racy git")."""
_CHUNK = 1 << 20


def temporary_name() -> str:
    """Return a file name that no other process or thread uses."""
    return f"{os.getpid()}-{time.monotonic_ns()}-{os.urandom(4).hex()}"


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a temporary file that atomically replaces `path` if the block succeeds."""
    target = os.fspath(path)
    temporary = os.path.join(os.path.dirname(target), f".{temporary_name()}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def output_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a temporary file that replaces the user's output file if the block succeeds.

    The content is appended, instead, to a device, a pipe or an open file such as `/dev/stdout`.
    """
    target = os.fspath(path)
    if not _is_stream(target):
        with replacing(target) as temporary:
            yield temporary
        return
    # Imported here because output is rarely a stream.
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        temporary = os.path.join(folder, "content")
        yield temporary
        with open(temporary, "rb") as source, open(target, "ab", buffering=0) as stream:
            shutil.copyfileobj(source, stream)


def _is_stream(path: str) -> bool:
    """Return whether a path is a device, a pipe, a socket, or an open file such as `/dev/fd/3`."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    if stat.S_ISREG(mode):
        folder = os.path.realpath(os.path.dirname(path))
        return folder == "/dev" or folder.startswith("/proc/")
    return not stat.S_ISDIR(mode)


def write_output(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a user's output file atomically, or append to a stream (see `output_file`)."""
    with output_file(path) as temporary:
        _write(temporary, content)


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file atomically: readers see the old or the new content. Permissions follow the umask."""
    with replacing(path) as temporary:
        _write(temporary, content)


def _write(path: str, content: bytes | str) -> None:
    with open(path, "wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY)
"""Error numbers with which file systems refuse unsupported calls."""


def flush_file(descriptor: int) -> bool:
    """Flush an open file to the disk; return False if its file system cannot.

    A power failure may then damage the file, which readers detect by its digest.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def sync(path: str) -> bool:
    """Flush a file or a folder to the disk, as `flush_file` does."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        # Some file systems cannot open folders, and a writable folder may be unreadable.
        if not os.path.isdir(path):
            raise
        return False
    try:
        return flush_file(descriptor)
    finally:
        os.close(descriptor)


def protect(path: str) -> bool:
    """Make a file read-only; return whether the file system allows that."""
    try:
        os.chmod(path, 0o444)
    except OSError:
        return False
    return True


def symlink_or_copy(source: str | os.PathLike[str], link: str | os.PathLike[str]) -> None:
    """Link to a file that no longer changes, or copy it if the file system has no symbolic links."""
    try:
        os.symlink(source, link)
    except FileExistsError:
        raise
    except OSError:
        import shutil

        shutil.copyfile(source, link)


def map_file(stream: BinaryIO | FileIO) -> mmap.mmap:
    """Return the content of an open file, memory-mapped if possible; ValueError if it is empty."""
    import mmap

    descriptor = stream.fileno()
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.ENODEV, errno.EACCES, errno.EPERM):
            raise
    size, position = os.fstat(descriptor).st_size, 0
    content = mmap.mmap(-1, size)
    while chunk := os.pread(descriptor, min(_CHUNK, size - position), position):
        content[position : position + len(chunk)] = chunk
        position += len(chunk)
    return content


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a regular file for reading; OSError for folders, pipes and devices, which could block."""
    stream = FileIO(
        os.fspath(path), opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    )
    try:
        _check_regular(os.fstat(stream.fileno()), path)
    except OSError:
        stream.close()
        raise
    return stream


def _check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ENXIO, "Not a regular file", os.fspath(path))


def is_irregular(error: OSError) -> bool:
    """Return whether `open_regular` refused a path because it is a folder, a pipe or a device."""
    return error.errno in (errno.EISDIR, errno.ENXIO)


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file."""
    # A run reads thousands of small files, and reading without a stream takes half the time.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        _check_regular(status, path)
        content = os.read(descriptor, status.st_size + 1)
        while more := os.read(descriptor, _CHUNK):
            content += more
        return content
    finally:
        os.close(descriptor)


def hash_file(path: str | os.PathLike[str]) -> str:
    """Return the sha256 (hex) of a file's content."""
    digest = hashlib.sha256()
    with open_regular(path) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def digest_files(paths: Iterable[os.PathLike[str]]) -> str:
    """Return one sha256 (hex) of the names and contents of files in any order, cached by timestamps."""
    stamped = []
    for path in paths:
        status = os.stat(path)
        stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        stamped.append((os.fspath(path), stamp))
    return _digest_stamped(tuple(sorted(stamped)))


@functools.lru_cache(maxsize=64)
def _digest_stamped(stamped: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    files = sorted((os.path.basename(path), hash_file(path)) for path, _ in stamped)
    return hashlib.sha256(repr(files).encode()).hexdigest()
