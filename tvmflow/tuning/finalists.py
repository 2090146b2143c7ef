"""Finalists: a workload's best trials, timed again in turns with each other and the untuned kernel.

Turns make a disturbance of the machine disturb all of them alike, and go on until it is decided
whether the fastest one is faster than the untuned kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.canonical_json import digest_of
from tvmflow.core.codec import from_json
from tvmflow.core.fork_server import Emit, ForkServer
from tvmflow.core.statistics import PairedTimes, geometric_means, take_turns
from tvmflow.core.types import Array, Json
from tvmflow.tuning import measure
from tvmflow.tuning.ledger import WorkloadLedger
from tvmflow.tuning.measure import Timing
from tvmflow.tuning.trials import Ban, FinalistsRecord, timestamp, trial_id
from tvmflow.tuning.tuning_job import call_alone
from tvmflow.tuning.workloads import list_compared_sizes

if TYPE_CHECKING:
    import tvm


# An untuned kernel that takes longer than this is timed once.
_SLOW_S: Final = 0.1
# As many rounds as those of the request may follow, of the fastest finalist and the untuned kernel
# alone, until it is decided which is faster; less than this share of its time is no gain.
_MAX_ROUNDS_FACTOR: Final = 4
_MAX_SECONDS: Final = 5.0
MIN_GAIN: Final = 0.02
# Sums in another order differ by less than this share of the largest value, those of float16 by less than ten times as
# much.
_MAX_ERROR: Final = 1e-3


@dataclass(frozen=True, kw_only=True)
class FinalistsRequest(measure.KernelRequest):
    """The finalists of one workload.

    Attributes:
        rounds: How often each finalist has its turn, timed as `timing` says; the fastest one more often.
    """

    traces: Sequence[Json]
    rounds: int

    @property
    def digest(self) -> str:
        """The digest of what is measured and how, for one workload on one target."""
        how = [self.rounds, _MAX_ROUNDS_FACTOR, self.rules_version, self.timing]
        return digest_of([self.traces, *how])

    def time(self, kernels: Sequence[Any], argument_lists: Sequence[list[Any]]) -> Json:
        """Return what `time_in_turns` does of the untuned kernel, which is the first one, and the finalists."""
        untuned, *finalists = kernels
        return time_in_turns(untuned, finalists, argument_lists, self.timing, self.rounds)


class FinalistTimes(NamedTuple):
    """Seconds of the finalists of one workload, as a `FinalistsRecord` has them.

    Attributes:
        error: The reason why nothing was measured; otherwise empty.
        wrong: What is wrong with the values of finalists, by their places; they have no samples.
    """

    rule: str = "none"
    untuned: tuple[float, ...] = ()
    samples: tuple[tuple[float, ...], ...] = ()
    error: str = ""
    sizes: tuple[tuple[tuple[float, ...], ...], ...] = ()
    wrong: Mapping[int, str] = MappingProxyType({})


def read_or_measure(
    request: FinalistsRequest, ledger: WorkloadLedger, measure: Callable[[], FinalistTimes]
) -> FinalistTimes:
    """Return the times that the ledger has of these finalists, or measure and record them.

    Finalists that are nearly equal would otherwise win by turns, and each time give another library.
    Those with wrong values are banned.

    Raises:
        StoreError: The times cannot be recorded.
    """
    known = ledger.finalists.get(request.digest)
    if known is not None:
        return FinalistTimes(known.rule, known.untuned, known.samples, sizes=known.sizes)
    times = measure()
    bans = [
        Ban(trial_id(request.traces[place]), reason, timestamp())
        for place, reason in times.wrong.items()
    ]
    if not times.error:
        fields = (times.rule, times.untuned, times.samples)
        ledger.add([*bans, FinalistsRecord(request.digest, *fields, timestamp(), times.sizes)])
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

    Raises:
        StageError: The run was cancelled.
    """
    outcome = call_alone(
        fork_server,
        time_finalists,
        request.to_json(),
        device=device,
        locks=locks,
        timeout_s=timeout_s,
        log=log,
    )
    if outcome.kind != "ok":
        return FinalistTimes(error=outcome.message)
    return from_json(FinalistTimes, outcome.value)


# ---------------------------------------------------------------- in the child


def time_finalists(payload: Json, emit: Emit) -> Json:
    """Build and time the finalists of a `FinalistsRequest`: the entry point of the child.

    Returns:
        `FinalistTimes` as JSON.
    """
    import tvm

    del emit
    request = FinalistsRequest.from_json(payload)
    request.load_compiler()
    scheduled, rule = request.schedule(None)
    untuned = request.build(scheduled)
    kernels = [_build_or_none(request, trace) for trace in request.traces]
    measure.use_threads(request.target)
    mod = tvm.ir.load_json(request.mod)
    reasons = [kernel and find_wrong_values(mod, untuned, kernel) for kernel in kernels]
    kernels = [None if reason else kernel for kernel, reason in zip(kernels, reasons, strict=True)]
    argument_lists = request.place_arguments(request.make_arguments())
    times = request.time([untuned, *kernels], argument_lists)
    wrong = {str(place): reason for place, reason in enumerate(reasons) if reason}
    return {"rule": rule, **times, "wrong": wrong}


