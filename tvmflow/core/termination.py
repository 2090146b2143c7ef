"""Termination: after a signal, the process ends within two seconds, whatever it waits for.

The store is complete at any instant, so a process may end anywhere. Code that must do something before is in a block
of `Unwinding` or `Cancelling`; elsewhere, as during imports and in exit handlers, the process ends at once.
`_GRACE_S` after the signal it ends in any case, with everything that it has started. A thread does that, because
Python calls signal handlers only between two bytecodes of the main thread, which may wait in native code. Further
signals change nothing. Imports next to nothing, for up-to-date runs: the module `signal` costs more.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import os
import sys
import time

from tvmflow.core.processes import kill_descendants

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

SIGNAL_EXIT_BASE = 128
"""The exit code of a process that ends because of a signal is this and the number of the signal."""

_NAMES = {1: "SIGHUP", 2: "SIGINT", 15: "SIGTERM"}
# Other signals that may end a run.
_SILENT = {9: "SIGKILL", 13: "SIGPIPE"}
_GRACE_S = 1.2
_STDERR = 2


class _Termination:
    """The first signal of this process (0: none), its reactions, innermost last, and a note to announce."""

    def __init__(self) -> None:
        self.number = 0
        self.note = ""
        self.reactions: list[Callable[[], None]] = []
        self.has_signal_thread = False
        self._announcement = _thread.allocate_lock()

    def handle(self, number: int, _: object = None) -> None:
        if not self.number:
            self.number = number
            # `watch` hears of no signal while asyncio runs
            _start_thread(self._end_soon, ())
            (self.reactions[-1] if self.reactions else self.end)()

    def watch(self, wakeup: int) -> None:
        """End the process a while after a signal, in a thread that waits for nothing else."""
        number = 0
        while not number:
            received = os.read(wakeup, 64)
            number = next((value for value in received if value in _NAMES), 0)
        self._end_soon(number)

    def _end_soon(self, number: int = 0) -> None:
        time.sleep(_GRACE_S)
        self.number = self.number or number
        self.end()

    def announce(self) -> None:
        """Say once on stderr that the process ends, unless nobody can read it."""
        import select

        if self._announcement.acquire(blocking=False):
            text = f"tvmflow: interrupted ({_NAMES[self.number]}){self.note}\n"
            try:
                # nobody may read the pipe, and it may be full
                if select.select([], [_STDERR], [], 0)[1]:
                    os.write(_STDERR, text.encode())
            except (OSError, ValueError):
                pass

    def end(self) -> "NoReturn":
        kill_descendants(os.getpid())
        self.announce()
        os._exit(SIGNAL_EXIT_BASE + self.number)


_termination = _Termination()


def watch_signals() -> None:
    """Handle the signals in this process; signals that it was started to ignore stay ignored."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    _signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in _NAMES:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _termination.handle)
    _termination.has_signal_thread = _start_thread(_termination.watch, (read_end,))


def _start_thread(function: "Callable[..., None]", arguments: "tuple[int, ...]") -> bool:
    """Start a thread; return whether that is allowed: else the main thread alone handles signals."""
    try:
        _thread.start_new_thread(function, arguments)
    except RuntimeError:
        return False
    return True


def has_signal_thread() -> bool:
    """Return whether a thread of this process waits for signals."""
    return _termination.has_signal_thread


def signal_number() -> int:
    """Return the number of the signal after which this process ends; 0 while there is none."""
    return _termination.number


def signal_name(exit_code: int) -> str:
    """Return the name of the signal that a process ended with; empty for another exit code."""
    return (_NAMES | _SILENT).get(exit_code - SIGNAL_EXIT_BASE, "")


def end() -> "NoReturn":
    """End the process after a signal, with everything that it has started."""
    _termination.end()


class _Reacting:
    """A block of code in which a signal has a reaction of its own."""

    def __enter__(self) -> None:
        _termination.reactions.append(self._react)

    def __exit__(self, *_: object) -> None:
        _termination.reactions.pop()

    def _react(self) -> None:
        raise NotImplementedError


class Unwinding(_Reacting):
    """A block of code in which a signal raises KeyboardInterrupt."""

    def _react(self) -> None:
        _termination.announce()
        # in a destructor it would be shown, and have no effect
        sys.unraisablehook = lambda _: None
        raise KeyboardInterrupt


class Cancelling(_Reacting):
    """A block of code that ends by itself soon after `cancel` was called.

    `describe` returns how the announcement of a signal goes on: what is kept, and what to do next.
    """

    def __init__(self, cancel: "Callable[[], None]", describe: "Callable[[], str]" = str) -> None:
        self._cancel = cancel
        self._describe = describe

    def _react(self) -> None:
        self._cancel()
        _termination.note = self._describe()
        _termination.announce()
