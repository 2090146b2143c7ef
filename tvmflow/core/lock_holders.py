"""Holders of file locks: which processes hold one, as far as the operating system says."""

import contextlib
import os
import re
from pathlib import Path
from typing import Final

_MAX_SHOWN: Final = 3
_MAX_COMMAND_CHARS: Final = 100
_CREDENTIALS: Final = re.compile(r"//[^/@\s]*@")
_HELPERS: Final = ("fork_server_process",)
"""Modules that run in processes of a command, not as one."""


def describe_holders(status: os.stat_result) -> str | None:
    """Return the commands that hold the lock of a file: `pid 12 (tvmflow run a.yaml) and pid 13 (…)`.

    Returns:
        `another process` where the operating system does not tell; None for this command itself,
        whose stages wait for each other.
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
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            # a line with an arrow is of a process that waits; some file systems give another device
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(status.st_ino):
                pids.append(int(words[4]))
    return pids


def _find_command(pid: int) -> tuple[int, str]:
    """Return the command that a process belongs to: the processes of a run's stages are its own."""
    words = _command_line(pid)
    while any(helper in word for word in words for helper in _HELPERS):
        parent = _parent(pid)
        if parent <= 1:
            break
        pid, words = parent, _command_line(parent)
    return pid, format_command(words)


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def format_command(words: list[str]) -> str:
    """Return a command line without the path of the interpreter and without passwords."""
    if "-m" in words[1:3] and Path(words[0]).name.startswith("python"):
        words = words[words.index("-m") + 1 :]
    elif len(words) > 1 and Path(words[0]).name.startswith("python"):
        words = words[1:]
    text = " ".join([Path(words[0]).name, *words[1:]]) if words else "which has ended"
    text = "".join(char for char in _CREDENTIALS.sub("//", text) if char.isprintable())
    return text if len(text) <= _MAX_COMMAND_CHARS else f"{text[:_MAX_COMMAND_CHARS]}…"
