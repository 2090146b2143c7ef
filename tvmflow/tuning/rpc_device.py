"""Use remote devices behind TVM's RPC: sessions, pools, and the functions that children run.

The children build kernels on this machine, or send built kernels to the device and time them there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core import spans
from tvmflow.core.codec import from_json
from tvmflow.core.errors import StageError, TvmflowError
from tvmflow.core.fork_server import ChildFunction, Emit, ForkServer
from tvmflow.core.formatting import count_text
from tvmflow.core.generated_text import shell_word
from tvmflow.core.types import Json
from tvmflow.targets.backends import backend_for
from tvmflow.targets.linking import export_library
from tvmflow.targets.tracker import (
    TRACKER_VARIABLE,
    DeviceLease,
    DevicePoolStatus,
    Tracker,
    split_address,
)
from tvmflow.targets.tvm_target import cpu_triple, split_threads
from tvmflow.tuning import measure
from tvmflow.tuning.measurer import (
    FinalistsRequest,
    FinalistTimes,
    MeasureContext,
    MeasureJob,
    Measurer,
    RecordTrial,
    TrialRequest,
)
from tvmflow.tuning.trials import Failure, Trial
from tvmflow.tuning.tuning_job import PhaseReporter, PhaseSpans, read_failure, report_failure

# If a session's server has not ended it this many seconds after its time limit, it is ended here.
_GRACE_S: Final = 2.0
# The failed sessions after which the devices count as faulty, and after which the candidate does.
_MAX_DEVICE_FAULTS: Final = 3
_MAX_CANDIDATE_FAILURES: Final = 2
# Waiting ends if no device became free for the longest duration of this many sessions.
_PATIENCE_SESSIONS: Final = 10
_POLL_S: Final = 2.0
_log = logging.getLogger(__name__)

MayContinue = Callable[[], bool]
"""Is called before work begins; returning False ends the wait for a device."""


class RpcEndpoint(NamedTuple):
    """Where devices are requested: at a tracker (`HOST:PORT`), by their `key`.

    Attributes:
        priority: The priority of the requests; the tracker serves higher ones first.
        timeout_s: The time limit of a session.
    """

    tracker: str
    key: str
    priority: int
    timeout_s: float

    @classmethod
    def from_settings(cls, remote: Mapping[str, Json]) -> RpcEndpoint:
        """Return the endpoint in a target's `remote`.

        Raises:
            StageError: Neither the recipe nor the environment names the tracker.
        """
        address = remote.get("tracker") or os.environ.get(TRACKER_VARIABLE, "")
        try:
            split_address(address)
        except ValueError as error:
            reason = error if address else f"neither the recipe nor ${TRACKER_VARIABLE} names one"
            raise StageError(
                f"there is no RPC tracker for the device '{remote['key']}': {reason}",
                fix=f"set {TRACKER_VARIABLE}=HOST:PORT, or remote.tracker of the target in the recipe",
            ) from error
        return cls(address, remote["key"], remote["priority"], remote["timeout_s"])


class SessionResult(NamedTuple):
    """The result of a call in a child: a value or a failure, and the device's address."""

    value: Json
    failure: Failure | None
    server: str


