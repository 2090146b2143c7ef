"""Images and labels in manifests, and the preprocessing compared with Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tuning import dense, model, relu, softmax
from tvmflow.core.errors import StageError
from tvmflow.core.types import TensorSpec
from tvmflow.runtime.images import Preprocessing
from tvmflow.stages import _findings, _verify_images
from tvmflow.stages._images import ImageInput, _find_activation, describe_images

SIGNATURE = {
    "inputs": [{"name": "data", "shape": [1, 3, 8, 8], "dtype": "float32"}],
    "outputs": [{"name": "scores", "shape": [1, 3], "dtype": "float32"}],
}


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.txt"
    path.write_text("cat\ndog\nowl\n")
    return path


def test_the_manifest_has_all_settings_and_names(labels: Path) -> None:
    """Also those that have defaults; and the digest of the file of labels."""
    inputs = {"data": ImageInput(image={"mean": 0.5})}
    fields = describe_images(inputs, SIGNATURE, labels)
    assert fields["images"]["data"]["mean"] == [0.5] * 3
    assert (
        fields["labels"]["names"] == ["cat", "dog", "owl"] and len(fields["labels"]["sha256"]) == 64
    )
    assert describe_images({}, SIGNATURE, None) == {}


def test_what_does_not_fit_the_model_is_an_error(labels: Path) -> None:
    """An input that it lacks or that is no image, and another number of scores: with the field of the recipe."""
    with pytest.raises(StageError, match=r"inputs.image.image: the model has no input 'image'"):
        describe_images({"image": ImageInput(image={})}, SIGNATURE, None)
    inputs = {"data": ImageInput(image={"crop": 9})}
    with pytest.raises(StageError, match=r"inputs.data.image.crop: gives 9x9"):
        describe_images(inputs, SIGNATURE, None)
    labels.write_text("cat\ndog\n")
    with pytest.raises(StageError, match="there are 2 names, and 3 scores for a sample") as caught:
        describe_images({}, SIGNATURE, labels)
    assert caught.value.exit_code == 1 and "one name a line" in caught.value.fix


def test_the_last_operator_tells_what_scores_are(tmp_path: Path) -> None:
    """Behind what only reshapes them."""
    import tvm
    from tvm import relax

    def flat(value: Any, _: Any) -> Any:
        return relax.op.reshape(value, (2, 4))

    path = tmp_path / "model.json"
    for operators, activation in (((dense(4), softmax, flat), "softmax"), ((softmax, relu), "")):
        made = model(dense(4), *operators, shape=(2, 8))
        path.write_text(tvm.ir.save_json(made))
        assert _find_activation(path) == activation


def preprocessing(shape: tuple[int, ...], **fields: Any) -> Preprocessing:
    return Preprocessing.of(fields, TensorSpec("data", shape, "float32"))


@pytest.mark.parametrize(
    ("shape", "fields"),
    [
        ((1, 3, 32, 32), {"resize": 40, "crop": 32, "interpolation": "bicubic"}),
        ((1, 3, 20, 32), {"resize": [20, 32], "colour": "BGR"}),
        ((1, 48, 32, 1), {"pad": 114}),
        ((1, 3, 8, 8), {"crop": 8}),
    ],
)
def test_the_preprocessing_is_that_of_pillow(
    shape: tuple[int, ...], fields: dict[str, Any]
) -> None:
    """On generated images of several sizes, bit for bit."""
    entry = preprocessing(shape, **fields)
    comparison = _verify_images._compare(entry, _verify_images._generate_images(entry))
    assert comparison["passed"] and comparison["max_level_error"] == 0
    assert comparison["images"] == 4 and comparison["against"].startswith("Pillow ")


def test_another_preprocessing_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the largest difference in levels."""
    entry = preprocessing((1, 3, 8, 8))
    monkeypatch.setattr(Preprocessing, "fit", lambda *_: np.zeros((8, 8, 3), np.uint8))
    comparison = _verify_images._compare(entry, [np.full((8, 8, 3), 7, np.uint8)])
    [sentence] = _findings._list_image_mismatches({"data": comparison})
    assert "the preprocessing of 'data' differs from that by Pillow" in sentence
    assert "by 7 of 255 levels" in sentence
