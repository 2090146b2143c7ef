"""Measures candidates: several are built at a time, one runs at a time, and nothing disturbs the one that runs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.errors import StageError
from tvmflow.executors.nursery import Nursery, Outcome
from tvmflow.targets import devices
from tvmflow.targets.gpu import CUDA
from tvmflow.tuning.ledger import Failure, Trial, now
from tvmflow.tuning.measure import DEVICE, Timing
from tvmflow.values import Json

# Each builder is a process with TVM in it.
_MOST_BUILDERS: Final = 8


class Site(NamedTuple):
    """Where trials are made: the target, the version of the schedules that untuned kernels have, and what a record says of the place."""

    target: Mapping[str, Json]
    schedules: int
    device: Mapping[str, str]
    locks: Path
    tvm: str
    host: Json
    log: Path | None


class Job(NamedTuple):
    """One schedule to measure (None: the kernel as it is): of which workload (saved module), and the best time so far."""

    id: str
    mod: str
    trace: Json
    best_s: float | None
    seed: int


Keep = Callable[[int, Trial], None]


class Bench:
    """Where candidates are measured on this machine's CPU or GPU.

    Builders work side by side, as many as there are cores. Where the target leaves cores
    free they go on while a candidate runs; elsewhere they stand still for that time.
    """

    def __init__(self, site: Site, timing: Timing, timeout_s: float, nursery: Nursery) -> None:
        self._site = site
        self._timing = timing
        self._timeout_s = timeout_s
        self._nursery = nursery
        cores = int(site.host.get("cores") or os.cpu_count() or 1)
        # a GPU's kernels leave the CPU alone
        taken = 0 if site.target["kind"] == CUDA else int(site.target.get("num-cores", cores))
        spare = cores - taken
        self._builders = min(spare if spare > 0 else cores, _MOST_BUILDERS)
        self._gate = _Gate(together=spare > 0)

    def measure(
        self, jobs: Sequence[Job], keep: Keep, go_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Measure all jobs, and hand each trial to `keep(index, trial)` as soon as it is there, one at a time.

        Jobs that have not begun when `go_on` turns false are left out. Raises StageError when
        measuring itself does not work; what was measured until then has been kept.
        """
        keeping = threading.Lock()

        def one(index: int) -> None:
            if go_on():
                trial = self._trial(jobs[index])
                with keeping:
                    keep(index, trial)

        with ThreadPoolExecutor(min(self._builders, len(jobs)) or 1) as pool:
            running = [pool.submit(one, index) for index in range(len(jobs))]
            try:
                for each in running:
                    each.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _trial(self, job: Job) -> Trial:
        payload = {
            "mod": job.mod,
            "trace": job.trace,
            "target": dict(self._site.target),
            "schedules": self._site.schedules,
            "timing": self._timing._asdict(),
            "best_s": job.best_s,
        }
        phases: list[str] = []
        load = tuple(round(value, 2) for value in os.getloadavg())
        with _Turn(self._gate, self._site) as turn:

            def follow(event: dict[str, Any]) -> None:
                phases.append(event["phase"])
                if event.get("ask"):
                    turn.run()

            outcome = self._nursery.call(
                "tvmflow.tuning.measure:measure_one",
                payload,
                timeout_s=self._timeout_s,
                log=self._site.log,
                emit=follow,
            )
        if outcome.kind == "cancelled":
            raise StageError(
                "tuning was cancelled", fix="run it again; it goes on where it stopped"
            )
        if outcome.kind in ("error", "crashed") and not phases:
            # nothing of this candidate has been touched yet: it is not its fault
            raise StageError(
                f"trials cannot be run: {outcome.message}",
                fix="run it again; it goes on where it stopped. `tvmflow doctor` checks the installation",
            )
        run_secs, ran, failure = _read(outcome, phases[-1] if phases else "start")
        if failure is not None and failure.phase == DEVICE:
            raise StageError(
                f"nothing can be run on this machine's {self._site.target['kind']} device: {failure.message}",
                fix="see what else uses it (`nvidia-smi` tells of a GPU), then run it again; it goes on where it stopped",
            )
        return Trial(
            id=job.id,
            trace=job.trace,
            run_secs=run_secs,
            failure=failure,
            when=now(),
            tvm=self._site.tvm,
            host=self._site.host,
            load=load,
            seed=job.seed,
            ran=ran,
        )


def _read(
    outcome: Outcome, phase: str
) -> tuple[tuple[float, ...], tuple[float, ...], Failure | None]:
    """Times and when they were taken, or a failure: from what a child said, or from how it died."""
    if outcome.kind != "ok":
        return (), (), Failure(phase, outcome.kind, outcome.message)
    if "failure" in outcome.value:
        return (), (), Failure(kind="error", **outcome.value["failure"])
    return tuple(outcome.value["run_secs"]), tuple(outcome.value["ran"]), None


class _Gate:
    """Lets builders in together, and runners one by one; unless both may go `together`, never at one time.

    Who waits to run goes before those who would begin to build, so that no finished build waits for long.
    """

    def __init__(self, *, together: bool) -> None:
        self.together = together
        self._changed = threading.Condition()
        self._building = 0
        self._waiting = 0
        self._running = False

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self.together or not (self._waiting or self._running))
            self._building += 1
        try:
            yield
        finally:
            with self._changed:
                self._building -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(
                lambda: not self._running and (self.together or not self._building)
            )
            self._waiting -= 1
            self._running = True
        try:
            yield
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()


class _Turn:
    """One candidate's way through the gate: first as a builder, from `run` on as the one that runs.

    The device's lock makes the same hold across all runs on this machine.
    """

    def __init__(self, gate: _Gate, site: Site) -> None:
        self._gate = gate
        self._site = site
        self._held = contextlib.ExitStack()

    def __enter__(self) -> _Turn:
        self._held.enter_context(self._gate.building())
        if self._site.target["kind"] == CUDA:
            # the GPU is left alone, and kernels that somebody measures on the CPU are not
            self._held.enter_context(devices.shared(self._site.locks, devices.CPU))
        elif not self._gate.together:
            self._held.enter_context(devices.shared(self._site.locks, self._site.device))
        return self

    def run(self) -> None:
        self._held.close()
        self._held.enter_context(self._gate.running())
        self._held.enter_context(devices.exclusive(self._site.locks, self._site.device))

    def __exit__(self, *_: object) -> None:
        self._held.close()
