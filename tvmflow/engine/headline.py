"""The headline of a run: one line that says what was achieved, and nothing that lies within the noise. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from tvmflow.core.formatting import count_text, latency_text, size_text
from tvmflow.engine.builds import Build, Peer, Speedup

# From here on a factor says more than a percentage.
_LEAST_FACTOR: Final = 1.095
_WHOLE_FACTOR: Final = 9.95
# Limits that are so far apart stand in the headline themselves: their median says too little.
_WIDE: Final = 1.5
_UNTUNED: Final = "the same model untuned"
_REJECTED: Final = "rejected"
_VERDICTS: Final = {
    "verified": "verified",
    _REJECTED: "REJECTED",
    "not verified": "NOT VERIFIED",
}


def make_headline(builds: Sequence[Build]) -> str:
    """Return the headline of some builds; empty when nothing is known of them."""
    if len(builds) == 1:
        parts = headline_parts(builds[0])
        return f"{builds[0].name}: {', '.join(parts)}" if parts else ""
    return "; ".join(_summarize(builds)) if any(map(headline_parts, builds)) else ""


def headline_parts(build: Build) -> tuple[str, ...]:
    """Return what the headline says of a build: its speed, its verdict, its accuracy and its size, as far as known."""
    parts = [_speed_text(build), verdict_text(build)]
    if build.accuracy is not None:
        parts.append(f"accuracy {build.accuracy:.2%}")
    if build.size_bytes is not None:
        parts.append(size_text(build.size_bytes))
    return tuple(part for part in parts if part)


def verdict_text(build: Build) -> str:
    """Return the verdict on a library, bad ones in capitals; `FAILED` when it was not made, empty when it is not known."""
    if build.verdict:
        return _VERDICTS[build.verdict]
    if build.problems:
        return "FAILED"
    if build.is_stopped:
        return "stopped"
    return "skipped" if build.is_skipped else ""


def _speed_text(build: Build) -> str:
    """Return how fast a library is: beside the fastest other runtime, else untuned, else in seconds.

    Of one that was rejected nothing is said: what computes wrong numbers is not fast.
    """
    if build.verdict == _REJECTED:
        return ""
    peer = choose_peer(build)
    if peer is not None and peer.speedup is not None:
        return speedup_text(peer.speedup, peer.name)
    if build.tuning_speedup is not None:
        return speedup_text(build.tuning_speedup, _UNTUNED)
    return "" if build.latency_s is None else f"{latency_text(build.latency_s)} a call"


def choose_peer(build: Build) -> Peer | None:
    """Return the fastest runtime that was measured in turns with a library, else the fastest one; None without any.

    The speed of one whose outputs differ from the reference's is no measure.
    """
    compared = [peer for peer in build.peers if peer.speedup is not None and not peer.differs]
    in_turns = [peer for peer in compared if peer.speedup and peer.speedup.pairs]
    return min(in_turns or compared, key=lambda peer: peer.latency_s, default=None)


def speedup_text(speedup: Speedup, name: str) -> str:
    """Return a speedup over something as people say it, without a claim that the noise does not allow."""
    judgement, median, low, high = speedup.judgement, speedup.median, speedup.low, speedup.high
    if judgement == "more":
        limits = (low, high)
        return _factor_text(median, limits, "{} times as fast as", "{} faster than", name)
    if judgement == "less":
        limits = (1 / high, 1 / low)
        return _factor_text(
            1 / median, limits, "SLOWER: {} times the time of", "{} slower than", name
        )
    if judgement == "equal":
        return f"as fast as {name}, within the noise"
    limits_text = f"{low:.2g} to {high:.2g} times as fast"
    return f"the machine was too noisy to compare it with {name} ({limits_text})"


def _factor_text(
    factor: float, limits: tuple[float, float], times: str, percent: str, name: str
) -> str:
    low, high = limits
    if factor < _LEAST_FACTOR:
        return f"{percent.format(f'{factor - 1:.0%}')} {name}"
    if high > low * _WIDE:
        return f"{times.format(f'{_round_factor(low)} to {_round_factor(high)}')} {name}"
    return f"{times.format(_round_factor(factor))} {name}"


def _round_factor(factor: float) -> str:
    return f"{factor:.{1 if factor < _WHOLE_FACTOR else 0}f}"


def _summarize(builds: Sequence[Build]) -> Iterator[str]:
    """Yield how many builds there are with which verdict, and the best and the worst of them."""
    verdicts = Counter(verdict_text(build) for build in builds)
    counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items() if verdict)
    number = count_text(len(builds), "build")
    yield f"{number}: {counts}" if counts else number
    compared = _ranked(builds, lambda build: _speedup_of(choose_peer(build)))
    ranked = compared or _ranked(builds, lambda build: build.tuning_speedup)
    if len(ranked) > 1:
        yield f"best: {ranked[-1].name}, {_speed_text(ranked[-1])}"
        yield f"worst: {ranked[0].name}, {_speed_text(ranked[0])}"


def _speedup_of(peer: Peer | None) -> Speedup | None:
    return peer.speedup if peer else None


def _ranked(
    builds: Iterable[Build], find_speedup: Callable[[Build], Speedup | None]
) -> list[Build]:
    """Return the builds that were not rejected and have a speedup, the smallest first."""
    known = [
        (speedup.median, build)
        for build in builds
        if build.verdict != _REJECTED and (speedup := find_speedup(build))
    ]
    return [build for _, build in sorted(known, key=lambda entry: entry[0])]
