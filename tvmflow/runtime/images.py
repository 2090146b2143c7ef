"""Preprocessing: images to inputs of a model, by the settings in a bundle's manifest.

An image is resized, cropped or padded as 8-bit pixels; a lookup table then maps the 256 levels of each channel
to values. Results have the same bits on every machine, with Pillow or without.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tvmflow.core.errors import BundleError
from tvmflow.core.types import Array, Json, TensorSpec

LEVELS: Final = 256
LAYOUTS: Final = ("NCHW", "NHWC")
COLOURS: Final[Mapping[str, int]] = {"RGB": 3, "BGR": 3, "GRAY": 1}
"""Order of channels -> number of channels."""
MAX_SIZE: Final = 1 << 15
"""The largest height and width of a resized image."""

# The maximum number of pixels of a resized image: a few times the pixels of the largest model inputs.
_MAX_RESIZED_PIXELS: Final = 1 << 28

Size = tuple[int, int]

# The weights of red, green and blue in gray (ITU-R BT.601), times 2^16 and rounded as in Pillow.
_GRAY_WEIGHTS: Final = (19595, 38470, 7471)
_GRAY_BITS: Final = 16


class ImageMismatch(ValueError):
    """Settings contradict each other or do not fit the input; `field` names a single wrong setting."""

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field


class Preprocessing(NamedTuple):
    """The preprocessing of images for an input.

    Attributes:
        input: The input.
        size: Its height and width.
        colour: The order of its channels, one of `COLOURS`.
        layout: The order of its dimensions, one of `LAYOUTS`.
        resize: The length of the shorter side, or height and width; None does not resize.
        crop: Whether the center of the resized image is cut out.
        pad: The level (0 to 255) of the bars beside an image that keeps its aspect ratio; None stretches the image.
        interpolation: One of `INTERPOLATIONS`.
        scale: The factor by which levels from 0 to 255 are multiplied first.
        mean: For each channel, the value that is subtracted after scaling.
        std: For each channel, the divisor after the subtraction.
    """

    input: TensorSpec
    size: Size
    colour: str
    layout: str
    resize: int | Size | None
    crop: bool
    pad: int | None
    interpolation: str
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, fields: Mapping[str, Json], spec: TensorSpec) -> Preprocessing:
        """Return the preprocessing from settings; ImageMismatch if they do not fit the input."""
        unknown = sorted(fields.keys() - set(FIELDS))
        if unknown:
            raise ImageMismatch(f"{unknown[0]} is unknown", unknown[0])
        layout = _find_layout(fields.get("layout"), spec)
        shape = dict(zip(layout, spec.shape, strict=True))
        size = (shape["H"], shape["W"])
        colour = _find_colour(fields.get("colour"), shape["C"])
        interpolation = fields.get("interpolation", INTERPOLATIONS[0])
        if interpolation not in INTERPOLATIONS:
            raise ImageMismatch("interpolation is unknown", "interpolation")
        scale, mean, std = _read_scaling(fields, spec, COLOURS[colour])
        resize, crop = _read_length(fields, "resize"), _read_length(fields, "crop")
        pad = fields.get("pad")
        return cls(
            input=spec,
            size=size,
            colour=colour,
            layout=layout,
            resize=_check_size(resize, crop, pad, size),
            crop=crop is not None,
            pad=pad,
            interpolation=interpolation,
            scale=scale,
            mean=mean,
            std=std,
        )

    def to_json(self) -> dict[str, Json]:
        """Return all settings; `of` makes the same preprocessing from them."""
        resize = list(self.resize) if isinstance(self.resize, tuple) else self.resize
        fields: dict[str, Json] = {
            "resize": resize,
            "crop": list(self.size) if self.crop else None,
            "pad": self.pad,
            "interpolation": self.interpolation,
            "colour": self.colour,
            "layout": self.layout,
            "scale": self.scale,
            "mean": list(self.mean),
            "std": list(self.std),
        }
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def channels(self) -> int:
        """The number of channels."""
        return COLOURS[self.colour]

    def fit(self, pixels: Array) -> Array:
        """Return an image with the input's size and channels, uint8 `[height, width, channels]`.

        Raises:
            BundleError: when the resized image would have too many pixels, as for a long and thin image.
        """
        pixels = _convert_colour(pixels, self.colour)
        old_height, old_width = pixels.shape[:2]
        height, width = self.resized_size(old_height, old_width)
        # rows are resized first, so the intermediate image has the old height and the new width
        if (height, width) != (old_height, old_width) and (
            max(height, old_height) * width > _MAX_RESIZED_PIXELS
        ):
            raise BundleError(
                f"an image of {old_width} x {old_height} pixels would have {width} x {height} when it is resized, "
                f"and the limit is {_MAX_RESIZED_PIXELS:,} pixels",
                fix="cut the part out of it that the model is to see",
            )
        resized = resize(pixels, height, width, self.interpolation)
        sizes = [*zip((height, width), self.size, strict=True)]
        if self.pad is not None:
            offsets = [-((size - resized_size) // 2) for resized_size, size in sizes]
            return _place(resized, self.size, offsets, self.pad)
        return _place(resized, self.size, [crop_offset(*pair) for pair in sizes], 0)

    def resized_size(self, height: int, width: int) -> Size:
        """Return height and width of an image of this size after it is resized."""
        if self.resize is None:
            return height, width
        if isinstance(self.resize, int):
            # as in torchvision's Resize, the longer side is rounded down
            short = min(height, width)
            return height * self.resize // short, width * self.resize // short
        if self.pad is None:
            return self.resize
        new_height, new_width = self.resize
        if new_height * width <= new_width * height:
            return new_height, max(1, (2 * width * new_height + height) // (2 * height))
        return max(1, (2 * height * new_width + width) // (2 * width)), new_width

    def table(self) -> Array:
        """Return the lookup table from level to value, `[channels, 256]` in the dtype of the input."""
        return _make_table(self.input.dtype, self.scale, self.mean, self.std)

    def tensor(self, images: Sequence[Array]) -> Array:
        """Return the input for images from `fit`, the last one repeated; ImageMismatch if they are too many."""
        import numpy as np

        batch = self.input.shape[0]
        if not 0 < len(images) <= batch:
            raise ImageMismatch(
                f"{len(images)} images are given, and a batch of '{self.input.name}' has {batch}"
            )
        stacked = np.stack([*images, *[images[-1]] * (batch - len(images))])
        values = self.table()[np.arange(self.channels), stacked]
        values = values.transpose(0, 3, 1, 2) if self.layout == "NCHW" else values
        return np.ascontiguousarray(values)


FIELDS: Final = tuple("resize crop pad interpolation colour layout scale mean std".split())
"""The names of the settings."""


def read_preprocessing(
    manifest: Mapping[str, Json], inputs: Iterable[TensorSpec]
) -> dict[str, Preprocessing]:
    """Return the preprocessing of each image input; ImageMismatch or LookupError if it does not fit."""
    specs = {spec.name: spec for spec in inputs}
    images = manifest.get("images", {})
    return {name: Preprocessing.of(fields, specs[name]) for name, fields in images.items()}


# ---------------------------------------------------------------- settings


def _find_layout(layout: Json, spec: TensorSpec) -> str:
    """Return the layout of an input: the given one, or the layout that has 1 or 3 channels."""
    if len(spec.shape) != len(LAYOUTS[0]):
        raise ImageMismatch(
            "images are for inputs with 4 dimensions: batch, channels, height and width, "
            f"not of the shape {list(spec.shape)}"
        )
    is_number = spec.dtype.startswith(("float", "int", "uint"))
    if not is_number:
        raise ImageMismatch(f"images are for numeric inputs, not for {spec.dtype}")
    if layout is not None and layout not in LAYOUTS:
        raise ImageMismatch("layout is unknown", "layout")
    fitting = [name for name in LAYOUTS if spec.shape[name.index("C")] in COLOURS.values()]
    if layout in fitting:
        return str(layout)
    shape = list(spec.shape)
    if layout is not None:
        channels = spec.shape[layout.index("C")]
        raise ImageMismatch(
            f"{layout} gives {channels} channels for the shape {shape}; images have 1 or 3",
            "layout",
        )
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ImageMismatch(f"the shape {shape} fits NCHW and NHWC: set layout", "layout")
    raise ImageMismatch(f"no dimension for channels in the shape {shape} is 1 or 3")


def _find_colour(colour: Json, channels: int) -> str:
    if colour is None:
        return next(name for name, count in COLOURS.items() if count == channels)
    if colour not in COLOURS:
        raise ImageMismatch("colour is unknown", "colour")
    if COLOURS[colour] != channels:
        raise ImageMismatch(
            f"{colour} has {COLOURS[colour]} channels, and the input has {channels}", "colour"
        )
    return str(colour)


def _read_scaling(
    fields: Mapping[str, Json], spec: TensorSpec, channels: int
) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    is_float = spec.dtype.startswith("float")
    default = 1 / (LEVELS - 1) if is_float else 1.0
    (scale,) = _read_numbers(fields, "scale", default, 1)
    if not scale:
        raise ImageMismatch("scale must not be 0, which makes all images equal", "scale")
    mean = _read_numbers(fields, "mean", 0.0, channels)
    std = _read_numbers(fields, "std", 1.0, channels)
    if not all(value > 0 for value in std):
        raise ImageMismatch("std must be above 0", "std")
    if "scale" not in fields and is_float and max(map(abs, mean)) > 1:
        raise ImageMismatch(
            "these are levels from 0 to 255, and scale is 1/255 by default: set scale: 1", "mean"
        )
    return scale, mean, std


def _read_numbers(
    fields: Mapping[str, Json], name: str, default: float, channels: int
) -> tuple[float, ...]:
    value = fields.get(name, default)
    values = list(value) if isinstance(value, list | tuple) else [value] * channels
    numbers = [number for number in values if type(number) in (int, float)]
    if len(numbers) < len(values) or not all(map(math.isfinite, numbers)):
        raise ImageMismatch(f"{name} must be numbers", name)
    if len(values) != channels:
        raise ImageMismatch(
            f"there are {len(values)} numbers for an input with {channels} channels", name
        )
    return tuple(map(float, numbers))


def _read_length(fields: Mapping[str, Json], name: str) -> int | Size | None:
    """Return a setting that is the length of a side, or height and width; None if it is not given."""
    value = fields.get(name)
    if value is None:
        return None
    lengths = list(value) if isinstance(value, list | tuple) else [value]
    if not all(type(length) is int and 0 < length <= MAX_SIZE for length in lengths):
        raise ImageMismatch(f"{name} must be from 1 to {MAX_SIZE}", name)
    if not isinstance(value, list | tuple):
        return int(value)
    if len(lengths) != 2:
        raise ImageMismatch(f"{name} must be a number, or height and width", name)
    return lengths[0], lengths[1]


def _check_size(
    resize: int | Size | None, crop: int | Size | None, pad: Json, size: Size
) -> int | Size | None:
    """Return the effective `resize`; ImageMismatch unless the result has the size of the input."""
    takes = f"the input takes {_size_text(size)}"
    if pad is not None:
        if type(pad) is not int or not 0 <= pad < LEVELS:
            raise ImageMismatch(f"pad must be a level from 0 to {LEVELS - 1}", "pad")
        if crop is not None:
            raise ImageMismatch("an image that is padded is not cropped", "crop")
    if crop is not None:
        crop_size = (crop, crop) if isinstance(crop, int) else crop
        if crop_size != size:
            raise ImageMismatch(f"gives {_size_text(crop_size)}, and {takes}", "crop")
        shortest = (resize, resize) if isinstance(resize, int) else resize or size
        if shortest[0] < size[0] or shortest[1] < size[1]:
            raise ImageMismatch(f"is smaller than crop, {_size_text(size)}", "resize")
        return resize
    if isinstance(resize, int):
        height, width = size
        raise ImageMismatch(
            f"is the length of the shorter side, and {takes}: "
            f"add crop: [{height}, {width}], or write resize: [{height}, {width}]",
            "resize",
        )
    if resize not in (None, size):
        raise ImageMismatch(f"gives {_size_text(resize or size)}, and {takes}: add crop", "resize")
    return size


def _size_text(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


# ---------------------------------------------------------------- pixels


def _convert_colour(pixels: Array, colour: str) -> Array:
    """Convert gray or RGB pixels to an order of channels, one of `COLOURS`."""
    import numpy as np

    is_gray = pixels.shape[2] == 1
    if colour == "GRAY":
        if is_gray:
            return pixels
        total = pixels.astype(np.int32) @ np.array(_GRAY_WEIGHTS, np.int32)
        gray = (total + (1 << (_GRAY_BITS - 1))) >> _GRAY_BITS
        return gray.astype(np.uint8)[:, :, None]
    if is_gray:
        return np.repeat(pixels, COLOURS[colour], axis=2)
    return pixels if colour == "RGB" else pixels[:, :, ::-1]


def crop_offset(size: int, new_size: int) -> int:
    """Return the offset of torchvision's CenterCrop along a side; negative if the side is too short.

    >>> crop_offset(256, 224), crop_offset(7, 4), crop_offset(9, 4), crop_offset(3, 8)
    (16, 2, 2, -2)
    """
    if size < new_size:
        return -((new_size - size) // 2)
    return round((size - new_size) / 2)


def _place(image: Array, size: Size, offsets: Sequence[int], level: int) -> Array:
    """Return a window of an image that begins at `offsets`, filled with `level` outside of the image."""
    import numpy as np

    placed = np.full((*size, image.shape[2]), level, np.uint8)
    windows, sources = [], []
    for offset, length, old_length in zip(offsets, size, image.shape[:2], strict=True):
        start, end = max(offset, 0), min(offset + length, old_length)
        sources.append(slice(start, end))
        windows.append(slice(start - offset, end - offset))
    placed[tuple(windows)] = image[tuple(sources)]
    return placed


@functools.lru_cache(maxsize=16)
def _make_table(dtype: str, scale: float, mean: tuple[float, ...], std: tuple[float, ...]) -> Array:
    import numpy as np

    levels = np.arange(LEVELS) * scale
    values: Array = (levels - np.array(mean)[:, None]) / np.array(std)[:, None]
    if not dtype.startswith("float"):
        limits = np.iinfo(dtype)
        values = np.rint(values).clip(limits.min, limits.max)
    return values.astype(dtype)


# ---------------------------------------------------------------- resampling

# The fractional bits of a weight: of 32 bits, a pixel takes 8, and 2 are headroom for the sum.
_WEIGHT_BITS: Final = 22


def _triangle(x: Array) -> Array:
    import numpy as np

    distance = np.abs(x)
    return np.where(distance < 1.0, 1.0 - distance, 0.0)


def _cubic(x: Array) -> Array:
    """Return the cubic convolution kernel of Keys with a = -0.5, with operations in Pillow's order."""
    import numpy as np

    a, distance = -0.5, np.abs(x)
    near = ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * a
    return np.where(distance < 1.0, near, np.where(distance < 2.0, far, 0.0))


# Name -> resampling kernel, and the distance beyond which the kernel is 0.
_FILTERS: Final[Mapping[str, tuple[Callable[[Array], Array], float]]] = {
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic, 2.0),
}
INTERPOLATIONS: Final = tuple(_FILTERS)
"""The names of the resampling kernels."""

# How many output pixels share a matrix of weights. With more pixels, more of the weights would be zeros.
_BLOCK: Final = 32


def resize(image: Array, height: int, width: int, interpolation: str) -> Array:
    """Resize an image."""
    resized = _resize_rows(image, width, interpolation)
    return _resize_rows(resized.swapaxes(0, 1), height, interpolation).swapaxes(0, 1)


def _resize_rows(image: Array, width: int, interpolation: str) -> Array:
    import numpy as np

    height, old_width, channels = image.shape
    if old_width == width:
        return image
    starts, weights = _compute_weights(old_width, width, interpolation)
    resized = np.empty((height, width, channels), np.uint8)
    for first in range(0, width, _BLOCK):
        block = slice(first, first + _BLOCK)
        start = int(starts[block][0])
        matrix = _weight_matrix(starts[block] - start, weights[block])[: old_width - start]
        pixels = image[:, start : start + len(matrix)].swapaxes(1, 2)
        # all sums are integers below 2^53, so that a float64 matmul is exact in any order of additions
        sums = pixels.reshape(height * channels, -1).astype(np.float64) @ matrix
        rounded = (sums.astype(np.int64) + (1 << (_WEIGHT_BITS - 1))) >> _WEIGHT_BITS
        columns = rounded.clip(0, 255).reshape(height, channels, -1)
        resized[:, block] = columns.swapaxes(1, 2)
    return resized