class DevicePool:
    """The devices of one endpoint. Safe to use in several threads."""

    def __init__(self, endpoint: RpcEndpoint, fork_server: ForkServer, log: Path | None) -> None:
        self.endpoint = endpoint
        self._tracker = Tracker(endpoint.tracker)
        self._fork_server = fork_server
        self._log = log
        self._lock = threading.Lock()
        self._sessions = 0
        self._last_change = time.monotonic()

    def size(self) -> int:
        """Return the number of devices, busy or free.

        Raises:
            StageError: There is no device.
        """
        devices = self._tracker.list_devices()
        if self.endpoint.key not in devices:
            raise self._no_device_error(devices)
        return devices[self.endpoint.key].total

    def call(
        self,
        function: ChildFunction | str,
        payload: Mapping[str, Json],
        may_continue: MayContinue = lambda: True,
        sessions: int = 1,
    ) -> SessionResult | None:
        """Run a function in a child that uses a device; if the device fails, try another one.

        The payload of the function gets the field `session`; its time limit is `sessions` times that of a session.
        While waiting for a device, `may_continue` is called; the result is None if it returned False.

        Raises:
            StageError: A failure that neither the function nor a single device causes.
        """
        timeout_s = self.endpoint.timeout_s * sessions
        faults = failures = 0
        while True:
            with spans.span(f"wait for a device with the key {self.endpoint.key}"):
                lease = self._wait_for_device(may_continue)
            if lease is None:
                return None
            try:
                request = {**payload, "session": [*lease, timeout_s]}
                result = self.call_here(function, request, timeout_s + _GRACE_S, lease.address)
            finally:
                self._count_session(-1)
            if result.failure is None:
                return result
            _log.debug("%s failed at %s: %s", function, lease.address, result.failure)
            if result.failure.phase == "run":
                failures += 1
            else:
                faults += 1
            if failures == _MAX_CANDIDATE_FAILURES:
                return result
            if faults == _MAX_DEVICE_FAULTS:
                raise StageError(
                    f"the devices with the key '{self.endpoint.key}' cannot be used; the last, "
                    f"{result.server}: {result.failure.message}",
                    fix="check that the target in the recipe describes the devices and that their "
                    "servers have the same version of TVM; run it again to resume",
                )

    # ---------------------------------------------------------------- waiting for a device

    def _wait_for_device(self, may_continue: MayContinue) -> DeviceLease | None:
        """Wait for a device and lease it; there is no time limit while others use the devices."""
        started = last_poll = last_seen = time.monotonic()

        def keep_waiting() -> bool:
            nonlocal last_poll, last_seen
            instant = time.monotonic()
            if instant - last_poll > _POLL_S:
                last_poll = instant
                devices = self._tracker.list_devices()
                if self.endpoint.key in devices:
                    last_seen = instant
                elif instant - last_seen > self.endpoint.timeout_s:
                    # A restarting server had enough time to register again.
                    raise self._no_device_error(devices)
                self._check_patience(started, devices.get(self.endpoint.key))
            return may_continue()

        lease = self._tracker.request(self.endpoint.key, self.endpoint.priority, keep_waiting)
        if lease is not None:
            self._count_session(+1)
        return lease

    def _check_patience(self, started: float, devices: DevicePoolStatus | None) -> None:
        """Raise StageError if no device was used or became free for too long."""
        idle_s = time.monotonic() - max(started, self._last_change)
        if self._sessions or idle_s < _PATIENCE_SESSIONS * self.endpoint.timeout_s:
            return
        state = (
            f"{devices.total} registered, {devices.free} free, "
            f"{count_text(devices.pending, 'waiting request')}"
            if devices
            else "none is registered"
        )
        raise StageError(
            f"no device with the key '{self.endpoint.key}' became free in {idle_s:.0f} s ({state})",
            fix="check whether others use the devices or their servers hang (`tvmflow device ls`); "
            "run it again to resume",
        )

    def _count_session(self, change: int) -> None:
        with self._lock:
            self._sessions += change
            self._last_change = time.monotonic()

    def _no_device_error(self, devices: Mapping[str, DevicePoolStatus]) -> StageError:
        tracker, key = self.endpoint.tracker, self.endpoint.key
        others = ", ".join(f"{other.key} ({other.total})" for other in devices.values())
        return StageError(
            f"the RPC tracker at {tracker} has no device with the key '{key}'; "
            f"it has {others or 'no devices'}",
            fix=f"run `tvmflow device serve --tracker {shell_word(tracker)} --key {shell_word(key)}` on the device, "
            "or correct remote.key of the target in the recipe",
        )

    # ---------------------------------------------------------------- children

    def call_here(
        self,
        function: ChildFunction | str,
        payload: Mapping[str, Json],
        timeout_s: float,
        server: str = "",
    ) -> SessionResult:
        """Run a function in a child on this machine; `server` is the device it uses, or empty."""
        phases = PhaseSpans()
        outcome = self._fork_server.call(
            function,
            payload,
            timeout_s=timeout_s,
            log=self._log,
            emit=lambda event: phases.begin(event["phase"]),
        )
        phases.end()
        return SessionResult(outcome.value, read_failure(outcome, phases.names), server)


