"""Process trees and memory where there is no /proc: psutil must agree with what Linux says."""

from __future__ import annotations

import os

import pytest

from tvmflow.core import memory, processes


def hide_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, processes):
        monkeypatch.setattr(module, "lists_processes", lambda: False)


@pytest.mark.parametrize("has_proc", [True, False])
def test_the_descendants_of_init_hold_this_process(
    has_proc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways name the same processes: this one, and those that started it."""
    if not has_proc:
        hide_proc(monkeypatch)
    ancestor = os.getppid()
    assert os.getpid() in processes.list_descendants(ancestor)


def test_a_process_that_has_ended_has_no_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no memory."""
    hide_proc(monkeypatch)
    gone = 1 << 22
    assert processes.list_descendants(gone) == []
    assert list(memory._resident_bytes([gone, os.getpid()])) == [os.getpid()]


def test_memory_is_that_which_linux_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what this process takes between two readings."""
    (linux,) = memory._resident_bytes([os.getpid()]).values()
    hide_proc(monkeypatch)
    (portable,) = memory._resident_bytes([os.getpid()]).values()
    assert abs(portable - linux) < 64 << 20


def test_a_user_without_a_home_folder_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM asks for it while it is imported; it is none that another user may fill."""
    assert processes.home_variables() == {}
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert processes.home_variables() == {"HOME": "/nonexistent"}
