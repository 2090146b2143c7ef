"""Fork servers: processes with preloaded modules that fork a child for each call.

A crash in native code, a hang or a kill affects a single call. Forking a process that has loaded `tvm` takes
milliseconds; starting a new process takes a second. The server stays single-threaded, so that forking is safe: it
imports, waits and forks, and never runs a kernel.

No process outlives its parent. The server ends when its client's socket closes, Linux kills the children of a dead
server, and every child leads a process group that is killed as a whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from tvmflow.core import fork_server_process, memory, termination
from tvmflow.core.fork_server_process import Emit
from tvmflow.core.processes import home_variables, kill_tree, module_command

__all__ = ["WITH_TVM", "ChildFunction", "Emit", "ForkServer", "Outcome"]

ChildFunction = Callable[[Any, Emit], Any]
"""An importable function that a child can run: it takes JSON and an `Emit`, and returns JSON."""

_log: Final = logging.getLogger(__name__)

# Thread pools that NumPy and other libraries start on import would make forking unsafe.
_SINGLE_THREADED: Final = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)

WITH_TVM: Final = ("numpy", "tvm")
"""The imports of a server whose children compile."""

_CANCELLED: Final = "the run was cancelled"

# Signals that may be sent to all processes of a run at once; processes receive them in any order.
_TERMINATION_SIGNALS: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_SETTLE_S: Final = 0.5
# A server that does not report the end of a killed child after this time is stopped.
_REPORT_S: Final = 30.0
# If a wait takes twice as long, SIGSTOP or SIGTSTP interrupted it.
_MAX_WAIT_S: Final = 1.0


class Outcome(NamedTuple):
    """The end of a call: `value` if it is `ok`, or else a message, a fix, and the error's class name.

    `is_external`: a termination signal of another process ended the child. `is_killed`: SIGKILL ended it, as the OOM
    killer does.
    """

    kind: Literal["ok", "error", "crashed", "timeout", "cancelled"]
    seconds: float
    message: str = ""
    fix: str = ""
    error: str = ""
    value: Any = None
    is_external: bool = False
    is_killed: bool = False


class ForkServer:
    """A client of a fork server, for use by several threads; `is_gone` is true once the server ended."""

    def __init__(self, control: socket.socket, pid: int, reap: Callable[[], None]) -> None:
        self._control = control
        self._pid = pid
        self._reap = reap
        self._lock = threading.Lock()
        self._cancelled = False
        self.is_gone = False

    @classmethod
    def start(cls, preload: Sequence[str] = ()) -> ForkServer:
        """Start a server in a new interpreter; `preload` lists modules or `module:name` to import."""
        control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            descriptor = server_end.fileno()
            process = subprocess.Popen(
                module_command(fork_server_process.__name__, str(descriptor), *preload),
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **home_variables(), **_SINGLE_THREADED},
                # Ctrl-C and signals to the process group must reach only the client.
                start_new_session=True,
            )
        _log.debug("fork server %d imports %s", process.pid, ", ".join(preload) or "nothing")
        return cls(control, process.pid, lambda: _wait_or_kill(process))

    @classmethod
    def fork(cls) -> ForkServer:
        """Fork a server from this process, which must still be single-threaded."""
        control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            control.close()
            fork_server_process.serve(server_end)
        server_end.close()
        return cls(control, pid, lambda: _reap(pid))

    def call(
        self,
        function: ChildFunction | str,
        payload: Any,
        *,
        timeout_s: float,
        log: Path | None = None,
        emit: Emit | None = None,
        on_start: Callable[[int], None] | None = None,
    ) -> Outcome:
        """Run a function, given as itself or as `module:name`, in a child, and wait for its end.

        The child is killed after `timeout_s` seconds. Its output is appended to `log`. `emit` receives its events;
        after an event with `ask: true`, the child waits without limit until `emit` returns. `on_start` gets its pid.
        """
        started, oom_kills = time.monotonic(), memory.count_oom_kills()
        if self._is_cancelled():
            return Outcome("cancelled", 0.0, _CANCELLED)
        read_end, write_end = os.pipe()
        log_fd = os.open(
            log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        request_read, request_write = os.pipe()
        try:
            try:
                with self._lock:
                    socket.send_fds(self._control, [b"call"], [write_end, log_fd, request_read])
            except OSError as broken:
                return self._server_gone(broken, started)
            finally:
                for descriptor in (write_end, log_fd, request_read):
                    os.close(descriptor)
            if not isinstance(function, str):
                function = f"{function.__module__}:{function.__qualname__}"
            request = json.dumps({"function": function, "payload": payload})

            def begin(pid: int) -> None:
                if on_start is not None:
                    on_start(pid)
                _write_line(request_write, request)

            end = self._follow(read_end, request_write, started, timeout_s, emit, begin)
            return end._replace(message=_explain_kill(end, oom_kills))
        finally:
            os.close(read_end)
            os.close(request_write)

    def _follow(
        self,
        read_end: int,
        answers: int,
        started: float,
        timeout_s: float,
        emit: Emit | None,
        begin: Callable[[int], None],
    ) -> Outcome:
        lines = _LineReader(read_end, started + timeout_s)
        pid, timed_out, result = 0, False, None
        while True:
            try:
                message = lines.next()
            except TimeoutError:
                kill_tree(self._pid if timed_out else pid)
                lines.deadline = math.inf if timed_out else time.monotonic() + _REPORT_S
                timed_out = True
                continue
            if message is None and timed_out:
                self.is_gone = True
                return _timeout(started, timeout_s)
            if message is None:
                return self._server_gone(None, started)
            if "pid" in message:
                pid = message["pid"]
                if timed_out:
                    kill_tree(pid)
                begin(pid)
            elif "event" in message:
                emit_started = time.monotonic()
                if emit is not None:
                    emit(message)
                if message.get("ask"):
                    lines.deadline += time.monotonic() - emit_started
                    _write_line(answers, "")
            elif "exit" in message:
                if timed_out:
                    return _timeout(started, timeout_s)
                return self._outcome(message["exit"], result, time.monotonic() - started)
            else:
                result = message

    def _outcome(self, status: int, result: dict[str, Any] | None, seconds: float) -> Outcome:
        if result is not None:
            return Outcome(seconds=seconds, **result)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        is_external, is_killed = number in _TERMINATION_SIGNALS, number == signal.SIGKILL
        if is_external:
            self._await_cancellation()
        if self._is_cancelled():
            return Outcome("cancelled", seconds, _CANCELLED)
        text = _describe_death(status)
        return Outcome("crashed", seconds, text, is_external=is_external, is_killed=is_killed)

    def _server_gone(self, cause: OSError | None, started: float) -> Outcome:
        self.is_gone = True
        self._await_cancellation()
        seconds = time.monotonic() - started
        if self._is_cancelled():
            return Outcome("cancelled", seconds, _CANCELLED)
        detail = f" ({cause.strerror})" if cause is not None else ""
        message = f"the fork server ended unexpectedly{detail}"
        return Outcome("crashed", seconds, message, is_killed=True)

    def _await_cancellation(self) -> None:
        """Wait a moment for this process to receive the signal that ended another process of the run."""
        deadline = time.monotonic() + _SETTLE_S
        while not self._is_cancelled() and time.monotonic() < deadline:
            time.sleep(_SETTLE_S / 10)

    def _is_cancelled(self) -> bool:
        return self._cancelled or termination.signal_number() != 0

    def cancel(self) -> None:
        """Kill the server and every running child; their calls, and all later ones, return `cancelled`."""
        self._cancelled = True
        kill_tree(self._pid)

    def close(self) -> None:
        """End the server and all of its children."""
        self._control.close()
        self._reap()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _timeout(started: float, timeout_s: float) -> Outcome:
    text = f"took longer than {timeout_s:g} s and was stopped"
    return Outcome("timeout", time.monotonic() - started, text)


def _describe_death(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name
        if number == signal.SIGKILL:
            return f"was killed ({name})"
        if number in _TERMINATION_SIGNALS:
            return f"was ended by {name}, which another process sent"
        return f"crashed in native code ({name}: {signal.strsignal(number)})"
    return f"ended without a result (exit status {os.WEXITSTATUS(status)})"


def _explain_kill(outcome: Outcome, oom_kills: int | None) -> str:
    """Return the message of an outcome; for a kill, add whether memory ran out."""
    if not outcome.is_killed:
        return outcome.message
    now = memory.count_oom_kills()
    if now is None or oom_kills is None:
        return f"{outcome.message}; perhaps the machine ran out of memory"
    if now > oom_kills:
        return f"{outcome.message}: memory ran out, and the kernel killed a process for that"
    return f"{outcome.message} by another process; the kernel killed none for lack of memory"


class _LineReader:
    """Reader of JSON lines from a pipe, with a deadline."""

    def __init__(self, descriptor: int, deadline: float) -> None:
        self.deadline = deadline
        self._descriptor = descriptor
        self._partial = b""
        self._lines: list[bytes] = []

    def next(self) -> dict[str, Any] | None:
        """Return the next message; None at the end of the pipe. Raises TimeoutError at the deadline."""
        while True:
            while self._lines:
                # A child that was killed while writing leaves a partial line.
                with contextlib.suppress(ValueError):
                    message: dict[str, Any] = json.loads(self._lines.pop(0))
                    return message
            if not self._is_readable():
                continue
            chunk = os.read(self._descriptor, 1 << 16)
            if not chunk:
                return None
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            self._lines += [line for line in lines if line]

    def _is_readable(self) -> bool:
        """Wait up to `_MAX_WAIT_S`, and return whether the pipe is readable."""
        began = time.monotonic()
        wait_s = min(max(self.deadline - began, 0.0), _MAX_WAIT_S)
        readable = bool(select.select([self._descriptor], [], [], wait_s)[0])
        now = time.monotonic()
        # If this process was suspended, it could not answer the child: that time does not count toward the deadline.
        if now - began > 2 * _MAX_WAIT_S:
            self.deadline += now - began
        if not readable and now >= self.deadline:
            raise TimeoutError
        return readable


def _write_line(descriptor: int, line: str) -> None:
    # The child may die before it has read the line.
    with contextlib.suppress(BrokenPipeError):
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
