"""Pooling and reductions over the image, on blocked layouts."""

from __future__ import annotations

from typing import Any, Final

from tvm import relax, topi

from tvmflow.compiler.open_sizes import is_open, known_sizes
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.resize import as_resize, emit_resize

IMAGE_REDUCTIONS: Final = {
    f"relax.{name}": getattr(relax.op, name) for name in ("mean", "sum", "max", "min", "variance")
}
"""Operators that may reduce spatial axes of each channel's sequence, image or volume."""

_FIRST_SPATIAL_AXIS: Final = 2

_POOLS: Final = {1: topi.nn.pool1d, 2: topi.nn.pool2d, 3: topi.nn.pool3d}
_ADAPTIVE_POOLS: Final = {
    1: topi.nn.adaptive_pool1d,
    2: topi.nn.adaptive_pool,
    3: topi.nn.adaptive_pool3d,
}


def rewrite_pool(rewriter: LayoutRewriter, call: relax.Call, data: Any) -> relax.Expr | None:
    """Rewrite max or average pooling of blocked data."""
    tensor = rewriter.blocked_form(data)
    attrs = call.attrs
    layout = _default_layout(call)
    if tensor is None or (attrs.layout, attrs.out_layout) != (layout, layout):
        return None
    rank = len(layout) - 2
    kind = "max" if "max" in call.op.name else "avg"
    return rewriter.builder_.emit_te(
        _POOLS[rank],
        tensor,
        kernel=attrs.pool_size,
        stride=attrs.strides,
        dilation=attrs.dilation,
        padding=attrs.padding,
        pool_type=kind,
        ceil_mode=bool(attrs.ceil_mode),
        layout=f"{layout}{rewriter.block}c",
        count_include_pad=bool(attrs.count_include_pad),
        primfunc_name_hint=f"{kind}_pool{rank}d",
    )


def rewrite_adaptive_pool(
    rewriter: LayoutRewriter, call: relax.Call, data: Any
) -> relax.Expr | None:
    """Rewrite adaptive average pooling of blocked data."""
    tensor = rewriter.blocked_form(data)
    layout = _default_layout(call)
    if tensor is None or call.attrs.layout != layout:
        return None
    rank = len(layout) - 2
    size = list(known_sizes(call)[2:])
    if any(map(is_open, size)):
        return None
    arguments = (tensor, size, "avg", f"{layout}{rewriter.block}c")
    name = f"adaptive_avg_pool{rank}d"
    return rewriter.kernel(_ADAPTIVE_POOLS[rank], name, *arguments, pattern=None)


def rewrite_image_reduction(
    rewriter: LayoutRewriter, call: relax.Call, data: Any
) -> relax.Expr | None:
    """Rewrite a reduction over spatial axes, which may drop them: no lane is added to another."""
    tensor = rewriter.blocked_form(data)
    if tensor is None or call.attrs.axis is None:
        return None
    rank = len(known_sizes(data))
    axes = sorted(int(axis) % rank for axis in call.attrs.axis)
    if not axes or axes[0] < _FIRST_SPATIAL_AXIS:
        return None
    reduce = IMAGE_REDUCTIONS[call.op.name]
    return rewriter.emit(reduce(tensor, axes, keepdims=bool(call.attrs.keepdims)))


def _default_layout(call: relax.Call) -> str:
    """Return the frontends' layout of an operator's data."""
    return "NC" + "DHW"[2 - len(known_sizes(call)) :]


# ---------------------------------------------------------------- resizing
# Resizing of images and volumes on blocked layouts.


def rewrite_resize(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, _: Any
) -> relax.Expr | None:
    """Rewrite a resize of the spatial axes whose reader takes blocked data.

    Where none does, fewer pixels are unpacked before.
    """
    resize = as_resize(call)
    if (
        resize is None
        or rewriter.numbers.shape(call.args[0]) is None
        or not call.attrs.layout.startswith("NC")
        or min(resize.axes, default=0) < 2
        or not rewriter.is_read_blocked(call)
    ):
        return None
    return emit_resize(rewriter, rewriter.to_blocked(data), resize)
