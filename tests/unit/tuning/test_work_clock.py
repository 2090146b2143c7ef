"""The clock of a tuning, which stands while other runs hold what the tuning waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.support.trials import DEVICE
from tests.support.tuning import TIMING, measure_context
from tvmflow.core.fork_server import ForkServer, Outcome
from tvmflow.targets import devices
from tvmflow.tuning.measurer import MeasureJob, Measurer
from tvmflow.tuning.trials import Trial
from tvmflow.tuning.work_clock import WorkClock


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

    measurer = Measurer(context, TIMING, 1.0, cast(ForkServer, SimpleNamespace(call=call)))
    threading.Thread(target=hold).start()
    assert held.wait(10)
    trials: list[Trial] = []
    measurer.measure([MeasureJob("id", "", None, None, 0)], lambda _, trial: trials.append(trial))
    assert (seconds[0], context.clock.now()) == (5.0, 0.0)
    assert [trial.run_secs for trial in trials] == [(1.0,)]
