"""Finalists: a workload's best trials, timed again in turns with each other and the untuned kernel.

Turns make a disturbance of the machine disturb all of them alike, and go on until it is decided
whether the fastest one is faster than the untuned kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.errors import StageError
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.statistics import PairedTimes
from tvmflow.core.types import Json
from tvmflow.targets import devices
from tvmflow.tuning import measure
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.trials import FinalistsRecord, timestamp
from tvmflow.tuning.workload_ledger import WorkloadLedger

# An untuned kernel that takes longer than this is timed once.
_SLOW_S: Final = 0.1
# As many rounds as those of the request may follow, of the fastest finalist and the untuned kernel
# alone, until it is decided which is faster; less than this share of its time is no gain.
_MAX_ROUNDS_FACTOR: Final = 4
_MAX_SECONDS: Final = 5.0
MIN_GAIN: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class FinalistsRequest(measure.KernelRequest):
    """The finalists of one workload.

    Attributes:
        traces: Their schedules.
        rounds: How often each finalist has its turn, timed as `timing` says; the fastest one more often.
        libraries: For a remote device, the paths of the built kernels: the untuned one first,
            None for a schedule that does not apply.
    """

    traces: Sequence[Json]
    rounds: int
    libraries: Sequence[str | None] = ()

    @property
    def digest(self) -> str:
        """The digest of what is measured and how, for one workload on one target."""
        how = [self.rounds, _MAX_ROUNDS_FACTOR, self.rules_version, self.timing]
        return digest_of([self.traces, *how])


class FinalistTimes(NamedTuple):
    """Seconds of the finalists of one workload.

    Attributes:
        rule: The schedule rule of the untuned kernel; `none` when it has none.
        untuned: One sample a round of the untuned kernel; a single one where it takes long.
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
            time_finalists, request.to_json(), timeout_s=timeout_s, log=log, emit=lambda _: None
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
        rounds: Samples of each finalist, at least.
    """
    once = timing._replace(repeat=1)

    def measure_kernel(kernel: Any) -> float:
        return measure.time_kernel(kernel, arguments, once)[0]

    # One call of a kernel without a schedule can take seconds, and then one is enough.
    first_look = measure.time_kernel(untuned, arguments, Timing(1, 1, 0))[0]
    is_slow = first_look > _SLOW_S
    turns = [None] if is_slow else [untuned]
    return run_rounds([*turns, *kernels], measure_kernel, rounds, [first_look] if is_slow else [])


def run_rounds(
    kernels: Sequence[Any],
    measure_kernel: Callable[[Any], float],
    rounds: int,
    untuned: Sequence[float] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Json:
    """Measure kernels in turns until it is decided whether one is faster than the untuned kernel.

    Args:
        kernels: The untuned kernel, or None where `untuned` has its time, then the finalists; None
            for one that could not be built.
        measure_kernel: Returns the seconds of a call.
        rounds: Samples of each; the fastest finalist and the untuned kernel get four times as many
            at most.
        untuned: The time of an untuned kernel that is not measured again.
        clock: Returns the current time in seconds.

    Returns:
        The `untuned` times and the `samples` of the finalists.
    """
    samples: list[list[float]] = [[] for _ in kernels]
    samples[0] += untuned
    order = [(index, kernel) for index, kernel in enumerate(kernels) if kernel is not None]
    started = clock()
    for number in range(_MAX_ROUNDS_FACTOR * rounds):
        if number == rounds:
            fastest = min(filter(None, samples[1:]), key=median, default=[])
            order = [entry for entry in order if entry[0] == 0 or samples[entry[0]] is fastest]
        if number >= rounds and (clock() - started > _MAX_SECONDS or _is_decided(samples)):
            break
        # Every second round runs backwards, so that no kernel always follows the same one.
        for index, kernel in order if number % 2 == 0 else reversed(order):
            samples[index].append(measure_kernel(kernel))
    return {"untuned": samples[0], "samples": samples[1:]}


def _is_decided(samples: Sequence[Sequence[float]]) -> bool:
    """Return whether it is known that the fastest finalist beats the untuned kernel, or gains nothing."""
    measured = [times for times in samples[1:] if times]
    if not measured:
        return True
    times = pair_with_untuned(min(measured, key=median), samples[0])
    return times.is_decided or times.limits[0] > 1 - MIN_GAIN


def pair_with_untuned(samples: Sequence[float], untuned: Sequence[float]) -> PairedTimes:
    """Return the times of a finalist beside those of the untuned kernel, round by round."""
    # Of a slow untuned kernel there is one time.
    same_rounds = untuned[: len(samples)] if len(untuned) > 1 else tuple(untuned) * len(samples)
    return PairedTimes(tuple(samples), tuple(same_rounds))
