"""Runs functions in freshly forked children of a small process that has the heavy imports done.

A crash in native code, a hang or a kill costs one call and nothing else. Forking from a
process in which `tvm` is loaded takes milliseconds where starting one takes a second. The
server stays single-threaded, which is what makes forking from it safe: it imports, waits
and forks, and never runs a kernel itself.

Nothing outlives its parent: the server ends when its client's socket closes, a child is
killed by the kernel when the server dies, and every child leads a process group of its own
that is killed as a whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn

from tvmflow.errors import TvmflowError

Emit = Callable[[dict[str, Any]], None]

# Thread pools that numpy and friends start on import would make forking unsafe.
_SINGLE_THREADED: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_PR_SET_PDEATHSIG: Final = 1


class Outcome(NamedTuple):
    """How a call ended: `value` when `ok`, otherwise a sentence, a remedy, and the error's class name."""

    kind: Literal["ok", "error", "crashed", "timeout", "cancelled"]
    value: Any
    message: str
    fix: str
    error: str
    seconds: float


class Nursery:
    """A fork server and the calls that are running in its children. Safe to call from several threads."""

    def __init__(self, control: socket.socket, reap: Callable[[], None]) -> None:
        self._control = control
        self._reap = reap
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._cancelled = False

    @classmethod
    def start(cls, preload: Sequence[str] = ()) -> Nursery:
        """A server in a new interpreter, with the modules in `preload` imported."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_SINGLE_THREADED},
            )
        return cls(ours, lambda: _wait_or_kill(process))

    @classmethod
    def fork(cls) -> Nursery:
        """A server forked from this process, which must still be single-threaded."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            _serve(theirs)
        theirs.close()
        return cls(ours, lambda: _reap_pid(pid))

    def call(
        self,
        function: str,
        payload: Any,
        *,
        timeout_s: float,
        log: Path | None = None,
        emit: Emit | None = None,
    ) -> Outcome:
        """Run `function` (`module:name`, taking the payload and an emit function) in a child.

        The payload and what comes back are JSON. What the child and its own children print
        goes to the end of `log` (nowhere without one). Seconds beyond `timeout_s` kill it.
        An event with `ask: true` makes the child wait until `emit` has returned, and that
        wait does not count.
        """
        started = time.monotonic()
        if self._cancelled:
            return Outcome("cancelled", None, "the run was cancelled", "", "", 0.0)
        read_end, write_end = os.pipe()
        log_fd = os.open(
            log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        request_read, request_write = os.pipe()
        try:
            try:
                with self._lock:
                    socket.send_fds(self._control, [b"call"], [write_end, log_fd, request_read])
            except OSError as broken:
                return _server_gone(broken, started)
            finally:
                for descriptor in (write_end, log_fd, request_read):
                    os.close(descriptor)
            _tell(request_write, json.dumps({"function": function, "payload": payload}))
            return self._follow(read_end, request_write, started, timeout_s, emit)
        finally:
            os.close(read_end)
            os.close(request_write)

    def _follow(
        self, read_end: int, answers: int, started: float, timeout_s: float, emit: Emit | None
    ) -> Outcome:
        """Read what the child says until the server reports its end."""
        lines = _Lines(read_end)
        deadline: float | None = started + timeout_s
        pid, timed_out, result = 0, False, None
        try:
            while True:
                try:
                    message = lines.next(deadline)
                except TimeoutError:
                    timed_out, deadline = True, None
                    _kill_group(pid)
                    continue
                if message is None:
                    return _server_gone(None, started)
                if "pid" in message:
                    pid = message["pid"]
                    self._running.add(pid)
                    if self._cancelled:
                        _kill_group(pid)
                elif "event" in message:
                    began = time.monotonic()
                    if emit is not None:
                        emit(message)
                    if message.get("ask"):
                        deadline = deadline and deadline + time.monotonic() - began
                        _tell(answers, "")
                elif "exit" in message:
                    return self._outcome(message["exit"], result, started, timed_out, timeout_s)
                else:
                    result = message
        finally:
            self._running.discard(pid)

    def _outcome(
        self,
        status: int,
        result: dict[str, Any] | None,
        started: float,
        timed_out: bool,
        timeout_s: float,
    ) -> Outcome:
        seconds = time.monotonic() - started
        if result is not None and not timed_out:
            return Outcome(
                result["kind"],
                result.get("value"),
                result.get("message", ""),
                result.get("fix", ""),
                result.get("error", ""),
                seconds,
            )
        if timed_out:
            message = f"took longer than {timeout_s:g} s and was stopped"
            return Outcome("timeout", None, message, "", "", seconds)
        if self._cancelled:
            return Outcome("cancelled", None, "the run was cancelled", "", "", seconds)
        return Outcome("crashed", None, _death(status), "", "", seconds)

    def cancel(self) -> None:
        """Kill every running child; their calls return `cancelled`, and so does every later call."""
        self._cancelled = True
        for pid in list(self._running):
            _kill_group(pid)

    def close(self) -> None:
        """End the server and whatever still runs in it."""
        self._control.close()
        self._reap()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _server_gone(cause: OSError | None, started: float) -> Outcome:
    detail = f" ({cause.strerror})" if cause is not None else ""
    message = f"the worker server ended unexpectedly{detail}; perhaps the machine ran out of memory"
    return Outcome("crashed", None, message, "", "", time.monotonic() - started)


def _death(status: int) -> str:
    """The sentence for a child that ended without an answer."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name
        if number == signal.SIGKILL:
            return f"was killed ({name}); perhaps the machine ran out of memory"
        return f"crashed in native code ({name}: {signal.strsignal(number)})"
    return f"ended without an answer (exit status {os.WEXITSTATUS(status)})"


class _Lines:
    """The JSON lines of a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._whole: list[bytes] = []

    def next(self, deadline: float | None) -> dict[str, Any] | None:
        """The next message; None at the end of the pipe. Raises TimeoutError when the deadline passes."""
        while True:
            while self._whole:
                # a child killed in the middle of a line leaves a torn one
                with contextlib.suppress(ValueError):
                    message: dict[str, Any] = json.loads(self._whole.pop(0))
                    return message
            wait = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready, _, _ = select.select([self._descriptor], [], [], wait)
            if not ready:
                raise TimeoutError
            chunk = os.read(self._descriptor, 1 << 16)
            if not chunk:
                return None
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            self._whole += [line for line in whole if line]


def _tell(descriptor: int, line: str) -> None:
    # the child may die before it has read everything
    with contextlib.suppress(BrokenPipeError):
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]


