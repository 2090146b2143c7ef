"""Measures on remote devices: kernels are built and linked on this machine, and run there."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tvmflow.core.fork_server import ForkServer
from tvmflow.targets.tvm_target import cpu_triple, split_threads
from tvmflow.tuning.device_pool import DevicePool, MayContinue, RpcEndpoint
from tvmflow.tuning.finalists import FinalistsRequest, FinalistTimes
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.measurer import MeasureContext, MeasureJob, Measurer, RecordTrial
from tvmflow.tuning.rpc_device import BUILD_FINALISTS, BUILD_TRIAL, RUN_FINALISTS, RUN_TRIAL
from tvmflow.tuning.trial_process import TrialResult
from tvmflow.tuning.trials import Trial

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
                session = self._pool.call_here(BUILD_TRIAL, request, self._timeout_s)
            if session.failure is None:
                ran = self._pool.call(RUN_TRIAL, request, self._may_continue)
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
        built = pool.call_here(BUILD_FINALISTS, payload, timeout_s)
        if built.failure is not None:
            return FinalistTimes(error=built.failure.message)
        payload["libraries"] = built.value["libraries"]
        result = pool.call(RUN_FINALISTS, payload, sessions=1 + len(payload["libraries"]))
    if result is None or result.failure is not None:
        reason = result.failure.message if result and result.failure else "it was not begun"
        return FinalistTimes(error=reason)
    return FinalistTimes.from_json({"rule": built.value["rule"], **result.value})
