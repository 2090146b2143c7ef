"""What is said of steps that take long the first time."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable

import pytest

from tvmflow.core import logs
from tvmflow.core.logs import explain_wait


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when something was written to a terminal; a wait is long at once."""
    event = threading.Event()
    write: Callable[[str], None] = logs.show_status

    def write_and_tell(text: str) -> None:
        write(text)
        event.set()

    monkeypatch.setattr(logs, "show_status", write_and_tell)
    monkeypatch.setattr(logs, "_PATIENCE_S", 0.0)
    return event


def test_a_long_step_is_explained_until_it_ends(
    written: threading.Event,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the line is gone then, also after an error."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(ValueError), explain_wait("asking LLVM"):
        assert written.wait(10)
        raise ValueError
    assert capsys.readouterr().err == "\r\x1b[Kasking LLVM …\r\x1b[K"


def test_nothing_is_said_of_short_steps_in_files_and_with_quiet(
    written: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    with explain_wait("a file"):
        assert not written.wait(0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(logs, "_PATIENCE_S", 60.0)
    with explain_wait("a short step"):
        assert not written.wait(0.05)
    monkeypatch.setattr(logs, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(logs._log, "isEnabledFor", lambda level: level >= logging.ERROR)
    with explain_wait("quiet"):
        assert not written.wait(0.05)