# Larger arguments are filled with random values on the device, because the network is slow.
_LARGE_BYTES: Final = 1 << 16
_FILL_FUNCTION: Final = "tvm.contrib.random.random_fill_for_measure"


class RpcDevice:
    """A session on a leased remote device; its server enforces the time limit."""

    def __init__(self, payload: Mapping[str, Json]) -> None:
        """Connect to the device; StageError if it cannot run code for the target.

        The payload of `DevicePool.call` has `target`, and `session`: host, port, the key that the server expects, and
        the time limit in seconds.
        """
        from tvm import rpc

        host, port, match_key, timeout_s = payload["session"]
        target = payload["target"]
        self._address = f"{host}:{port}"
        self._session = rpc.connect(host, port, match_key, session_timeout=timeout_s)
        self.device = self._session.device(backend_for(target).DEVICE, 0)
        self._check_device(target)
        if threads := split_threads(target)[1]:
            self._use_threads(threads)

    def load_library(self, library: Path) -> Any:
        """Send a shared library to the device, and load it there."""
        self._session.upload(str(library), library.name)
        return self._session.load_module(library.name)

    def make_arguments(self, mod: str) -> list[list[Any]]:
        """Make arguments on the device for each measurement of a saved workload."""
        import tvm

        fill = self._find_function(_FILL_FUNCTION)
        return [
            [self._copy_or_fill(argument, fill) for argument in arguments]
            for arguments in measure.make_measured_arguments(tvm.ir.load_json(mod))
        ]

    def _copy_or_fill(self, array: Any, fill: Any) -> Any:
        import numpy as np
        import tvm

        if isinstance(array, int):
            return array
        dtype = np.dtype(str(array.dtype))
        size = int(np.prod(array.shape)) * dtype.itemsize
        if fill is None or dtype.kind != "f" or size < _LARGE_BYTES:
            return array.copyto(self.device)
        filled = tvm.runtime.empty(array.shape, str(array.dtype), self.device)
        fill(filled)
        return filled

    def _check_device(self, target: Mapping[str, Json]) -> None:
        mismatch = backend_for(target).remote_device_mismatch(target, self.device)
        if not mismatch:
            return
        raise StageError(
            f"the target is for {target['arch']}, but the device at {self._address} has {mismatch}",
            fix="give devices with other GPUs a key of their own; "
            "run `tvmflow doctor` on the device to see its GPU",
        )

    def _use_threads(self, count: int) -> None:
        configure = self._find_function("runtime.config_threadpool")
        read_count = self._find_function("runtime.NumThreads")
        if configure is None or read_count is None:
            return
        configure(1, count)
        if read_count() != count:
            raise StageError(
                f"the device at {self._address} runs kernels with {read_count()} threads, "
                f"but the target is for {count} threads",
                fix=f"correct the target's threads in the recipe, or start its server with TVM_NUM_THREADS={count}",
            )

    def _find_function(self, name: str) -> Any:
        """Return a function of the device's runtime; None if a small runtime lacks it."""
        try:
            return self._session.get_function(name)
        except Exception:
            return None


# ---------------------------------------------------------------- entry points of children


def build_kernels(payload: Json, emit: Emit) -> Json:
    """Build the schedules `traces` of a `KernelRequest` as shared libraries in `folder`.

    Returns:
        `libraries`, with None for a schedule that does not apply, and the `rule` of the first schedule, which must
        apply.
    """
    request = measure.KernelRequest.from_json(payload)

    def work(phases: PhaseReporter) -> Json:
        libraries: list[str | None] = []
        rule = ""
        with phases.phase("apply"):
            measure.load_compiler(request.target, runs=False)
        for number, trace in enumerate(payload["traces"]):
            library = Path(payload["folder"], f"kernel{number}.so")
            try:
                with phases.phase("apply"):
                    mod, name = request.schedule(trace)
                with phases.phase("build"):
                    export_library(measure.build(mod, request.target), library, request.target)
            except TvmflowError:
                raise
            # TVM raises various exceptions for a trace that does not apply. Only the first one must apply.
            except Exception:
                if not number:
                    raise
                libraries.append(None)
            else:
                libraries.append(str(library))
                rule = rule or name
        return {"libraries": libraries, "rule": rule}

    return report_failure(emit, work)


