"""The gates that a release fails, and their messages."""

from __future__ import annotations

from typing import Any

import pytest

from tvmflow.recipe import Gates
from tvmflow.recipe.lock_file import Measurements
from tvmflow.release.gates import TargetComparison, find_failed_gates, list_checked_gates
from tvmflow.release.timing import LatencyPair

CURRENT = Measurements(accuracy=0.9, coverage=0.8, latency_us=110.0, bytes={"a.so": 120})
PREVIOUS = Measurements(accuracy=0.95, coverage=0.8, latency_us=100.0, bytes={"a.so": 100})


def comparison(**changes: Any) -> TargetComparison:
    return TargetComparison("net", "host", CURRENT, PREVIOUS)._replace(**changes)


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ({"min_accuracy": 0.95}, "accuracy 90.00%, below 95.00%"),
        ({"min_accuracy": 0.9}, None),
        (
            {"max_accuracy_drop": 0.01},
            "accuracy 90.00%, 5.00% below the 95.00% of the previous release",
        ),
        ({"max_accuracy_drop": 0.06}, None),
        ({"min_coverage": 0.9}, "coverage 80.00%, below 90.00%"),
        (
            {"max_slowdown": 0.05},
            "latency 110 µs, 10.0% slower than the previous release (100 µs, as recorded)",
        ),
        ({"max_slowdown": 0.2}, None),
        ({"max_growth": 0.1}, "a.so has 120 bytes, 20.0% more than the previous release"),
        ({"max_growth": 0.2}, None),
        ({"max_bytes": 119}, "a.so has 120 bytes, more than 119"),
        ({"max_bytes": 120}, None),
    ],
)
def test_each_gate_is_checked(gates: dict[str, Any], message: str | None) -> None:
    failed = find_failed_gates([comparison()], Gates.model_validate(gates))
    assert [gate.message for gate in failed] == ([] if message is None else [message])
    assert all((gate.label, gate.gate) == ("net/host", *gates) for gate in failed)


def test_latencies_measured_alternately_take_precedence_over_recorded_ones() -> None:
    gates = Gates(max_slowdown=0.05)
    assert find_failed_gates([comparison(latencies=LatencyPair(1.0, 1.0))], gates) == []
    assert (
        "measured interleaved"
        in find_failed_gates([comparison(latencies=LatencyPair(1.2, 1.0))], gates)[0].message
    )
    assert find_failed_gates([comparison(is_same_library=True)], gates) == []


@pytest.mark.parametrize(
    ("gates", "lost"),
    [
        ({"min_accuracy": 0.5}, "accuracy"),
        ({"max_accuracy_drop": 0.5}, "accuracy"),
        ({"max_slowdown": 0.5}, "latency"),
        ({"min_coverage": 0.5}, "coverage"),
    ],
)
def test_a_value_that_is_no_longer_measured_fails_its_gate(
    gates: dict[str, Any], lost: str
) -> None:
    (failed,) = find_failed_gates([comparison(current=Measurements())], Gates.model_validate(gates))
    assert failed.message == f"{lost} is no longer measured"


def test_the_first_release_passes_relative_gates() -> None:
    gates = Gates(max_accuracy_drop=0.0, max_slowdown=0.0, max_growth=0.0)
    assert find_failed_gates([comparison(previous=Measurements())], gates) == []


@pytest.mark.parametrize(
    ("gate", "limit", "current", "previous", "value", "is_failed"),
    [
        ("min_accuracy", 0.9, Measurements(accuracy=0.8), Measurements(), 0.8, True),
        ("max_accuracy_drop", 0.1, Measurements(accuracy=0.8), Measurements(), None, False),
        (
            "max_accuracy_drop",
            0.1,
            Measurements(accuracy=0.8),
            Measurements(accuracy=0.85),
            0.05,
            False,
        ),
        ("min_coverage", 0.5, Measurements(coverage=0.6), Measurements(), 0.6, False),
        (
            "max_slowdown",
            0.1,
            Measurements(latency_us=3.0),
            Measurements(latency_us=2.0),
            0.5,
            True,
        ),
        ("max_slowdown", 0.1, Measurements(), Measurements(latency_us=2.0), None, True),
        (
            "max_growth",
            0.1,
            Measurements(bytes={"a": 3, "b": 1}),
            Measurements(bytes={"a": 2}),
            0.5,
            True,
        ),
        ("max_bytes", 5.0, Measurements(bytes={"a": 3, "b": 4}), Measurements(), 4, False),
    ],
)
def test_a_checked_gate_has_its_value(
    gate: str,
    limit: float,
    current: Measurements,
    previous: Measurements,
    value: float | None,
    is_failed: bool,
) -> None:
    """None where nothing was measured, whether that fails it or not."""
    (checked,) = list_checked_gates(
        [TargetComparison("net", "host", current, previous)], {gate: limit}
    )
    assert (checked.label, checked.gate, checked.limit) == ("net/host", gate, limit)
    assert checked.value == (None if value is None else pytest.approx(value))
    assert checked.is_failed is is_failed
