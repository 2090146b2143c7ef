"""Device locks: one measurement at a time on each device of this machine, across all runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.core import disk_errors, file_locks, spans
from tvmflow.core.errors import StoreError
from tvmflow.targets.backends import BACKENDS
from tvmflow.targets.backends.cpu import CpuBackend

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNTIME_VARIABLE: Final = "XDG_RUNTIME_DIR"
RUNTIME_FIX: Final = f"set ${RUNTIME_VARIABLE} to a folder of your own, or unset it"
"""What to do where the device locks cannot be made."""
CPU: Final = {"kind": CpuBackend.DEVICE}
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
    """Hold a device alone, to measure on it.

    The lock is the operating system's and dies with this process.
    """
    return _hold(locks, device, shared=False)


def shared(locks: Path, device: Mapping[str, str]) -> AbstractContextManager[None]:
    """Keep a device busy together with others: nothing is measured on it meanwhile."""
    return _hold(locks, device, shared=True)


@contextmanager
def _hold(locks: Path, device: Mapping[str, str], *, shared: bool) -> Iterator[None]:
    path = locks / f"{device['kind']}.lock"
    subject = f"the device {device['kind']} of this machine"
    with ExitStack() as stack:
        try:
            os.makedirs(locks, mode=0o700, exist_ok=True)
            held = file_locks.held(path, shared=shared, mode=0o600, subject=subject)
            stack.enter_context(held)
        except OSError as error:
            problem = disk_errors.explain(error, locks)
            if problem is None or disk_errors.is_disk_full(error):
                raise
            text = f"the devices of this machine cannot be locked: {problem.message}"
            raise StoreError(text, fix=RUNTIME_FIX) from error
        if not shared:
            stack.enter_context(spans.span("measurement", device=device["kind"]))
        yield
