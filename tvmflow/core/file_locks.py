"""File locks, which the operating system releases when their process dies.

Waiting can be interrupted (see `termination`). A wait is reported with the lock's holder after a second, and then every
minute.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tvmflow.core import spans, termination
from tvmflow.core.errors import Interrupted
from tvmflow.core.files import UNSUPPORTED
from tvmflow.core.processes import read_text

_POLL_S = 0.1
_FIRST_NOTICE_S = 1.0
_NOTICE_INTERVAL_S = 60.0
_MAX_SHOWN = 3
_MAX_COMMAND_CHARS = 100
_CREDENTIALS = re.compile(r"//[^/@\s]*@")
# Processes of this module are children of a command.
_HELPER = "fork_server_process"


class Locked(Exception):
    """Another process holds the lock, and `wait` was not set."""


def _print_notice(text: str) -> None:
    sys.stderr.write(f"tvmflow: {text}\n")


_notify: Callable[[str], None] = _print_notice
_notices: dict[str, float] = {}
"""Message about a wait -> when it was last shown."""


def report_waits(notify: Callable[[str], None]) -> Callable[[str], None]:
    """Set the function that is called with the reason of each wait; return the previous function."""
    global _notify
    before, _notify = _notify, notify
    return before


def open_lock_file(
    path: str | os.PathLike[str], *, mode: int = 0o666, folder: int | None = None
) -> int:
    """Open the lock file at `path`, or create it; return its descriptor.

    The folder must exist. The umask decides whether other users of a shared folder can lock the file. With the
    descriptor of its `folder`, a symbolic link is refused.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if folder is None:
        return os.open(path, flags, mode)
    try:
        return os.open(os.path.basename(path), flags | os.O_NOFOLLOW, mode, dir_fd=folder)
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def lock(descriptor: int, *, shared: bool = False, wait: bool = True, subject: str = "") -> None:
    """Lock an open file until its descriptor is closed; threads that share a descriptor share its lock.

    `subject` names the locked resource in messages; if it is set, the file's modification time is the time of locking.

    Raises:
        Locked: if another process holds the lock and `wait` is not set.
        Interrupted: if a signal ends this process during the wait.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise Locked from None
        _wait_for_lock(descriptor, operation, subject)
    except OSError as error:
        raise _explain_refusal(descriptor, error) from error
    if subject:
        # Waiting processes show this time. It cannot be set on another user's file.
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _explain_refusal(descriptor: int, error: OSError) -> OSError:
    """Return an error with a clear message and the path if the file system has no locks."""
    if error.errno not in (*UNSUPPORTED, errno.ENOLCK):
        return error
    return OSError(errno.ENOLCK, "files cannot be locked there", _find_path(descriptor))


@contextlib.contextmanager
def held(
    path: str | os.PathLike[str],
    *,
    shared: bool = False,
    wait: bool = True,
    mode: int = 0o666,
    subject: str = "",
    folder: int | None = None,
) -> Iterator[int]:
    """Hold the lock of the file at `path` while the block runs; yield the descriptor."""
    descriptor = open_lock_file(path, mode=mode, folder=folder)
    try:
        lock(descriptor, shared=shared, wait=wait, subject=subject)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, operation: int, subject: str) -> None:
    """Wait in a thread: no signal ends a blocking `flock`, and polling would lose the place in the queue."""
    # A duplicate shares the lock, and stays open if the wait is given up.
    copy = os.dup(descriptor)
    errors: list[OSError] = []
    locked = threading.Event()

    def wait() -> None:
        try:
            fcntl.flock(copy, operation)
        except OSError as error:
            errors.append(error)
        finally:
            os.close(copy)
            locked.set()

    began_s = time.time()
    threading.Thread(target=wait, name="file-lock", daemon=True).start()
    next_notice = time.monotonic() + _FIRST_NOTICE_S
    while not locked.wait(_POLL_S):
        if termination.signal_number():
            raise Interrupted(f"stopped while waiting for {subject or _name(descriptor)}")
        if time.monotonic() >= next_notice:
            next_notice = time.monotonic() + _NOTICE_INTERVAL_S
            _report_wait(descriptor, subject)
    spans.add_span(f"wait for {subject or _name(descriptor)}", began_s, time.time())
    if errors:
        raise errors[0]


def _report_wait(descriptor: int, subject: str) -> None:
    """Report the current wait: `waiting for the CPU, held by pid 12 (tvmflow run a.yaml)`."""
    status = os.fstat(descriptor)
    if (holders := describe_holders(status)) is not None:
        since = time.strftime(" since %H:%M:%S", time.localtime(status.st_mtime)) if subject else ""
        text = f"waiting for {subject or _name(descriptor)}, held by {holders}{since}"
        # Several threads may wait for the same lock and report it once.
        now = time.monotonic()
        if now - _notices.get(text, -_NOTICE_INTERVAL_S) >= _NOTICE_INTERVAL_S / 2:
            _notices[text] = now
            _notify(text)


def _find_path(descriptor: int) -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return None


def _name(descriptor: int) -> str:
    path = _find_path(descriptor)
    return f"the lock file {path}" if path else "a file lock"


def describe_holders(status: os.stat_result) -> str | None:
    """Return the commands that hold the lock of a file: `pid 12 (tvmflow run a.yaml) and pid 13 (…)`.

    Returns `another process` if the system does not name the holder, and None if only this command holds the lock: its
    stages wait for each other.
    """
    commands = dict(map(_find_command, _list_holders(status)))
    if not commands:
        return "another process"
    own, _ = _find_command(os.getpid())
    texts = [f"pid {pid} ({text})" for pid, text in commands.items() if pid != own]
    more = [f"{len(texts) - _MAX_SHOWN} more"] if len(texts) > _MAX_SHOWN else []
    return " and ".join(texts[:_MAX_SHOWN] + more) or None


def _list_holders(status: os.stat_result) -> list[int]:
    """Return the processes in Linux's table of locks: `1: FLOCK ADVISORY WRITE PID DEVICE:INODE 0 EOF`."""
    pids = []
    for line in read_text("/proc/locks").splitlines():
        words = line.split()
        # Lines with an arrow are waiting processes. Only the inode is compared, because some file systems
        # report another device number here.
        if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(status.st_ino):
            pids.append(int(words[4]))
    return pids


