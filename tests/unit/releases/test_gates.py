"""Which gates a release misses, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from tvmflow.recipe import Gates
from tvmflow.releases.gates import Row, misses

NOW = {"accuracy": 0.9, "coverage": 0.8, "latency_us": 110.0, "bytes": {"a.so": 120}}
BEFORE = {"accuracy": 0.95, "coverage": 0.8, "latency_us": 100.0, "bytes": {"a.so": 100}}


def row(**changes: Any) -> Row:
    return Row("net", "host", NOW, BEFORE)._replace(**changes)


@pytest.mark.parametrize(
    ("gates", "told"),
    [
        ({"min_accuracy": 0.95}, "accuracy 90.00%, below 95.00%"),
        ({"min_accuracy": 0.9}, None),
        (
            {"max_accuracy_drop": 0.01},
            "accuracy 90.00%, 5.00% below the 95.00% of the last release",
        ),
        ({"max_accuracy_drop": 0.06}, None),
        ({"min_coverage": 0.9}, "coverage 80.00%, below 90.00%"),
        (
            {"max_slowdown": 0.05},
            "110 µs a call, 10.0% slower than the last release (100 µs, as recorded)",
        ),
        ({"max_slowdown": 0.2}, None),
        ({"max_growth": 0.1}, "a.so has 120 bytes, 20.0% more than the last release"),
        ({"max_growth": 0.2}, None),
        ({"max_bytes": 119}, "a.so has 120 bytes, more than 119"),
        ({"max_bytes": 120}, None),
    ],
)
def test_each_gate_is_judged(gates: dict[str, Any], told: str | None) -> None:
    found = misses([row()], Gates.model_validate(gates))
    assert [miss.text for miss in found] == ([] if told is None else [told])
    assert all((miss.place, miss.gate) == ("net/host", *gates) for miss in found)


def test_times_side_by_side_count_more_than_recorded_ones() -> None:
    gates = Gates(max_slowdown=0.05)
    assert misses([row(timed=(1.0, 1.0))], gates) == []
    assert "side by side" in misses([row(timed=(1.2, 1.0))], gates)[0].text
    assert misses([row(same=True)], gates) == []


@pytest.mark.parametrize(
    ("gates", "lost"),
    [
        ({"min_accuracy": 0.5}, "accuracy"),
        ({"max_accuracy_drop": 0.5}, "accuracy"),
        ({"max_slowdown": 0.5}, "latency"),
        ({"min_coverage": 0.5}, "coverage"),
    ],
)
def test_what_is_no_longer_measured_fails_its_gate(gates: dict[str, Any], lost: str) -> None:
    (miss,) = misses([row(now={})], Gates.model_validate(gates))
    assert miss.text == f"its {lost} is no longer measured"


def test_the_first_release_has_nothing_to_be_worse_than() -> None:
    gates = Gates(max_accuracy_drop=0.0, max_slowdown=0.0, max_growth=0.0)
    assert misses([row(before=None)], gates) == []
