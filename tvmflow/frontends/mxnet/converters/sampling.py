"""Converters of resizing, sampling at positions, and pooling of regions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Final

from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op

R = relax.op


def _up_sampling(op: Op) -> Expr:
    """`UpSampling`: repeats each pixel so that all inputs get the size of the first one times `scale`."""
    scale = op.integer("scale")
    kind = op.choice("sample_type", "", ("nearest", "bilinear"))
    if kind == "bilinear":
        return _up_sampling_bilinear(op, scale)
    op.ignore("num_filter")
    mode = op.choice("multi_input_mode", "concat", ("concat", "sum"))
    height, width = (size * scale for size in op.shape()[2:])
    parts = []
    for index, value in enumerate(op.all_inputs()):
        size = op.shape(index)[2:]
        if height % size[0] or width % size[1]:
            op.refuse(f"input {index} of size {size} does not divide {(height, width)}")
        rows = R.repeat(value, height // size[0], axis=2)
        parts.append(R.repeat(rows, width // size[1], axis=3))
    if len(parts) == 1:
        return parts[0]
    return R.concat(parts, axis=1) if mode == "concat" else functools.reduce(R.add, parts)


def _up_sampling_bilinear(op: Op, scale: int) -> Expr:
    """Bilinear `UpSampling`: a deconvolution with one (learned) filter per channel, as in MXNet."""
    op.ignore("multi_input_mode", "num_args")
    channels = op.shape()[1]
    if op.integer("num_filter", channels) != channels:
        op.refuse(f"num_filter is not its data's {channels} channels")
    kernel = 2 * scale - scale % 2
    pad = math.ceil((scale - 1) / 2)
    return R.nn.conv2d_transpose(
        op[0],
        op.expect_shape(1, (channels, 1, kernel, kernel)),
        strides=(scale, scale),
        padding=(pad, pad, pad, pad),
        groups=channels,
    )


# Output size for an input size and a scale, in the modes of BilinearResize2D that need no `like`.
_RESIZED_SIZES: Final[dict[str, Callable[[int, float], int]]] = {
    "odd_scale": lambda n, scale: int(n * scale) if n % 2 == 0 else int((n - 1) * scale) + 1,
    "to_even_down": lambda n, _: n - n % 2,
    "to_even_up": lambda n, _: n + n % 2,
    "to_odd_down": lambda n, _: n - (n + 1) % 2,
    "to_odd_up": lambda n, _: n + (n + 1) % 2,
}


def _bilinear_resize(op: Op) -> Expr:
    """`contrib.BilinearResize2D`: the output size comes from size, scale, another tensor or parity."""
    mode = op.choice("mode", "size", ("size", "like", *_RESIZED_SIZES))
    size = op.shape()[2:]
    scales = [op.number(key, 0.0) for key in ("scale_height", "scale_width")]
    new_size = [op.integer(key, 1) for key in ("height", "width")]
    if mode == "like":
        new_size = list(op.shape(1)[2:])
    elif mode in _RESIZED_SIZES:
        new_size = [_RESIZED_SIZES[mode](n, scale) for n, scale in zip(size, scales, strict=True)]
    elif scales[0]:
        new_size = [int(n * scale) for n, scale in zip(size, scales, strict=True)]
    aligned = op.flag("align_corners", True)
    if tuple(new_size) == size:
        return op[0]
    if aligned and min(new_size) == 1:
        op.refuse("resizing to 1 with align_corners is not supported")
    return R.image.resize2d(
        op[0],
        tuple(new_size),
        layout="NCHW",
        method="linear",
        coordinate_transformation_mode="align_corners" if aligned else "half_pixel",
    )


def _bilinear_sampler(op: Op) -> Expr:
    """`BilinearSampler`: positions are −1 to 1 between the centers of the corner pixels; zeros outside."""
    return _sample(op, op[1])


def _sample(op: Op, grid: Expr) -> Expr:
    return R.image.grid_sample(
        op[0], grid, method="bilinear", layout="NCHW", padding_mode="zeros", align_corners=True
    )


def _spatial_transformer(op: Op) -> Expr:
    """`SpatialTransformer`: samples the data on an affine grid, with one matrix per instance."""
    op.choice("transform_type", "", ("affine",))
    op.choice("sampler_type", "", ("bilinear",))
    size = op.integers("target_shape", (0, 0))
    if len(size) != 2 or min(size) < 1:
        size = op.shape()[2:]
    matrix = R.reshape(op[1], (op.shape()[0], 2, 3))
    return _sample(op, R.image.affine_grid(matrix, size, align_corners=True))


def _roi_pooling(op: Op) -> Expr:
    """`ROIPooling`: the maximum of each cell of a region (image, left, top, right, bottom)."""
    return R.vision.roi_pool(
        op[0],
        op[1],
        pooled_size=op.integers("pooled_size"),
        spatial_scale=op.number("spatial_scale"),
        layout="NCHW",
    )


def _roi_align(op: Op) -> Expr:
    """`contrib.ROIAlign`: the average of bilinear samples in each cell of a region."""
    op.require("position_sensitive", "false", "only the form without it can be imported")
    op.require("aligned", "false", "TVM's and MXNet's results differ")
    if op.shape(1)[-1] != 5:
        op.refuse(f"regions have {op.shape(1)[-1]} columns, 5 are needed")
    return R.vision.roi_align(
        op[0],
        op[1],
        pooled_size=op.integers("pooled_size"),
        spatial_scale=op.number("spatial_scale"),
        sample_ratio=op.integer("sample_ratio", -1),
        layout="NCHW",
        mode="avg",
    )


CONVERTERS: Final[dict[str, Converter]] = {
    "BilinearSampler": _bilinear_sampler,
    "ROIPooling": _roi_pooling,
    "SpatialTransformer": _spatial_transformer,
    "UpSampling": _up_sampling,
    "_contrib_BilinearResize2D": _bilinear_resize,
    "_contrib_ROIAlign": _roi_align,
}
