"""Devices that are measured on, one measurement at a time across all runs on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

CPU: Final = {"kind": "cpu"}
GPU: Final = {"kind": "cuda"}
"""This machine's, whatever they are."""


def machine_locks() -> str:
    """Where device locks are: one place for all stores and users' runs on this machine."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return f"{base}/tvmflow-{os.getuid()}/locks"


def exclusive(locks: Path, device: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Hold the device alone, to measure on it. The lock is the operating system's and dies with this process."""
    return _held(locks, device, fcntl.LOCK_EX)


def shared(locks: Path, device: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Keep the device busy together with others: nothing is measured meanwhile."""
    return _held(locks, device, fcntl.LOCK_SH)


@contextlib.contextmanager
def _held(locks: Path, device: Mapping[str, str], how: int) -> Iterator[None]:
    os.makedirs(locks, mode=0o700, exist_ok=True)
    path = locks / f"{device['kind']}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
