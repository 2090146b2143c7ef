"""Images in `verify`: those of the recipe's data or generated ones, and the preprocessing compared with Pillow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tvmflow.core.errors import BundleError, StageError
from tvmflow.core.types import TensorSpec
from tvmflow.runtime.bundles import read_bundle
from tvmflow.runtime.image_files import is_pillow_installed, read_files, read_pixels
from tvmflow.runtime.images import Preprocessing, crop_offset, read_preprocessing
from tvmflow.runtime.labels import read_labels
from tvmflow.runtime.samples import Samples, image_samples
from tvmflow.stages._base import StageContext
from tvmflow.stages._image_data import DATA, ImageList, list_files, read_table
from tvmflow.stages._verdict import ImageComparison
from tvmflow.stages._verify_settings import VerifySettings

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# So many images of the data are preprocessed by Pillow, too, beside generated ones.
_COMPARED: Final = 4


class Images(NamedTuple):
    """The images that a library is verified on.

    Attributes:
        samples: What it is run on; None where its inputs are no images alone.
        comparisons: The preprocessing of each input, compared with Pillow.
    """

    samples: Samples | None
    comparisons: dict[str, ImageComparison]


def load_images(settings: VerifySettings, context: StageContext) -> Images:
    """Return the images for a model, of which the recipe describes some inputs as such.

    Raises:
        StageError: when an image cannot be read, or has no class.
    """
    bundle = read_bundle(context.inputs["export/module.tvmflow"], with_libraries=False)
    inputs = [TensorSpec.from_json(tensor) for tensor in bundle.signature["inputs"]]
    preprocessing = read_preprocessing(bundle.manifest, inputs)
    listed = _list_images(context)
    samples, pixels = None, {name: _generate_images(entry) for name, entry in preprocessing.items()}
    if listed:
        labels = read_labels(bundle.manifest)
        (entry,) = _only_input(inputs, preprocessing)
        paths = [context.inputs[f"{DATA}/{file}"] for file in listed.files]
        samples = _load(listed, paths, entry, labels.names if labels else ())
        pixels[entry.input.name] += [read_pixels(path) for path in paths[:_COMPARED]]
    elif not settings.verify.data and len(inputs) == len(preprocessing) == 1:
        (entry,) = preprocessing.values()
        if not settings.inputs[entry.input.name].range:
            samples = _make_random_samples(entry, settings.verify.samples, settings.verify.seed)
    compared = {name: _compare(preprocessing[name], images) for name, images in pixels.items()}
    return Images(samples, compared)


def with_images(
    images: Images, candidates: Iterator[tuple[str, Samples]], *, has_data: bool
) -> Iterator[tuple[str, Samples]]:
    """Return what the library may be run on: images in place of random numbers from 0 to 1, or of a file of arrays."""
    if images.samples is None:
        return candidates
    # the first candidate reads the file, if there is one
    others = () if has_data else itertools.islice(candidates, 1, None)
    return itertools.chain([("", images.samples)], others)


def _list_images(context: StageContext) -> ImageList | None:
    """Return the images of `verify.data`, or None where that is a file of arrays or nothing."""
    prefix = f"{DATA}/"
    files = [role.removeprefix(prefix) for role in context.inputs if role.startswith(prefix)]
    if not files:
        return None
    table = context.inputs.get(DATA)
    return read_table(table) if table else list_files(files)


def _only_input(
    inputs: Sequence[TensorSpec], preprocessing: dict[str, Preprocessing]
) -> list[Preprocessing]:
    if len(inputs) != 1:
        names = ", ".join(spec.name for spec in inputs)
        raise StageError(
            f"verify.data is images, and the model has {len(inputs)} inputs: {names}",
            fix="give an npz file with an array for each input",
        )
    return list(preprocessing.values())


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
    """Return batches of seeded noise."""
    import numpy as np

    shape = (*preprocessing.size, preprocessing.channels)
    count = batches * preprocessing.input.shape[0]
    noise = np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)
    # random batches are not counted by samples
    return image_samples(preprocessing, list(noise))._replace(total=batches, batch_size=0)


def _generate_images(preprocessing: Preprocessing) -> list[Array]:
    """Return images of noise that are larger, smaller, wider and higher than the input."""
    import numpy as np

    height, width = preprocessing.size
    rng = np.random.default_rng(0)
    sizes = [(2 * height + 3, 3 * width + 1), (height // 2 + 1, width // 2 + 1)]
    sizes += [(height + 1, 3 * width), (3 * height, width + 1)]
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


# ---------------------------------------------------------------- compared with Pillow


def _compare(preprocessing: Preprocessing, images: Sequence[Array]) -> ImageComparison:
    """Return by how many levels the preprocessing differs from that by Pillow."""
    import numpy as np

    if not is_pillow_installed():
        return {"passed": True, "against": "", "images": 0, "max_level_error": 0}
    import PIL

    errors = []
    for pixels in images:
        expected = _fit_by_pillow(preprocessing, pixels)
        difference = preprocessing.fit(pixels).astype(np.int64) - expected
        errors.append(int(np.abs(difference).max()))
    # with fused multiply-add, as on AArch64, Pillow rounds some weights otherwise
    return {
        "passed": max(errors) <= 1,
        "images": len(images),
        "against": f"Pillow {PIL.__version__}",
        "max_level_error": max(errors),
    }


def _fit_by_pillow(preprocessing: Preprocessing, pixels: Array) -> Array:
    """Return an image in size and colour of the input, `[height, width, channels]`, by Pillow's functions."""
    import numpy as np
    from PIL import Image

    mode = "L" if preprocessing.colour == "GRAY" else "RGB"
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).convert(mode)
    height, width = preprocessing.resized_size(image.height, image.width)
    method = Image.Resampling[preprocessing.interpolation.upper()]
    # Pillow 13 may resize columns first
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
