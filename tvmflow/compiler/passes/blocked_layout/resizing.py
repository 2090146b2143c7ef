"""Resizing of images and volumes on blocked layouts."""

from __future__ import annotations

from typing import Any

from tvm import relax

from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.resize import as_resize, emit_resize


def rewrite_resize(
    rewriter: LayoutRewriter, call: relax.Call, data: Any, _: Any
) -> relax.Expr | None:
    """Rewrite a resize of the spatial axes whose reader takes blocked data.

    Where none does, fewer pixels are unpacked before.
    """
    resize = as_resize(call)
    if (
        resize is None
        or not call.attrs.layout.startswith("NC")
        or min(resize.axes, default=0) < 2
        or not rewriter.is_read_blocked(call)
    ):
        return None
    return emit_resize(rewriter, rewriter.to_blocked(data), resize)
