"""Functions that the tests of the fork server call in its children."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvmflow.core import fork_server_process
from tvmflow.core.errors import ImportFailed
from tvmflow.core.fork_server import ForkServer

Emit = Callable[[dict[str, Any]], None]


def add(numbers: list[int], emit: Emit) -> int:
    emit({"event": "adding", "numbers": numbers})
    return sum(numbers)


def echo(value: Any, emit: Emit) -> Any:
    return value


def crash(_: Any, emit: Emit) -> None:
    ctypes.string_at(0)


def hang(_: Any, emit: Emit) -> None:
    child = subprocess.Popen(["sleep", "100"])
    emit({"event": "started", "child": child.pid, "own": os.getpid(), "server": os.getppid()})
    time.sleep(100)


def refuse(_: Any, emit: Emit) -> None:
    raise ImportFailed("no such operator", fix="use another")


def stumble(_: Any, emit: Emit) -> None:
    raise ValueError("a long story\nthe point")


def talk(_: Any, emit: Emit) -> None:
    print("from Python")
    subprocess.run(["echo", "from a subprocess"], check=True)


def kill_itself(_: Any, emit: Emit) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def talk_much(_: Any, emit: Emit) -> None:
    """Send more than a pipe takes, for three seconds."""
    for _step in range(300):
        emit({"event": "talking", "text": "x" * 2000})
        time.sleep(0.01)


def end_itself(_: Any, emit: Emit) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(100)


def nested(crashes: int, emit: Emit) -> list[Any]:
    with ForkServer.fork() as own:
        kinds = [own.call(f"{__name__}:crash", None, timeout_s=10).kind for _ in range(crashes)]
        return [*kinds, own.call(f"{__name__}:add", [1, 2], timeout_s=10).value]


def main(notes: str) -> None:
    """Run a hanging call, and record the processes that are involved."""

    def write(event: dict[str, int]) -> None:
        Path(notes).write_text(f"{event['server']} {event['own']} {event['child']}\n")

    with ForkServer.start() as fork_server:
        fork_server.call(f"{CALLS}:hang", None, timeout_s=100, emit=write)


CALLS = "tests.unit.core.fork_server_calls"

if __name__ == "__main__":
    main(sys.argv[1])


def ask(seconds: float, emit: Emit) -> float:
    started = time.monotonic()
    emit({"event": "ready", "ask": True})
    waited = time.monotonic() - started
    time.sleep(seconds)
    return waited


def grow(megabytes: int, emit: Emit) -> int:
    """Take memory, and hold it for a while after the caller has been told."""
    held = bytearray(megabytes << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    emit({"event": "grown", "ask": True})
    time.sleep(1.5)
    return len(held) >> 20


def grow_in_a_child(megabytes: int, emit: Emit) -> int:
    """Return the exit status of a process that takes memory."""
    code = f"import time; held = bytearray({megabytes} << 20); held[::4096] = b'x' * len(held[::4096]); time.sleep(20)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode


def tell_whether_child(payload: Any, emit: Emit) -> bool:
    """Say what a function called here sees of the process it runs in."""
    return fork_server_process.is_child


def find_torch(_payload: None, _emit: Emit) -> list[bool]:
    """Return whether PyTorch was imported with the modules of the server, and whether it can be imported."""
    was_imported = "torch" in sys.modules
    importlib.import_module("torch")
    return [was_imported, "torch" in sys.modules]
