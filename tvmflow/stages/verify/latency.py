"""Latencies of a library, its variants, other runtimes and the reference; performance gates."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Final, cast

import numpy as np
import psutil

from tvmflow.compiler import LoweredModel, ScheduledModel, load_intrinsics, lower
from tvmflow.core.errors import EnvironmentProblem, StageError
from tvmflow.core.formatting import size_text
from tvmflow.core.statistics import (
    MIN_PAIRS,
    PairedTimes,
    is_decided,
    measure_interleaved,
    median_limits,
    summarize,
)
from tvmflow.core.types import Array, Feed
from tvmflow.frontends.peers import PEERS, open_peer
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import at_sizes
from tvmflow.recipe.sections import QUANTITIES
from tvmflow.runtime import bundles
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.runtime.weights import read_safetensors
from tvmflow.stages import build
from tvmflow.stages.choose import read_choices
from tvmflow.stages.lower import LOWERED_ROLE
from tvmflow.stages.verify import comparison
from tvmflow.stages.verify.libraries import (
    Library,
    LocalLibrary,
    Timed,
    TimedLibrary,
)
from tvmflow.stages.verify.reference_run import Case
from tvmflow.stages.verify.verdict import (
    LATENCY,
    MEMORY,
    SIZE,
    VERSUS,
    ComparedRuntime,
    GateResult,
    GateState,
    Latency,
    Profile,
    Speedup,
    Verdict,
)
from tvmflow.stages.verify_settings import LOCAL, UNTIMED_REASONS
from tvmflow.targets.devices import CPU, exclusive
from tvmflow.targets.tvm_target import make_target

# The interval to poll for spinning threads: Linux counts CPU time in steps of 0.01 s, and a spinning thread uses at
# least one step in this time.
_POLL_S: Final = 0.02
_MAX_SETTLE_S: Final = 2.0
# Slow models, such as an untuned ResNet with seconds per call, have fewer repeats, but at least this many.
_MIN_REPEATS: Final = 3
SECONDS_PER_SUBJECT: Final = 20.0
MIN_SECONDS_PER_REPEAT: Final = 0.02
# With many sizes, each is measured briefly: this many repeats, or a single call if it takes longer than `_LONG_CALL_S`.
_BRIEF_REPEATS: Final = 5
_LONG_CALL_S: Final = 0.5
# The maximum number of rounds of a profile. Each round has profiled calls, and this many plain calls.
_PROFILE_ROUNDS: Final = 9
_PLAIN_CALLS: Final = 3
# Profiling ends when shares vary by no more than this: reports show whole percents.
_EQUAL_SHARES: Final = 0.01
# A library and another runtime usually differ so much that a few pairs show which is faster. Measuring goes on until
# the ratio is precise as well, or this many pairs have been measured.
_PRECISE_PAIRS: Final = 12
_MAX_PAIRS: Final = 64
# The time of a reference was not requested, so it must not delay a run. If this many pairs all lie far on one side,
# more pairs would only make the ratio more precise.
_REFERENCE_PAIRS: Final = 5
_SECONDS_PER_REFERENCE: Final = 1.0
# The minimum number of rounds of a profile, and the seconds after which no further round starts: with long
# calls, the shares of kernels agree after few rounds.
_MIN_PROFILE_ROUNDS: Final = 3
_SECONDS_PER_PROFILE: Final = 1.0


def add_latencies(verdict: Verdict, library: Library, case: Case) -> None:
    """Measure the library (if it is tuned, interleaved with the untuned model), and each part."""
    assert library.timed is not None
    with exclusive_devices(case):
        _measure_variants(verdict, library.timed, case.read_feed(library), case)
        for name, part_feed in part_feeds(library, case.tensors).items():
            part = library.parts[name].timed
            assert part is not None
            latency = measure(part, part_feed, case.settings.verify.repeat)
            verdict.setdefault("parts", {}).setdefault(name, {})["latency"] = latency


def part_feeds(library: Library, tensors: Mapping[str, Array]) -> dict[str, Feed]:
    """Return the first batch of each part; a part runs only if its outputs are not known yet."""
    known = dict(tensors)
    feeds = {}
    for name, part in library.parts.items():
        feeds[name] = {spec.name: known[spec.name] for spec in part.inputs}
        if any(spec.name not in known for spec in part.outputs):
            known |= part.run_all([feeds[name]])[0]
    return feeds


@contextlib.contextmanager
def exclusive_devices(case: Case) -> Iterator[None]:
    """Lock the devices that the library runs on, and this machine's CPU if it calls the library."""
    devices = [machine.device for machine in case.settings.machines.values()]
    if case.settings.run_on == LOCAL:
        devices.append(dict(CPU))
    with contextlib.ExitStack() as stack:
        # lock in a fixed order, so that two runs cannot deadlock
        for _, device in sorted({device["kind"]: device for device in devices}.items()):
            stack.enter_context(exclusive(case.context.locks, device))
        yield


def _measure_variants(verdict: Verdict, library: TimedLibrary, feed: Feed, case: Case) -> None:
    kernels = case.context.inputs.get("build/kernels.json")
    rules: dict[str, str] = json.loads(kernels.read_text()) if kernels else {}
    if build.TUNED in rules.values() or read_choices(case.context.inputs):
        inputs, has_choices = case.context.inputs, bool(read_choices(case.context.inputs))
        lowered = lower_untuned(case) if has_choices else LoweredModel.read(inputs[LOWERED_ROLE])
        [scheduled] = _schedule_by_rules([lowered], case)
        untuned = library.load_variant(scheduled)
        times = measure_variant(library, untuned, feed)
        verdict["latency"] = {
            "library": make_latency(times.first),
            "untuned": make_latency(times.second),
        }
        verdict["speedup"] = make_speedup(times)
    else:
        verdict["latency"] = {"library": measure(library, feed, case.settings.verify.repeat)}
    profile = measure_profile(library, feed, rules) if rules else None
    if profile is not None:
        verdict["profile"] = profile


def measure_profile(library: TimedLibrary, feed: Feed, rules: Mapping[str, str]) -> Profile | None:
    """Profile a library, interleaved with plain calls, until rounds agree or time is over."""
    profiles: list[Mapping[str, float]] = []
    calls_s: list[float] = []
    deadline = time.monotonic() + _SECONDS_PER_PROFILE
    while len(profiles) < _MIN_PROFILE_ROUNDS or (
        len(profiles) < _PROFILE_ROUNDS
        and time.monotonic() < deadline
        and not _is_stable(profiles[-_MIN_PROFILE_ROUNDS:], rules)
    ):
        profiles.append(library.profile(feed))
        if not profiles[0]:
            return None
        # single calls, like the profiled ones: a mean of many calls includes other work of the machine
        calls_s += library.latency(feed, repeat=_PLAIN_CALLS, min_seconds=0.0)
    seconds = {name: median(times.get(name, 0.0) for times in profiles) for name in profiles[0]}
    profile = make_profile(seconds, rules, median(calls_s))
    return None if profile is None else {**profile, "rounds": len(profiles)}


def _is_stable(profiles: Sequence[Mapping[str, float]], kernels: Iterable[str]) -> bool:
    totals = [sum(seconds.get(name, 0.0) for name in kernels) for seconds in profiles]
    if not all(totals):
        return False
    return all(
        max(shares) - min(shares) <= _EQUAL_SHARES
        for shares in (
            [
                seconds.get(name, 0.0) / total
                for seconds, total in zip(profiles, totals, strict=True)
            ]
            for name in kernels
        )
    )


def make_profile(
    seconds: Mapping[str, float], rules: Mapping[str, str], call_s: float
) -> Profile | None:
    """Return the shares of kernels and of schedule rules in a call; None if no kernel was timed.

    `call_s` is the time of a plain call. If all profiled kernels together take longer, because reporting them takes
    time, their shares add up to 1.
    """
    kernels_s = sum(seconds.get(name, 0.0) for name in rules)
    if not kernels_s:
        return None
    total_s = max(kernels_s, call_s)
    shares = {name: round(seconds.get(name, 0.0) / total_s, 4) for name in rules}
    by_rule: dict[str, float] = {}
    for name, rule in rules.items():
        by_rule[rule] = round(by_rule.get(rule, 0.0) + shares[name], 4)
    kernels = dict(sorted(shares.items(), key=lambda entry: (-entry[1], entry[0])))
    without_rule = {
        name: share for name, share in kernels.items() if rules[name] in build.WITHOUT_RULE
    }
    return {
        "kernels": kernels,
        "rules": by_rule,
        "without_rule": without_rule,
        "between_kernels": round(1 - kernels_s / total_s, 4),
    }


