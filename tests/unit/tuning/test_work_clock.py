"""The clock of a tuning, which stands while other runs hold what the tuning waits for."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.support.trials import DEVICE
from tests.support.tuning import measure_context
from tvmflow.core.fork_server import ForkServer, Outcome
from tvmflow.targets import devices
from tvmflow.tuning.measurer import MeasureJob, Measurer
from tvmflow.tuning.trials import Trial
from tvmflow.tuning.tuning_job import WorkClock


def test_the_clock_stands_while_any_thread_waits() -> None:
    """Two waits that overlap count once."""
    seconds = [0.0]
    clock = WorkClock(lambda: seconds[0])
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    seconds[0] = 1.0
    first.enter_context(clock.waiting())
    seconds[0] = 2.0
    second.enter_context(clock.waiting())
    seconds[0] = 4.0
    first.close()
    assert clock.now() == 1.0
    seconds[0] = 8.0
    second.close()
    seconds[0] = 16.0
    assert clock.now() == 9.0


def test_the_clock_stands_while_the_process_is_stopped() -> None:
    """An hour between two looks counts as one second, if no CPU was used; without stops all seconds count."""
    seconds, busy = [0.0], [0.0]
    clock = WorkClock(lambda: seconds[0], lambda: busy[0])
    with clock.ticking():
        for _ in range(10):
            seconds[0] += 4.0
            clock.now()
        assert clock.now() == 40.0
        seconds[0] += 3600.0
        assert clock.now() == 41.0
        # native code that gives no thread a chance to look
        seconds[0] += 60.0
        busy[0] += 50.0
        assert clock.now() == 101.0
        # what was waited meanwhile does not count twice
        with clock.waiting():
            seconds[0] += 3600.0
        assert clock.now() == 101.0
        seconds[0] += 2.0
    assert clock.now() == 103.0


STOPPED = """
import signal, sys, time
from tvmflow.tuning.tuning_job import WorkClock

clock = WorkClock(tick_s=0.05, max_silent_s=0.5)
with clock.ticking():
    began, real_s = clock.now(), time.monotonic()
    print("ready", flush=True)
    sys.stdin.readline()
    print(clock.now() - began, time.monotonic() - real_s)
"""


def test_a_search_that_was_suspended_keeps_its_minutes() -> None:
    """After SIGSTOP and SIGCONT; the thread of the clock alone looks at it."""
    command = [sys.executable, "-c", STOPPED]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        counted_s, real_s = map(float, process.communicate("\n")[0].split())
    assert real_s - counted_s > 1.2


def test_a_tuning_that_waits_for_the_device_of_another_run_loses_no_time(tmp_path: Path) -> None:
    """A thread holds the device, as another run does in its process, for 5 seconds from when it is waited for."""
    seconds, held, waited_for = [0.0], threading.Event(), threading.Event()

    class Clock(WorkClock):
        @contextlib.contextmanager
        def waiting(self) -> Iterator[None]:
            with super().waiting():
                waited_for.set()
                yield

    context = measure_context(tmp_path)._replace(clock=Clock(lambda: seconds[0]))

    def hold() -> None:
        with devices.exclusive(context.locks, DEVICE):
            held.set()
            waited_for.wait(10)
            seconds[0] += 5.0

    def call(*_: Any, emit: Any, **__: Any) -> Outcome:
        emit({"phase": "run", "ask": True})
        return Outcome("ok", 0.0, value={"run_secs": [1.0], "ran": []})

    measurer = Measurer(context, cast(ForkServer, SimpleNamespace(call=call)))
    threading.Thread(target=hold).start()
    assert held.wait(10)
    trials: list[Trial] = []
    measurer.measure([MeasureJob("id", "", None, None, 0)], lambda _, trial: trials.append(trial))
    assert (seconds[0], context.clock.now()) == (5.0, 0.0)
    assert [trial.run_secs for trial in trials] == [(1.0,)]