def _kill_group(pid: int) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _reap_pid(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


# ---------------------------------------------------------------- in the server


def _serve(control: socket.socket) -> NoReturn:
    """Fork a child for each request until the client goes away, then take all children along."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
            _bury(children)
        if control in ready:
            try:
                message, descriptors, _, _ = socket.recv_fds(control, 16, 3)
            except OSError:
                message, descriptors = b"", []
            if not message:
                break
            result, log, request = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (control.fileno(), wake_read, wake_write, *children.values()):
                    os.close(descriptor)
                _run_child(result, log, request)
            os.close(log)
            os.close(request)
            children[pid] = result
    for pid in children:
        _kill_group(pid)
    os._exit(0)


def _bury(children: dict[int, int]) -> None:
    """Report every child that has ended, after its whole process group is gone."""
    for pid, descriptor in list(children.items()):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        _kill_group(pid)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, b"\n" + json.dumps({"exit": status}).encode() + b"\n")
        os.close(descriptor)
        del children[pid]


def _run_child(result: int, log: int, request: int) -> NoReturn:
    """Run one call in this freshly forked process, and end it without any of Python's farewells."""
    parent = os.getppid()
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)

    told = os.fdopen(request, "rb")

    def send(message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(result, data) :]
        if message.get("ask") and not told.readline():
            # whoever asked for this is gone
            os._exit(1)

    send({"pid": os.getpid()})
    send(_answer(told.readline(), send))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _answer(request: bytes, send: Emit) -> dict[str, Any]:
    try:
        call = json.loads(request)
        module, _, name = call["function"].partition(":")
        value = getattr(importlib.import_module(module), name)(call["payload"], send)
        json.dumps(value)
        return {"kind": "ok", "value": value}
    except TvmflowError as error:
        return {
            "kind": "error",
            "message": error.message,
            "fix": error.fix,
            "error": type(error).__name__,
        }
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        sentence = f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
        return {"kind": "error", "message": sentence, "error": type(error).__name__}


def main(argv: list[str]) -> NoReturn:
    """`python -m tvmflow.executors.nursery FD MODULE…`: preload the modules and serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(argv[0]))
    for module in argv[1:]:
        importlib.import_module(module)
    _serve(control)


if __name__ == "__main__":
    main(sys.argv[1:])
