"""Converts ONNX's Resize where TVM cannot: rounded sizes, sizes that keep the aspect ratio, some axes, and antialiasing."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler.tir_kernels import resize
from tvmflow.compiler.tir_kernels.resize import Interpolation

_METHODS: Final = {"nearest": "nearest_neighbor", "linear": "linear", "cubic": "cubic"}
_MAX_TAPS: Final = 256


class _Axis(NamedTuple):
    """An axis that is resized: the number of its pixels before and after, and the length after, which may be no integer."""

    axis: int
    source: int
    size: int
    length: float


def convert(
    builder: relax.BlockBuilder, inputs: Sequence[Any], attributes: Mapping[str, Any]
) -> relax.Expr | None:
    """Convert a Resize with constant scales or sizes; None for one that TVM converts correctly.

    Args:
        builder: The builder of the model.
        inputs: The operands of the node; None for missing ones.
        attributes: Its attributes.

    Raises:
        ValueError: for a mode that is not supported.
    """
    axes = _find_axes(inputs, attributes)
    antialias = bool(attributes.get("antialias", 0))
    coordinates = _text(attributes, "coordinate_transformation_mode", "half_pixel")
    if axes is None or not (
        antialias
        or "axes" in attributes
        or "keep_aspect_ratio_policy" in attributes
        or coordinates == "half_pixel_symmetric"
        # Factors are float32: 1/3 of 6 counts as exactly 2.
        or any(not math.isclose(axis.length, axis.size, rel_tol=1e-5) for axis in axes)
    ):
        return None
    mode = Interpolation(
        _METHODS[_text(attributes, "mode", "nearest")],
        coordinates,
        _text(attributes, "nearest_mode", "round_prefer_floor"),
        float(attributes.get("cubic_coeff_a", -0.75)),
        bool(attributes.get("exclude_outside", 0)),
    )
    if not resize.is_supported(mode):
        raise ValueError(f"the mode {coordinates} with a rounded size or axes is not supported")
    return _emit(builder, inputs[0], axes, mode, antialias)


def _emit(
    builder: relax.BlockBuilder,
    data: relax.Expr,
    axes: Sequence[_Axis],
    mode: Interpolation,
    antialias: bool,
) -> relax.Expr:
    """Emit a kernel for each axis; numbers that are no float32 are computed as such."""
    dtype = str(data.ty.dtype.dtype)
    if dtype == "float64":
        raise ValueError("float64 with a rounded size or axes is not supported")
    data = builder.normalize(relax.op.astype(data, "float32")) if dtype != "float32" else data
    for axis, source, size, length in axes:
        taps = resize.find_taps(source, size, mode, length, antialias=antialias)
        if taps.positions.shape[1] > _MAX_TAPS:
            raise ValueError(f"antialiasing from {source} to {size} pixels is not supported")
        function = functools.partial(resize.resize, axes=(axis,), steps={})
        tables = [relax.const(table) for table in taps]
        data = builder.emit_te(function, data, *tables, primfunc_name_hint="resize")
    return relax.op.astype(data, dtype) if dtype != "float32" else data


def _find_axes(inputs: Sequence[Any], attributes: Mapping[str, Any]) -> list[_Axis] | None:
    """Return the axes that change; None where scales and sizes are no constants."""
    shape = [int(extent) for extent in inputs[0].ty.shape]
    axes = [int(axis) % len(shape) for axis in attributes.get("axes", range(len(shape)))]
    extents = [shape[axis] for axis in axes]
    scales, sizes = (_constant(inputs, position) for position in (2, 3))
    if scales is not None:
        lengths = [extent * float(scale) for extent, scale in zip(extents, scales, strict=True)]
        counts = [math.floor(length * (1 + 1e-7)) for length in lengths]
    elif sizes is not None:
        counts = [int(size) for size in sizes]
        lengths = [float(count) for count in counts]
        policy = _text(attributes, "keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            choose = min if policy == "not_larger" else max
            factor = choose(n / extent for n, extent in zip(counts, extents, strict=True))
            lengths = [extent * factor for extent in extents]
            counts = [math.floor(length + 0.5) for length in lengths]
    else:
        return None
    all_axes = [_Axis(*axis) for axis in zip(axes, extents, counts, lengths, strict=True)]
    return [axis for axis in all_axes if axis.source != axis.length]


def _constant(inputs: Sequence[Any], position: int) -> np.ndarray[Any, Any] | None:
    value = inputs[position] if position < len(inputs) else None
    if isinstance(value, relax.ShapeExpr):
        return np.array([int(extent) for extent in value.values])
    array = np.asarray(value.value.numpy()) if isinstance(value, tvm.ir.Constant) else None
    return array if array is not None and array.size else None


def _text(attributes: Mapping[str, Any], name: str, default: str) -> str:
    value = attributes.get(name, default)
    return value.decode() if isinstance(value, bytes) else str(value)
