"""Resizes images and volumes with tables of source pixels and weights.

One axis is resized after another where that is less work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.open_sizes import IrSize, is_open, known_sizes, same_size, sizes_of
from tvmflow.compiler.passes.rewriter import (
    OPAQUE,
    TAKES_EPILOGUE,
    MainRewriter,
    rewrite_main,
)
from tvmflow.compiler.tir_kernels import resize as operators
from tvmflow.compiler.tir_kernels.resize import Interpolation, Steps

RESIZES: Final = ("relax.image.resize2d", "relax.image.resize3d")
"""The operators that resize images and volumes."""

# TVM's nearest mode where a model names none.
_DEFAULT_ROUNDING: Final = {"align_corners": "round"}


# Pixels are repeated at all sizes where they are at these, of which the last one is beyond any image.
_CHECKED_SOURCES: Final = (2, 3, 37, 65_536)
_MAX_FACTOR: Final = 8


class Resize(NamedTuple):
    """A resize of a tensor.

    Attributes:
        mode: How pixels are computed.
        axes: The axes that change.
        sizes: The number of pixels of the result along them.
    """

    mode: Interpolation
    axes: tuple[int, ...]
    sizes: tuple[IrSize, ...]


def convert_resize(mod: tvm.IRModule) -> tvm.IRModule:
    """Convert resizes of float32 data to kernels with tables."""
    return rewrite_main(mod, _ResizeRewriter)


def as_resize(call: relax.Call) -> Resize | None:
    """Return the resize that a call is; None for other calls, and for modes without a table."""
    if ir.operator_name(call) not in RESIZES or not all(map(ir.is_float32, (call, call.args[0]))):
        return None
    source, target, attrs = sizes_of(call.args[0]), sizes_of(call), call.attrs
    if source is None or target is None or len(attrs.layout) != len(target):
        return None
    coordinates = attrs.coordinate_transformation_mode
    rounding = attrs.rounding_method or _DEFAULT_ROUNDING.get(coordinates, "floor")
    mode = Interpolation(
        method=attrs.method,
        coordinates=coordinates,
        rounding=rounding,
        cubic_alpha=float(attrs.cubic_alpha),
        excludes_outside=bool(attrs.cubic_exclude),
    )
    axes = tuple(axis for axis, n in enumerate(target) if not same_size(n, source[axis]))
    has_open = any(is_open(source[axis]) or is_open(target[axis]) for axis in axes)
    if not operators.is_supported(mode) or (has_open and not operators.is_computed(mode)):
        return None
    return Resize(mode, axes, tuple(target[axis] for axis in axes))


def emit_resize(rewriter: MainRewriter, data: Any, resize: Resize, is_last: bool = True) -> Any:
    """Emit one kernel that resizes all axes.

    Args:
        rewriter: The rewriter that emits it.
        data: The data.
        resize: The resize; its axes are those of `data`.
        is_last: False if the result is resized again, so that nothing can be fused with it.
    """
    steps = _find_steps(rewriter, resize, data)
    axes = tuple(axis for axis in resize.axes if axis not in steps)
    sources, sizes = known_sizes(data), dict(zip(resize.axes, resize.sizes, strict=True))
    tables = [
        table
        for axis in axes
        for table in _make_tables(rewriter, sources[axis], sizes[axis], resize.mode)
    ]
    function = functools.partial(operators.resize, axes=axes, steps=steps)
    pattern = TAKES_EPILOGUE if is_last else OPAQUE
    return rewriter.kernel(function, "resize", data, *tables, pattern=pattern)


def _find_steps(rewriter: MainRewriter, resize: Resize, data: Any) -> dict[int, Steps]:
    """Return the steps of the pixels along each axis where they are even."""
    sources = known_sizes(data)
    found = {
        axis: _find_steps_along(rewriter, sources[axis], size, resize.mode)
        for axis, size in zip(resize.axes, resize.sizes, strict=True)
    }
    return {axis: steps for axis, steps in found.items() if steps is not None}


def _find_steps_along(
    rewriter: MainRewriter, source: IrSize, size: IrSize, mode: Interpolation
) -> Steps | None:
    """Return the steps along an axis; of an open one only where each pixel is repeated, at all sizes."""
    if not is_open(source) and not is_open(size):
        return operators.find_steps(operators.find_taps(source, size, mode))
    factor = _find_factor(source, size)
    if factor is None:
        return None
    for number in {rewriter.numbers.size(source), *_CHECKED_SOURCES}:
        steps = operators.find_steps(operators.find_taps(number, number * factor, mode))
        if steps != Steps(number * factor, 0, 1, factor):
            return None
    return Steps(None, 0, 1, factor)


def _find_factor(source: IrSize, size: IrSize) -> int | None:
    """Return by how many times a size is larger than an open one, for small whole numbers."""
    return next((n for n in range(2, _MAX_FACTOR + 1) if same_size(source * n, size)), None)


def _make_tables(
    rewriter: MainRewriter, source: IrSize, size: IrSize, mode: Interpolation
) -> list[Any]:
    """Return the tables of an axis: constants, or what a kernel computes from open sizes."""
    if not is_open(source) and not is_open(size):
        return [relax.const(table) for table in operators.find_taps(source, size, mode)]
    function = functools.partial(operators.compute_taps, mode=mode)
    tables = rewriter.kernel(function, "resize_tables", source, size, pattern=OPAQUE)
    return [rewriter.emit(relax.TupleGetItem(tables, position)) for position in range(2)]


class _ResizeRewriter(MainRewriter):
    """Rewrites the resizes that are left on plain data."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        resize = as_resize(call)
        source, target = self.numbers.shape(call.args[0]), self.numbers.shape(call)
        if resize is None or source is None or target is None or self.flow.is_weight(call.args[0]):
            return rewritten
        data, last = rewritten.args[0], len(target) - 1
        if not resize.axes:
            return data
        # without tables, no axis is worth a pass over memory of its own
        is_even = len(_find_steps(self, resize, data)) == len(resize.axes)
        if last not in resize.axes or is_even:
            return emit_resize(self, data, resize)
        sizes = dict(zip(resize.axes, resize.sizes, strict=True))
        order = _order_axes(resize.axes, target, source)
        for axis in order:
            step = Resize(resize.mode, (axis,), (sizes[axis],))
            data = emit_resize(self, data, step, axis == order[-1])
        return data


def _order_axes(axes: Sequence[int], sizes: Sequence[int], source: Sequence[int]) -> list[int]:
    """Return the order in which the axes of plain data are resized.

    Only the innermost axis is no vector: it comes when there are fewest rows.
    """
    shrinking = [axis for axis in axes if sizes[axis] < source[axis]]
    return shrinking + [axis for axis in reversed(axes) if axis not in shrinking]
