"""Traces: whatever intervals and names there are, viewers can read them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.support.hostile_names import TEXTS
from tests.support.trace_checks import check_trace
from tvmflow.core.trace_events import Trace

INTERVALS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.floats(-1.0, 10.0, allow_nan=False),
        st.floats(0.0, 5.0, allow_nan=False),
    ),
    max_size=20,
)


@given(INTERVALS)
def test_slices_of_any_intervals_nest(intervals: list[tuple[str, float, float]]) -> None:
    """Those of machines whose clocks differ overlap; flows still join the slices that they are of."""
    trace = Trace({})
    slices = [
        trace.track(track, "t").slice(f"{index}", began_s, seconds)
        for index, (track, began_s, seconds) in enumerate(intervals)
    ]
    checked = check_trace(trace.to_json())
    assert sum(map(len, checked.slices.values())) == len(slices)


@given(TEXTS, TEXTS)
def test_names_of_others_are_text(name: str, other: str) -> None:
    """Their control characters are escaped, and the file is plain ASCII."""
    trace = Trace({"command": name})
    for process, track in ((name, other), (other, name)):
        trace.track(f"p{process}", f"t{track}").slice(f"s{name}", 0.0, 1.0, {other or "a": name})
    content = trace.to_bytes(Path("trace.json"))
    assert content.isascii()
    check_trace(json.loads(content))


def test_a_child_that_ends_later_ends_with_its_parent() -> None:
    trace = Trace({})
    for name, began_s, seconds in (("trial", 1.0, 2.0), ("build", 1.0, 1.0), ("run", 2.0, 1.5)):
        trace.track("worker 1", "builder").slice(name, began_s, seconds)
    (items,) = check_trace(trace.to_json()).slices.values()
    assert [(item["name"], item["ts"], item["dur"]) for item in items] == [
        ("trial", 1e6, 2e6),
        ("build", 1e6, 1e6),
        ("run", 2e6, 1e6),
    ]


def test_spans_that_only_rounding_lets_overlap_follow_each_other() -> None:
    trace = Trace({})
    track = trace.track("worker 1", "builder")
    track.slice("apply", 0.0, 1.000001)
    track.slice("build", 1.0, 1.0)
    (items,) = check_trace(trace.to_json()).slices.values()
    assert [(item["name"], item["dur"]) for item in items] == [("apply", 1e6), ("build", 1e6)]


def test_a_name_that_ends_in_gz_packs_the_file() -> None:
    """Equal traces give equal bytes."""
    trace = Trace({"run": "abc"})
    packed = trace.to_bytes(Path("trace.json.gz"))
    assert json.loads(gzip.decompress(packed)) == trace.to_json()
    assert packed == trace.to_bytes(Path("trace.json.gz"))
