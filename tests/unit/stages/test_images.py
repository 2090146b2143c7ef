"""Images and labels in manifests, and the preprocessing compared with Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.engine import recipe, target
from tests.support.tuning import dense, model, relu, softmax
from tvmflow.core.errors import StageError
from tvmflow.core.types import TensorSpec
from tvmflow.runtime.bundles import Bundle
from tvmflow.runtime.images import Preprocessing
from tvmflow.runtime.samples import Samples
from tvmflow.stages import verify
from tvmflow.stages.base import StageContext
from tvmflow.stages.images import ImageInput, _find_activation, describe_images
from tvmflow.stages.verify import image_inputs, verdict_text
from tvmflow.stages.verify.verdict import ImageComparison

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
    """An input that it lacks or that is not an image, and another number of scores: with the field of the recipe."""
    with pytest.raises(StageError, match=r"inputs.image.image: the model has no input 'image'"):
        describe_images({"image": ImageInput(image={})}, SIGNATURE, None)
    inputs = {"data": ImageInput(image={"crop": 9})}
    with pytest.raises(StageError, match=r"inputs.data.image.crop: gives 9x9"):
        describe_images(inputs, SIGNATURE, None)
    labels.write_text("cat\ndog\n")
    with pytest.raises(StageError, match="there are 2 names, and 3 scores for a sample") as caught:
        describe_images({}, SIGNATURE, labels)
    assert caught.value.exit_code == 1 and "one name per line" in caught.value.fix


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
    comparison = image_inputs._compare(entry, image_inputs._generate_images(entry))
    assert comparison["passed"] and comparison["max_level_error"] == 0
    assert comparison["images"] == 4 and comparison["against"].startswith("Pillow ")


def test_another_preprocessing_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the largest difference in levels."""
    entry = preprocessing((1, 3, 8, 8))
    monkeypatch.setattr(Preprocessing, "fit", lambda *_: np.zeros((8, 8, 3), np.uint8))
    comparison = image_inputs._compare(entry, [np.full((8, 8, 3), 7, np.uint8)])
    [sentence] = verdict_text._list_image_mismatches({"data": comparison})
    assert "the preprocessing of 'data' differs from that by Pillow" in sentence
    assert "by 7 of 255 levels" in sentence


# ---------------------------------------------------------------- what verify runs on


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The inputs of `verify` for two classes with an image each, and the bundle of a model for them."""
    labels = {"names": ["cat", "dog", "owl"], "activation": "", "sha256": ""}
    manifest = {"images": {"data": {"scale": 1}}, "labels": labels}
    bundle = Bundle(manifest, SIGNATURE, b"", {})
    monkeypatch.setattr(image_inputs, "read_bundle", lambda *_, **__: bundle)
    files = {"export/module.tvmflow": tmp_path}
    for name, level in (("dog/a.png", 200), ("cat/b.png", 100)):
        path = tmp_path / name
        path.parent.mkdir()
        Image.new("RGB", (20, 10), (level,) * 3).save(path)
        files[f"data/{name}"] = path
    return files


def load(
    inputs: dict[str, Path], *, data: bool = True, range: tuple[float, float] | None = None
) -> tuple[Samples | None, dict[str, ImageComparison]]:
    made = recipe(
        inputs={"data": {"shape": [1, 3, 8, 8], "image": {"scale": 1}, "range": range}},
        verify={"data": "images" if data else None, "samples": 2},
    )
    nothing = Path()
    context = StageContext(inputs, nothing, nothing, nothing, nothing, lambda _: None)
    return image_inputs.load_images(verify.settings(made, target()), context)


def test_a_library_is_verified_on_the_images_of_a_folder(images: dict[str, Path]) -> None:
    """Each through the preprocessing of the bundle, with the index of its class."""
    samples, comparisons = load(images)
    assert samples is not None and samples.labels is not None
    assert samples.labels.tolist() == [0, 1] and samples.total == len(samples.batches) == 2
    assert [batch["data"][0, 0, 0, 0] for batch in samples.batches] == [100, 200]
    assert comparisons["data"]["passed"] and comparisons["data"]["images"] == 4 + 2


def test_a_table_gives_the_order_and_the_classes(images: dict[str, Path], tmp_path: Path) -> None:
    """An image may be in it twice."""
    images["data"] = tmp_path / "test.csv"
    images["data"].write_text("file,label\ndog/a.png,owl\ncat/b.png,cat\ndog/a.png,dog\n")
    samples, _ = load(images)
    assert samples is not None and samples.labels is not None
    assert samples.labels.tolist() == [2, 0, 1]


def test_every_image_that_cannot_be_read_is_named(images: dict[str, Path]) -> None:
    """All of them in one error; so is a class without a label."""
    for name in ("dog/a.png", "cat/b.png"):
        images[f"data/{name}"].write_text("no image")
    with pytest.raises(
        StageError, match=r"verify\.data: .*b.png cannot .*; .*a.png cannot be read"
    ):
        load(images)
    images["data/emu/c.png"] = images["data/dog/a.png"]
    with pytest.raises(StageError, match=r"verify\.data: no label names the class 'emu'"):
        load(images)


def test_without_data_images_of_noise_take_the_place_of_random_numbers(
    images: dict[str, Path],
) -> None:
    """The same for the same seed, and not where the recipe has a range."""
    inputs = {"export/module.tvmflow": images["export/module.tvmflow"]}
    (first, _), (second, _) = load(inputs, data=False), load(inputs, data=False)
    assert first is not None and second is not None and len(first.batches) == 2
    tensor = first.batches[0]["data"]
    assert tensor.max() > 200 and np.array_equal(tensor, np.rint(tensor))
    np.testing.assert_array_equal(tensor, second.batches[0]["data"])
    usual = iter([("", second), ("normal", second)])
    candidates = image_inputs.with_images(first, usual, has_data=False)
    assert [distribution for distribution, _ in candidates] == ["", "normal"]
    assert load(inputs, data=False, range=(0, 1))[0] is None
