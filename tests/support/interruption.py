"""Commands that get a signal while they run, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

_MARK = "TVMFLOW_TEST_RUN"


class Ended(NamedTuple):
    """How a command ended after a signal."""

    code: int
    seconds: float
    out: str
    err: str
    survivors: list[str]


class RunningCommand:
    """A command in a process group of its own; a mark in the environment finds all of its processes."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, **dict([self._mark.split("=")])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream))
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: IO[str]) -> None:
        for line in stream:
            self._lines[name].append(line)

    def output(self, name: str) -> str:
        return "".join(self._lines[name])

    def wait_for(self, pattern: str, limit_s: float = 90.0) -> None:
        """Wait until a line of the output matches."""
        deadline = time.monotonic() + limit_s
        while not re.search(pattern, self.output("out") + self.output("err")):
            assert self.process.poll() is None, self.output("out") + self.output("err")
            assert time.monotonic() < deadline, self.output("out") + self.output("err")
            time.sleep(0.02)

    def wait_for_handlers(self, limit_s: float = 30.0) -> None:
        """Wait until the command handles SIGTERM: Python's start is not its own, and may drop a signal."""
        deadline = time.monotonic() + limit_s
        handled = 0
        while not handled & 1 << (signal.SIGTERM - 1):
            assert time.monotonic() < deadline, self.output("err")
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            handled = int(status.partition("SigCgt:")[2].split()[0], 16)
            time.sleep(0.005)

    def end(self, number: int, *, to_group: bool = False, times: int = 1) -> Ended:
        """Send a signal, and wait until the command and all that it has started have ended."""
        started = time.monotonic()
        for _ in range(times):
            with contextlib.suppress(ProcessLookupError):
                send = os.killpg if to_group else os.kill
                send(self.process.pid, number)
            time.sleep(0.05 if times > 1 else 0)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not obeyed: {self._describe_threads()}") from None
        finally:
            seconds = time.monotonic() - started
            survivors = self._survivors()
            self.kill()
        return Ended(code, seconds, self.output("out"), self.output("err"), survivors)

    def _describe_threads(self) -> dict[str, str]:
        """Return the state of each thread, and the function of the kernel that it waits in."""
        states = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                states[task.name] = f"{state} {(task / 'wchan').read_text()}"
        return states

    def _survivors(self, limit_s: float = 30.0) -> list[str]:
        """Return the command lines of processes that are still there a while later."""
        deadline = time.monotonic() + limit_s
        while (pids := self.list_processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        lines = []
        for pid in pids:
            with contextlib.suppress(OSError):
                lines.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        return lines

    def list_processes(self) -> list[int]:
        """Return the processes of this command that have not ended."""
        pids = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and folder.name != str(os.getpid()):
                with contextlib.suppress(OSError):
                    if self._mark in (folder / "environ").read_text(errors="replace"):
                        pids.append(int(folder.name))
        return pids

    def kill(self) -> None:
        """End what is left."""
        for pid in self.list_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@contextlib.contextmanager
def slow_server(first: bytes = b"", drip: bytes = b"", pause_s: float = 0.2) -> Iterator[str]:
    """Give the URL of a server that answers every connection with `first`, then a byte of `drip` now and then, without end."""
    stopped = threading.Event()
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    server.settimeout(0.1)

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(first)
            while not stopped.wait(pause_s):
                connection.sendall(drip)

    def accept() -> None:
        while not stopped.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                threading.Thread(target=answer, args=(connection,)).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    finally:
        stopped.set()
        thread.join()
        server.close()
