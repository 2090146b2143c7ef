"""Measures candidates on devices elsewhere, through TVM's RPC tracker: built and linked here, run there.

A device that dies, hangs or refuses costs a session, never a trial: the trial goes to the
next device that is free. A candidate is to blame when it fails in two sessions.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import rpc

from tvmflow.errors import StageError, TvmflowError
from tvmflow.executors.nursery import Nursery, Outcome
from tvmflow.targets.gpu import CUDA, fits
from tvmflow.targets.linking import write_library
from tvmflow.targets.platforms import host_triple
from tvmflow.targets.tracker import VARIABLE, Devices, Tracker, Turn, split_address
from tvmflow.tuning import measure
from tvmflow.tuning.bench import Bench, Job, Keep, Site
from tvmflow.tuning.ledger import Failure, Trial, now
from tvmflow.tuning.measure import Send, Timing
from tvmflow.values import Json

# A session that its own server does not end in time is ended here so much later.
_GRACE_S: Final = 2.0
# How many sessions may fail before the device is to blame, and how many before the candidate is.
_MOST_FAULTS: Final = 3
_MOST_FAILURES: Final = 2
# Without a device for as long as so many sessions may take, waiting on makes no sense.
_PATIENCE: Final = 10
_LOOK_S: Final = 2.0
_MOST_JOBS: Final = 64
# Larger arguments are made up on the device: the network is slow.
_LARGE_BYTES: Final = 1 << 16
_FILL: Final = "tvm.contrib.random.random_fill_for_measure"

GoOn = Callable[[], bool]


class Place(NamedTuple):
    """Where devices are asked for: those with `key`, at a tracker (`HOST:PORT`); no session is longer than `timeout_s`."""

    tracker: str
    key: str
    priority: int
    timeout_s: float

    @classmethod
    def of(cls, remote: Mapping[str, Json]) -> Place:
        """What a recipe says under `remote`. Raises StageError when nothing names the tracker."""
        address = remote.get("tracker") or os.environ.get(VARIABLE, "")
        try:
            split_address(address)
        except ValueError as shape:
            raise StageError(
                f"there is no RPC tracker to ask for the device '{remote['key']}': "
                f"{shape if address else f'neither the recipe nor ${VARIABLE} names one'}",
                fix=f"set {VARIABLE}=HOST:PORT, or remote.tracker of the target in the recipe",
            ) from shape
        return cls(address, remote["key"], remote["priority"], remote["timeout_s"])


# ---------------------------------------------------------------- turns on devices


class Session(NamedTuple):
    """How a call on a device ended: what it gave or why not, in which phase, and at which server."""

    value: Json
    failure: Failure | None
    server: str


class Farm:
    """The devices of one place. Safe to use from several threads."""

    def __init__(self, place: Place, nursery: Nursery, log: Path | None) -> None:
        self.place = place
        self._tracker = Tracker(place.tracker)
        self._nursery = nursery
        self._log = log
        self._lock = threading.Lock()
        self._busy = 0
        self._served = time.monotonic()

    def size(self) -> int:
        """How many devices there are, busy or free. Raises StageError when there is none."""
        found = self._tracker.devices()
        if self.place.key not in found:
            raise self._no_device(found)
        return found[self.place.key].total

    def call(
        self,
        function: str,
        payload: Mapping[str, Json],
        go_on: GoOn = lambda: True,
        sessions: int = 1,
    ) -> Session | None:
        """Run a function with a device (see `run_one`), in time for so many `sessions`; elsewhere again if the device fails.

        None when `go_on` turned false before it began. Raises StageError when it is not the
        function that fails.
        """
        limit_s = self.place.timeout_s * sessions
        faults = failures = 0
        while True:
            turn = self._next(go_on)
            if turn is None:
                return None
            try:
                request = {**payload, "turn": list(turn), "limit_s": limit_s}
                session = self._child(function, request, limit_s + _GRACE_S, turn.address)
            finally:
                self._count(-1)
            if session.failure is None:
                return session
            if session.failure.phase == "run":
                failures += 1
            else:
                faults += 1
            if failures == _MOST_FAILURES:
                return session
            if faults == _MOST_FAULTS:
                raise StageError(
                    f"devices with the key '{self.place.key}' cannot be used; the last, "
                    f"{session.server}: {session.failure.message}",
                    fix="see that the target in the recipe is what they are, and that their servers "
                    "run the same version of TVM; run it again, it goes on where it stopped",
                )

    def build(self, function: str, payload: Mapping[str, Json], timeout_s: float) -> Session:
        """Run a function here, without a device."""
        return self._child(function, payload, timeout_s, "")

    def _next(self, go_on: GoOn) -> Turn | None:
        """A turn, however long others need the devices, as long as there are any."""
        started = looked = time.monotonic()
        seen = started

        def wait() -> bool:
            nonlocal looked, seen
            instant = time.monotonic()
            if instant - looked > _LOOK_S:
                looked = instant
                found = self._tracker.devices()
                if self.place.key in found:
                    seen = instant
                elif instant - seen > self.place.timeout_s:
                    # a server that is started anew was given the time for it
                    raise self._no_device(found)
                self._check_patience(started, found)
            return go_on()

        turn = self._tracker.request(self.place.key, self.place.priority, wait)
        if turn is not None:
            self._count(+1)
        return turn

    def _check_patience(self, started: float, found: Mapping[str, Devices]) -> None:
        patience = _PATIENCE * self.place.timeout_s
        idle = time.monotonic() - max(started, self._served)
        if self._busy or idle < patience:
            return
        there = found.get(self.place.key)
        state = (
            f"{there.total} there, {there.free} free, {there.pending} requests wait"
            if there
            else "none there"
        )
        raise StageError(
            f"no device with the key '{self.place.key}' became free in {idle:.0f} s ({state})",
            fix="see whether others use them or their servers hang (`tvmflow device ls`); "
            "run it again, it goes on where it stopped",
        )

    def _count(self, change: int) -> None:
        with self._lock:
            self._busy += change
            self._served = time.monotonic()

    def _no_device(self, found: Mapping[str, Devices]) -> StageError:
        place = self.place
        there = ", ".join(f"{each.key} ({each.total})" for each in found.values())
        start = f"`tvmflow device serve --tracker {place.tracker} --key {place.key}`"
        return StageError(
            f"the RPC tracker at {place.tracker} has no device with the key '{place.key}'; "
            f"it has {there or 'none at all'}",
            fix=f"on the device, run {start}, or correct remote.key of the target in the recipe",
        )

    def _child(
        self, function: str, payload: Mapping[str, Json], timeout_s: float, server: str
    ) -> Session:
        phases: list[str] = []
        outcome = self._nursery.call(
            function,
            payload,
            timeout_s=timeout_s,
            log=self._log,
            emit=lambda event: phases.append(event["phase"]),
        )
        _stop_for_other_reasons(outcome, phases)
        return Session(outcome.value, _failure_of(outcome, phases), server)


def _stop_for_other_reasons(outcome: Outcome, phases: Sequence[str]) -> None:
    """Raise StageError for an end that neither a candidate nor a device has caused."""
    if outcome.kind == "cancelled":
        raise StageError("tuning was cancelled", fix="run it again; it goes on where it stopped")
    if outcome.kind == "error" and outcome.error == StageError.__name__:
        raise StageError(outcome.message, fix=outcome.fix)
    if outcome.kind != "ok" and not phases:
        raise StageError(
            f"trials cannot be run: {outcome.message}",
            fix="run it again; it goes on where it stopped. `tvmflow doctor` checks the installation",
        )


def _failure_of(outcome: Outcome, phases: Sequence[str]) -> Failure | None:
    """Why a call in a child gave nothing; None when it gave what was asked for."""
    if outcome.kind != "ok":
        return Failure(phases[-1], outcome.kind, outcome.message)
    return Failure(**outcome.value["failure"]) if "failure" in outcome.value else None


# ---------------------------------------------------------------- trials


class _OutOfTime(Exception):
    """A trial that waited for a device when the time was up."""


class RemoteBench(Bench):
    """A `Bench` whose candidates run on the devices of a farm, as many at once as there are devices.

    Builders work beside them, as many as this machine has cores. `folder` holds libraries on
    their way.
    """

    def __init__(
        self,
        site: Site,
        timing: Timing,
        timeout_s: float,
        nursery: Nursery,
        place: Place,
        folder: Path,
    ) -> None:
        super().__init__(site, timing, timeout_s, nursery)
        self._farm = Farm(place, nursery, site.log)
        self._folder = folder
        self._cores = os.cpu_count() or 1
        self._building = threading.Semaphore(self._cores)
        self._go_on: GoOn = lambda: True

    def measure(self, jobs: Sequence[Job], keep: Keep, go_on: GoOn = lambda: True) -> None:
        """As a Bench does; jobs that wait for a device when `go_on` turns false are left out too."""
        if not jobs:
            return
        self._builders = min(self._farm.size() + self._cores, _MOST_JOBS)
        broken = threading.Event()
        self._go_on = lambda: not broken.is_set() and go_on()
        with contextlib.suppress(_OutOfTime):
            try:
                super().measure(jobs, keep, go_on)
            except BaseException:
                broken.set()
                raise

    def _trial(self, job: Job) -> Trial:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            request = {
                "mod": job.mod,
                "trace": job.trace,
                "target": dict(self._site.target),
                "schedules": self._site.schedules,
                "library": str(Path(folder, "kernel.so")),
                "timing": self._timing._asdict(),
                "best_s": job.best_s,
            }
            with self._building:
                build = "tvmflow.tuning.remote:build_one"
                session: Session | None = self._farm.build(build, request, self._timeout_s)
            if session is not None and session.failure is None:
                run = "tvmflow.tuning.remote:run_one"
                session = self._farm.call(run, request, self._go_on)
        if session is None:
            raise _OutOfTime
        return self._record(job, session)

    def _record(self, job: Job, session: Session) -> Trial:
        target, timed = self._site.target, {} if session.failure else session.value
        return Trial(
            id=job.id,
            trace=job.trace,
            run_secs=tuple(timed.get("run_secs", ())),
            failure=session.failure,
            when=now(),
            tvm=self._site.tvm,
            host={
                "model": self._farm.place.key,
                "arch": host_triple(target).partition("-")[0],
                **({"cores": target["num-cores"]} if "num-cores" in target else {}),
                "server": session.server,
            },
            # that of the device is not known
            load=(),
            seed=job.seed,
            ran=tuple(timed.get("ran", ())),
        )


def measure_finalists(
    farm: Farm, payload: Mapping[str, Json], folder: Path, timeout_s: float
) -> Json:
    """What `measure.measure_finalists` gives, of one session on one device; or `{"error": sentence}`.

    Takes the same payload. Building takes at most `timeout_s`; `folder` holds libraries on
    their way. Raises StageError when there is no device that works.
    """
    with tempfile.TemporaryDirectory(dir=folder) as libraries:
        request = {**payload, "folder": libraries}
        built = farm.build("tvmflow.tuning.remote:build_finalists", request, timeout_s)
        if built.failure is not None:
            return {"error": built.failure.message}
        request["libraries"] = built.value["libraries"]
        sessions = 1 + len(request["libraries"])
        ran = farm.call("tvmflow.tuning.remote:run_finalists", request, sessions=sessions)
    if ran is None or ran.failure is not None:
        return {"error": ran.failure.message if ran and ran.failure else "it was not begun"}
    return {"road": built.value["road"], **ran.value}


# ---------------------------------------------------------------- in children


def build_one(payload: Json, send: Send) -> Json:
    """Apply a trace (`mod`, `trace`, `target`) and leave the kernel as a shared library at `library`.

    Gives `{}`, or `{"failure": …}` as `measure.measure_one` does.
    """
    clock = measure.Phases(send)
    try:
        with clock.phase("apply"):
            measure.load_compiler(payload["target"], runs=False)
            workload = tvm.ir.load_json(payload["mod"])
            mod, _ = measure.prepared(workload, payload["trace"], payload)
        with clock.phase("build"):
            kernel = measure.build(mod, payload["target"])
            write_library(kernel, Path(payload["library"]), payload["target"])
    except TvmflowError:
        raise
    # whatever TVM raises here is this candidate's failure and no one else's
    except Exception as error:
        return {"failure": failure(clock.now, error)}
    return {}


def build_finalists(payload: Json, send: Send) -> Json:
    """Leave a workload (`mod`) untuned and with each of `traces` as libraries in `folder`.

    Gives `{"libraries": [file name…], "road": …}`, the untuned one first, None for one that does not apply any more.
    """
    clock = measure.Phases(send)
    try:
        with clock.phase("build"):
            measure.load_compiler(payload["target"], runs=False)
            mod = tvm.ir.load_json(payload["mod"])
            folder, target = Path(payload["folder"]), payload["target"]
            untuned, road = measure.prepared(mod, None, payload)
            write_library(measure.build(untuned, target), folder / "untuned.so", target)
            names = [
                _built_or_none(mod, trace, folder / f"{place}.so", target)
                for place, trace in enumerate(payload["traces"])
            ]
    except TvmflowError:
        raise
    # whatever TVM raises
    except Exception as error:
        return {"failure": failure(clock.now, error)}
    return {"libraries": ["untuned.so", *names], "road": road}


def _built_or_none(
    mod: tvm.IRModule, trace: Json, library: Path, target: Mapping[str, Json]
) -> str | None:
    try:
        write_library(measure.build(measure.scheduled(mod, trace), target), library, target)
    except TvmflowError:
        raise
    # whatever TVM raises: the others need not suffer for it
    except Exception:
        return None
    return library.name


def run_finalists(payload: Json, send: Send) -> Json:
    """Send the `libraries` in `folder` to the device that `turn` opens and time them in turns.

    Gives what `measure.take_turns` gives, or a failure in the phase `send` or `run`.
    """
    clock = measure.Phases(send)
    try:
        with clock.phase("send"):
            there = Device(payload)
            folder = Path(payload["folder"])
            kernels = [name and there.load(folder / name) for name in payload["libraries"]]
            arguments = there.arguments(payload["mod"])
        with clock.phase("run"):
            timing = Timing(**payload["timing"])
            untuned, *tuned = kernels
            found: Json = measure.take_turns(untuned, tuned, arguments, timing, payload["rounds"])
            return found
    except TvmflowError:
        raise
    # whatever the session raises; who is to blame is decided by those who sent this
    except Exception as error:
        return {"failure": failure(clock.now, error)}


def run_one(payload: Json, send: Send) -> Json:
    """Send a library to the device that `turn` opens and time its kernel.

    Takes `library`, `mod` (the workload), `target`, `timing`, `best_s`, `turn`, `limit_s`. Gives
    `{"run_secs": […], "ran": [start, end]}`, or a failure in the phase `send` or `run`.
    """
    clock = measure.Phases(send)
    try:
        with clock.phase("send"):
            there = Device(payload)
            kernel = there.load(Path(payload["library"]))
            arguments = there.arguments(payload["mod"])
        with clock.phase("run"):
            began = time.time()
            timing = Timing(**payload["timing"])
            run_secs = measure.race(kernel, arguments, timing, payload["best_s"])
            return {"run_secs": run_secs, "ran": [began, time.time()]}
    except TvmflowError:
        raise
    # whatever the session raises; who is to blame is decided by those who sent this
    except Exception as error:
        return {"failure": failure(clock.now, error)}


def failure(phase: str, error: Exception) -> Json:
    """What a child that works with a device gives when something is raised in a phase."""
    kind = "timeout" if "RPCSessionTimeoutError" in str(error) else "error"
    return {"phase": phase, "kind": kind, "message": measure.first_line(error)}


class _Kernel:
    """A kernel on a device, timed as one that is here."""

    def __init__(self, module: Any, device: Any) -> None:
        self._module = module
        self._device = device

    def time_evaluator(self, name: str, _: Any, **options: Any) -> Any:
        return self._module.time_evaluator(name, self._device, **options)


class Device:
    """A session on a device. Its server ends it after `limit_s`."""

    def __init__(self, payload: Json) -> None:
        host, port, match = payload["turn"]
        self._address = f"{host}:{port}"
        self._session = rpc.connect(host, port, match, session_timeout=payload["limit_s"])
        target = payload["target"]
        self._device = self._session.cuda(0) if target["kind"] == CUDA else self._session.cpu(0)
        if target["kind"] == CUDA:
            self._check_gpu(str(target["arch"]))
        if "num-cores" in target:
            self._use_threads(int(target["num-cores"]))

    @property
    def device(self) -> Any:
        """TVM's name of it in this session."""
        return self._device

    def send(self, library: Path) -> Any:
        """A shared library, loaded there."""
        self._session.upload(str(library), library.name)
        return self._session.load_module(library.name)

    def load(self, library: Path) -> _Kernel:
        """A library with one kernel."""
        return _Kernel(self.send(library), self._device)

    def arguments(self, mod: str) -> list[Any]:
        fill = self._function(_FILL)
        return [self._placed(each, fill) for each in measure.arguments_for(tvm.ir.load_json(mod))]

    def _placed(self, array: Any, fill: Any) -> Any:
        dtype = np.dtype(str(array.dtype))
        size = int(np.prod(array.shape)) * dtype.itemsize
        if fill is None or dtype.kind != "f" or size < _LARGE_BYTES:
            return array.copyto(self._device)
        made = tvm.runtime.empty(array.shape, str(array.dtype), self._device)
        fill(made)
        return made

    def _check_gpu(self, arch: str) -> None:
        """Raises StageError for a device without a GPU that runs what is for `arch`."""
        there = "no NVIDIA GPU that TVM's runtime there can use"
        if self._device.exist:
            there = f"sm_{str(self._device.compute_version).replace('.', '')}"
            if fits(arch, there):
                return
        raise StageError(
            f"the target is for {arch}, and the device at {self._address} has {there}",
            fix="give devices with other GPUs a key of their own; `tvmflow doctor` there tells what it has",
        )

    def _use_threads(self, wanted: int) -> None:
        """Run kernels with as many threads as they are tuned for. Raises StageError for a device that has fewer."""
        configure, count = map(self._function, ("runtime.config_threadpool", "runtime.NumThreads"))
        if configure is None or count is None:
            return
        configure(1, wanted)
        if count() != wanted:
            raise StageError(
                f"the device at {self._address} runs kernels with {count()} threads, "
                f"and the target says num-cores {wanted}",
                fix=f"correct num_cores in the recipe, or start its server with TVM_NUM_THREADS={wanted}",
            )

    def _function(self, name: str) -> Any:
        """A function of the device's runtime; None where a small one lacks it."""
        try:
            return self._session.get_function(name)
        except Exception:
            return None
