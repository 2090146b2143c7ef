"""The pixels of images: from arrays, from Pillow images, and from files, which Pillow decodes.

Image files are opened only here, with an explicit list of decoders: Pillow chooses decoders by content, not by name, and
one of them starts a program (Ghostscript for EPS).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from tvmflow.core.errors import BundleError, EnvironmentProblem
from tvmflow.core.formatting import count_text
from tvmflow.core.types import Array

_Converted = TypeVar("_Converted")

SUFFIXES: Final = frozenset(".bmp .gif .jpeg .jpg .pgm .png .ppm .tif .tiff .webp".split())
"""The suffixes of files that count as images."""

# Iterables that are not series of images.
_NO_SERIES: Final = (str, bytes, bytearray, memoryview, Mapping)
# An array of several images: [images, height, width, channels].
_BATCH_DIMENSIONS: Final = 4
_ARRAYS: Final = (
    "uint8 of the shape [height, width] or [height, width, channels] for an image, with 1, 3 or 4 channels; "
    "[images, height, width, channels], or a list of images, for several"
)
# Pillow's decoders for these suffixes: its own code, and the libraries that it bundles.
_FORMATS: Final = tuple("BMP GIF JPEG PNG PPM TIFF WEBP".split())
# To read the pixels of these images, Pillow runs another program (Ghostscript).
_DRAWN_BY_PROGRAMS: Final = "EPS"
# A quarter of a GiB in RGB; Pillow itself warns from this size on.
_MAX_PIXELS: Final = 89_478_485
# The limit of JPEG. A limit is needed because resampling stores weights for each pixel of a row.
_MAX_SIDE: Final = (1 << 16) - 1

# Pillow's modes with one 8-bit channel, with or without alpha.
_GRAY_MODES: Final = frozenset({"1", "L", "LA", "La"})
# Pillow's modes with more than 8 bits per channel, by their beginning.
_DEEP_MODES: Final = ("I", "F")


# How many unreadable files a message names.
_SHOWN: Final = 10


def is_pillow_installed() -> bool:
    """Return whether Pillow, which decodes image files, is installed."""
    return importlib.util.find_spec("PIL") is not None


def read_pixels(image: Any) -> Array:
    """Return the pixels of an image, uint8 `[height, width, channels]`, gray or RGB without transparency.

    The image is a path, a Pillow image, or a uint8 array `[height, width]` or `[height, width, channels]` (gray, RGB or
    RGBA). Image files are turned upright by their EXIF data.

    Raises:
        BundleError: when it cannot be read, or does not have 8 bits per channel.
        EnvironmentProblem: when Pillow is needed and not installed.
    """
    import numpy as np

    if isinstance(image, np.ndarray):
        return _check_array(image)
    if isinstance(image, str | os.PathLike):
        return _decode(os.fspath(image))
    if _is_of_pillow(image):
        return _convert(image, "the image")
    raise BundleError(
        f"a {type(image).__name__} is not an image",
        fix=f"give the path of a file, an image of Pillow, or an array of {_ARRAYS}",
    )


def _is_of_pillow(image: Any) -> bool:
    return type(image).__module__.partition(".")[0] == "PIL"


def list_images(images: Any) -> list[Any]:
    """Return a list of images for `read_pixels`, from one image, a 4-D array, or an iterable of images."""
    import numpy as np

    if isinstance(images, np.ndarray):
        return list(images) if images.ndim == _BATCH_DIMENSIONS else [images]
    is_series = isinstance(images, Iterable) and not isinstance(images, (*_NO_SERIES, os.PathLike))
    return list(images) if is_series and not _is_of_pillow(images) else [images]


def read_files(
    paths: Iterable[str | os.PathLike[str]], convert: Callable[[Array], _Converted]
) -> list[_Converted]:
    """Return `convert(pixels)` for each file; errors are those of `check_files`."""
    return _for_each(paths, lambda path: convert(read_pixels(path)))


def check_files(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Check that files are images, by their headers, without decoding pixels.

    Raises:
        BundleError: with every file that is not an image.
        EnvironmentProblem: when Pillow is not installed.
    """

    def check(path: str | os.PathLike[str]) -> None:
        with _open(os.fspath(path)):
            pass

    _for_each(paths, check)


def _for_each(
    paths: Iterable[str | os.PathLike[str]],
    read: Callable[[str | os.PathLike[str]], _Converted],
) -> list[_Converted]:
    results, problems = [], []
    for path in paths:
        try:
            results.append(read(path))
        except BundleError as error:
            problems.append(error.message)
    if not problems:
        return results
    more = [f"and {count_text(n, 'file')} more"] if (n := len(problems) - _SHOWN) > 0 else []
    raise BundleError(
        "; ".join([*problems[:_SHOWN], *more]),
        fix="give 8-bit images that Pillow opens, such as JPEG or PNG",
    )


def _check_array(image: Array) -> Array:
    pixels = image[:, :, None] if image.ndim == 2 else image
    if image.dtype != "uint8" or pixels.ndim != 3 or pixels.shape[-1] not in (1, 3, 4):
        raise BundleError(
            f"an array {image.dtype}{list(image.shape)} is not an image", fix=f"give {_ARRAYS}"
        )
    if not image.size:
        raise BundleError(f"an array of the shape {list(image.shape)} has no pixels")
    return pixels[:, :, :3] if pixels.shape[2] == 4 else pixels


def _decode(path: str) -> Array:
    with _open(path) as image:
        from PIL import ImageOps

        upright = ImageOps.exif_transpose(image)
        upright.load()
    return _convert(upright, path)


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
    """Yield a Pillow image, which decodes its pixels on first access."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise EnvironmentProblem(
            f"Pillow, which decodes images, is not installed: {path}",
            fix="pip install pillow, or give the pixels as an array of uint8",
        ) from None
    try:
        with Image.open(path, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > _MAX_PIXELS or max(width, height) > _MAX_SIDE:
                raise BundleError(
                    f"{path} has {width} x {height} pixels, and the limits are {_MAX_PIXELS:,} pixels and "
                    f"{_MAX_SIDE:,} for each side",
                    fix="make it smaller, or give the pixels as an array of uint8",
                )
            yield image
    except FileNotFoundError:
        raise BundleError(f"there is no file {path}", fix="give the path of an image") from None
    except UnidentifiedImageError:
        names = ", ".join(_FORMATS)
        raise BundleError(
            f"{path} cannot be read as an image: it is none of {names}",
            fix="convert it, for example to PNG",
        ) from None
    except BundleError:
        raise
    except Exception as error:
        # damaged files make decoders raise errors of any type
        raise BundleError(
            f"{path} cannot be read as an image: {error}",
            fix="give an image that Pillow opens, such as JPEG or PNG",
        ) from error


def _convert(image: Any, name: str) -> Array:
    import numpy as np

    if image.format == _DRAWN_BY_PROGRAMS:
        raise BundleError(
            f"{name} is an EPS file, which another program would have to draw",
            fix="convert it, for example to PNG",
        )
    mode = image.mode
    if mode.startswith(_DEEP_MODES):
        raise BundleError(
            f"{name} has the mode {mode}, more than 8 bits for a channel",
            fix="convert it to 8 bits in the way that the model was trained with",
        )
    converted = image.convert("L" if mode in _GRAY_MODES else "RGB")
    pixels = np.asarray(converted)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels
