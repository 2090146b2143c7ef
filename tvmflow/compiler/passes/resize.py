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
from tvmflow.compiler.passes.rewriter import (
    OPAQUE,
    TAKES_EPILOGUE,
    MainRewriter,
    rewrite_main,
)
from tvmflow.compiler.tir_kernels import resize as operators
from tvmflow.compiler.tir_kernels.resize import Interpolation, Taps

RESIZES: Final = ("relax.image.resize2d", "relax.image.resize3d")
"""The operators that resize images and volumes."""

# TVM's nearest mode where a model names none.
_DEFAULT_ROUNDING: Final = {"align_corners": "round"}


class Resize(NamedTuple):
    """A resize of a tensor.

    Attributes:
        mode: How pixels are computed.
        axes: The axes that change.
        sizes: The number of pixels of the result along them.
    """

    mode: Interpolation
    axes: tuple[int, ...]
    sizes: tuple[int, ...]


def convert_resize(mod: tvm.IRModule) -> tvm.IRModule:
    """Convert resizes of float32 data to kernels with tables."""
    return rewrite_main(mod, _ResizeRewriter)


def as_resize(call: relax.Call) -> Resize | None:
    """Return the resize that a call is; None for other calls, and for modes without a table."""
    if ir.operator_name(call) not in RESIZES or not all(map(ir.is_float32, (call, call.args[0]))):
        return None
    source, target, attrs = ir.shape_of(call.args[0]), ir.shape_of(call), call.attrs
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
    axes = tuple(axis for axis, extent in enumerate(target) if extent != source[axis])
    if not operators.is_supported(mode):
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
    taps = _find_taps(resize, ir.known_shape(data))
    steps = {axis: even for axis in taps if (even := operators.find_steps(taps[axis])) is not None}
    axes = tuple(axis for axis in taps if axis not in steps)
    tables = [relax.const(table) for axis in axes for table in taps[axis]]
    function = functools.partial(operators.resize, axes=axes, steps=steps)
    pattern = TAKES_EPILOGUE if is_last else OPAQUE
    return rewriter.kernel(function, "resize", data, *tables, pattern=pattern)


def _find_taps(resize: Resize, shape: Sequence[int]) -> dict[int, Taps]:
    """Return the taps of each axis that a resize of data of a shape changes."""
    return {
        axis: operators.find_taps(shape[axis], size, resize.mode)
        for axis, size in zip(resize.axes, resize.sizes, strict=True)
    }


def _is_even(resize: Resize, shape: Sequence[int]) -> bool:
    """Return whether a resize of data of a shape needs no tables.

    Then no axis is worth a pass over memory of its own.
    """
    return None not in map(operators.find_steps, _find_taps(resize, shape).values())


class _ResizeRewriter(MainRewriter):
    """Rewrites the resizes that are left on plain data."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        resize = as_resize(call)
        if resize is None or self.flow.is_weight(call.args[0]):
            return rewritten
        data, last = rewritten.args[0], len(ir.known_shape(call)) - 1
        if not resize.axes:
            return data
        if last not in resize.axes or _is_even(resize, ir.known_shape(data)):
            return emit_resize(self, data, resize)
        sizes = dict(zip(resize.axes, resize.sizes, strict=True))
        order = _order_axes(resize.axes, sizes, ir.known_shape(data))
        for axis in order:
            step = Resize(resize.mode, (axis,), (sizes[axis],))
            data = emit_resize(self, data, step, axis == order[-1])
        return data


def _order_axes(axes: Sequence[int], sizes: dict[int, int], source: Sequence[int]) -> list[int]:
    """Return the order in which the axes of plain data are resized.

    Only the innermost axis is no vector: it comes when there are fewest rows.
    """
    shrinking = [axis for axis in axes if sizes[axis] < source[axis]]
    return shrinking + [axis for axis in reversed(axes) if axis not in shrinking]
