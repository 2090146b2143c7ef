"""A limit of the CPU time of this process, of which other programs take nothing away."""

from __future__ import annotations

import os
import signal
from typing import Final, NoReturn

# How much longer this process may run where no Python code is interrupted.
_GRACE_S: Final = 2


class CpuTimeExceeded(BaseException):
    """The limit was reached. No reader handles it as damage of its file."""


def limit_cpu_time(seconds: int) -> None:
    """Raise CpuTimeExceeded after a time, or end this process a little later where that has no effect.

    Processes that it starts inherit the limit, and are ended by it.
    """
    import resource

    def stop(*_: object) -> NoReturn:
        raise CpuTimeExceeded

    used = sum(os.times()[:2])
    signal.signal(signal.SIGXCPU, stop)
    limit = int(used) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + _GRACE_S))
