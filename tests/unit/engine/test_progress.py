"""The progress display: on a terminal, without one, and for programs."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest

from tvmflow.engine.progress import Printer


class Terminal(io.StringIO):
    """Text that goes to a terminal, whose environment says nothing of colours."""

    def isatty(self) -> bool:
        return True

    def last_frame(self) -> list[str]:
        """Return the lines of the last frame, without escapes."""
        frame = self.getvalue().rpartition("\x1b[?2026h")[2]
        return [
            re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", line).rstrip() for line in frame.split("\n")
        ]


@pytest.fixture(autouse=True)
def terminal_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


def started(*stages: str) -> dict[str, Any]:
    """The event at the begin of a run of these stages."""
    entries = [{"stage_id": f"net:{stage}", "kind": "run", "seconds": None} for stage in stages]
    return {"event": "run_started", "stages": entries}


def begun(stage: str = "tune/host") -> dict[str, Any]:
    return {"event": "stage_started", "stage_id": f"net:{stage}", "reason": "never ran"}


def finished(outcome: str = "ran", stage: str = "tune/host", **more: Any) -> dict[str, Any]:
    base = {"event": "stage_finished", "stage_id": f"net:{stage}", "seconds": 1.5}
    return {**base, "reason": "never ran", "outcome": outcome, **more}


def progress(workload: str, done: int, best_us: float | None, **more: Any) -> dict[str, Any]:
    base = {"event": "progress", "stage_id": "net:tune/host", "unit": "trial", "total": 20}
    return {
        **base,
        "workload": workload,
        "done": done,
        "calls": 1,
        "trials": done,
        "best_us": best_us,
        "untuned_us": 40.0,
        "gflops": 3.25 if best_us else None,
        "spread": 0.04 if best_us else None,
        "failed": 0,
        "seconds_left": 61.0,
        "untuned_latency_us": 80.0,
        "best_latency_us": 20.0,
        **more,
    }


def test_a_stage_is_one_line_without_escapes_when_there_is_no_terminal() -> None:
    """Its name, its outcome, its duration, and why it ran."""
    stream = io.StringIO()
    printer = Printer(stream, as_json=False, many=False)
    printer.event(finished("hit", "import"))
    printer.event(finished("ran"))
    printer.event(finished("blocked", "build/host"))
    printer.end()
    lines = stream.getvalue().splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["import", "up"],
        ["tune/host", "done"],
        ["build/host", "BLOCKED"],
    ]
    assert lines[1].endswith("1.5 s   never ran")
    assert "\x1b" not in stream.getvalue()


def test_of_many_stages_those_that_are_up_to_date_are_not_shown() -> None:
    """The summary counts them; a stage that ran still has its line."""
    stream = io.StringIO()
    printer = Printer(stream, as_json=False, many=False, stages=201)
    printer.event(finished("hit"))
    printer.event(finished("ran"))
    assert [line.split()[:2] for line in stream.getvalue().splitlines()] == [["tune/host", "done"]]


def test_stages_of_several_recipes_have_the_names_of_their_recipes() -> None:
    """A single recipe needs no name."""
    stream = io.StringIO()
    Printer(stream, as_json=False, many=True).event(finished())
    assert stream.getvalue().startswith("net:tune/host ")


def test_outcomes_stand_below_each_other() -> None:
    """Also behind names that are longer than most."""
    stream = io.StringIO()
    printer = Printer(stream, as_json=False, many=True)
    names = ("import", "extract_tasks/a-board-with-a-name")
    printer.event(started(*names))
    for name in names:
        printer.event(finished(stage=name))
    assert len({line.index("done") for line in stream.getvalue().splitlines()}) == 1


def test_without_a_terminal_a_long_search_says_so_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing in the first two minutes, then a line in two minutes; a short stage is one line."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    printer = Printer(stream, as_json=False, many=False)
    printer.event(started("tune/host"))
    printer.event(begun())
    for done in range(1, 21):
        clock[0] += 16
        printer.event(progress("conv", done, 10.0, failed=1))
    printer.event(finished())
    printer.end()
    assert stream.getvalue().splitlines() == [
        "tune/host: trial 8 of 20, about 1 min left, 1 failed; "
        "estimated latency 80 µs → 20 µs, 4.00× faster",
        "tune/host: trial 16 of 20, about 1 min left, 1 failed; "
        "estimated latency 80 µs → 20 µs, 4.00× faster",
        "tune/host                    done              1.5 s   never ran",
    ]


def test_a_stage_says_once_for_whom_it_waits() -> None:
    """A search takes the device for each batch, and may wait each time."""
    stream = io.StringIO()
    printer = Printer(stream, as_json=False, many=False)
    printer.event(started("tune/host"))
    printer.event(begun())
    for _ in range(5):
        printer.event({"event": "waiting", "stage_id": "net:tune/host", "message": "waiting for x"})
    assert stream.getvalue() == "tune/host: waiting for x\n"


def test_a_step_that_takes_long_is_a_line() -> None:
    """Others are lines when the stage has been silent for long; a terminal shows each."""
    stream = io.StringIO()
    printer = Printer(stream, as_json=False, many=False)
    printer.event(started("export/host"))
    for message, is_long in (("linking", False), ("linking long", True), ("writing web", False)):
        stage = "net:export/host"
        step = {"event": "step", "stage_id": stage, "message": message, "is_long": is_long}
        printer.event(step)
        assert printer._progress.stages[stage].note == message
    assert stream.getvalue() == "export/host: linking long\n"


def test_a_terminal_shows_the_run_below_the_finished_stages() -> None:
    """The display goes away at the end, and the lines of the stages are left."""
    stream = Terminal()
    printer = Printer(stream, as_json=False, many=False)
    printer.event(started("import", "tune/host"))
    printer.event(begun("import"))
    printer.event(finished("ran", "import"))
    printer.event(begun())
    printer.event(progress("conv", 5, 10.0))
    frame = stream.last_frame()
    assert frame[0].startswith("net ") and "1 of 2 stages" in frame[0]
    assert frame[4] == "tune/host  ━━━━━───────────────  trial 5 of 20, about 1 min left"
    printer.event(finished())
    printer.end()
    plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", stream.getvalue())
    assert "import                       done              1.5 s   never ran\n" in plain
    assert stream.getvalue().endswith("never ran\n\x1b[J\x1b[?2026l")


def test_nothing_is_drawn_after_the_end() -> None:
    """A run that is stopped goes on for a moment; its last lines are plain."""
    stream = Terminal()
    printer = Printer(stream, as_json=False, many=False)
    printer.event(started("import", "tune/host"))
    printer.event(begun())
    printer.end()
    stream.seek(0)
    stream.truncate()
    printer.event(progress("conv", 5, 10.0))
    assert stream.getvalue() == ""
    printer.event(finished("cancelled"))
    assert (
        stream.last_frame()[0] == "tune/host                    stopped           1.5 s   never ran"
    )


@pytest.mark.parametrize("setting", ["dumb", "logged", "quiet"])
def test_some_terminals_get_lines_only(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TERM=dumb`; with `-v`, whose log is on the same terminal; with `-q`."""
    if setting == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    printer = Printer(
        stream, as_json=False, many=False, is_logged=setting == "logged", quiet=setting == "quiet"
    )
    printer.event(started("tune/host"))
    printer.event(begun())
    printer.event(progress("conv", 5, 10.0))
    assert stream.getvalue() == ""


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is red; `NO_COLOR` ends that, `FORCE_COLOR` begins it in a pipe."""

    def printed(stream: io.StringIO) -> str:
        Printer(stream, as_json=False, many=False).event(finished("failed"))
        return stream.getvalue()

    assert "\x1b[1;31mFAILED     \x1b[0m" in printed(Terminal())
    assert "\x1b" not in printed(io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1;31mFAILED" in printed(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in printed(Terminal())


def test_programs_get_one_object_a_line() -> None:
    """Every event, with its time, whether or not people would see it."""
    stream = Terminal()
    printer = Printer(stream, as_json=True, many=False)
    printer.event(progress("conv", 1, None))
    printer.event({"event": "something new", "stage_id": "net:import"})
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["progress", "something new"]
    assert all(event["time"] > 1.7e9 for event in events)


def test_a_long_download_shows_how_much_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """In megabytes, with the total when the server says it."""
    stream = io.StringIO()
    printer = Printer(stream, as_json=False, many=False)
    event = {"event": "download", "stage_id": "net:import", "url": "https://example.org/m"}
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    printer.event({**event, "done": 1_000_000, "total": 5_000_000})
    clock[0] += 121
    printer.event({**event, "done": 2_500_000, "total": 5_000_000})
    assert stream.getvalue() == "import: downloading 2.5 of 5.0 MB  https://example.org/m\n"


def test_a_quiet_run_shows_only_problems() -> None:
    """Stages that succeed, start or progress are not shown; JSON has all events."""
    stream = io.StringIO()
    printer = Printer(stream, as_json=False, many=False, quiet=True)
    for outcome in ("hit", "ran", "fetched"):
        printer.event(finished(outcome))
    printer.event({"event": "stage_started", "stage_id": "net:build/host", "reason": "never ran"})
    assert stream.getvalue() == ""
    printer.event(finished("failed"))
    printer.event({"event": "remote", "message": "it does not answer"})
    failed, remote = stream.getvalue().splitlines()
    assert failed.startswith("tune/host") and "FAILED" in failed
    assert remote.endswith("it does not answer")
    as_json = io.StringIO()
    Printer(as_json, as_json=True, many=False, quiet=True).event(finished("ran"))
    assert json.loads(as_json.getvalue())["outcome"] == "ran"


def test_text_from_elsewhere_cannot_write_to_the_terminal() -> None:
    """Reasons and URLs are escaped; programs get them as they are."""
    for is_terminal in (False, True):
        stream = Terminal() if is_terminal else io.StringIO()
        printer = Printer(stream, as_json=False, many=False)
        printer.event(finished("failed", reason="\x1b]0;title\x07\rx"))
        printer.end()
        assert "\\x1b]0;title\\x07\\rx" in stream.getvalue()
        assert "\x1b]0" not in stream.getvalue()
    stream = io.StringIO()
    Printer(stream, as_json=True, many=False).event(finished("failed", reason="\x1b]0;\r"))
    assert json.loads(stream.getvalue())["reason"] == "\x1b]0;\r"