def measure_variant(
    library: Timed, variant: Timed, feed: Feed, seconds: float = SECONDS_PER_SUBJECT
) -> PairedTimes:
    """Time a library interleaved with a variant, until it is clear which is faster."""

    def measure_once(timed: Timed) -> float:
        return timed.latency(feed, repeat=1, min_seconds=MIN_SECONDS_PER_REPEAT)[0]

    settle()
    return measure_interleaved(
        lambda: measure_once(library), lambda: measure_once(variant), seconds=seconds
    )


def measure_peer(
    library: Timed,
    feed: Feed,
    peer: Timed,
    peer_feed: Mapping[str, Array],
    limit: float | None = None,
    *,
    is_requested: bool = True,
) -> PairedTimes:
    """Time the library interleaved with a runtime in another process, until it is clear which is faster.

    Before one of them is called, the other's threads must have stopped spinning.
    """
    last: Timed | None = None

    def measure_once(timed: Timed, inputs: Mapping[str, Array]) -> float:
        nonlocal last
        if timed is not last:
            settle()
        last = timed
        return timed.latency(dict(inputs), repeat=1, min_seconds=MIN_SECONDS_PER_REPEAT)[0]

    return measure_interleaved(
        lambda: measure_once(library, feed),
        lambda: measure_once(peer, peer_feed),
        seconds=SECONDS_PER_SUBJECT if is_requested else _SECONDS_PER_REFERENCE,
        min_pairs=MIN_PAIRS if limit else 3,
        precise_pairs=_PRECISE_PAIRS if is_requested else MIN_PAIRS,
        clear_pairs=0 if is_requested else _REFERENCE_PAIRS,
        max_pairs=_MAX_PAIRS if is_requested else _PRECISE_PAIRS,
        bound=limit or 1.0,
    )


def make_speedup(times: PairedTimes) -> Speedup:
    """Return the speedup of A over B."""
    low, high = times.limits
    return {
        "median": 1 / times.ratio,
        "low": 1 / high,
        "high": 1 / low,
        "pairs": len(times.first),
        "is_slower": times.is_slower,
    }


def measure(timed: Timed, feed: Feed, repeat: int) -> Latency:
    """Measure the latency in `repeat` repeats, or in fewer if a call takes long."""
    settle()
    once_s = timed.latency(feed, repeat=1, min_seconds=0.0)[0]
    affordable = int(SECONDS_PER_SUBJECT / max(once_s, MIN_SECONDS_PER_REPEAT))
    repeats = max(_MIN_REPEATS, min(repeat, affordable))
    return make_latency(timed.latency(feed, repeat=repeats, min_seconds=MIN_SECONDS_PER_REPEAT))


def measure_briefly(timed: Timed, feed: Mapping[str, Array]) -> float:
    """Return the seconds of a call: the median of a few repeats, or of one call if it takes long."""
    settle()
    once_s = timed.latency(dict(feed), repeat=1, min_seconds=0.0)[0]
    if once_s > _LONG_CALL_S:
        return once_s
    return median(
        timed.latency(dict(feed), repeat=_BRIEF_REPEATS, min_seconds=MIN_SECONDS_PER_REPEAT)
    )


def make_latency(seconds: Sequence[float]) -> Latency:
    """Return the statistics of the repeats of a measurement."""
    return cast(Latency, {**summarize(seconds)._asdict(), "repeats": len(seconds)})


def settle() -> None:
    """Wait until no thread of an earlier measurement spins, as threads of TVM and OpenMP do."""
    # planning imports this module
    # list children once: listing takes milliseconds, which would look like a spinning thread
    children = psutil.Process().children(recursive=True)
    deadline = time.monotonic() + _MAX_SETTLE_S

    def busy_seconds() -> float:
        seconds = time.process_time() - time.thread_time()
        for child in children:
            with contextlib.suppress(psutil.Error):
                seconds += sum(child.cpu_times()[:2])
        return seconds

    now_s = busy_seconds()
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        before_s, now_s = now_s, busy_seconds()
        if now_s - before_s < _POLL_S / 4:
            return


