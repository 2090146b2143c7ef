"""Gates of a recipe: limits of latency, memory and size, measured and described."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Final

from tvmflow.core.formatting import count_text, latency_text, size_text
from tvmflow.core.statistics import MIN_PAIRS, is_decided, median_limits
from tvmflow.core.types import Array, Feed
from tvmflow.recipe.sections import QUANTITIES
from tvmflow.runtime import bundles
from tvmflow.stages.base import StageContext
from tvmflow.stages.verify.latency import (
    MIN_SECONDS_PER_REPEAT,
    SECONDS_PER_SUBJECT,
    exclusive_devices,
    make_latency,
    part_feeds,
    settle,
)
from tvmflow.stages.verify.libraries import UNTIMED_REASONS, Library, LocalLibrary, Timed
from tvmflow.stages.verify.verdict import ComparedRuntime, GateResult, Verdict
from tvmflow.stages.verify_settings import VerifySettings

LATENCY: Final = "max_latency"
MEMORY: Final = "max_memory"
SIZE: Final = "max_size"
VERSUS: Final = "max_vs"

PASSED: Final = "passed"
FAILED: Final = "failed"
NOISE: Final = "within the noise"
NOT_MEASURED: Final = "not measured"

_MAX_REPEATS: Final = 64
_NO_MEMORY: Final = "only a C library that runs on this machine says what it allocates"
_FASTER: Final = "a longer search finds faster kernels (tune.trials), and `tvmflow show kernels` says what takes the time"
_SMALLER: Final = "weights take less with `quantize` or kernels.precision"
_REMEDIES: Final[Mapping[str, str]] = {
    LATENCY: _FASTER,
    VERSUS: _FASTER,
    MEMORY: _SMALLER,
    SIZE: _SMALLER,
}


def check_gates(
    verdict: Verdict,
    library: Library,
    tensors: Mapping[str, Array],
    settings: VerifySettings,
    context: StageContext,
) -> dict[str, GateResult]:
    """Return the result of every gate that the recipe has, by its field in `verify`.

    `tensors` are the first batch, and the tensors of it that the reference gave.
    """
    checks, gates = settings.verify, dict[str, GateResult]()
    limits = {name: read(getattr(checks, name) or "0") for name, read in QUANTITIES.items()}
    if limits[LATENCY]:
        with exclusive_devices(settings, context):
            gates[LATENCY] = _check_latency(verdict, library, tensors, limits[LATENCY], settings)
    if limits[MEMORY] or limits[SIZE]:
        whole = bundles.read_bundle(context.inputs["export/module.tvmflow"])
        size = sum(len(part.library) for part in (whole.parts or {"": whole}).values())
        if limits[MEMORY]:
            gates[MEMORY] = _check_memory(library, tensors, limits[MEMORY], size)
        if limits[SIZE]:
            gates[SIZE] = _judge(limits[SIZE], size, (size, size))
    for name, limit in checks.max_vs.items():
        gates[f"{VERSUS}.{name}"] = _check_versus(limit, verdict["compared"][name])
    return gates


def _judge(
    limit: float, value: float, interval: tuple[float, float], *, count: int = 0, note: str = ""
) -> GateResult:
    """Return the result for a value that lies in an interval with confidence."""
    low, high = interval
    state = FAILED if low > limit else PASSED if high <= limit else NOISE
    result: GateResult = {"limit": limit, "value": value, "low": low, "high": high, "state": state}
    if count:
        result["count"] = count
    if note:
        result["note"] = note
    return result


def _not_measured(limit: float, reason: str) -> GateResult:
    return {"limit": limit, "state": NOT_MEASURED, "note": reason}


def _check_latency(
    verdict: Verdict,
    library: Library,
    tensors: Mapping[str, Array],
    limit: float,
    settings: VerifySettings,
) -> GateResult:
    """Measure until it is clear on which side of the limit the latency lies; twice, before it fails.

    The library has one latency: that of the verdict becomes the one that is judged.
    """
    if library.timed is None:
        return _not_measured(limit, UNTIMED_REASONS[settings.run_on])
    feed = {spec.name: tensors[spec.name] for spec in library.inputs}
    for _ in range(2):
        # what disturbs the machine for some seconds has often ended before the second time
        settle()
        seconds = _measure(library.timed, feed, limit)
        verdict["latency"]["library"] = latency = make_latency(seconds)
        interval = median_limits(seconds)
        result = _judge(limit, latency["median"], interval, count=len(seconds))
        if result["state"] != FAILED:
            break
    return result


def _measure(subject: Timed, feed: Feed, limit: float) -> list[float]:
    seconds: list[float] = []
    deadline = time.monotonic() + SECONDS_PER_SUBJECT
    while len(seconds) < _MAX_REPEATS:
        is_enough = len(seconds) >= MIN_PAIRS
        if is_enough and (is_decided(median_limits(seconds), limit) or time.monotonic() > deadline):
            break
        seconds += subject.latency(feed, repeat=1, min_seconds=MIN_SECONDS_PER_REPEAT)
    return seconds


def _check_memory(
    library: Library, tensors: Mapping[str, Array], limit: float, library_bytes: int
) -> GateResult:
    """Add up the library and the contexts of its parts, which are in memory together."""
    import numpy as np

    from tvmflow.runtime.c_loader import NativeProgram

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


# ---------------------------------------------------------------- sentences


def amount_text(gate: str, amount: float) -> str:
    """Return a limit or a figure in the unit of its gate."""
    if gate == LATENCY:
        return latency_text(amount)
    return size_text(amount) if gate in (MEMORY, SIZE) else f"{amount:.3g}"


def describe_gate(gate: str, result: GateResult) -> str:
    """Return what was measured for a gate, with its limit."""
    limit = f"verify.{gate} {amount_text(gate, result['limit'])}"
    if result["state"] == NOT_MEASURED:
        return f"{limit} is not measured: {result['note']}"
    subject = _SUBJECTS.get(gate) or f"latency relative to {result['note']}"
    notes = [result["note"]] if gate == MEMORY else []
    if "count" in result:
        low, high = (amount_text(gate, end) for end in (result["low"], result["high"]))
        times = count_text(result["count"], "pair" if gate.startswith(VERSUS) else "repeat")
        notes.append(f"{low} to {high}, {times}")
    figure = amount_text(gate, result["value"]) + (f" ({', '.join(notes)})" if notes else "")
    verb = {FAILED: "above", PASSED: "within", NOISE: "within the noise of"}[result["state"]]
    return f"{subject} {figure} is {verb} {limit}"


_SUBJECTS: Final[Mapping[str, str]] = {
    LATENCY: "latency",
    MEMORY: "memory",
    SIZE: "the library's size",
}


def list_rows(verdict: Verdict) -> Iterator[tuple[str, str, str, str]]:
    """Yield the field, the limit, the figure and the state of each gate, for tables."""
    for gate, result in verdict.get("gates", {}).items():
        value = amount_text(gate, result["value"]) if "value" in result else "–"
        yield f"verify.{gate}", amount_text(gate, result["limit"]), value, result["state"]


def list_exceeded(verdict: Verdict) -> list[str]:
    """Return a sentence for every gate that is exceeded or not measured."""
    return [
        describe_gate(gate, result)
        for gate, result in verdict.get("gates", {}).items()
        if result["state"] in (FAILED, NOT_MEASURED)
    ]


def list_undecided(verdict: Verdict) -> Iterator[str]:
    """Yield a sentence for every gate whose limit lies within the noise."""
    for gate, result in verdict.get("gates", {}).items():
        if result["state"] == NOISE:
            yield f"{describe_gate(gate, result)}, which passes"


def list_remedies(verdict: Verdict) -> Iterator[str]:
    """Yield what may help against the gates that fail."""
    gates = verdict.get("gates", {})
    failed = [gate.partition(".")[0] for gate in gates if gates[gate]["state"] == FAILED]
    yield from dict.fromkeys(_REMEDIES[gate] for gate in failed)
    if any(result["state"] == NOT_MEASURED for result in gates.values()):
        yield "leave a gate out where nothing measures it"
    elif failed:
        yield "or raise the limit"
