"""An RPC tracker and servers on this machine's loopback, in processes of their own."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tvmflow.core.errors import EnvironmentProblem
from tvmflow.targets.tracker import DevicePoolStatus, Tracker

HOST = "127.0.0.1"
KEY = "board"
_START_S = 120.0
# Below those that a system gives to clients: until a server listens, no connection of another test takes its port.
_PORTS = range(10_000, 32_000)


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


class Member:
    """A process with all its children; TVM's servers leave some behind, which only a signal to the group reaches."""

    def __init__(self, log: Path, *arguments: str, **variables: str) -> None:
        self._log = log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                # as many threads as the tests' target asks for
                env={**os.environ, "TVM_NUM_THREADS": "2", **variables},
            )

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()


class Server(Member):
    """A device: TVM's own server, or tvmflow's."""

    def __init__(
        self, log: Path, tracker: str, key: str, *, tvmflow_server: bool, **variables: str
    ) -> None:
        port = free_port()
        self.address = f"{HOST}:{port}"
        arguments = ["--host", HOST, "--tracker", tracker, "--key", key, "--port", str(port)]
        if tvmflow_server:
            super().__init__(log, "tvmflow", "device", "serve", *arguments, **variables)
        else:
            words = ["server", str(port), tracker, key]
            super().__init__(log, "tests.support.rpc", *words, **variables)

    @property
    def sessions(self) -> int:
        """How many it has begun; only TVM's own tells."""
        return self.log.count("connected from")

    def at_next_session(self, number: signal.Signals) -> None:
        """Send a signal to all its processes in the middle of the next session."""

        def watch() -> None:
            before = self.sessions
            wait_until(lambda: self.sessions > before)
            self.signal(number)

        threading.Thread(target=watch, daemon=True).start()

    def crash_session(self) -> None:
        """End the youngest of its processes as a bad kernel does."""
        youngest = max(
            psutil.Process(self._process.pid).children(recursive=True),
            key=lambda process: process.create_time(),
        )
        youngest.send_signal(signal.SIGSEGV)


class DevicePool:
    """A tracker, and the servers that were added to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        port = free_port()
        self.address = f"{HOST}:{port}"
        self.members: list[Member] = [
            Member(folder / "tracker.log", "tests.support.rpc", "tracker", str(port))
        ]

    @property
    def servers(self) -> list[Server]:
        return [member for member in self.members if isinstance(member, Server)]

    def add(self, key: str = KEY, *, tvmflow_server: bool = False, **variables: str) -> Server:
        """One more server, with more variables of the environment; it is not there yet when this returns."""
        log = self._folder / f"{len(self.members)}.log"
        server = Server(log, self.address, key, tvmflow_server=tvmflow_server, **variables)
        self.members.append(server)
        return server

    def devices(self) -> dict[str, DevicePoolStatus]:
        return Tracker(self.address).list_devices()

    def wait_for(self, count: int, key: str = KEY) -> None:
        """Return when so many servers are free."""
        try:
            wait_until(lambda: self._free(key) == count)
        except AssertionError as error:
            logs = "\n".join(member.log for member in self.members)
            raise AssertionError(f"{error}; the logs are:\n{logs}") from None

    def _free(self, key: str) -> int:
        with contextlib.suppress(EnvironmentProblem):
            devices_by_key = self.devices()
            return devices_by_key[key].free if key in devices_by_key else 0
        return -1


def wait_until(holds: Callable[[], bool], seconds: float = _START_S) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


@contextlib.contextmanager
def running_pool(folder: Path, servers: int) -> Iterator[DevicePool]:
    """A tracker with so many free servers; all of them are killed at the end."""
    pool = DevicePool(folder)
    try:
        pool.wait_for(0)
        for _ in range(servers):
            pool.add()
        pool.wait_for(servers)
        yield pool
    finally:
        for member in pool.members:
            member.kill()


# ---------------------------------------------------------------- run in children


def fail(payload: Any, send: Callable[[dict[str, Any]], None]) -> Any:
    """Open a session, and fail in the phase that the payload names."""
    from tvm import rpc

    host, port, match_key, timeout_s = payload["session"]
    send({"event": "phase", "phase": payload["phase"]})
    rpc.connect(host, port, match_key, session_timeout=timeout_s)
    return {"failure": {"phase": payload["phase"], "kind": "error", "message": "as it was told"}}


def _run_member(kind: str, port: int, tracker: str = "", key: str = "") -> None:
    """Be a tracker or a server of TVM, whose own commands import TVM in two processes each."""
    from tvm.rpc.server import PopenRPCServerState
    from tvm.rpc.tracker import PopenTrackerServerState

    logging.basicConfig(level=logging.INFO)
    if kind == "tracker":
        PopenTrackerServerState(HOST, port, port + 1)
    else:
        host, _, tracker_port = tracker.rpartition(":")
        PopenRPCServerState(HOST, port, port + 1, tracker_addr=(host, int(tracker_port)), key=key)


if __name__ == "__main__":
    name, own_port, *others = sys.argv[1:]
    _run_member(name, int(own_port), *others)
