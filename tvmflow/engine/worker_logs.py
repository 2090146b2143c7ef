"""The logs of running stages, copied to a stream while their workers write them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final, TextIO

from tvmflow.core.formatting import printable
from tvmflow.executors._base import Event

_POLL_S: Final = 0.2


class WorkerLogs:
    """Copies the lines of the logs of all running stages, each with the name of its stage."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._logs: dict[str, _GrowingLog] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="worker-logs", daemon=True)
        self._thread.start()

    def event(self, event: Event) -> None:
        """Note that a stage has started, or copy the rest of its log when it has ended."""
        with self._lock:
            if event["event"] == "stage_started":
                self._logs[event["stage_id"]] = _GrowingLog(Path(event["log"]))
            elif event["event"] == "stage_finished" and event["stage_id"] in self._logs:
                log = self._logs.pop(event["stage_id"])
                self._write(event["stage_id"], [*log.read_lines(), *log.read_rest()])

    def close(self) -> None:
        """Stop copying."""
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_S):
            with self._lock:
                for stage_id, log in self._logs.items():
                    self._write(stage_id, log.read_lines())

    def _write(self, stage_id: str, lines: list[str]) -> None:
        self._stream.write("".join(f"{stage_id} | {printable(line)}\n" for line in lines))
        self._stream.flush()


class _GrowingLog:
    """A log and how much of it was read; it may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def read_lines(self) -> list[str]:
        """Return the complete lines that were written since the last call."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._position)
                content = stream.read()
        except FileNotFoundError:
            return []
        self._position += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [_decode(line) for line in lines]

    def read_rest(self) -> list[str]:
        """Return what stands behind the last complete line, if anything."""
        return [_decode(self._rest)] if self._rest else []


def _decode(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").expandtabs()
