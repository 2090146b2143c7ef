"""`image` and `labels` in a recipe: what they mean, and mistakes in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.engine import recipe
from tvmflow.core.errors import RecipeError
from tvmflow.planning.recipes import load_recipe

RECIPE = """\
recipe: 1
name: net
model: {onnx: net.onnx}
inputs:
  data:
    shape: [1, 3, 224, 224]
    dtype: float32
    image: %s
labels: labels.txt
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.onnx").touch()
    Path("labels.txt").touch()


def problems(image: str) -> list[str]:
    Path("net.yaml").write_text(RECIPE % image)
    with pytest.raises(RecipeError) as caught:
        load_recipe(Path("net.yaml"))
    return caught.value.problems


def test_settings_are_numbers_fractions_and_lists() -> None:
    """One number stands for all channels, and for the shorter side."""
    Path("net.yaml").write_text(RECIPE % "{resize: 256, crop: [224, 224], scale: 1/255, mean: 0.5}")
    image = load_recipe(Path("net.yaml")).recipe.inputs["data"].image
    assert image is not None and image.to_fields() == {
        "resize": 256,
        "crop": [224, 224],
        "scale": 1 / 255,
        "mean": 0.5,
    }


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (
            "{resize: large}",
            "net.yaml:8:21: inputs.data.image.resize: must be a number or [height, width], from 1 to 32768",
        ),
        (
            "{resize: 256}",
            "net.yaml:8:21: inputs.data.image.resize: is the length of the shorter side, and the input takes 224x224: "
            "add crop: [224, 224], or write resize: [224, 224]",
        ),
        (
            "{mean: [1, two, 3]}",
            "net.yaml:8:19: inputs.data.image.mean: must be a number, or a list with one for each channel",
        ),
        (
            "{scale: 1/0}",
            "net.yaml:8:20: inputs.data.image.scale: must be a number or a fraction, such as 1/255",
        ),
        (
            f"{{scale: {'9' * 400}/1}}",
            "net.yaml:8:20: inputs.data.image.scale: must be a number or a fraction, such as 1/255",
        ),
        (
            "{scale: .inf}",
            "net.yaml:8:20: inputs.data.image.scale: must be a finite number",
        ),
        (
            "{colour: rgb}",
            "net.yaml:8:21: inputs.data.image.colour: 'rgb' is not a colour; did you mean 'RGB'? (valid: BGR, GRAY, RGB)",
        ),
        (
            "{sharpen: 1}",
            "net.yaml:8:13: inputs.data.image.sharpen: unknown field (valid: resize, crop, pad, interpolation, colour, "
            "layout, scale, mean, std)",
        ),
    ],
)
def test_mistakes_have_their_place(image: str, problem: str) -> None:
    """The field, what is wrong, and what to write."""
    assert problems(image) == [problem]


def test_missing_labels_are_named() -> None:
    """With the nearest name in the folder."""
    Path("labels.txt").rename("label.txt")
    assert problems("{}") == [
        "net.yaml:9:9: labels: there is no file labels.txt; did you mean 'label.txt'?"
    ]


def test_an_image_does_not_fit_an_input_of_other_dimensions() -> None:
    """Nor that of a variant with another shape."""
    data: dict[str, Any] = {"shape": [1, 784], "dtype": "float32", "image": {}}
    with pytest.raises(ValidationError, match="images are for inputs with 4 dimensions"):
        recipe(inputs={"data": data})
    data = {"shape": [1, 3, 8, 8], "dtype": "float32", "image": {"crop": 8}}
    variants = {"large": {"inputs": {"data": {"shape": [1, 3, 16, 16]}}}}
    with pytest.raises(ValidationError) as caught:
        recipe(inputs={"data": data}, variants=variants)
    [error] = caught.value.errors()
    assert error["ctx"]["path"] == ("variants", "large", "inputs", "data", "image", "crop")
    variants = {"b8": {"inputs": {"data": {"shape": [8, 3, 8, 8]}}}}
    assert recipe(inputs={"data": data}, variants=variants).for_variant("b8").inputs["data"].image
