"""The progress display: on a terminal, without one, and for programs."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest

from tvmflow.engine.progress import Printer


class Terminal(io.StringIO):
    """Text that goes to a terminal."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines that stand on it in the end."""
        lines, row = [""], 0
        for part in re.split(r"(\x1b\[1A|\x1b\[K|\r|\n)", self.getvalue()):
            if part == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part == "\x1b[1A":
                row -= 1
            elif part == "\x1b[K":
                lines[row] = ""
            elif part != "\r":
                lines[row] += part
        return [line.rstrip() for line in lines]


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


def test_without_a_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first, then at most one in ten seconds, and the last."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    printer = Printer(stream, as_json=False, many=False)
    for done in range(1, 21):
        printer.event(progress("conv", done, 10.0))
        clock[0] += 1
    lines = stream.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == ["1/20,", "11/20,", "20/20,"]
    assert lines[0] == "tune/host: trial 1/20, 1 min 01 s left  conv, best 10 µs"


def test_a_limit_in_minutes_is_shown_instead_of_a_number_of_trials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a limit in trials the bar shows the time."""
    monkeypatch.setenv("COLUMNS", "110")
    event = progress("conv", 26, 10.0, total=None, limit_s=240.0, seconds_left=60.0)
    plain, terminal = io.StringIO(), Terminal()
    Printer(plain, as_json=False, many=False).event(event)
    Printer(terminal, as_json=False, many=False).event(event)
    text = "trial 26 of as many as fit in 4 min 00 s, 1 min 00 s left"
    assert plain.getvalue() == f"tune/host: {text}  conv, best 10 µs\n"
    assert terminal.screen()[0] == f"tune/host: {'█' * 15}{'░' * 5} {text}"


def test_a_terminal_shows_a_table_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each workload has a row, those that take longest first; at the end the stage's line is left."""
    monkeypatch.setenv("COLUMNS", "110")
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stream = Terminal()
    printer = Printer(stream, as_json=False, many=False)
    for number, (name, best) in enumerate((("small", 2.0), ("large", 30.0), ("none", None)), 1):
        printer.event(progress(name, number, best, failed=number - 1))
        clock[0] += 1
    screen = stream.screen()
    assert "███" in screen[0]
    assert screen[0].endswith("trial 3/20, 1 min 01 s left, 2 failed")
    assert screen[2].split() == ["large", "2", "30", "µs", "1.3×", "4%", "3.2"]
    assert screen[3].split()[0] == "small"
    assert len(screen) == 4
    printer.event(finished())
    printer.end()
    assert [line.split()[0] for line in stream.screen() if line] == ["tune/host"]


def test_lines_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that wraps could not be taken away again."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "3")
    stream = Terminal()
    printer = Printer(stream, as_json=False, many=False)
    printer.event(progress("a_kernel_with_a_long_name" * 4, 1, 5.0))
    assert all(len(line) < 40 for line in stream.screen())
    assert len(stream.screen()) <= 2


def test_programs_get_one_object_a_line() -> None:
    """Every event, with its time, whether or not people would see it."""
    stream = Terminal()
    printer = Printer(stream, as_json=True, many=False)
    printer.event(progress("conv", 1, None))
    printer.event({"event": "something new", "stage_id": "net:import"})
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["progress", "something new"]
    assert all(event["time"] > 1.7e9 for event in events)


def test_a_download_shows_how_much_has_arrived() -> None:
    """In megabytes, with the total when the server says it."""
    stream = io.StringIO()
    printer = Printer(stream, as_json=False, many=False)
    event = {"event": "download", "stage_id": "net:import", "url": "https://example.org/m"}
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
    printer.remote("it does not answer")
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
