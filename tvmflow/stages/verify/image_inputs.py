"""Images as inputs for `verify`, and comparison of their preprocessing with Pillow."""

from __future__ import annotations

import itertools
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tvmflow.core.dimensions import specs_at
from tvmflow.core.errors import BundleError, StageError
from tvmflow.core.types import Array, Json, TensorSpec
from tvmflow.runtime.bundles import MANIFEST, SIGNATURE, read_bundle
from tvmflow.runtime.image_files import is_pillow_installed, read_files, read_pixels
from tvmflow.runtime.images import Preprocessing, crop_offset, read_preprocessing
from tvmflow.runtime.labels import read_labels
from tvmflow.runtime.samples import Samples, image_samples
from tvmflow.stages.base import StageContext
from tvmflow.stages.images import DATA, ImageList, find_images
from tvmflow.stages.verify.inputs import choose_tuning_sizes, read_dimensions
from tvmflow.stages.verify.verdict import ImageComparison
from tvmflow.stages.verify_settings import CHROMIUM, VerifySettings

# The number of images of the data whose preprocessing is compared with Pillow's; generated images are compared, too.
_COMPARED: Final = 4


def load_images(
    settings: VerifySettings, context: StageContext
) -> tuple[Samples | None, dict[str, ImageComparison]]:
    """Return image samples, and the comparison of each input's preprocessing with Pillow.

    The samples are None if not all inputs are images. StageError if an image is unreadable.
    """
    manifest, signature = _read_descriptions(settings, context)
    sizes = choose_tuning_sizes(read_dimensions(signature, settings))
    inputs = specs_at([*map(TensorSpec.from_json, signature["inputs"])], sizes)
    preprocessing = read_preprocessing(manifest, inputs)
    listed = find_images(context.inputs, DATA)
    samples, pixels = None, {name: _generate_images(entry) for name, entry in preprocessing.items()}
    if listed:
        labels = read_labels(manifest)
        if len(inputs) != 1:
            names = ", ".join(spec.name for spec in inputs)
            raise StageError(
                f"verify.data is images, and the model has {len(inputs)} inputs: {names}",
                fix="give an npz file with an array for each input",
            )
        (entry,) = preprocessing.values()
        paths = [context.inputs[f"{DATA}/{file}"] for file in listed.files]
        samples = _load(listed, paths, entry, labels.names if labels else ())
        pixels[entry.input.name] += [read_pixels(path) for path in paths[:_COMPARED]]
    elif not settings.verify.data and len(inputs) == len(preprocessing) == 1:
        (entry,) = preprocessing.values()
        if not settings.inputs[entry.input.name].range:
            samples = _make_random_samples(entry, settings.verify.samples, settings.verify.seed)
    return samples, {name: _compare(preprocessing[name], own) for name, own in pixels.items()}


def _read_descriptions(
    settings: VerifySettings, context: StageContext
) -> tuple[Mapping[str, Json], Mapping[str, Json]]:
    """Return the bundle's manifest and signature; `export` makes a bundle for browsers, too."""
    path = context.inputs["export/module.tvmflow"]
    if settings.run_on != CHROMIUM:
        bundle = read_bundle(path, with_libraries=False)
        return bundle.manifest, bundle.signature
    # a bundle with a library for browsers cannot be opened as usual
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read(MANIFEST)), json.loads(archive.read(SIGNATURE))


def with_images(
    images: Samples | None, candidates: Iterator[tuple[str, Samples]], *, has_data: bool
) -> Iterator[tuple[str, Samples]]:
    """Return candidate inputs with `images`, if any, in place of the first or of all candidates."""
    if images is None:
        return candidates
    # images replace a data file completely, but only the first random candidate
    others = () if has_data else itertools.islice(candidates, 1, None)
    return itertools.chain([("", images)], others)


def _load(
    listed: ImageList, paths: Sequence[Path], preprocessing: Preprocessing, labels: Sequence[str]
) -> Samples:
    try:
        indices = listed.find_indices(labels)
        fitted = read_files(paths, preprocessing.fit)
    except (BundleError, ValueError) as error:
        text = error.message if isinstance(error, BundleError) else str(error)
        fix = "replace or remove them" if isinstance(error, BundleError) else "add it to `labels`"
        raise StageError(f"verify.data: {text}", fix=fix) from None
    return image_samples(preprocessing, fitted, indices)


def _make_random_samples(preprocessing: Preprocessing, batches: int, seed: int) -> Samples:
    shape = (*preprocessing.size, preprocessing.channels)
    count = batches * preprocessing.input.shape[0]
    noise = np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)
    # count batches, as for other random inputs
    return image_samples(preprocessing, list(noise))._replace(total=batches, batch_size=0)


def _generate_images(preprocessing: Preprocessing) -> list[Array]:
    """Return noise images that are larger, smaller, wider and higher than the input."""
    height, width = preprocessing.size
    rng = np.random.default_rng(0)
    sizes = [(2 * height + 3, 3 * width + 1), (height // 2 + 1, width // 2 + 1)]
    sizes += [(height + 1, 3 * width), (3 * height, width + 1)]
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def _compare(preprocessing: Preprocessing, images: Sequence[Array]) -> ImageComparison:
    if not is_pillow_installed():
        return {"passed": True, "against": "", "images": 0, "max_level_error": 0}
    import PIL

    errors = []
    for pixels in images:
        expected = _fit_by_pillow(preprocessing, pixels)
        difference = preprocessing.fit(pixels).astype(np.int64) - expected
        errors.append(int(np.abs(difference).max()))
    # with fused multiply-add, as on AArch64, Pillow rounds some weights differently: allow one level
    return {
        "passed": max(errors) <= 1,
        "images": len(images),
        "against": f"Pillow {PIL.__version__}",
        "max_level_error": max(errors),
    }


def _fit_by_pillow(preprocessing: Preprocessing, pixels: Array) -> Array:
    """Fit an image to the input's size and colour with Pillow; returns `[height, width, channels]`."""
    from PIL import Image

    mode = "L" if preprocessing.colour == "GRAY" else "RGB"
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).convert(mode)
    height, width = preprocessing.resized_size(image.height, image.width)
    method = Image.Resampling[preprocessing.interpolation.upper()]
    # resize rows, then columns: the order of a single call may change with Pillow 13
    image = image.resize((width, image.height), method).resize((width, height), method)
    new_height, new_width = preprocessing.size
    if preprocessing.pad is None:
        top, left = crop_offset(height, new_height), crop_offset(width, new_width)
        image = image.crop((left, top, left + new_width, top + new_height))
    else:
        background = Image.new(mode, (new_width, new_height), (preprocessing.pad,) * len(mode))
        background.paste(image, ((new_width - width) // 2, (new_height - height) // 2))
        image = background
    array = np.asarray(image).reshape(new_height, new_width, -1)
    return array[:, :, ::-1] if preprocessing.colour == "BGR" else array
