"""Cached answers: what a command printed when all was up to date, and the files that it depends on.

An answer is valid while no file that it depends on has changed since: tvmflow's own code, the
recipes, the models, the installed tools, the results in the store, the delivered files. Only
their stamps are read (size, times of modification and change, inode), so an up-to-date command
costs little more than the start of Python. Whatever differs leads to the full evaluation, which
saves a new answer (see `up_to_date`).

This module imports next to nothing.
"""

import os
import sys
import time

try:
    # hashlib takes its BLAKE2 from here; importing hashlib itself also loads OpenSSL.
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

from tvmflow.core.project import find_project, store_root
from tvmflow.core.terminal import find_width
from tvmflow.planning.environment import describe_environment, without_password

# A report is rendered with this duration, and the text of it is replaced by the real one.
PLACEHOLDER_SECONDS = 987654321.0

_VERSION = "tvmflow answer 3"
_SEPARATOR = "\0\0"
_ABSENT = "0 0 0 0 0"
# No file has this name.
_NEXT_FOLDER = "\0//\0"


def find_answer(argv: list[str]) -> str | None:
    """Return what this command line in the current folder prints, or None when something may have changed."""
    started = time.monotonic()
    try:
        path = answer_path(argv)
    except Exception:
        # The full evaluation reports what is wrong with the project.
        return None
    try:
        # a pipe in its place must not be waited for
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            digest, _, body = stream.read().decode(errors="surrogateescape").partition("\n")
        if digest != _seal(path, body):
            return None
        system, expires_ns, paths, folders, stamps, text = body.split(_SEPARATOR, 5)
    except (OSError, ValueError):
        return None
    if system != describe_system() or time.time_ns() >= int(expires_ns):
        return None
    watched = [group.split("\0") for group in folders.split(_NEXT_FOLDER)]
    if stamps != "\n".join(read_stamps(paths.split("\0"), watched)):
        return None
    from tvmflow.core.formatting import duration_text

    for to_text in (repr, duration_text):
        text = text.replace(to_text(PLACEHOLDER_SECONDS), to_text(time.monotonic() - started))
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

    Args:
        path: The file: the answer to another command line is none, even under its name.
        system: The text of `describe_system`.
        expires_ns: When the answer ends to be valid.
        paths: Every file and folder that it depends on, whether it exists or not.
        folders: Folders with many more, each followed by the names of what is in it.
        stamps: What `read_stamps` says of them.
        text: What is printed.
    """
    watched = _NEXT_FOLDER.join(map("\0".join, folders))
    parts = (system, str(expires_ns), "\0".join(paths), watched, "\n".join(stamps), text)
    body = _SEPARATOR.join(parts)
    return f"{_seal(path, body)}\n{body}".encode(errors="surrogateescape")


def is_sealed(path: str, content: bytes) -> bool:
    """Return whether this is the undamaged content of an answer's file, of this version or an earlier one."""
    digest, _, body = content.decode(errors="surrogateescape").partition("\n")
    return digest in (_seal(path, body), _digest(body))


def _seal(path: str, body: str) -> str:
    return _digest(f"{os.path.basename(path)}\0{body}")


def answer_path(argv: list[str]) -> str:
    """Return the file of the answer to a command line in the current folder."""
    project = find_project()
    words = "\0".join(
        [_VERSION, str(find_width()), os.getcwd(), project.dist, *map(without_password, argv)]
    )
    return f"{store_root(argv, project.store)}/plans/{_digest(words)}.answer"


def read_stamps(paths: list[str], folders: list[list[str]]) -> list[str]:
    """Return the stamp of each path, and one for all that is named in each folder."""
    return [*map(read_stamp, paths), *(_read_folder_stamp(*folder) for folder in folders)]


def _read_folder_stamp(folder: str, *names: str) -> str:
    """Return a digest of the change times of many files, their number, and the latest of these times.

    Nobody can set a change time, so that it stands for size and content.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            changed_ns = [os.stat(name, dir_fd=descriptor).st_ctime_ns for name in names]
        finally:
            os.close(descriptor)
    except OSError:
        return _ABSENT
    return f"{_digest(repr(changed_ns))} {len(names)} {max(changed_ns)}"


def read_stamp(path: str) -> str:
    """Return what the file system knows of a file's content, whether it exists or not."""
    try:
        status = os.stat(path)
    except OSError:
        return _ABSENT
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino} {status.st_dev}"


def changed_ns(stamp: str) -> int:
    """Return the change time in a stamp."""
    return int(stamp.split()[2])


def describe_system() -> str:
    """Return a digest of this machine and environment; empty where a machine cannot be told from others.

    What Linux reports of the CPU stays as it is until the next boot.
    """
    if sys.platform != "linux":
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            boot = stream.read().strip()
        cores = len(os.sched_getaffinity(0))
        return _digest(f"{boot} {cores}\n{describe_environment()}")
    except OSError:
        return ""


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogateescape"), digest_size=32).hexdigest()