def run_trial(payload: Json, emit: Emit) -> Json:
    """Time the library of a `TrialRequest` on the device."""
    return _run(TrialRequest, payload, emit)


def run_finalists(payload: Json, emit: Emit) -> Json:
    """Time the libraries of a `FinalistsRequest` interleaved on the device."""
    return _run(FinalistsRequest, payload, emit)


def _run(kind: type[TrialRequest | FinalistsRequest], payload: Json, emit: Emit) -> Json:
    def work(phases: PhaseReporter) -> Json:
        with phases.phase("send"):
            device, request = RpcDevice(payload), kind.from_json(payload)
            kernels = [path and device.load_library(Path(path)) for path in request.libraries]
            argument_lists = device.make_arguments(request.mod)
        with phases.phase("run"):
            return request.time(kernels, argument_lists)

    return report_failure(emit, work)


# ---------------------------------------------------------------- remote measurer


_MAX_JOBS: Final = 64


class _OutOfTime(Exception):
    """The time limit ended while a job was waiting for a device."""


class RemoteMeasurer(Measurer):
    """Measures candidates on all devices of a pool at once.

    There are as many builders as this machine has cores. `folder` is for the libraries that are sent to devices.
    """

    def __init__(
        self,
        context: MeasureContext,
        fork_server: ForkServer,
        endpoint: RpcEndpoint,
        folder: Path,
    ) -> None:
        super().__init__(context, fork_server)
        self._pool = DevicePool(endpoint, fork_server, context.log)
        self._folder = folder
        self._cores = os.cpu_count() or 1
        self._building = threading.Semaphore(self._cores)
        self._may_continue: MayContinue = lambda: True

    def measure(
        self,
        jobs: Sequence[MeasureJob],
        record: RecordTrial,
        may_continue: MayContinue = lambda: True,
    ) -> None:
        """Measure all jobs, except jobs still waiting for a device when `may_continue` returns False."""
        if not jobs:
            return
        self._builders = min(self._pool.size() + self._cores, _MAX_JOBS)
        self._may_continue = may_continue
        with contextlib.suppress(_OutOfTime):
            super().measure(jobs, record, may_continue)

    def _measure_job(self, job: MeasureJob) -> Trial:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            request = {**self._request(job).to_json(), "traces": [job.trace], "folder": folder}
            with self._building:
                session = self._pool.call_here(build_kernels, request, self._context.timeout_s)
            if session.failure is None:
                request["libraries"] = session.value["libraries"]
                ran = self._pool.call(run_trial, request, self._may_continue)
                if ran is None:
                    raise _OutOfTime
                session = ran
        target = self._context.target
        host = {
            "model": self._pool.endpoint.key,
            "arch": cpu_triple(target).partition("-")[0],
            **({"threads": threads} if (threads := split_threads(target)[1]) else {}),
            "server": session.server,
        }
        # The load of the device is unknown.
        return self._make_trial(job, session.value, session.failure, host)


def measure_finalists_remotely(
    request: FinalistsRequest, pool: DevicePool, folder: Path, timeout_s: float
) -> FinalistTimes:
    """Time the finalists of a workload in one session on one device.

    Raises:
        StageError: No device works.
    """
    with tempfile.TemporaryDirectory(dir=folder) as libraries:
        payload = request.to_json()
        schedules = {"traces": [None, *request.traces], "folder": libraries}
        built = pool.call_here(build_kernels, {**payload, **schedules}, timeout_s)
        if built.failure is not None:
            return FinalistTimes(error=built.failure.message)
        payload["libraries"] = built.value["libraries"]
        result = pool.call(run_finalists, payload, sessions=1 + len(payload["libraries"]))
    if result is None or result.failure is not None:
        reason = result.failure.message if result and result.failure else "it was not begun"
        return FinalistTimes(error=reason)
    return from_json(FinalistTimes, {"rule": built.value["rule"], **result.value})
