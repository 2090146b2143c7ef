"""Direct convolutions on blocked layouts: of float32, or of bfloat16 where the recipe asks for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tvmflow.compiler import ir
from tvmflow.compiler.passes.blocked_layout import taps
from tvmflow.compiler.passes.blocked_layout.rewriter import LayoutRewriter
from tvmflow.compiler.passes.blocked_layout.taps import Image, Window
from tvmflow.compiler.tir_kernels import blocked, dot_products, tiles
from tvmflow.compiler.tir_kernels.blocked import Groups
from tvmflow.compiler.tir_kernels.dot_products import BFLOAT16


def is_plain_data(rewriter: LayoutRewriter, data: Any) -> bool:
    """Return whether a convolution reads its data as they are because they have few channels."""
    few = ir.known_shape(data)[1] <= rewriter.block // 2
    return few and rewriter.blocked_form(data) is None


def block_data(rewriter: LayoutRewriter, data: Any, weight_dtype: str) -> tuple[Any, int]:
    """Return a convolution's data and their lanes: 1 for data that stay plain, few for bfloat16 of few channels."""
    if not is_plain_data(rewriter, data):
        return rewriter.to_blocked(data), rewriter.block
    if not _uses_bfloat16(rewriter, weight_dtype):
        return data, 1
    channels = ir.known_shape(data)[1]
    lanes = channels + -channels % BFLOAT16.terms
    return rewriter.pack(rewriter.round_data(data), lanes), lanes


def emit(
    rewriter: LayoutRewriter,
    name: str,
    x: Any,
    packed: Any,
    window: Window,
    reads: Groups,
    weight_dtype: str,
    image: Image | None = None,
) -> Any:
    """Emit a convolution.

    Args:
        rewriter: The rewriter.
        name: The name of the kernel.
        x: The data, as `block_data` returns them.
        packed: Weights (o/b, blocks of data, …, lanes of i, b of o), without the axis of lanes if there is one.
        window: The movement of the kernel.
        reads: The blocks of data that each block of the result reads.
        weight_dtype: The dtype of the weights in the library, where they are not rounded to bfloat16.
        image: The extents of data and result, where each tap may be a convolution of its own.
    """
    convolve: Callable[..., Any] = blocked.conv
    if _uses_bfloat16(rewriter, weight_dtype):
        convolve, name = functools.partial(dot_products.conv, BFLOAT16), f"bfloat16_{name}"
        x = x if reads.lanes < rewriter.block else rewriter.round_data(x)
        weights = rewriter.round_weights(rewriter.split_terms(packed, BFLOAT16.terms))
    else:
        weights = rewriter.cast(packed, weight_dtype)
    kernel = ir.known_shape(packed)[2 : 2 + len(window.strides)]
    if image is not None and taps.are_profitable(image, kernel, window):
        return taps.emit_convolutions(rewriter, image, x, weights, window, reads, convolve)
    if convolve is blocked.conv:
        columns = _pad_columns(rewriter, x, weights, window)
        convolve = functools.partial(blocked.conv, padded_columns=columns)
    return rewriter.kernel(lambda x, w: convolve(x, w, *window, reads), name, x, weights)


def _pad_columns(rewriter: LayoutRewriter, x: Any, weights: Any, window: Window) -> int:
    """Return how many columns of a result, which are pixels of a row, are computed, so that tiles divide them."""
    cpu, rank = rewriter.context.cpu, len(window.strides)
    assert cpu is not None, "layouts are blocked for a CPU model"
    blocks, *reads, lanes = ir.known_shape(weights)
    padded = ir.known_shape(x)[1 + rank] + sum(window.padding[rank - 1 :: rank])
    reach = (reads[rank] - 1) * window.dilation[-1]
    columns = (padded - reach - 1) // window.strides[-1] + 1
    return tiles.pad_rows(columns, blocks, math.prod(reads), cpu._replace(lanes=lanes))


def count_terms(rewriter: LayoutRewriter, weight_dtype: str) -> int:
    """Return how many products of a direct convolution an instruction computes for each result."""
    return BFLOAT16.terms if _uses_bfloat16(rewriter, weight_dtype) else 1


def _uses_bfloat16(rewriter: LayoutRewriter, weight_dtype: str) -> bool:
    """Return whether a convolution with these weights is one of bfloat16: int8 weights are narrower already."""
    return rewriter.context.uses_bfloat16() and weight_dtype == "float32"
