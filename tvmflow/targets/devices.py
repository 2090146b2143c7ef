"""Devices that are measured on, one measurement at a time across all runs on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path


@contextlib.contextmanager
def exclusive(locks: Path, device: Mapping[str, str]) -> Iterator[None]:
    """Hold the device alone. The lock is the operating system's and dies with this process."""
    locks.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(locks / f"{device['kind']}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