def _weight_matrix(starts: Array, weights: Array) -> Array:
    """Return weights `[output pixels, taps]` as a float64 matrix `[input pixels, output pixels]`."""
    import numpy as np

    count, taps = weights.shape
    matrix = np.zeros((int(starts[-1]) + taps, count))
    matrix[starts[:, None] + np.arange(taps), np.arange(count)[:, None]] = weights
    return matrix


def _compute_weights(size: int, new_size: int, interpolation: str) -> tuple[Array, Array]:
    """Return the first input pixel that each output pixel reads, and the weights from there on."""
    import numpy as np

    kernel, support = _FILTERS[interpolation]
    scale = size / new_size
    filter_scale = max(scale, 1.0)
    support *= filter_scale
    centers = (np.arange(new_size) + 0.5) * scale
    # conversion to integers rounds toward 0, as in Pillow's C code
    starts = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + support + 0.5).astype(np.int64), size)
    taps = np.arange(math.ceil(support) * 2 + 1)
    positions = taps + starts[:, None]
    weights = kernel((positions - centers[:, None] + 0.5) * (1.0 / filter_scale))
    weights = np.where(positions < ends[:, None], weights, 0.0)
    total = np.zeros(new_size)
    for tap in taps:
        # added in this order, because the order of additions decides the last bit
        total += weights[:, tap]
    weights = np.divide(weights, total[:, None], out=weights, where=total[:, None] != 0)
    fixed = weights * (1 << _WEIGHT_BITS)
    return starts, (fixed + np.where(fixed < 0, -0.5, 0.5)).astype(np.int32)
