"""One session on a remote device, and the functions that children run with it.

The children build kernels on this machine, or send built ones to the device and time them there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tvmflow.core.errors import StageError, TvmflowError
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.types import Json
from tvmflow.targets.backends import backend_for
from tvmflow.targets.linking import export_library
from tvmflow.targets.tvm_target import cpu_triple, split_threads
from tvmflow.tuning import measure
from tvmflow.tuning.device_pool import DevicePool, MayContinue, RpcEndpoint
from tvmflow.tuning.finalists import FinalistsRequest, FinalistTimes, time_in_turns
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.measurer import (
    MeasureContext,
    MeasureJob,
    Measurer,
    RecordTrial,
    TrialRequest,
    TrialResult,
    time_trial,
)
from tvmflow.tuning.trials import Trial
from tvmflow.tuning.tuning_job import PhaseReporter, report_failure

# Larger arguments are filled on the device: the network is slow.
_LARGE_BYTES: Final = 1 << 16
_FILL_FUNCTION: Final = "tvm.contrib.random.random_fill_for_measure"


class RpcDevice:
    """A session on a remote device that was leased for it; its server ends the session in time."""

    def __init__(self, payload: Mapping[str, Json]) -> None:
        """Connect to the device.

        Args:
            payload: That of `DevicePool.call`: `target`, and `session` with host, port, the key
                that the server expects, and the time limit in seconds.

        Raises:
            StageError: The device does not run what the target is for.
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
        """Send a shared library to the device and return it, loaded there."""
        self._session.upload(str(library), library.name)
        return self._session.load_module(library.name)

    def make_arguments(self, mod: str) -> list[list[Any]]:
        """Return arguments on the device for each measurement of a saved workload."""
        import tvm

        fill = self._find_function(_FILL_FUNCTION)
        argument_lists = measure.make_measured_arguments(tvm.ir.load_json(mod))
        return [
            [self._copy_or_fill(argument, fill) for argument in arguments]
            for arguments in argument_lists
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
        """Check that the device runs the target's code.

        Raises:
            StageError: It does not.
        """
        mismatch = backend_for(target).remote_device_mismatch(target, self.device)
        if not mismatch:
            return
        raise StageError(
            f"the target is for {target['arch']}, but the device at {self._address} has {mismatch}",
            fix="give devices with other GPUs a key of their own; "
            "run `tvmflow doctor` on the device to see its GPU",
        )

    def _use_threads(self, count: int) -> None:
        """Run kernels with as many threads as they are tuned for.

        Raises:
            StageError: The device has fewer.
        """
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
        """Return a function of the device's runtime; None where a small runtime lacks it."""
        try:
            return self._session.get_function(name)
        except Exception:
            return None


# ---------------------------------------------------------------- entry points of children


def build_trial(payload: Json, emit: Emit) -> Json:
    """Build the kernel of a `TrialRequest` as the shared library that it names."""
    request = TrialRequest.from_json(payload)

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("apply"):
            measure.load_compiler(request.target, runs=False)
            mod, _ = request.schedule(request.trace)
        with phases.phase("build"):
            kernel = measure.build(mod, request.target)
            export_library(kernel, Path(request.library), request.target)
        return {}

    return report_failure(emit, work)


def run_trial(payload: Json, emit: Emit) -> Json:
    """Time the library of a `TrialRequest` on the device; see `time_trial`."""

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("send"):
            device = RpcDevice(payload)
            request = TrialRequest.from_json(payload)
            kernel = device.load_library(Path(request.library))
            argument_lists = device.make_arguments(request.mod)
        with phases.phase("run"):
            return time_trial(request, kernel, argument_lists)

    return report_failure(emit, work)


def build_finalists(payload: Json, emit: Emit) -> Json:
    """Build the finalists of a `FinalistsRequest` as libraries in the payload's `folder`.

    Returns:
        `libraries`, the untuned one first, None for a schedule that does not apply; and `rule`.
    """
    request = FinalistsRequest.from_json(payload)
    folder = Path(payload["folder"])

    def export(trace: Json | None, name: str) -> tuple[str, str]:
        mod, rule = request.schedule(trace)
        library = folder / f"{name}.so"
        export_library(measure.build(mod, request.target), library, request.target)
        return str(library), rule

    def export_or_none(trace: Json, name: str) -> str | None:
        try:
            return export(trace, name)[0]
        except TvmflowError:
            raise
        # TVM raises anything for a trace that does not apply; the other finalists go on.
        except Exception:
            return None

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("build"):
            measure.load_compiler(request.target, runs=False)
            untuned, rule = export(None, "untuned")
            finalists = [
                export_or_none(trace, str(index)) for index, trace in enumerate(request.traces)
            ]
        return {"libraries": [untuned, *finalists], "rule": rule}

    return report_failure(emit, work)


def run_finalists(payload: Json, emit: Emit) -> Json:
    """Time the libraries of a `FinalistsRequest` on the device in turns; see `time_in_turns`."""
    request = FinalistsRequest.from_json(payload)

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("send"):
            device = RpcDevice(payload)
            untuned, *kernels = [
                library and device.load_library(Path(library)) for library in request.libraries
            ]
            argument_lists = device.make_arguments(request.mod)
        with phases.phase("run"):
            return time_in_turns(untuned, kernels, argument_lists, request.timing, request.rounds)

    return report_failure(emit, work)


# ---------------------------------------------------------------- remote measurer
# Measures on remote devices: kernels are built and linked on this machine, and run there.


_MAX_JOBS: Final = 64


class _OutOfTime(Exception):
    """A job was waiting for a device when the time was up."""


class RemoteMeasurer(Measurer):
    """A measurer whose candidates run on a pool of devices, as many at once as there are devices.

    There are as many builders as this machine has cores. `folder` holds the libraries that are
    sent to devices.
    """

    def __init__(
        self,
        context: MeasureContext,
        timing: Timing,
        timeout_s: float,
        fork_server: ForkServer,
        endpoint: RpcEndpoint,
        folder: Path,
    ) -> None:
        super().__init__(context, timing, timeout_s, fork_server)
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
        """Measure all jobs; those that wait for a device when `may_continue` turns false are left out."""
        if not jobs:
            return
        self._builders = min(self._pool.size() + self._cores, _MAX_JOBS)
        self._may_continue = may_continue
        with contextlib.suppress(_OutOfTime):
            super().measure(jobs, record, may_continue)

    def _measure_job(self, job: MeasureJob) -> Trial:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            request = self._request(job, str(Path(folder, "kernel.so"))).to_json()
            with self._building:
                session = self._pool.call_here(build_trial, request, self._timeout_s)
            if session.failure is None:
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
        # The load of the device is not known.
        return self._make_trial(job, TrialResult.read(session.value, session.failure), host)


def measure_finalists_remotely(
    request: FinalistsRequest, pool: DevicePool, folder: Path, timeout_s: float
) -> FinalistTimes:
    """Time the finalists of a workload in one session on one device.

    Args:
        request: The finalists.
        pool: The devices.
        folder: Where libraries are kept until they are sent.
        timeout_s: Seconds that building may take.

    Raises:
        StageError: No device works.
    """
    with tempfile.TemporaryDirectory(dir=folder) as libraries:
        payload = {**request.to_json(), "folder": libraries}
        built = pool.call_here(build_finalists, payload, timeout_s)
        if built.failure is not None:
            return FinalistTimes(error=built.failure.message)
        payload["libraries"] = built.value["libraries"]
        result = pool.call(run_finalists, payload, sessions=1 + len(payload["libraries"]))
    if result is None or result.failure is not None:
        reason = result.failure.message if result and result.failure else "it was not begun"
        return FinalistTimes(error=reason)
    return FinalistTimes.from_json({"rule": built.value["rule"], **result.value})
