"""Processes: process trees, and the environment of new processes.

`python -m` and `python -c` import first from the current folder, where a user's `numpy.py` or `onnx/` would hide the
package. Processes started here get the import path of this one. Imports next to nothing, for up-to-date runs.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# ---------------------------------------------------------------- environment

_NO_HOME = "/nonexistent"


def home_variables() -> dict[str, str]:
    """Return the variables that a process needs if its user has no home folder, as in many containers.

    TVM and others look for that folder while they are imported, and fail without one. They only cache there: the folder
    need not exist, and must not be one that another user could fill, as in `/tmp`.
    """
    return {"HOME": _NO_HOME} if os.path.expanduser("~") == "~" else {}


# ---------------------------------------------------------------- process trees

_KILL = 9
_ATTEMPTS = 3


def kill_descendants(pid: int) -> None:
    """Kill everything that a process has started, directly or not; only Linux can name all of it."""
    for _ in range(_ATTEMPTS):
        # processes forked during the kill are found by the next attempt
        pids = list_descendants(pid)
        if not pids:
            return
        _kill(pids)


def kill_tree(pid: int) -> None:
    """Kill a process, its process group if it leads one, and everything that it has started; 0 names none."""
    if pid:
        # listed first: the children of a dead process belong to another one
        _kill([pid, *list_descendants(pid)])


def _kill(pids: list[int]) -> None:
    for pid in pids:
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, _KILL)
            except (ProcessLookupError, PermissionError):
                pass


def lists_processes() -> bool:
    """Return whether the system has `/proc`."""
    return os.path.isdir("/proc/self")


def list_descendants(pid: int) -> list[int]:
    """Return the processes that descend from a process and have not ended."""
    if not lists_processes():
        import psutil

        try:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.Error:
            # it has ended
            return []
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    state, parent = stream.read().rpartition(b")")[2].split()[:2]
            except OSError:
                # it has ended meanwhile
                continue
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    descendants, queue = [], [pid]
    while queue:
        members = children.get(queue.pop(), [])
        descendants += members
        queue += members
    return descendants


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as `python -m` does."""
    run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [*code_command(run), *arguments]


def code_command(code: str) -> list[str]:
    """Return the command that runs Python code as `python -c` does."""
    folder = os.getcwd()
    path = [os.path.join(folder, entry) if entry else folder for entry in sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"]


@contextmanager
def without_torch() -> Iterator[None]:
    """Let TVM be imported in this process as if PyTorch were not installed.

    tvm_ffi imports an installed PyTorch, and asks it for a GPU. That takes seconds and hundreds of megabytes, and starts
    NVIDIA's driver, which then fails in every forked process.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop("torch", None)


# ---------------------------------------------------------------- control groups
# The groups of Linux that this process is in; they may limit its CPUs and memory.

GROUPS_FOLDER = "/sys/fs/cgroup"
OWN_GROUPS = "/proc/self/cgroup"


def list_groups(controller: str, own: str = OWN_GROUPS, root: str = GROUPS_FOLDER) -> Iterator[str]:
    """Yield the folders of the control groups of this process with a controller (`cpu`, `memory`).

    The outermost is first. `own` lists the groups of this process, and groups are mounted at `root`. In a container,
    paths may be those of the machine, and the root is its own group.
    """
    for line in read_text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        # version 2 has one tree for all controllers, and names none
        if not controllers or controller in controllers.split(","):
            folder = f"{root}/{controllers}" if controllers else root
            yield folder
            for name in filter(None, path.split("/")):
                folder = f"{folder}/{name}"
                yield folder


def read_text(path: str) -> str:
    """Return the content of a file of the kernel; nothing if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