def lower_untuned(case: Case, sizes: Mapping[str, int] | None = None) -> LoweredModel:
    """Lower the model without tuned choices; with `sizes`, as a fixed-shape model."""
    settings = case.settings
    assert settings.lowering is not None, "the model is in one piece"
    mod = ir.load_module(case.context.inputs["import/model.json"])
    mod = mod if sizes is None else at_sizes(mod, sizes)
    return lower(mod, make_target(settings.machines[""].tvm), settings.lowering)


def schedule_each(
    combinations: Iterable[Mapping[str, int]], case: Case
) -> Iterator[ScheduledModel]:
    """Yield an untuned fixed-shape build of a dynamic model for each combination of sizes."""
    return _schedule_by_rules((lower_untuned(case, sizes) for sizes in combinations), case)


def _schedule_by_rules(models: Iterable[LoweredModel], case: Case) -> Iterator[ScheduledModel]:
    """Yield models scheduled by the rules; weights are read once for all."""
    params = read_safetensors(case.context.inputs["import/params.safetensors"])
    target, schedules = case.settings.machines[""].tvm, case.settings.schedules
    assert schedules is not None
    load_intrinsics(target)
    for model in models:
        yield model.schedule_untuned(params, target, schedules)


# ---------------------------------------------------------------- gates
# Limits of latency, memory, size, and latency relative to other runtimes.

_MAX_REPEATS: Final = 64
_NO_MEMORY: Final = "only a C library that runs on this machine says what it allocates"


def check_gates(verdict: Verdict, library: Library, case: Case) -> dict[str, GateResult]:
    """Return the result of each gate of the recipe, by its field in `verify`."""
    checks, gates = case.settings.verify, dict[str, GateResult]()
    limits = {name: read(getattr(checks, name) or "0") for name, read in QUANTITIES.items()}
    if limits[LATENCY]:
        with exclusive_devices(case):
            gates[LATENCY] = _check_latency(verdict, library, limits[LATENCY], case)
    if limits[MEMORY] or limits[SIZE]:
        whole = bundles.read_bundle(case.context.inputs["export/module.tvmflow"])
        size = sum(len(part.library) for part in (whole.parts or {"": whole}).values())
        if limits[MEMORY]:
            gates[MEMORY] = _check_memory(library, case.tensors, limits[MEMORY], size)
        if limits[SIZE]:
            gates[SIZE] = _judge(limits[SIZE], size, (size, size))
    for name, limit in checks.max_vs.items():
        gates[f"{VERSUS}.{name}"] = _check_versus(limit, verdict["compared"][name])
    return gates


def _judge(
    limit: float, value: float, interval: tuple[float, float], *, count: int = 0, note: str = ""
) -> GateResult:
    low, high = interval
    state: GateState = (
        "failed" if low > limit else "passed" if high <= limit else "within the noise"
    )
    result: GateResult = {"limit": limit, "value": value, "low": low, "high": high, "state": state}
    if count:
        result["count"] = count
    if note:
        result["note"] = note
    return result


def _not_measured(limit: float, reason: str) -> GateResult:
    return {"limit": limit, "state": "not measured", "note": reason}


def _check_latency(verdict: Verdict, library: Library, limit: float, case: Case) -> GateResult:
    """Measure until the latency is clearly above or below the limit; measure a failure a second time.

    The judged latency replaces the verdict's, so that reports show a single latency.
    """
    if library.timed is None:
        return _not_measured(limit, UNTIMED_REASONS[case.settings.run_on])
    feed = case.read_feed(library)
    for _ in range(2):
        # other load on the machine has often ended before the second measurement
        settle()
        seconds = _measure(library.timed, feed, limit)
        verdict["latency"]["library"] = latency = make_latency(seconds)
        interval = median_limits(seconds)
        result = _judge(limit, latency["median"], interval, count=len(seconds))
        if result["state"] != "failed":
            break
    return result


def _measure(timed: Timed, feed: Feed, limit: float) -> list[float]:
    seconds: list[float] = []
    deadline = time.monotonic() + SECONDS_PER_SUBJECT
    while len(seconds) < _MAX_REPEATS:
        is_enough = len(seconds) >= MIN_PAIRS
        if is_enough and (is_decided(median_limits(seconds), limit) or time.monotonic() > deadline):
            break
        seconds += timed.latency(feed, repeat=1, min_seconds=MIN_SECONDS_PER_REPEAT)
    return seconds


