"""Nearest pixels at even distances need no table."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tvmflow.graph.resize import Interpolation, Steps, find_steps, find_taps

FLOOR = Interpolation("nearest_neighbor", "asymmetric", "floor", -0.75, False)
HALF = FLOOR._replace(coordinates="half_pixel", rounding="round_prefer_floor")


@pytest.mark.parametrize("mode", [FLOOR, HALF])
def test_steps_are_those_of_the_table(mode: Interpolation) -> None:
    """For all sizes for which there are steps: at least wherever the result is twice or four times as large."""
    for source, size in itertools.product(range(1, 25), repeat=2):
        taps = find_taps(source, size, mode)
        steps = find_steps(taps)
        if steps is None:
            # a distance that float32 does not hold may be rounded down
            assert size not in (source, 2 * source, 4 * source)
            continue
        places = (steps.start + np.arange(len(taps.positions)) * steps.step) // steps.repeats
        np.testing.assert_array_equal(places, taps.positions[:, 0])


def test_sums_of_pixels_have_no_steps() -> None:
    assert find_steps(find_taps(4, 8, FLOOR._replace(method="linear"))) is None
    assert find_steps(find_taps(4, 8, FLOOR)) == Steps(8, 0, 1, 2)
    assert find_steps(find_taps(9, 3, HALF)) == Steps(3, 1, 3, 1)
    assert find_steps(find_taps(4, 6, FLOOR)) is None
