"""Device locks: only one measurement at a time on each device of this machine, across all runs."""

from __future__ import annotations

import contextlib
import os
import stat
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
"""The remedy if the device locks cannot be created."""
CPU: Final = {"kind": CpuBackend.DEVICE}
"""This machine's CPU."""
ALL_DEVICES: Final = tuple({"kind": backend.DEVICE} for backend in BACKENDS.values())
"""All devices that this machine may have, in the order in which their locks are acquired."""


def device_locks_folder() -> str:
    """Return the folder of this user's device locks, which all stores and runs share."""
    base = os.environ.get(RUNTIME_VARIABLE, "")
    # A relative path would mean another folder in each working directory; the specification says to ignore it.
    if not os.path.isabs(base):
        base = "/tmp"
    return f"{base}/tvmflow-{os.getuid()}/locks"


def exclusive(locks: Path, device: Mapping[str, str]) -> AbstractContextManager[None]:
    """Hold the exclusive lock of a device, to measure on it. The lock dies with this process."""
    return _hold(locks, device, shared=False)


def shared(locks: Path, device: Mapping[str, str]) -> AbstractContextManager[None]:
    """Hold a device's shared lock, for work that measures nothing on it."""
    return _hold(locks, device, shared=True)


@contextmanager
def _hold(locks: Path, device: Mapping[str, str], *, shared: bool) -> Iterator[None]:
    path = locks / f"{device['kind']}.lock"
    subject = f"the device {device['kind']} of this machine"
    with ExitStack() as stack:
        try:
            folder = _open_private_folder(locks)
            stack.callback(os.close, folder)
            held = file_locks.held(path, shared=shared, mode=0o600, subject=subject, folder=folder)
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


def find_privacy_problem(path: Path, status: os.stat_result) -> str:
    """Return why another user could replace the device locks in a folder, as a sentence; otherwise empty."""
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a folder"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write to {path}"
    return ""


def _open_private_folder(locks: Path) -> int:
    """Return a descriptor of the device locks' folder, which is created if missing.

    The folder above may be writable for all users, so another user could put links to other files there. It is an
    error if another user can change the folder of the locks.
    """
    base = locks.parents[1]
    os.makedirs(base, mode=0o700, exist_ok=True)
    folder = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for path in (locks.parent, locks):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=folder)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(path.name, flags, dir_fd=folder)
        except OSError as error:
            # The failed call had only the descriptor, so the error has no path yet.
            error.filename = str(path)
            raise
        finally:
            os.close(folder)
        folder = inner
        if problem := find_privacy_problem(path, os.fstat(folder)):
            os.close(folder)
            text = f"the devices of this machine cannot be locked: {problem}"
            raise StoreError(text, fix=RUNTIME_FIX)
        os.fchmod(folder, 0o700)
    return folder
