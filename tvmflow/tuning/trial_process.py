"""One trial in a child process of this machine: the request, the function that runs, the result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tvmflow.core.fork_server import Emit
from tvmflow.core.types import Json
from tvmflow.tuning import measure
from tvmflow.tuning.phases import PhaseReporter, report_failure
from tvmflow.tuning.trials import Failure

MEASURE_TRIAL: Final = f"{__name__}:measure_trial"
"""The function for the fork server."""

DEVICE_PHASE: Final = "device"
"""The phase that uses the device but not the candidate: its errors are not the candidate's."""


@dataclass(frozen=True, kw_only=True)
class TrialRequest(measure.KernelRequest):
    """A schedule of a workload that is to be built and timed.

    Attributes:
        trace: The schedule; None for that of the untuned kernel.
        best_s: Seconds of the workload's best schedule; None when there is none.
        library: The path of the shared library for a remote device; empty on this machine.
    """

    trace: Json
    best_s: float | None = None
    library: str = ""


class TrialResult(NamedTuple):
    """Times of a trial, or its failure.

    Attributes:
        run_secs: Seconds of a call, one number for each repeat.
        ran: Start and end of the measurement in seconds since 1970.
        failure: The reason why there are no times.
    """

    run_secs: tuple[float, ...] = ()
    ran: tuple[float, ...] = ()
    failure: Failure | None = None

    @classmethod
    def read(cls, answer: Mapping[str, Json], failure: Failure | None) -> TrialResult:
        """Return the result in the answer of a child, or that of a trial that failed."""
        if failure:
            return cls(failure=failure)
        return cls(tuple(answer["run_secs"]), tuple(answer["ran"]))


def measure_trial(payload: Json, emit: Emit) -> Json:
    """Build and run one schedule: the entry point of the child.

    The child asks before it uses the device, and waits until it may.

    Args:
        payload: A `TrialRequest` as JSON.
        emit: Sends the event of each phase.

    Returns:
        `run_secs` and `ran` of a `TrialResult`, or `failure`; and `phase_secs`.
    """
    request = TrialRequest.from_json(payload)
    measure.load_compiler(request.target)

    def work(phases: PhaseReporter) -> Json:
        with phases.phase("apply"):
            mod, _ = request.schedule(request.trace)
        with phases.phase("build"):
            kernel = measure.build(mod, request.target)
            arguments = measure.make_arguments(mod)
        with phases.phase(DEVICE_PHASE, ask=True):
            measure.use_threads(request.target)
            arguments = measure.copy_to_device(arguments, request.target)
        with phases.phase("run"):
            return time_trial(request, kernel, arguments)

    # Whatever is raised is the failure of this candidate alone.
    return report_failure(emit, work, fatal=())


def time_trial(request: TrialRequest, kernel: Any, arguments: list[Any]) -> Json:
    """Return `run_secs` and `ran` of a built kernel; see `TrialResult`."""
    start = time.time()
    run_secs = measure.time_candidate(kernel, arguments, request.timing, request.best_s)
    return {"run_secs": run_secs, "ran": [start, time.time()]}
