"""Memory limits: memory of the machine and of processes, and a watch that enforces limits.

Resident memory counts, not address space: TVM and the CUDA driver map far more than they use, so that a limit of the
address space (RLIMIT_AS) would end programs that fit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, NoReturn

from tvmflow.core.formatting import size_text
from tvmflow.core.processes import (
    kill_tree,
    list_descendants,
    list_groups,
    lists_processes,
    read_text,
)

_log: Final = logging.getLogger(__name__)

_SHARE: Final = 0.8
# Assumed rate of allocation: the next check happens before a process could reach its limit.
_BYTES_PER_S: Final = 4e9
_SHORTEST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 1.0
# cgroup v1 reports at least this if there is no limit.
_NO_LIMIT: Final = 1 << 60


def machine_bytes() -> int:
    """Return the memory available to this process: the machine's, or less in a container or cgroup."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_read_numbers("memory.max"), *_read_numbers("memory.limit_in_bytes")])


def count_oom_kills() -> int | None:
    """Return how many processes the OOM killer has killed; None if the kernel does not report it."""
    groups = (*_cgroup_texts("memory.events"), *_cgroup_texts("memory.oom_control"))
    counts = [
        int(number)
        for text in (read_text("/proc/vmstat"), *groups)
        for number in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE)
    ]
    return sum(counts) if counts else None


def _read_numbers(name: str) -> Iterator[int]:
    """Yield the limits of this process's control groups that have one."""
    for text in _cgroup_texts(name):
        if text.strip().isdecimal() and 0 < int(text) < _NO_LIMIT:
            yield int(text)


def _cgroup_texts(name: str) -> Iterator[str]:
    for folder in list_groups("memory"):
        yield read_text(f"{folder}/{name}")


def limit_address_space(size: int) -> None:
    """Limit this process to `size` more bytes of address space, where supported; not with TVM or a GPU."""
    import resource

    if pages := read_text("/proc/self/statm").split():
        limit = int(pages[0]) * os.sysconf("SC_PAGE_SIZE") + size
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _resident_bytes(pids: Iterable[int]) -> dict[int, int]:
    """Return the resident memory of running processes; shared memory counts for each of them."""
    usage = {}
    if lists_processes():
        page = os.sysconf("SC_PAGE_SIZE")
        for pid in pids:
            if fields := read_text(f"/proc/{pid}/statm").split():
                usage[pid] = int(fields[1]) * page
        return usage
    import psutil

    for pid in pids:
        with contextlib.suppress(psutil.Error):
            usage[pid] = psutil.Process(pid).memory_info().rss
    return usage


def _proportional_bytes(pid: int, resident: int) -> int:
    """Return the proportional set size (PSS) of a process, which is slow to read."""
    match = re.search(r"^Pss:\s+(\d+) kB", read_text(f"/proc/{pid}/smaps_rollup"), re.MULTILINE)
    return int(match[1]) << 10 if match else resident


class MemoryExcess(NamedTuple):
    """A worker above its memory limit, in bytes.

    With `is_shared`, all workers together exceeded the shared limit, and this is the largest. If `is_stopped` is false,
    one of its child processes was stopped instead.
    """

    used: int
    limit: int
    is_shared: bool
    is_stopped: bool

    @property
    def text(self) -> str:
        """The predicate of a message about the worker."""
        took = f"took {size_text(self.used)} of memory"
        if self.is_shared:
            took = f"was the largest when all stages {took} together"
        stopped = "" if self.is_stopped else " with a process that it had started, which"
        limit = f"more than the limit of {size_text(self.limit)}"
        return f"{took}, {limit}, and{stopped} was stopped"


class MemoryWatch:
    """A watch that stops workers, or their descendants, above their own limit or the shared limit."""

    def __init__(self, shared_limit: int | None = None) -> None:
        self._shared_limit = shared_limit
        self._limits: dict[int, int | None] = {}
        self._excesses: dict[int, MemoryExcess] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._listed = 0.0
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, pid: int, limit: int | None) -> None:
        """Watch a worker with its own limit in bytes, without a limit (0), or with the shared limit (None)."""
        with self._lock:
            self._limits[pid] = limit
            self._changed.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
                self._thread.start()

    def remove(self, pid: int) -> MemoryExcess | None:
        """Stop watching a worker; return its excess, if any."""
        with self._lock:
            self._limits.pop(pid, None)
            return self._excesses.pop(pid, None)

    def _watch(self) -> None:
        wait_s = 0.0
        while True:
            self._changed.wait(wait_s)
            self._changed.clear()
            with self._lock:
                if not self._limits:
                    self._thread = None
                    return
                wait_s = self._check()

    def _check(self) -> float:
        """Stop workers above their limits; return the seconds until the next check."""
        shared = self._shared_limit or int(machine_bytes() * _SHARE)
        watched = [pid for pid, limit in self._limits.items() if limit != 0]
        # Listing all processes of the machine is slow, so descendants are updated only once a second.
        now = time.monotonic()
        if now - self._listed >= _LONGEST_WAIT_S or self._members.keys() != set(watched):
            self._members = {pid: (pid, *list_descendants(pid)) for pid in watched}
            self._listed = now
        usage = {pid: _resident_bytes(self._members[pid]) for pid in watched}
        headroom = [shared]
        for pid, limit in self._limits.items():
            if limit:
                headroom.append(self._check_group({pid: usage[pid]}, limit, is_shared=False))
        sharing = {pid: usage[pid] for pid, limit in self._limits.items() if limit is None}
        headroom.append(self._check_group(sharing, shared, is_shared=True))
        return min(max(min(headroom) / _BYTES_PER_S, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)

    def _check_group(
        self, workers: Mapping[int, Mapping[int, int]], limit: int, *, is_shared: bool
    ) -> int:
        used = _sum(workers)
        if used > limit:
            workers = {
                pid: {member: _proportional_bytes(member, size) for member, size in tree.items()}
                for pid, tree in workers.items()
            }
            used = _sum(workers)
        if used > limit:
            worker = max(workers, key=lambda pid: sum(workers[pid].values()))
            self._stop(worker, workers[worker], MemoryExcess(used, limit, is_shared, True))
        return max(limit - used, 0)

    def _stop(self, worker: int, tree: Mapping[int, int], excess: MemoryExcess) -> None:
        """Stop the largest process of a worker, which may be a child: a search survives a failed measurement."""
        largest = max(tree, key=tree.__getitem__, default=worker)
        excess = excess._replace(is_stopped=largest == worker)
        _log.debug("worker %d, process %d: %s", worker, largest, excess.text)
        self._excesses[worker] = excess
        kill_tree(largest)


def _sum(workers: Mapping[int, Mapping[int, int]]) -> int:
    return sum(sum(tree.values()) for tree in workers.values())


# After the soft limit, native code that Python cannot interrupt may run this much longer.
_GRACE_S: Final = 2


class CpuTimeExceeded(BaseException):
    """The CPU time limit was reached. A BaseException, so that readers do not treat it as a damaged file."""


def limit_cpu_time(seconds: int) -> None:
    """Raise CpuTimeExceeded after some seconds of CPU time; soon after, the system ends this process."""
    import resource

    def stop(*_: object) -> NoReturn:
        raise CpuTimeExceeded

    used = sum(os.times()[:2])
    signal.signal(signal.SIGXCPU, stop)
    limit = int(used) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + _GRACE_S))
