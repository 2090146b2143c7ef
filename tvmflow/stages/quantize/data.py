"""The samples that `quantize` reads batch by batch: calibration data and `verify.data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tvmflow.core.errors import BundleError, StageError
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Dimension, Feed, Json, TensorSpec
from tvmflow.runtime.image_files import read_files
from tvmflow.runtime.images import Preprocessing
from tvmflow.runtime.npz import open_npz, store_rows
from tvmflow.runtime.samples import Samples, image_samples, make_samples
from tvmflow.stages.images import ImageList, find_images

DEFAULT_SAMPLES = 128
_FIX = "replace or leave out the sample, and calibrate with data as the model gets them"


class DataSource(NamedTuple):
    """A source of samples.

    Attributes:
        role: The role of the files among the stage's inputs.
        field: The recipe field that names the files, for messages.
        images: The preprocessing of inputs that take images, by name.
        label: The name of the array with labels.
    """

    role: str
    field: str
    inputs: Sequence[TensorSpec]
    dimensions: Sequence[Dimension]
    images: Mapping[str, Json]
    label: str
    classes: Sequence[str]

    def load(
        self, files: Mapping[str, Path], count: int | None = None, limit: int | None = None
    ) -> Samples | None:
        """Return the samples; None if the recipe names none.

        At most `limit` images are read, spread evenly over all folders.

        Raises:
            StageError: if the samples do not fit the model, or if there are fewer than `count`.
        """
        if images := find_images(files, self.role):
            loaded = self._load_images(files, images, limit)
        elif path := files.get(self.role):
            loaded = make_samples(
                self.inputs,
                open_npz(path, self.field),
                source=self.field,
                label=self.label,
                dimensions=self.dimensions,
            )
        else:
            return None
        if count is not None and loaded.total < count:
            raise StageError(
                f"{self.field} has {count_text(loaded.total, 'sample')}, and quantize.samples asks for {count}",
                fix="provide more samples, or a smaller number",
            )
        return loaded

    def _load_images(
        self, files: Mapping[str, Path], listed: ImageList, limit: int | None
    ) -> Samples:
        """Return preprocessed images; StageError if the model's only input is not an image."""
        if len(self.inputs) != 1 or self.inputs[0].name not in self.images:
            raise StageError(
                f"{self.field} is images, and the model's inputs are not: {', '.join(s.name for s in self.inputs)}",
                fix="give an npz file with an array for each input, or describe the input's `image`",
            )
        [entry] = self.inputs
        preprocessing = Preprocessing.of(self.images[entry.name], entry)
        names = listed.files
        if limit is not None and limit < len(names):
            # files are sorted by class: take every n-th one to cover all classes
            names = tuple(names[index * len(names) // limit] for index in range(limit))
        paths = [files[f"{self.role}/{name}"] for name in names]
        try:
            # a limit means calibration, which needs no classes
            indices = listed.find_indices(self.classes) if limit is None else None
            fitted = store_rows(
                lambda add: read_files(paths, lambda own: add(preprocessing.fit(own)))
            )
        except (BundleError, ValueError) as error:
            text = error.message if isinstance(error, BundleError) else str(error)
            raise StageError(f"{self.field}: {text}", fix="replace or remove them") from None
        return image_samples(preprocessing, fitted, indices)


def limit_samples(data: Samples, count: int | None) -> Sequence[Feed]:
    """Return the batches with the first `count` samples, or with `DEFAULT_SAMPLES`."""
    wanted = count or DEFAULT_SAMPLES
    size = data.batch_size or 1
    return data.batches[: -(-wanted // size)]


def check_finite(batches: Sequence[Feed], field: str) -> None:
    """Check that samples are finite; StageError names the first batch with NaN or infinity."""
    for index in range(len(batches)):
        for name, array in batches[index].items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise StageError(
                    f"{field}: '{name}' has NaN or infinity in batch {index}", fix=_FIX
                )
