"""Process trees, and the environment of new processes.

`python -m` and `python -c` import first from the current folder, where a user's `numpy.py` or `onnx/` would hide the
package, so new processes get this process's import path. Imports almost nothing, for fast up-to-date runs.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# ---------------------------------------------------------------- environment

_NO_HOME = "/nonexistent"


def home_variables() -> dict[str, str]:
    """Return the variables that a process needs if its user has no home folder, as in many containers.

    TVM and others fail to import without one. They only cache there, so the folder need not exist; it must not be one
    that other users can write, such as `/tmp`.
    """
    return {"HOME": _NO_HOME} if os.path.expanduser("~") == "~" else {}


# ---------------------------------------------------------------- process trees

_KILL = 9
_ATTEMPTS = 3


def kill_descendants(pid: int) -> None:
    """Kill all descendants of a process."""
    for _ in range(_ATTEMPTS):
        # The next attempt finds processes that were forked meanwhile.
        pids = list_descendants(pid)
        if not pids:
            return
        _kill(pids)


def kill_tree(pid: int) -> None:
    """Kill a process, its process group if it leads one, and its descendants; ignore pid 0."""
    if pid:
        # Descendants are listed first, because children of a dead process get another parent.
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
    """Return the pids of running descendants of a process."""
    if not lists_processes():
        import psutil

        try:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.Error:
            # The process has ended.
            return []
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as stream:
                    state, parent = stream.read().rpartition(b")")[2].split()[:2]
            except OSError:
                # The process has ended meanwhile.
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
    """Return a command like `python -m` with this process's import path."""
    run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [*code_command(run), *arguments]


def code_command(code: str) -> list[str]:
    """Return a command like `python -c` with this process's import path."""
    folder = os.getcwd()
    path = [os.path.join(folder, entry) if entry else folder for entry in sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"]


@contextmanager
def without_torch() -> Iterator[None]:
    """Hide PyTorch while the block imports TVM.

    tvm_ffi imports an installed PyTorch and queries its GPUs. That takes seconds and hundreds of megabytes, and
    initializes the CUDA driver, which then fails in every forked process.
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
# Linux cgroups of this process may limit its CPUs and memory.

GROUPS_FOLDER = "/sys/fs/cgroup"
OWN_GROUPS = "/proc/self/cgroup"


def list_groups(controller: str, own: str = OWN_GROUPS, root: str = GROUPS_FOLDER) -> Iterator[str]:
    """Yield this process's cgroup folders for a controller (`cpu`, `memory`), outermost first.

    The file `own` lists the groups, which are mounted at `root`. In a container, listed paths may be the host's, and
    `root` is then the container's own group.
    """
    for line in read_text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        # cgroup v2 has one tree for all controllers and names none.
        if not controllers or controller in controllers.split(","):
            folder = f"{root}/{controllers}" if controllers else root
            yield folder
            for name in filter(None, path.split("/")):
                folder = f"{folder}/{name}"
                yield folder


def read_text(path: str) -> str:
    """Return the content of a kernel file such as /proc/vmstat; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
