"""A loaded model that takes images: preprocess, run, classify."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tvmflow
from tests.support.images import LABELS, brightness_module, write_images
from tests.unit.runtime.damage import rewritten
from tvmflow.core.errors import BundleError


def test_images_are_classified_in_batches(tmp_path: Path) -> None:
    """Files, images of Pillow and arrays; more than a batch holds, the best class first."""
    module = brightness_module()
    light, dark, gray = write_images(tmp_path)
    images = [str(light), Image.open(dark), np.full((5, 5), 120, np.uint8), gray]
    best = module.classify(images, top=2)
    assert [row[0].label for row in best] == ["light", "dark", "gray", "gray"]
    assert best[0][0].probability > 0.99 and best[0][0].position == 2
    assert module.labels == LABELS


def test_an_image_becomes_the_input(tmp_path: Path) -> None:
    """A single one, or a list: the last fills up the batch."""
    module = brightness_module()
    light, dark, _ = write_images(tmp_path)
    tensor = module.preprocess(light)
    assert tensor.shape == (2, 1, 4, 4) and np.all(tensor == np.float32(250 / 255))
    scores = module.run(module.preprocess([light, dark]))["scores"]
    assert scores.argmax(axis=1).tolist() == [2, 0]


@pytest.mark.parametrize("shape", [(5, 6), (5, 6, 1), (5, 6, 3), (2, 3, 3), (5, 6, 4)])
def test_an_array_of_one_image_is_one_image(shape: tuple[int, ...]) -> None:
    """Not an image for each of its rows; classes come in a list of one."""
    module = brightness_module()
    pixels = np.full(shape, 250, np.uint8)
    assert [row[0].label for row in module.classify(pixels)] == ["light"]
    np.testing.assert_array_equal(module.preprocess(pixels), module.preprocess([pixels]))


def test_one_image_of_any_kind_needs_no_list(tmp_path: Path) -> None:
    """A path, also as text, and an image of Pillow."""
    (light, *_) = write_images(tmp_path)
    for image in (light, str(light), Image.open(light)):
        assert [row[0].label for row in brightness_module().classify(image)] == ["light"]


def test_an_array_of_four_dimensions_is_a_batch(tmp_path: Path) -> None:
    """As a list of its images, and as any other series of them."""
    module = brightness_module()
    batch = np.stack([np.full((5, 6, 3), level, np.uint8) for level in (250, 9, 120)])
    for images in (batch, list(batch), tuple(batch), iter(batch)):
        labels = [row[0].label for row in module.classify(images)]
        assert labels == ["light", "dark", "gray"]
    np.testing.assert_array_equal(module.preprocess(batch[:2]), module.preprocess(list(batch[:2])))
    assert module.classify([]) == module.classify(batch[:0]) == []
    files = write_images(tmp_path)
    assert len(module.classify(path for path in files)) == len(files)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((5, 6, 3), np.float32),
        np.zeros((5, 6, 2), np.uint8),
        np.zeros((3, 5, 6), np.uint8),
        np.zeros((2, 3, 5, 6), np.uint8),
        np.zeros((1, 2, 5, 6, 3), np.uint8),
        np.zeros(6, np.uint8),
        np.uint8(3),
        b"bytes",
        {"data": np.zeros((5, 6), np.uint8)},
        [[np.zeros((5, 6), np.uint8)]],
        7,
        None,
    ],
)
def test_anything_else_says_what_an_image_is(images: object) -> None:
    for call in (brightness_module().classify, brightness_module().preprocess):
        with pytest.raises(BundleError, match="is not an image") as caught:
            call(images)
        assert "[images, height, width, channels]" in caught.value.fix


def test_what_the_bundle_does_not_describe_is_an_error(tmp_path: Path) -> None:
    """With what to write in the recipe."""
    (light, *_) = write_images(tmp_path)
    with pytest.raises(BundleError, match="no input of the model takes images") as caught:
        brightness_module(images={}).preprocess(light)
    assert "inputs: {NAME: {image: …}}" in caught.value.fix
    with pytest.raises(BundleError, match="the inputs that take images are data"):
        brightness_module().preprocess(light, "other")
    with pytest.raises(BundleError, match="no names of classes") as caught:
        brightness_module(labels=None).classify([light])
    assert "labels: FILE" in caught.value.fix


@pytest.mark.parametrize(
    "fields",
    [
        {"images": {"x": {}}},
        {"images": {"y": {}}},
        {"images": [1]},
        {"labels": {"names": ["a"], "activation": "", "sha256": ""}},
        {"labels": {"names": [1, 2, 3], "activation": "", "sha256": ""}},
        {"labels": []},
    ],
)
def test_a_manifest_that_does_not_fit_is_damaged(
    small_bundle: Path, tmp_path: Path, fields: dict[str, object]
) -> None:
    """Before the library is loaded."""
    path = rewritten(small_bundle, tmp_path / "x.tvmflow", **fields)
    with pytest.raises(BundleError, match="its manifest or signature is damaged"):
        tvmflow.load(path)
