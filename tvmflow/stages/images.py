"""Images and labels of a recipe, as the manifest of a bundle has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tvmflow.core.errors import StageError
from tvmflow.core.types import Json, TensorSpec
from tvmflow.recipe import Recipe
from tvmflow.runtime.images import ImageMismatch, Preprocessing
from tvmflow.runtime.labels import PROBABILITIES, Labels, parse_labels
from tvmflow.stages.base import Settings

LABELS: Final = "labels"
"""The role of the file of labels."""
UNKEYED_LABELS: Final = "labels-check"
"""What a stage reads that checks labels, and whose result does not depend on them."""

# Operators that change neither which score is the largest nor whether scores are probabilities.
_TRANSPARENT: Final = frozenset(
    f"relax.{name}"
    for name in "reshape squeeze flatten expand_dims astype quantize dequantize".split()
)
_ACTIVATIONS: Final[Mapping[str, str]] = {
    "relax.nn.softmax": PROBABILITIES[0],
    "relax.sigmoid": PROBABILITIES[1],
}


class ImageInput(Settings):
    """The settings of an input that takes images, as the recipe has them."""

    image: dict[str, Json]


def image_inputs(recipe: Recipe) -> dict[str, ImageInput]:
    """Return the inputs of a recipe that take images."""
    return {
        name: ImageInput(image=spec.image.to_fields())
        for name, spec in recipe.inputs.items()
        if spec.image is not None
    }


def describe_images(
    inputs: Mapping[str, ImageInput],
    signature: Mapping[str, Json],
    labels: Path | None,
    model: Path | None = None,
) -> dict[str, Json]:
    """Return what a manifest says of images and labels.

    Args:
        inputs: The inputs that take images.
        signature: The signature of the model.
        labels: The file of labels, if there is one.
        model: The imported model, `model.json`, whose last operator tells what its scores are.

    Raises:
        StageError: when they do not fit the model.
    """
    fields: dict[str, Json] = {}
    if inputs:
        specs = {spec.name: spec for spec in _read_specs(signature, "inputs")}
        fields["images"] = {
            name: _make_preprocessing(name, settings.image, specs).to_json()
            for name, settings in inputs.items()
        }
    if labels is not None:
        activation = _find_activation(model) if model else ""
        scores = _read_specs(signature, "outputs")[0]
        fields["labels"] = read_labels(labels, scores, activation).to_json()
    return fields


def _read_specs(signature: Mapping[str, Json], direction: str) -> list[TensorSpec]:
    return [TensorSpec.from_json(tensor) for tensor in signature[direction]]


def _make_preprocessing(
    name: str, fields: Mapping[str, Json], specs: Mapping[str, TensorSpec]
) -> Preprocessing:
    if name not in specs:
        raise StageError(
            f"inputs.{name}.image: the model has no input '{name}' (it has {', '.join(specs)})"
        )
    try:
        return Preprocessing.of(fields, specs[name])
    except ImageMismatch as error:
        field = f".{error.field}" if error.field else ""
        raise StageError(
            f"inputs.{name}.image{field}: {error}",
            fix="change the recipe: size and channels must be those of the input",
        ) from None


def read_labels(path: Path, scores: TensorSpec, activation: str | None = None) -> Labels:
    """Return the labels in a file.

    Args:
        path: The file.
        scores: The first output.
        activation: The operator that the scores come from; None where it is not known.

    Raises:
        StageError: when they do not fit the output.
    """
    try:
        labels = parse_labels(path.read_bytes(), activation or "")
        labels.check(scores, is_activation_known=activation is not None)
    except ValueError as error:
        raise StageError(
            f"labels: the file does not fit the model: {error}",
            fix="write one name a line, one for each score of the first output, in their order",
        ) from None
    return labels


def _find_activation(model: Path) -> str:
    """Return the operator that makes the first output probabilities, or an empty string."""
    from tvmflow.compiler import ir, lowering

    main = lowering.load_ir(model)["main"]
    values = ir.DataFlow(main).values
    value: Any = ir.list_outputs(main)[0]
    while True:
        value = values.get(ir.resolve_alias(value, values.get))
        name = ir.operator_name(value)
        if name not in _TRANSPARENT:
            return _ACTIVATIONS.get(name, "")
        value = value.args[0]
