"""Resizing of images and volumes by tables of source pixels and weights, computed at build time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import te, tirx

from tvmflow.graph.dynamic_shapes import plain

_Array = np.ndarray[Any, Any]


class Interpolation(NamedTuple):
    """How the pixels of a resized image are computed, in the terms of ONNX's Resize.

    Attributes:
        method: `nearest_neighbor`, `linear` or `cubic`.
        coordinates: The coordinate transformation mode.
        rounding: The nearest mode.
        excludes_outside: Whether cubic weights of pixels outside of the image are zero.
    """

    method: str
    coordinates: str
    rounding: str
    cubic_alpha: float
    excludes_outside: bool


class Taps(NamedTuple):
    """The taps along an axis: int32 source positions and float32 weights, each (result pixels, taps)."""

    positions: _Array
    weights: _Array


class _Arithmetic(NamedTuple):
    """float32 arithmetic in numpy or in TIR: how to make a constant, and functions."""

    constant: Callable[[float], Any]
    floor: Callable[[Any], Any]
    ceil: Callable[[Any], Any]


_NUMPY: Final = _Arithmetic(np.float32, np.floor, np.ceil)
_TIR: Final = _Arithmetic(lambda value: tirx.const(value, "float32"), tirx.floor, tirx.ceil)


def _half_pixel(of: _Arithmetic, x: Any, _: Any, __: Any, ratio: Any) -> Any:
    return (x + of.constant(0.5)) / ratio - of.constant(0.5)


# Each function maps result coordinates, the sizes of source and result, and their ratio to source coordinates.
_COORDINATES: Final[Mapping[str, Callable[..., Any]]] = {
    "half_pixel": _half_pixel,
    "pytorch_half_pixel": _half_pixel,
    "align_corners": lambda of, x, source, size, _: (
        x * (source - of.constant(1)) / (size - of.constant(1))
    ),
    "asymmetric": lambda _, x, __, ___, ratio: x / ratio,
    "tf_half_pixel_for_nn": lambda of, x, _, __, ratio: (x + of.constant(0.5)) / ratio,
}
# With these modes, a result of one pixel reads the first source pixel.
_FROM_FIRST: Final = ("align_corners", "pytorch_half_pixel")
_SYMMETRIC: Final = "half_pixel_symmetric"
# ONNX's nearest modes, and TVM's `round`, which only `find_taps` supports.
_ROUNDING: Final[Mapping[str, Callable[[_Arithmetic, Any], Any]]] = {
    "floor": lambda of, x: of.floor(x),
    "ceil": lambda of, x: of.ceil(x),
    "round": lambda _, x: np.rint(x),
    "round_prefer_ceil": lambda of, x: of.floor(x + of.constant(0.5)),
    "round_prefer_floor": lambda of, x: of.ceil(x - of.constant(0.5)),
}


def is_supported(mode: Interpolation) -> bool:
    """Return whether `find_taps` supports a mode; it lacks cropping and methods of other frameworks."""
    rounds = mode.method != "nearest_neighbor" or mode.rounding in _ROUNDING
    return rounds and mode.method in _TAPS and mode.coordinates in (*_COORDINATES, _SYMMETRIC)


def find_taps(
    source: int,
    size: int,
    mode: Interpolation,
    length: float | None = None,
    *,
    antialias: bool = False,
) -> Taps:
    """Return the taps along an axis in a mode that `is_supported`, computed in float32 as in ONNX Runtime.

    `length` is the length of the source times the scale; `size` is that, rounded to an integer. With `antialias`, a
    pixel of a smaller result is a weighted mean of all source pixels that it covers.
    """
    length = float(size) if length is None else length
    x = np.arange(size, dtype=np.float32)
    if source != length:
        x = _find_coordinates(x, source, length, mode.coordinates).astype(np.float32)
    if antialias and length < source:
        positions, weights = _antialiased(x, mode, length / source)
    else:
        positions, weights = _TAPS[mode.method](x, source, mode)
    # with one or two taps, positions are clamped to the image instead
    if mode.excludes_outside and weights.shape[1] > 2:
        weights = np.where((positions >= 0) & (positions < source), weights, 0)
        weights = weights / weights.sum(1, keepdims=True)
    return Taps(positions.clip(0, source - 1).astype(np.int32), weights.astype(np.float32))


def _find_coordinates(x: _Array, source: int, length: float, name: str) -> Any:
    size = len(x)
    if name in _FROM_FIRST and size == 1:
        return x * 0
    # the division is in float64, so that the scale keeps all digits
    ratio = np.float32(length / source)
    if name == _SYMMETRIC:
        shift = np.float32(source / 2) * (1 - np.float32(size) / np.float32(length))
        return shift + (x + np.float32(0.5)) / ratio - np.float32(0.5)
    return _COORDINATES[name](_NUMPY, x, np.float32(source), np.float32(size), ratio)


def _nearest(x: _Array, _: int, mode: Interpolation) -> tuple[_Array, _Array]:
    return _ROUNDING[mode.rounding](_NUMPY, x)[:, None], np.ones((len(x), 1))


def _linear(x: _Array, source: int, _: Interpolation) -> tuple[_Array, _Array]:
    x = x.clip(0, source - 1)
    first = np.floor(x)
    fraction = x - first
    return np.stack([first, first + 1], 1), np.stack([1 - fraction, fraction], 1)


def _cubic(x: _Array, _: int, mode: Interpolation) -> tuple[_Array, _Array]:
    """Return four taps with the weights of Keys, "Cubic Convolution Interpolation", 1981."""
    positions = np.floor(x)[:, None] + np.arange(-1, 3)
    distance = np.abs(x[:, None] - positions).astype(np.float64)
    return positions, _cubic_weights(distance, mode.cubic_alpha)


def _cubic_weights(distance: _Array, a: float) -> _Array:
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((distance - 5) * distance + 8) * distance * a - 4 * a
    return np.where(distance <= 1, near, far)


def _antialiased(x: _Array, mode: Interpolation, scale: float) -> tuple[_Array, _Array]:
    """Return the taps of a filter whose width grows by the factor by which the image shrinks."""
    radius = 1 if mode.method == "linear" else 2
    start = math.floor(-radius / scale) + 1
    positions = np.floor(x)[:, None] + np.arange(start, 2 - start)
    distance = np.abs(x[:, None] - positions).astype(np.float64) * scale
    inside = 1 - distance if radius == 1 else _cubic_weights(distance, mode.cubic_alpha)
    weights = np.where(distance < radius, inside, 0)
    return positions, weights / weights.sum(1, keepdims=True)


_TAPS: Final = {"nearest_neighbor": _nearest, "linear": _linear, "cubic": _cubic}


# ---------------------------------------------------------------- dynamic shapes


def compute_taps(
    source: Any, size: Any, mode: Interpolation, scale: float | None = None
) -> tuple[Any, Any]:
    """Return the tables of `find_taps` as tensor expressions of dynamic sizes; the mode `is_computed`.

    `scale` is the factor that `size` was computed with; None to use the quotient of the sizes.
    """
    source, size = map(_as_int64, (source, size))
    shape = (size, _as_int64(_COMPUTED_TAPS[mode.method]))

    def coordinate(i: Any) -> Any:
        x, wide, long = (value.astype("float32") for value in (i, source, size))
        # TVM's LowerIntrin fails on a quotient of float32 if it knows limits of x (apache-tvm 0.27)
        x = te.abs(x)
        ratio = long / wide if scale is None else _TIR.constant(scale)
        moved = _COORDINATES[mode.coordinates](_TIR, x, wide, long, ratio)
        if mode.coordinates in _FROM_FIRST:
            moved = tirx.Select(long > _TIR.constant(1), moved, _TIR.constant(0))
        return moved if scale is not None else tirx.Select(tirx.EQ(source, size), x, moved)

    def position(i: Any, tap: Any) -> Any:
        x, last = coordinate(i), source - 1
        if mode.method == "nearest_neighbor":
            pixel = _ROUNDING[mode.rounding](_TIR, x)
        else:
            pixel = tirx.floor(tirx.max(tirx.min(x, last.astype("float32")), _TIR.constant(0)))
        chosen = pixel.astype("int64") + tap
        return tirx.max(tirx.min(chosen, last), tirx.const(0, "int64")).astype("int32")

    def weight(i: Any, tap: Any) -> Any:
        if mode.method == "nearest_neighbor":
            return _TIR.constant(1)
        x = tirx.max(tirx.min(coordinate(i), (source - 1).astype("float32")), _TIR.constant(0))
        fraction = x - tirx.floor(x)
        is_first = tirx.EQ(tap, tirx.const(0, "int64"))
        return tirx.Select(is_first, _TIR.constant(1) - fraction, fraction)

    positions = te.compute(shape, position, name="positions")
    return positions, te.compute(shape, weight, name="weights")


def _as_int64(size: Any) -> Any:
    """Return a fixed or dynamic size as an int64 expression."""
    return tirx.const(size, "int64") if isinstance(size, int) else size.astype("int64")


def is_computed(mode: Interpolation) -> bool:
    """Return whether `compute_taps` supports a mode."""
    rounds = mode.method != "nearest_neighbor" or mode.rounding in {*_ROUNDING} - {"round"}
    return rounds and mode.method in _COMPUTED_TAPS and mode.coordinates in _COORDINATES


def resize_image(
    x: Any, height: Any, width: Any, *, mode: Interpolation, scales: Sequence[float | None]
) -> Any:
    """Resize float32 images (N, C, H, W) to a dynamic size; mode and scales are those of `compute_taps`."""
    axes = zip(x.shape[2:], (height, width), scales, strict=True)
    tables = [t for source, size, scale in axes for t in compute_taps(source, size, mode, scale)]
    return resize(x, *tables, axes=(2, 3), steps={})


_COMPUTED_TAPS: Final = {"nearest_neighbor": 1, "linear": 2}


class Steps(NamedTuple):
    """Evenly spaced pixels: pixel i of `size` is pixel (start + i · step) // repeats of the source.

    If `size` is None, it is `repeats` times the size of the source.
    """

    size: int | None
    start: int
    step: int
    repeats: int


def find_steps(taps: Taps) -> Steps | None:
    """Return the steps of a table of taps; None if positions are uneven or pixels have several taps."""
    positions = taps.positions[:, 0]
    if taps.positions.shape[1] > 1:
        return None
    size, start = len(positions), int(positions[0])
    step = int(positions[1]) - start if size > 1 else 1
    changes = np.flatnonzero(positions != start)
    repeats = 1 if step else int(changes[0]) if len(changes) else size
    steps = Steps(size, start * repeats, step or 1, repeats)
    even = (steps.start + np.arange(size) * steps.step) // repeats
    return steps if np.array_equal(even, positions) else None


def resize(x: Any, *tables: Any, axes: Sequence[int], steps: Mapping[int, Steps]) -> Any:
    """Return data resized along the axes in `steps`, whose pixels are evenly spaced, and along `axes`.

    For each of `axes`, `tables` holds positions and weights, both (result pixels, taps).
    """
    shape = list(map(plain, x.shape))
    positions, weights = tables[::2], tables[1::2]
    for axis, table in zip(axes, positions, strict=True):
        shape[axis] = plain(table.shape[0])
    for axis, pixel in steps.items():
        shape[axis] = shape[axis] * pixel.repeats if pixel.size is None else pixel.size
    counts = [range(int(table.shape[1])) for table in positions]

    def element(*coordinates: Any) -> Any:
        values, index = [], list(coordinates)
        for axis, (_, start, step, repeats) in steps.items():
            index[axis] = (start + coordinates[axis] * step) // repeats
        for taps in itertools.product(*counts):
            source, factors = list(index), list[Any]()
            for axis, table, weight, tap in zip(axes, positions, weights, taps, strict=True):
                source[axis] = table[index[axis], tap].astype("int64")
                factors.append(weight[index[axis], tap])
            # With one tap (nearest neighbor), there is no weight to multiply by.
            weighted = [f for f, count in zip(factors, counts, strict=True) if len(count) > 1]
            values.append(math.prod(weighted, start=1.0) * x(*source) if weighted else x(*source))
        return sum(values[1:], values[0])

    return te.compute(tuple(shape), element, name="resize")
