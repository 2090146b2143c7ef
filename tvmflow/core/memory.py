"""Memory: how much there is, how much processes take, and a watch that stops processes above a limit.

Only memory in use counts, not address space: TVM and CUDA's driver map far more than they use, so that a limit of the
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
# Checks come more often the sooner a process could reach its limit, if it takes memory this fast.
_BYTES_PER_S: Final = 4e9
_SHORTEST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 1.0
# The limit of a control group without one.
_NO_LIMIT: Final = 1 << 60


def machine_bytes() -> int:
    """Return the memory of this machine, or of the container or control group that this process is in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_read_numbers("memory.max"), *_read_numbers("memory.limit_in_bytes")])


def count_oom_kills() -> int | None:
    """Return how many processes were killed because memory ran out; None if the kernel does not say."""
    groups = (*_cgroup_texts("memory.events"), *_cgroup_texts("memory.oom_control"))
    counts = [
        int(number)
        for text in (read_text("/proc/vmstat"), *groups)
        for number in re.findall(r"^oom_kill (\d+)$", text, re.MULTILINE)
    ]
    return sum(counts) if counts else None


def _read_numbers(name: str) -> Iterator[int]:
    """Yield the limits of the control groups that this process is in, as far as they have one."""
    for text in _cgroup_texts(name):
        if text.strip().isdecimal() and 0 < int(text) < _NO_LIMIT:
            yield int(text)


def _cgroup_texts(name: str) -> Iterator[str]:
    for folder in list_groups("memory"):
        yield read_text(f"{folder}/{name}")


def limit_address_space(size: int) -> None:
    """Let this process, without TVM and a GPU, map this many bytes more than now, if that can be limited."""
    import resource

    pages = read_text("/proc/self/statm").split()
    if pages:
        limit = int(pages[0]) * os.sysconf("SC_PAGE_SIZE") + size
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _resident_bytes(pids: Iterable[int]) -> dict[int, int]:
    """Return the memory of those processes that have not ended; shared memory counts for each."""
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
    """Return the memory of a process, with its share of shared memory. Takes time."""
    match = re.search(r"^Pss:\s+(\d+) kB", read_text(f"/proc/{pid}/smaps_rollup"), re.MULTILINE)
    return int(match[1]) << 10 if match else resident


class MemoryExcess(NamedTuple):
    """A worker above its memory limit, or with `is_shared`, the largest worker when all exceeded theirs.

    If it was not stopped itself, one of its child processes was.
    """

    used: int
    limit: int
    is_shared: bool
    is_stopped: bool

    @property
    def text(self) -> str:
        """A clause that follows the name of the worker."""
        took = f"took {size_text(self.used)} of memory"
        if self.is_shared:
            took = f"was the largest when all stages {took} together"
        stopped = "" if self.is_stopped else " with a process that it had started, which"
        limit = f"more than the limit of {size_text(self.limit)}"
        return f"{took}, {limit}, and{stopped} was stopped"


class MemoryWatch:
    """Stops workers, with their descendants, above their own limit or the shared one of this machine."""

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
        """Watch a worker: with a limit of its own, with none (0), or with the shared one (None)."""
        with self._lock:
            self._limits[pid] = limit
            self._changed.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
                self._thread.start()

    def remove(self, pid: int) -> MemoryExcess | None:
        """Watch a worker no longer; return how it took too much memory, if it did."""
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
        """Stop who takes too much; return the seconds until the next check."""
        shared = self._shared_limit or int(machine_bytes() * _SHARE)
        watched = [pid for pid, limit in self._limits.items() if limit != 0]
        # reading the processes of the whole machine takes more time than those of the workers
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
        """Stop the largest process of a worker: a measurement that fails is not the end of a search."""
        largest = max(tree, key=tree.__getitem__, default=worker)
        excess = excess._replace(is_stopped=largest == worker)
        _log.debug("worker %d, process %d: %s", worker, largest, excess.text)
        self._excesses[worker] = excess
        kill_tree(largest)


def _sum(workers: Mapping[int, Mapping[int, int]]) -> int:
    return sum(sum(tree.values()) for tree in workers.values())


# How much longer this process may run where no Python code is interrupted.
_GRACE_S: Final = 2


class CpuTimeExceeded(BaseException):
    """The limit was reached. No reader handles it as damage of its file."""


def limit_cpu_time(seconds: int) -> None:
    """Raise CpuTimeExceeded after a time, or end this process and its children soon after."""
    import resource

    def stop(*_: object) -> NoReturn:
        raise CpuTimeExceeded

    used = sum(os.times()[:2])
    signal.signal(signal.SIGXCPU, stop)
    limit = int(used) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + _GRACE_S))
