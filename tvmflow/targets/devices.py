"""Device locks: one measurement at a time on each device of this machine, across all runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.core import file_locks
from tvmflow.targets.backends import BACKENDS, cpu

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNTIME_VARIABLE: Final = "XDG_RUNTIME_DIR"
CPU: Final = {"kind": cpu.DEVICE}
"""This machine's CPU."""
ALL_DEVICES: Final = tuple({"kind": backend.DEVICE} for backend in BACKENDS.values())
"""Every device that this machine may have, in the order in which their locks are taken."""


def device_locks_folder() -> str:
    """Return the folder of the device locks: one for all stores and users' runs on this machine."""
    base = os.environ.get(RUNTIME_VARIABLE, "")
    # a relative one would be another folder for each command, and its specification has it ignored
    if not os.path.isabs(base):
        base = "/tmp"
    return f"{base}/tvmflow-{os.getuid()}/locks"


def exclusive(locks: Path, device: Mapping[str, str]) -> AbstractContextManager[None]:
    """Hold a device alone, to measure on it. The lock is the operating system's and dies with this process."""
    return _hold(locks, device, shared=False)


def shared(locks: Path, device: Mapping[str, str]) -> AbstractContextManager[None]:
    """Keep a device busy together with others: nothing is measured on it meanwhile."""
    return _hold(locks, device, shared=True)


@contextmanager
def _hold(locks: Path, device: Mapping[str, str], *, shared: bool) -> Iterator[None]:
    os.makedirs(locks, mode=0o700, exist_ok=True)
    path = locks / f"{device['kind']}.lock"
    subject = f"the device {device['kind']} of this machine"
    with file_locks.held(path, shared=shared, mode=0o600, subject=subject):
        yield
