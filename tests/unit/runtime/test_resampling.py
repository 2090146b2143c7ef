"""Images resized without Pillow: the bits that Pillow gives."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tvmflow.runtime.images import INTERPOLATIONS, resize

_SIZES = [((1, 1), (5, 3)), ((3, 5), (1, 1)), ((64, 48), (64, 20)), ((64, 48), (7, 48))]
_SIZES += [((33, 77), (20, 20)), ((20, 20), (33, 77)), ((97, 31), (14, 91)), ((300, 200), (9, 8))]


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize(("size", "new_size"), _SIZES)
def test_pixels_are_those_of_pillow(
    size: tuple[int, int], new_size: tuple[int, int], interpolation: str
) -> None:
    """Each level of noise, and of edges, where cubic weights leave the range of a level."""
    rng = np.random.default_rng(sum(size) + sum(new_size))
    noise = rng.integers(0, 256, (*size, 3), np.uint8)
    method = Image.Resampling[interpolation.upper()]
    for pixels in (noise, np.where(noise > 127, 255, 0).astype(np.uint8)):
        # in two calls, as Pillow 13 may resize columns first
        rows = Image.fromarray(pixels).resize((new_size[1], size[0]), method)
        expected = np.asarray(rows.resize(new_size[::-1], method))
        np.testing.assert_array_equal(resize(pixels, *new_size, interpolation), expected)


def test_one_call_of_pillow_gives_the_same_where_the_aspect_ratio_stays() -> None:
    """The shorter side to 256, as classifiers have it; gray as colour."""
    pixels = np.random.default_rng(1).integers(0, 256, (375, 500, 1), np.uint8)
    image = Image.fromarray(pixels[:, :, 0]).resize((341, 256), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(resize(pixels, 256, 341, "bilinear")[:, :, 0], np.asarray(image))
