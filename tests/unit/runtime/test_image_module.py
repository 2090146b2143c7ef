"""A loaded model that takes images: preprocess, run, classify."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tvmflow
from tests.support.images import LABELS, brightness_module, write_images
from tests.unit.runtime.test_module import rewritten
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
