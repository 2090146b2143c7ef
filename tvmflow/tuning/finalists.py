"""Finalists: the best trials of a workload, timed again in turns with each other and the untuned kernel.

Turns make a disturbance of the machine disturb all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.types import Json
from tvmflow.targets import devices
from tvmflow.tuning import measure
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.trials import FinalistsRecord, timestamp
from tvmflow.tuning.workload_ledger import WorkloadLedger

TIME_FINALISTS: Final = f"{__name__}:time_finalists"
"""The function for the fork server."""

# An untuned kernel that takes longer than this is timed once.
_SLOW_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class FinalistsRequest(measure.KernelRequest):
    """The finalists of one workload.

    Attributes:
        traces: Their schedules.
        rounds: How often each finalist has its turn, timed as `timing` says.
        libraries: For a remote device, the paths of the built kernels: the untuned one first,
            None for a schedule that does not apply.
    """

    traces: Sequence[Json]
    rounds: int
    libraries: Sequence[str | None] = ()

    @property
    def digest(self) -> str:
        """The digest of what is measured and how, for one workload on one target."""
        return digest_of([self.traces, self.rounds, self.rules_version, self.timing])


class FinalistTimes(NamedTuple):
    """Seconds of the finalists of one workload.

    Attributes:
        rule: The schedule rule of the untuned kernel; `none` when it has none.
        untuned: Samples of the untuned kernel, from the first and the last round.
        samples: One sample a round for each finalist; none for one that does not apply.
        error: The reason why nothing was measured; otherwise empty.
    """

    rule: str = "none"
    untuned: tuple[float, ...] = ()
    samples: tuple[tuple[float, ...], ...] = ()
    error: str = ""

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> FinalistTimes:
        """Return the times in the answer of a child."""
        return cls(
            value["rule"],
            tuple(value["untuned"]),
            tuple(tuple(samples) for samples in value["samples"]),
        )


def read_or_measure(
    request: FinalistsRequest, ledger: WorkloadLedger, measure: Callable[[], FinalistTimes]
) -> FinalistTimes:
    """Return the times that the ledger has of these finalists, or measure and record them.

    Finalists that are nearly equal would otherwise win by turns, and each time give another library.

    Args:
        request: The finalists.
        ledger: The records of their workload.
        measure: Measures them.

    Raises:
        StoreError: The times cannot be recorded.
    """
    known = ledger.finalists.get(request.digest)
    if known is not None:
        return FinalistTimes(known.rule, known.untuned, known.samples)
    times = measure()
    if not times.error:
        fields = (times.rule, times.untuned, times.samples)
        ledger.add([FinalistsRecord(request.digest, *fields, timestamp())])
    return times


def measure_finalists(
    request: FinalistsRequest,
    fork_server: ForkServer,
    *,
    device: Mapping[str, str],
    locks: Path,
    timeout_s: float,
    log: Path,
) -> FinalistTimes:
    """Time the finalists of a workload on this machine.

    Args:
        request: The finalists.
        fork_server: Where the child is forked.
        device: The device to hold alone meanwhile.
        locks: The folder of device locks.
        timeout_s: Seconds after which the child is killed.
        log: The file for what the child prints.

    Raises:
        StageError: The run was cancelled.
    """
    with devices.exclusive(locks, device):
        outcome = fork_server.call(
            TIME_FINALISTS, request.to_json(), timeout_s=timeout_s, log=log, emit=lambda _: None
        )
    if outcome.kind == "cancelled":
        raise StageError("measuring was cancelled", fix="run it again")
    if outcome.kind != "ok":
        return FinalistTimes(error=outcome.message)
    return FinalistTimes.from_json(outcome.value)


# ---------------------------------------------------------------- in the child


def time_finalists(payload: Json, emit: Emit) -> Json:
    """Build and time finalists: the entry point of the child.

    Args:
        payload: A `FinalistsRequest` as JSON.
        emit: Not used.

    Returns:
        `FinalistTimes` as JSON.
    """
    import tvm

    del emit
    request = FinalistsRequest.from_json(payload)
    measure.load_compiler(request.target)
    scheduled, rule = request.schedule(None)
    untuned = measure.build(scheduled, request.target)
    kernels = [_build_or_none(request, trace) for trace in request.traces]
    measure.use_threads(request.target)
    arguments = measure.make_arguments(tvm.ir.load_json(request.mod))
    arguments = measure.copy_to_device(arguments, request.target)
    times = time_in_turns(untuned, kernels, arguments, request.timing, request.rounds)
    return {"rule": rule, **times}


def _build_or_none(request: FinalistsRequest, trace: Json) -> Any:
    """Return a built finalist; None when its trace does not apply, so that the others go on."""
    try:
        return measure.build(request.schedule(trace)[0], request.target)
    # TVM raises anything here.
    except Exception:
        return None


def time_in_turns(
    untuned: Any, kernels: Sequence[Any], arguments: list[Any], timing: Timing, rounds: int
) -> Json:
    """Return the `untuned` times and the `samples` of built kernels.

    Args:
        untuned: The untuned kernel.
        kernels: The finalists; None for one that could not be built.
        arguments: Their arguments, on the device.
        timing: How to time one sample.
        rounds: Samples of each finalist.
    """
    # One call of a kernel without a schedule can take seconds, and then one is enough.
    untuned_secs = measure.time_kernel(
        untuned, arguments, Timing(number=1, repeat=1, min_repeat_ms=0)
    )
    is_slow = untuned_secs[0] > _SLOW_S
    baseline = timing._replace(number=1, repeat=3)
    samples: list[list[float]] = [[] for _ in kernels]
    order = [(index, kernel) for index, kernel in enumerate(kernels) if kernel is not None]
    for number in range(rounds):
        # Every second round runs backwards, so that no kernel always follows the same one.
        for index, kernel in order if number % 2 == 0 else reversed(order):
            samples[index] += measure.time_kernel(kernel, arguments, timing._replace(repeat=1))
        if not is_slow and number in (0, rounds - 1):
            untuned_secs += measure.time_kernel(untuned, arguments, baseline)
    return {"untuned": untuned_secs, "samples": samples}