def _check_memory(
    library: Library, tensors: Mapping[str, Array], limit: float, library_bytes: int
) -> GateResult:
    feeds = part_feeds(library, tensors) or {"": dict(tensors)}
    context_bytes = 0
    for name, feed in feeds.items():
        part = library.parts[name] if name else library
        program = part.module.program if isinstance(part, LocalLibrary) else None
        if not isinstance(program, NativeProgram):
            return _not_measured(limit, _NO_MEMORY)
        inputs = [np.asarray(feed[spec.name], order="C") for spec in part.inputs]
        context_bytes += program.measure_memory(inputs)
    total = library_bytes + context_bytes
    note = f"the library {size_text(library_bytes)}, a context {size_text(context_bytes)}"
    return _judge(limit, total, (total, total), note=note)


def _check_versus(limit: float, runtime: ComparedRuntime) -> GateResult:
    if "speedup" not in runtime:
        return _not_measured(limit, f"{runtime['name']} is not timed: {runtime['not_timed']}")
    speedup = runtime["speedup"]
    interval = 1 / speedup["high"], 1 / speedup["low"]
    name, count = runtime["name"], speedup["pairs"]
    return _judge(limit, 1 / speedup["median"], interval, count=count, note=name)


# ---------------------------------------------------------------- other runtimes
# Each runtime runs in its own process, is compared with the reference and timed.


def add_reference_time(verdict: Verdict, library: Library, case: Case) -> None:
    """Time the reference interleaved with the library, except if it is a requested runtime."""
    requested = case.settings.compare.runtimes if case.settings.compare else ()
    reference = case.reference.timed if case.reference else None
    if library.timed is None or reference is None:
        return
    if any(PEERS[name].is_reference for name in requested):
        return
    feed = case.read_feed(library)
    with exclusive_devices(case):
        peer_feed = {**feed, **case.model.bound}
        times = measure_peer(library.timed, feed, reference, peer_feed, is_requested=False)
    verdict["latency"]["reference"] = make_latency(times.second)
    verdict["reference_speedup"] = make_speedup(times)


def add_compared(verdict: Verdict, library: Library, case: Case) -> None:
    """Compare the requested runtimes with the reference, and time them interleaved with the library."""
    compare, run_on = case.settings.compare, case.settings.run_on
    if compare is None or not (compare.runtimes or compare.missing):
        return
    compared: dict[str, ComparedRuntime] = {}
    for name in compare.runtimes:
        if library.timed is None:
            compared[name] = _not_timed(name, UNTIMED_REASONS[run_on])
        elif run_on != LOCAL:
            compared[name] = _not_timed(name, "it would not run on the library's machine")
        else:
            compared[name] = _run(name, library.timed, library, case)
    for name in compare.missing:
        traits = PEERS[name].traits
        compared[name] = _not_timed(name, f"it is not installed ({traits.install})")
    verdict["compared"] = compared


def _not_timed(name: str, reason: str) -> ComparedRuntime:
    return {"name": PEERS[name].traits.name, "not_timed": reason}


def _run(name: str, timed: Timed, library: Library, case: Case) -> ComparedRuntime:
    settings, context, model, data, reference = case
    scratch = context.work / name
    scratch.mkdir(exist_ok=True)
    own_feed = case.read_feed(library)
    running = reference.timed if reference and PEERS[name].is_reference else None
    try:
        with (
            exclusive_devices(case),
            contextlib.nullcontext(running)
            if running
            else open_peer(
                name,
                model.files,
                model.framework_inputs,
                model.outputs,
                threads=settings.threads,
                precision=settings.precision,
                scratch=scratch,
            ) as peer,
        ):
            if peer.note:
                return _not_timed(name, peer.note)
            runtime: ComparedRuntime = {"name": peer.name}
            if reference is not None:
                outputs = [peer.run_as_timed({**feed, **model.bound}) for feed in data.batches]
                runtime["outputs"] = comparison.compare_batches(
                    outputs[0], outputs, reference.results.outputs, data, reference.tolerance
                )
            limit = settings.verify.max_vs.get(name)
            times = measure_peer(timed, own_feed, peer, {**own_feed, **model.bound}, limit)
            return {
                **runtime,
                "latency": make_latency(times.second),
                "library": make_latency(times.first),
                "speedup": make_speedup(times),
            }
    except (StageError, EnvironmentProblem) as error:
        return _not_timed(name, str(error))
