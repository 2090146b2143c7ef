"""Images and labels of a recipe: the fields of a manifest about them, and images as `verify.data`."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from tvmflow.core.errors import StageError
from tvmflow.core.formatting import count_text, quoted
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import Array, Json, TensorSpec
from tvmflow.recipe import Recipe
from tvmflow.runtime.image_files import SUFFIXES
from tvmflow.runtime.images import ImageMismatch, Preprocessing
from tvmflow.runtime.labels import PROBABILITIES, Labels, parse_labels
from tvmflow.stages.base import Settings

LABELS: Final = "labels"
"""The role of the labels file."""
UNKEYED_LABELS: Final = "labels-check"
"""The role of labels for a stage that only checks them, so that they are not in its key."""

# Operators that preserve the argmax of scores; if their input is probabilities, so is their output.
_TRANSPARENT: Final = frozenset(
    f"relax.{name}"
    for name in "reshape squeeze flatten expand_dims astype quantize dequantize".split()
)
_ACTIVATIONS: Final[Mapping[str, str]] = {
    "relax.nn.softmax": PROBABILITIES[0],
    "relax.sigmoid": PROBABILITIES[1],
}


class ImageInput(Settings):
    """The recipe's settings of an image input."""

    image: dict[str, Json]


def image_inputs(recipe: Recipe) -> dict[str, ImageInput]:
    """Return the image inputs of a recipe, by name."""
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
    """Return a manifest's fields about images and labels; StageError if they do not fit the model."""
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
    """Read the labels in a file; StageError if they do not fit the output."""
    try:
        labels = parse_labels(path.read_bytes(), activation or "")
        labels.check(scores, is_activation_known=activation is not None)
    except ValueError as error:
        raise StageError(
            f"labels: the file does not fit the model: {error}",
            fix="write one name per line, one for each score of the first output, in their order",
        ) from None
    return labels


def _find_activation(model: Path) -> str:
    """Return the operator (softmax, …) that computes the first output's probabilities, or an empty string."""
    from tvmflow.graph import ir

    main = ir.load_module(model)["main"]
    values = ir.DataFlow(main).values
    value: Any = ir.list_outputs(main)[0]
    while True:
        value = values.get(ir.resolve_alias(value, values.get))
        name = ir.operator_name(value)
        if name not in _TRANSPARENT:
            return _ACTIVATIONS.get(name, "")
        value = value.args[0]


# ---------------------------------------------------------------- verify.data
# A folder of images, a folder with one folder per class, or a table `file,label`.

DATA: Final = "data"
"""The role of `verify.data`; the role of an image in it is `data/<file>`."""

_COLUMNS: Final = ["file", "label"]
# Messages list at most this many classes without an index.
_SHOWN: Final = 10
_MAX_DIGITS: Final = 9


class ImageList(NamedTuple):
    """The paths of images in the data folder, and the class of each; `classes` may be empty.

    A class is a name or an index.
    """

    files: tuple[str, ...]
    classes: tuple[str, ...]

    def find_indices(self, labels: Sequence[str]) -> Array | None:
        """Return the label index of each image's class, or None; without labels, classes are indices.

        Raises:
            ValueError: if a class has no label; the message lists these classes.
        """
        import numpy as np

        if not self.classes:
            return None
        counts = Counter(labels)
        wrong = [name for name in dict.fromkeys(self.classes) if not _has_index(name, counts)]
        if wrong:
            problems = [_mismatch(name, labels) for name in wrong[:_SHOWN]]
            if more := len(wrong) - _SHOWN:
                problems += [f"and {count_text(more, 'class', 'classes')} more"] if more > 0 else []
            raise ValueError("; ".join(problems))
        indices = {name: index for index, name in enumerate(labels)}
        return np.array([indices[name] if labels else int(name) for name in self.classes])


def _has_index(name: str, counts: Counter[str]) -> bool:
    """Return whether a class names exactly one label, or without labels is an index."""
    is_index = name.isdecimal() and len(name) <= _MAX_DIGITS
    return counts[name] == 1 if counts else is_index


def _mismatch(name: str, labels: Sequence[str]) -> str:
    shown = quoted(name)
    if not labels:
        return f"the class {shown} is not an index, and there are no labels"
    count = labels.count(name)
    if count > 1:
        return f"the class {shown} is the name of {count} labels"
    return f"no label names the class {shown}{did_you_mean(name, labels)}"


def is_image_data(data: str, path: Path) -> bool:
    """Return whether `verify.data`, which is at `path`, consists of images."""
    return is_table(data) or path.is_dir()


def is_table(data: str) -> bool:
    """Return whether `verify.data` is a table of images."""
    return PurePosixPath(data).suffix.lower() == ".csv"


def list_folder(folder: Path) -> tuple[ImageList, list[Path]]:
    """List the images below a folder, without hidden ones, and all folders that were read.

    Raises:
        ValueError: if there are no images, or if only some are in the folder of a class.
    """
    files, folders = [], []
    seen = {_identity(folder)}
    for parent, names, inner in os.walk(folder, followlinks=True):
        names[:] = sorted(name for name in names if not name.startswith("."))
        identities = {name: _identity(Path(parent, name)) for name in names}
        # skip links to visited folders: a link to a parent folder would never end
        names[:] = [name for name in names if identities[name] not in seen]
        seen.update(identities.values())
        folders.append(Path(parent))
        for name in inner:
            if PurePosixPath(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                files.append(Path(parent, name).relative_to(folder).as_posix())
    if not files:
        raise ValueError(f"has no images ({', '.join(sorted(SUFFIXES))})")
    return list_files(files), folders


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def list_files(files: Sequence[str]) -> ImageList:
    """Return an image list from paths in a folder; a path's first component is the class.

    Raises:
        ValueError: if only some images are in the folder of a class.
    """
    ordered = tuple(sorted(files))
    classes = tuple(file.partition("/")[0] for file in ordered if "/" in file)
    if classes and len(classes) < len(ordered):
        outside = next(file for file in ordered if "/" not in file)
        raise ValueError(f"has folders of classes, and '{outside}' is in none")
    return ImageList(ordered, classes)


def find_images(files: Mapping[str, Path], role: str) -> ImageList | None:
    """Return the images that a stage reads in a role; None if it reads a file of arrays or nothing."""
    prefix = f"{role}/"
    names = [name.removeprefix(prefix) for name in files if name.startswith(prefix)]
    if not names:
        return None
    table = files.get(role)
    return read_table(table) if table else list_files(names)


def read_table(path: Path) -> ImageList:
    """Read a table of images with the columns `file` and `label`; ValueError for any other file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.reader(stream))
    except UnicodeDecodeError:
        raise ValueError("is not a table: it is not text in UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"is not a table: {error}") from None
    if not rows or [name.strip() for name in rows[0]] != _COLUMNS:
        raise ValueError(f"must begin with the line {','.join(_COLUMNS)}")
    images = [[cell.strip() for cell in row] for row in rows[1:] if row]
    wrong = [number for number, row in enumerate(images, 2) if len(row) != 2 or not all(row)]
    if wrong:
        raise ValueError(f"line {wrong[0]} is not file,label")
    if not images:
        raise ValueError("has no images")
    return ImageList(tuple(row[0] for row in images), tuple(row[1] for row in images))
