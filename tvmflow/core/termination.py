"""Termination: after a signal, the process ends within two seconds, even during a wait.

The store is consistent at any instant, so a process may end anywhere. Code that needs cleanup runs in a block of
`Unwinding` or `Cancelling`; elsewhere, as during imports and in exit handlers, the process ends immediately.
`_GRACE_S` seconds after the signal, a thread ends the process with its descendants in any case, because Python calls
signal handlers only between bytecodes of the main thread, which may wait in native code. Further signals are ignored.
Imports almost nothing, for fast up-to-date runs; the module `signal` would be too slow.
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
"""The exit code after a signal is this plus the signal's number."""

_NAMES = {1: "SIGHUP", 2: "SIGINT", 15: "SIGTERM"}
# Other signals that may end a run.
_SILENT = {9: "SIGKILL", 13: "SIGPIPE"}
_GRACE_S = 1.2
_STDERR = 2


class _Termination:
    """The first signal of this process (0: none), the stack of reactions, and a note for the message."""

    def __init__(self) -> None:
        self.number = 0
        self.note = ""
        self.reactions: list[Callable[[], None]] = []
        self.has_signal_thread = False
        self._announcement = _thread.allocate_lock()

    def handle(self, number: int, _: object = None) -> None:
        if not self.number:
            self.number = number
            # asyncio replaces the wakeup descriptor, so `watch` may not get the signal.
            _start_thread(self._end_soon, ())
            (self.reactions[-1] if self.reactions else self.end)()

    def watch(self, wakeup: int) -> None:
        """Wait for a signal in a thread, and end the process `_GRACE_S` seconds later."""
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
        """Print once on stderr that the process ends, unless the write would block."""
        import select

        if self._announcement.acquire(blocking=False):
            text = f"tvmflow: interrupted ({_NAMES[self.number]}){self.note}\n"
            try:
                # stderr may be a full pipe that nobody reads.
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
    """Handle termination signals in this process, except those ignored since its start."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    _signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in _NAMES:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _termination.handle)
    _termination.has_signal_thread = _start_thread(_termination.watch, (read_end,))


def _start_thread(function: "Callable[..., None]", arguments: "tuple[int, ...]") -> bool:
    """Start a thread; return False if the system refuses, so that only the main thread handles signals."""
    try:
        _thread.start_new_thread(function, arguments)
    except RuntimeError:
        return False
    return True


def has_signal_thread() -> bool:
    """Return whether a thread of this process waits for signals."""
    return _termination.has_signal_thread


def signal_number() -> int:
    """Return the number of the signal that ends this process, or 0."""
    return _termination.number


def signal_name(exit_code: int) -> str:
    """Return the name of the signal behind an exit code, or an empty string."""
    return (_NAMES | _SILENT).get(exit_code - SIGNAL_EXIT_BASE, "")


def end() -> "NoReturn":
    """End the process and its descendants after a signal."""
    _termination.end()


class _Reacting:
    """A block of code with its own reaction to a signal."""

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
        # In a destructor, KeyboardInterrupt has no effect and would be printed.
        sys.unraisablehook = lambda _: None
        raise KeyboardInterrupt


class Cancelling(_Reacting):
    """A block of code that ends soon after `cancel` is called.

    `describe` returns the rest of the message about the signal: what is kept, and what to do next.
    """

    def __init__(self, cancel: "Callable[[], None]", describe: "Callable[[], str]" = str) -> None:
        self._cancel = cancel
        self._describe = describe

    def _react(self) -> None:
        self._cancel()
        _termination.note = self._describe()
        _termination.announce()
