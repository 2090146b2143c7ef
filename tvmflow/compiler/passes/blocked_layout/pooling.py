"""Pooling and reductions over the image, on blocked layouts."""

from __future__ import annotations

from typing import Any, Final

from tvm import relax, topi

from tvmflow.compiler import ir
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter

IMAGE_REDUCTIONS: Final = {
    f"relax.{name}": getattr(relax.op, name) for name in ("mean", "sum", "max", "min")
}
"""Operators that may reduce each channel's image to one number."""


def rewrite_pool2d(rewriter: LayoutRewriter, call: relax.Call, data: Any) -> relax.Expr | None:
    """Rewrite max or average pooling of blocked data."""
    tensor = rewriter.blocked_form(data)
    attrs = call.attrs
    if tensor is None or (attrs.layout, attrs.out_layout) != ("NCHW", "NCHW"):
        return None
    kind = "max" if "max" in call.op.name else "avg"
    return rewriter.builder_.emit_te(
        topi.nn.pool2d,
        tensor,
        kernel=attrs.pool_size,
        stride=attrs.strides,
        dilation=attrs.dilation,
        padding=attrs.padding,
        pool_type=kind,
        ceil_mode=bool(attrs.ceil_mode),
        layout=f"NCHW{rewriter.block}c",
        count_include_pad=bool(attrs.count_include_pad),
        primfunc_name_hint=f"{kind}_pool2d",
    )


def rewrite_adaptive_pool2d(
    rewriter: LayoutRewriter, call: relax.Call, data: Any
) -> relax.Expr | None:
    """Rewrite adaptive average pooling of blocked data."""
    tensor = rewriter.blocked_form(data)
    if tensor is None or call.attrs.layout != "NCHW":
        return None
    arguments = (tensor, ir.known_shape(call)[2:], "avg", f"NCHW{rewriter.block}c")
    return rewriter.kernel(topi.nn.adaptive_pool, "adaptive_avg_pool2d", *arguments, pattern=None)


def rewrite_image_reduction(
    rewriter: LayoutRewriter, call: relax.Call, data: Any
) -> relax.Expr | None:
    """Rewrite a reduction over height and width that keeps its axes."""
    tensor = rewriter.blocked_form(data)
    axes = sorted(int(axis) % 4 for axis in call.attrs.axis or ())
    if tensor is None or axes != [2, 3] or not call.attrs.keepdims:
        return None
    return rewriter.emit(IMAGE_REDUCTIONS[call.op.name](tensor, [2, 3], keepdims=True))