def _build_or_none(request: FinalistsRequest, trace: Json) -> Any:
    """Return a built finalist; None when its trace does not apply, so that the others go on."""
    try:
        return request.build(request.schedule(trace)[0])
    # TVM raises anything here.
    except Exception:
        return None


def find_wrong_values(mod: tvm.IRModule, untuned: Any, kernel: Any) -> str:
    """Return how values of a kernel differ from those of the untuned one; empty if they do not.

    A schedule for open sizes is found by its times at a few of them. It is called at these, and at one that no tile
    divides. One for a device is called at its sizes: where threads miss a barrier, the driver does not say so.

    Args:
        mod: The workload; of one for a CPU with fixed sizes nothing is compared here.
        untuned: The untuned kernel.
        kernel: The kernel with that schedule.
    """
    if isinstance(kernel, measure.LibraryKernel):
        pairs = zip(untuned.compute(), kernel.compute(), strict=True)
        return "" if all(starmap(_agree, pairs)) else "its values are wrong"
    for sizes in list_compared_sizes(mod):
        arrays = []
        for built in (untuned, kernel):
            arguments = measure.make_arguments(mod, sizes)
            built(*arguments)
            arrays.append([entry.numpy() for entry in arguments if not isinstance(entry, int)])
        if not all(starmap(_agree, zip(*arrays, strict=True))):
            return f"its values are wrong at sizes {', '.join(map(str, sizes.values()))}"
    return ""


def _agree(expected: Array, actual: Array) -> bool:
    """Return whether values differ by no more than sums in another order."""
    import numpy as np

    if np.array_equal(expected, actual):
        return True
    share = _MAX_ERROR * (10 if expected.dtype == "float16" else 1)
    expected, actual = expected.astype("float64"), actual.astype("float64")
    scale = np.max(np.abs(expected), initial=1.0, where=np.isfinite(expected))
    limit = share * float(scale)
    return np.allclose(actual, expected, rtol=0.0, atol=limit, equal_nan=True)


def time_in_turns(
    untuned: Any,
    kernels: Sequence[Any],
    argument_lists: Sequence[list[Any]],
    timing: Timing,
    rounds: int,
) -> Json:
    """Return the `untuned` times and the `samples` of kernels; with several sizes, also `sizes`.

    Args:
        untuned: The untuned kernel.
        kernels: The finalists; None for one that could not be built.
        argument_lists: Their arguments, on the device, for each size.
        timing: How to time one sample.
        rounds: Samples of each finalist, at least.
    """
    once = timing._replace(repeat=1)
    samples: dict[int, list[list[float]]] = {}

    def measure_at_all_sizes(kernel: Any, how: Timing) -> float:
        times = [measure.time_kernel(kernel, arguments, how)[:1] for arguments in argument_lists]
        rows = samples.setdefault(id(kernel), [[] for _ in times])
        for row, seconds in zip(rows, times, strict=True):
            row += seconds
        return geometric_means(times)[0]

    # One call of a kernel without a schedule can take seconds, and then one is enough.
    first_look = measure_at_all_sizes(untuned, Timing(1, 1, 0))
    is_slow = first_look > _SLOW_S
    if not is_slow:
        samples.clear()
    turns = [None] if is_slow else [untuned]
    known = [first_look] if is_slow else []
    times = run_rounds(
        [*turns, *kernels], lambda kernel: measure_at_all_sizes(kernel, once), rounds, known
    )
    if len(argument_lists) == 1:
        return times
    return {**times, "sizes": [samples.get(id(kernel), []) for kernel in (untuned, *kernels)]}


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
        seconds = take_turns([partial(measure_kernel, kernel) for _, kernel in order], number)
        for (index, _), value in zip(order, seconds, strict=True):
            samples[index].append(value)
    return {"untuned": samples[0], "samples": samples[1:]}


def _is_decided(samples: Sequence[Sequence[float]]) -> bool:
    """Return whether the fastest finalist is known to beat the untuned kernel, or has not gained so far."""
    measured = [times for times in samples[1:] if times]
    if not measured:
        return True
    times = pair_with_untuned(min(measured, key=median), samples[0])
    # more rounds seldom make a finalist faster that was not in the first ones, and take seconds
    return times.is_decided or times.ratio >= 1 or times.limits[0] > 1 - MIN_GAIN


def pair_with_untuned(samples: Sequence[float], untuned: Sequence[float]) -> PairedTimes:
    """Return the times of a finalist beside those of the untuned kernel, round by round."""
    # Of a slow untuned kernel there is one time.
    same_rounds = untuned[: len(samples)] if len(untuned) > 1 else tuple(untuned) * len(samples)
    return PairedTimes(tuple(samples), tuple(same_rounds))
