"""Bounded calls: a limit for what has none."""

from __future__ import annotations

import threading
import time

import pytest

from tvmflow.core.errors import Interrupted
from tvmflow.store.http_client import call_within


def test_a_call_gives_its_value_and_its_error() -> None:
    """As if it had been called directly."""

    def fail() -> None:
        raise ValueError("no such host")

    assert call_within(10.0, lambda: 3) == 3
    with pytest.raises(ValueError, match="no such host"):
        call_within(10.0, fail)


def test_a_call_without_an_end_is_abandoned() -> None:
    """Its thread may go on, and nobody waits for it."""
    ended = threading.Event()
    with pytest.raises(TimeoutError, match=r"timed out after 0\.05 s"):
        call_within(0.05, lambda: ended.wait(60))
    ended.set()


def test_a_call_can_be_cancelled() -> None:
    """The question is put again and again."""
    ended, started = threading.Event(), time.monotonic()
    with pytest.raises(Interrupted):
        call_within(60.0, lambda: ended.wait(60), lambda: time.monotonic() - started > 0.2)
    ended.set()