def _find_command(pid: int) -> tuple[int, str]:
    """Return pid and text of the command of a process; a stage's process belongs to the command `run`."""
    words = _command_line(pid)
    while any(_HELPER in word for word in words):
        fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        parent = int(fields[1]) if fields else 0
        if parent <= 1:
            break
        pid, words = parent, _command_line(parent)
    return pid, format_command(words)


def _command_line(pid: int) -> list[str]:
    return read_text(f"/proc/{pid}/cmdline").split("\0")[:-1]


def format_command(words: list[str]) -> str:
    """Return a command line without interpreter path and credentials."""
    is_python = bool(words) and os.path.basename(words[0]).startswith("python")
    if is_python and "-m" in words[1:3]:
        words = words[words.index("-m") + 1 :]
    elif is_python and len(words) > 1:
        words = words[1:]
    text = " ".join([os.path.basename(words[0]), *words[1:]]) if words else "which has ended"
    text = "".join(char for char in _CREDENTIALS.sub("//", text) if char.isprintable())
    return text if len(text) <= _MAX_COMMAND_CHARS else f"{text[:_MAX_COMMAND_CHARS]}…"


# ---------------------------------------------------------------- waiting time


class WaitingTime:
    """Counter of the seconds during which at least one thread waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._threads = 0
        self._began = 0.0
        self._seconds = 0.0

    def read(self) -> tuple[float, float]:
        """Return the current time, and the seconds waited until then."""
        with self._lock:
            now = self._clock()
            return now, self._seconds + (now - self._began if self._threads else 0.0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting."""
        with self._lock:
            if not self._threads:
                self._began = self._clock()
            self._threads += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._seconds += self._clock() - self._began
