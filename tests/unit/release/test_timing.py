"""Alternating timing of two real bundles, and the reasons why it cannot be done."""

from __future__ import annotations

from pathlib import Path

from tvmflow.release.timing import LatencyPair, time_alternately


def test_two_bundles_are_timed_in_one_process(small_bundle: Path, tmp_path: Path) -> None:
    """The same library twice: both latencies are alike."""
    timed = time_alternately(small_bundle, small_bundle, tmp_path)
    assert isinstance(timed, LatencyPair), timed
    assert 0 < timed.current_s < 0.1
    assert 0.2 < timed.current_s / timed.previous_s < 5


def test_a_bundle_that_cannot_be_loaded_is_a_reason(small_bundle: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.tvmflow"
    broken.write_bytes(b"no bundle")
    reason = time_alternately(small_bundle, broken, tmp_path)
    assert isinstance(reason, str) and "broken.tvmflow" in reason and "\n" not in reason
