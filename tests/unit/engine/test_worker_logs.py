"""The logs of running stages, as `-vv` shows them."""

from __future__ import annotations

import io
import time
from pathlib import Path

from tvmflow.engine.run_records import WorkerLogs


class Silent:
    """An observer that shows nothing."""

    def event(self, event: object) -> None:
        pass

    def interrupted(self) -> str:
        return ""


def started(stage: str, log: Path) -> dict[str, object]:
    return {"event": "stage_started", "stage_id": stage, "reason": "", "log": str(log)}


def finished(stage: str) -> dict[str, object]:
    return {"event": "stage_finished", "stage_id": stage, "outcome": "ran"}


def test_lines_are_copied_with_their_stage(tmp_path: Path) -> None:
    """Each once, also the one at the end that has no newline; nothing in them commands the terminal."""
    stream, build, tune = io.StringIO(), tmp_path / "build.log", tmp_path / "tune.log"
    logs = WorkerLogs(stream, Silent())
    logs.event(started("net:build/host", build))
    logs.event(started("net:tune/host", tune))
    build.write_bytes(b"one\n\x1b[31mtwo\xff\nthree")
    tune.write_bytes(b"other\n")
    logs.event(finished("net:build/host"))
    logs.event(finished("net:tune/host"))
    logs.event(finished("net:verify/host"))
    logs.close()
    assert sorted(stream.getvalue().splitlines()) == [
        "net:build/host | \\x1b[31mtwo\ufffd",
        "net:build/host | one",
        "net:build/host | three",
        "net:tune/host | other",
    ]


def test_lines_are_copied_when_they_are_complete(tmp_path: Path) -> None:
    """A log need not exist yet, and a line or a character may be written in two parts."""
    path, stream = tmp_path / "log", io.StringIO()
    logs = WorkerLogs(stream, Silent())
    logs.event(started("net:build", path))
    time.sleep(0.25)
    path.write_bytes(b"a\nb\xc3")
    time.sleep(0.5)
    assert stream.getvalue() == "net:build | a\n"
    with path.open("ab") as log:
        log.write(b"\xa9c\n")
    logs.close()
    assert stream.getvalue() == "net:build | a\nnet:build | b\u00e9c\n"
