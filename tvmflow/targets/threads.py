"""Threads: how many a process may run at a time, by CPU affinity and its container's quota.

Up-to-date runs import this module, so it imports almost nothing.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Final

from tvmflow.core.processes import GROUPS_FOLDER, OWN_GROUPS, list_groups, read_text

VARIABLE: Final = "TVM_NUM_THREADS"
"""The environment variable with the number of threads for TVM to start."""

_BINDING: Final = "TVM_BIND_THREADS"
_CPUS: Final = "/sys/devices/system/cpu"
_UNLIMITED: Final = 1e9


def list_allowed_cpus() -> list[int]:
    """Return the indices of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(count_cpus()))


def count_cpus() -> int:
    """Return how many CPUs this machine has, including those that this process may not use."""
    return os.cpu_count() or 1


def count_usable_cpus() -> int:
    """Return how many CPUs this process may use: those in its affinity, at most its quota."""
    return max(1, min(len(list_allowed_cpus()), read_quota()))


def count_usable_cores(cpus: str = _CPUS) -> int:
    """Return how many cores this process may keep busy; SMT siblings count as one."""
    cores = {
        read_text(f"{cpus}/cpu{cpu}/topology/thread_siblings_list") or cpu
        for cpu in list_allowed_cpus()
    }
    return max(1, min(len(cores), read_quota()))


def choose_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Return the default number of kernel threads: the environment's, or one per usable core.

    TVM reads TVM_NUM_THREADS and OMP_NUM_THREADS. Without them, it would use half of the machine's CPUs.
    """
    for name in (VARIABLE, "OMP_NUM_THREADS"):
        value = environment.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return count_usable_cores()


def thread_variables(count: int) -> dict[str, str]:
    """Return the environment in which TVM starts `count` threads on this process's usable CPUs.

    By default, TVM ignores the affinity, and binds the threads of all processes to the machine's first CPUs.
    """
    return {VARIABLE: str(count), _BINDING: os.environ.get(_BINDING, "0")}


@contextlib.contextmanager
def environment_for(threads: int) -> Iterator[None]:
    """Set the variables for a number of threads, and restore their values at the end."""
    variables = thread_variables(threads)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---------------------------------------------------------------- quotas of control groups


def read_quota(own: str = OWN_GROUPS, root: str = GROUPS_FOLDER) -> int:
    """Return how many whole CPUs this process's control groups grant; a huge number if unlimited."""
    quotas = [_UNLIMITED]
    for group in list_groups("cpu", own, root):
        quotas.append(_parse_quota(f"{group}/cpu.max"))
        quotas.append(_parse_quota(f"{group}/cpu.cfs_quota_us", f"{group}/cpu.cfs_period_us"))
    return int(min(quotas))


def _parse_quota(*files: str) -> float:
    """Return the CPUs that the files grant, as quota / period in µs; `max` and -1 mean unlimited."""
    words = " ".join(map(read_text, files)).split()
    if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):
        return int(words[0]) / int(words[1])
    return _UNLIMITED
