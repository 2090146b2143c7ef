"""The process of a fork server, which forks a child for each call and reports its end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

from tvmflow.core.disk_errors import explain
from tvmflow.core.errors import TvmflowError
from tvmflow.core.processes import kill_tree, without_torch

Emit = Callable[[dict[str, Any]], None]
"""Sends an event, a small JSON object with the key `event`, to the caller."""

is_child = False
"""True in a child of a fork server, where a crash does not end the caller."""

_PR_SET_PDEATHSIG: Final = 1
_OOM_SCORE: Final = "500"


def _ignore_signals() -> None:
    """Ignore signals to all processes of a run: the client handles them and ends the server."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def serve(control: socket.socket) -> NoReturn:
    """Fork a child for each request until the client goes away, then kill all children and exit."""
    _ignore_signals()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    children: dict[int, int] = {}
    sources: list[socket.socket | int] = [control, wake_read]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(wake_read, 4096):
                    pass
            _reap_children(children)
        if control in ready:
            try:
                message, descriptors, _, _ = socket.recv_fds(control, 16, 3)
            except OSError:
                message, descriptors = b"", []
            if not message:
                break
            result, log, request = descriptors
            try:
                pid = os.fork()
            except OSError as error:
                _refuse(error, descriptors)
                continue
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (control.fileno(), wake_read, wake_write, *children.values()):
                    os.close(descriptor)
                _run_child(result, log, request)
            os.close(log)
            os.close(request)
            children[pid] = result
    for pid in children:
        kill_tree(pid)
    os._exit(0)


def _refuse(error: OSError, descriptors: list[int]) -> None:
    """Answer a call whose child could not be forked."""
    result = descriptors[0]
    for message in (_describe_error(error), {"exit": 0}):
        _write_message(result, message)
    for descriptor in descriptors:
        os.close(descriptor)


def _reap_children(children: dict[int, int]) -> None:
    """Kill the process group of each child that ended, and report its exit status."""
    for pid, descriptor in list(children.items()):
        status = _end_of(pid)
        if status is None:
            continue
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, b"\n" + json.dumps({"exit": status}).encode() + b"\n")
        os.close(descriptor)
        del children[pid]


def _end_of(pid: int) -> int | None:
    """Return the exit status of a child, after killing its process group, or None while it runs."""
    if sys.platform == "linux":
        # WNOWAIT keeps the pid reserved, so that the kill cannot hit another group.
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        _kill_group(pid)
        return os.waitpid(pid, 0)[1]
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    _kill_group(pid)
    return status


def end_with_parent() -> None:
    """Let Linux kill this process when the thread that forked it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run_child(result: int, log: int, request: int) -> NoReturn:
    """Run one call in this freshly forked process, and exit without Python's finalization."""
    global is_child
    is_child = True
    parent = os.getppid()
    os.setsid()
    if sys.platform == "linux":
        end_with_parent()
        if os.getppid() != parent:
            os._exit(1)
    for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # The OOM killer should choose this process, not the server or other programs.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as stream:
        stream.write(_OOM_SCORE)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)

    requests = os.fdopen(request, "rb")

    def send(message: dict[str, Any]) -> None:
        _write_message(result, message)
        if message.get("ask") and not requests.readline():
            # A closed pipe means that the caller ended.
            os._exit(1)

    send({"pid": os.getpid()})
    send(_answer(requests.readline(), send))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _write_message(result: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(result, data) :]


def _answer(request: bytes, send: Emit) -> dict[str, Any]:
    """Run a call and return its result or exception as a message."""
    try:
        call = json.loads(request)
        module, _, function = call["function"].partition(":")
        value = getattr(importlib.import_module(module), function)(call["payload"], send)
        json.dumps(value)
        return {"kind": "ok", "value": value}
    except TvmflowError as error:
        return _describe_problem(error)
    except BaseException as error:
        # The log may be on the full disk, too.
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return _describe_error(error)


def _describe_problem(error: TvmflowError) -> dict[str, Any]:
    name = type(error).__name__
    return {"kind": "error", "message": error.message, "fix": error.fix, "error": name}


def _describe_error(error: BaseException) -> dict[str, Any]:
    if isinstance(error, OSError) and (problem := explain(error, os.getcwd())):
        return _describe_problem(problem)
    name = type(error).__name__
    lines = str(error).strip().splitlines()
    message = f"{name}: {lines[-1] if lines else 'no message'}"
    return {"kind": "error", "message": message, "error": name}


def main(argv: list[str]) -> NoReturn:
    """Import modules and serve: `python -m tvmflow.core.fork_server_process FD MODULE[:NAME]…`."""
    _ignore_signals()
    control = socket.socket(fileno=int(argv[0]))
    # Garbage collection over imported objects, which live forever, would take a tenth of each child's time.
    gc.disable()
    with without_torch():
        for entry in argv[1:]:
            module, _, name = entry.partition(":")
            imported = importlib.import_module(module)
            if name:
                getattr(imported, name)
    gc.freeze()
    gc.enable()
    serve(control)


if __name__ == "__main__":
    # `is_child` must be set in the module that others import, not in this copy named `__main__`.
    importlib.import_module("tvmflow.core.fork_server_process").main(sys.argv[1:])
