"""Cached answers: the output of a command with nothing to do, and the files that it depends on.

An answer is valid until one of these changes: tvmflow's code, recipes, models, installed tools, results in the
store, delivered files. Only their stamps are read (size, mtime, ctime, inode), so that an up-to-date command costs
little more than the start of Python. After a change, the full evaluation saves a new answer (see `up_to_date`).

To start fast, this module imports almost nothing.
"""

import os
import sys
import time

try:
    # hashlib takes its BLAKE2 from this module, but importing hashlib also loads OpenSSL.
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

from tvmflow.core.formatting import find_width
from tvmflow.core.project import find_project, store_root
from tvmflow.planning.environment import describe_environment, without_password

# A report is rendered with this duration, whose text is then replaced by the real duration.
PLACEHOLDER_SECONDS = 987654321.0

_VERSION = "tvmflow answer 4"
_SEPARATOR = b"\0\0"
_ABSENT = "0 0 0 0 0"
# Separates folders; no file can have this name.
_NEXT_FOLDER = b"\0//\0"


def find_answer(argv: list[str]) -> str | None:
    """Return the saved output of this command in the current folder; None if something may have changed."""
    started = time.monotonic()
    try:
        path = answer_path(argv)
    except Exception:
        # The full evaluation reports problems of the project, such as an unreadable folder.
        return None
    try:
        # Without O_NONBLOCK, a named pipe at this path would block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            digest, _, body = stream.read().partition(b"\n")
        if digest != _seal(path, body):
            return None
        system, expires_ns, paths, folders, stamps, text = body.split(_SEPARATOR, 5)
    except (OSError, ValueError):
        return None
    if system.decode() != describe_system() or time.time_ns() >= int(expires_ns):
        return None
    watched = [group.split(b"\0") for group in folders.split(_NEXT_FOLDER)]
    if stamps.decode() != "\n".join(read_stamps(paths.split(b"\0"), watched)):
        return None
    return with_duration(text.decode(errors="surrogateescape"), time.monotonic() - started)


def with_duration(text: str, seconds: float) -> str:
    """Return a text that was rendered with `PLACEHOLDER_SECONDS`, with the real duration in its place."""
    from tvmflow.core.formatting import duration_text

    for to_text in (repr, duration_text):
        text = text.replace(to_text(PLACEHOLDER_SECONDS), to_text(seconds))
    return text


def encode(
    path: str,
    system: str,
    expires_ns: int,
    paths: list[str],
    folders: list[list[str]],
    stamps: list[str],
    text: str,
) -> bytes:
    """Return the content of the file of an answer.

    `folders` have many files that it depends on besides `paths`: each is followed by names in it. `stamps` is the
    result of `read_stamps`.
    """
    watched = _NEXT_FOLDER.join(_encode("\0".join(group)) for group in folders)
    head, tail = (system, str(expires_ns), "\0".join(paths)), ("\n".join(stamps), text)
    body = _SEPARATOR.join((*map(_encode, head), watched, *map(_encode, tail)))
    return _seal(path, body) + b"\n" + body


def is_sealed(path: str, content: bytes) -> bool:
    """Return whether this is the undamaged content of an answer's file."""
    digest, _, body = content.partition(b"\n")
    return digest == _seal(path, body)


def _seal(path: str, body: bytes) -> bytes:
    return _digest(_encode(os.path.basename(path)) + b"\0" + body).encode()


def answer_path(argv: list[str]) -> str:
    """Return the file of the answer to a command line in the current folder."""
    project = find_project()
    words = "\0".join(
        [_VERSION, str(find_width()), os.getcwd(), project.dist, *map(without_password, argv)]
    )
    return f"{store_root(argv, project.store)}/plans/{_digest(_encode(words))}.answer"


def read_stamps(
    paths: list[str] | list[bytes], folders: list[list[str]] | list[list[bytes]]
) -> list[str]:
    """Return the stamp of each path, and for each folder a single stamp of all names in it."""
    return [*map(read_stamp, paths), *(_read_folder_stamp(*folder) for folder in folders)]


def _read_folder_stamp(folder: str | bytes, *names: str | bytes) -> str:
    """Return a digest of the ctimes and inodes of files in a folder, their count, and the latest ctime.

    Programs cannot set a ctime, so it reveals any change of size or content. The inode distinguishes files that were
    replaced within one clock tick. A missing file counts as zeros.
    """
    stat, changed_ns, inodes = os.stat, [0], [0]
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return _ABSENT
    try:
        for name in names:
            try:
                status = stat(name, dir_fd=descriptor)
            except OSError:
                changed_ns.append(0)
                inodes.append(0)
            else:
                changed_ns.append(status.st_ctime_ns)
                inodes.append(status.st_ino)
    finally:
        os.close(descriptor)
    return f"{_digest(repr((changed_ns, inodes)).encode())} {len(names)} {max(changed_ns)}"


def read_stamp(path: str | bytes) -> str:
    """Return the file system's stamp of a file's content, whether it exists or not."""
    try:
        status = os.stat(path)
    except OSError:
        return _ABSENT
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino} {status.st_dev}"


def changed_ns(stamp: str) -> int:
    """Return the change time in a stamp."""
    return int(stamp.split()[2])


def describe_system() -> str:
    """Return a digest of this machine and environment; empty if the machine cannot be identified."""
    if sys.platform != "linux":
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            boot = stream.read().strip()
        cores = len(os.sched_getaffinity(0))
        return _digest(_encode(f"{boot} {cores}\n{describe_environment()}"))
    except OSError:
        return ""


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=32).hexdigest()
