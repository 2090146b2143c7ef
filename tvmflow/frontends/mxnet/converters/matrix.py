"""Converters of matrix products and of attention."""

from __future__ import annotations

import math
from typing import Final

from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op

R = relax.op


def _transpose_last(op: Op, index: int) -> Expr:
    """Return an input with its last two axes swapped."""
    *batch, rows, columns = range(op.rank(index))
    return R.permute_dims(op[index], [*batch, columns, rows])


def _dot(op: Op) -> Expr:
    """`dot`: sums over the last axis of the first input and the first axis of the second."""
    op.require("forward_stype", "default", "results are dense")
    ranks = op.rank(0), op.rank(1)
    if ranks == (2, 2):
        return R.matmul(*_matrices(op))
    if op.flag("transpose_a", False) or op.flag("transpose_b", False):
        op.refuse(f"transposed data of {ranks[0]} and {ranks[1]} dimensions are not supported")
    (*rows, inner), (_, *columns) = op.shape(0), op.shape(1)
    left = R.reshape(op[0], (math.prod(rows), inner))
    product = R.matmul(left, R.reshape(op[1], (inner, math.prod(columns))))
    return R.reshape(product, (*rows, *columns) or (1,))


def _batch_dot(op: Op) -> Expr:
    op.require("forward_stype", "default", "results are dense")
    return R.matmul(*_matrices(op))


def _matrices(op: Op) -> tuple[Expr, Expr]:
    transposed = op.flag("transpose_a", False), op.flag("transpose_b", False)
    left, right = (_transpose_last(op, i) if transposed[i] else op[i] for i in (0, 1))
    return left, right


def _gemm2(op: Op) -> Expr:
    """`linalg.gemm2`: alpha times the product of the last two axes."""
    op.require("axis", "-2", "matrices must be the last two axes")
    product = R.matmul(*_matrices(op))
    alpha = op.number("alpha", 1.0)
    return product if alpha == 1.0 else product * op.scalar(alpha)


def _split_heads(op: Op, heads: int) -> tuple[list[Expr], tuple[int, int, int]]:
    """Split interleaved projections (length, batch, heads · 3 · depth) into queries, keys and values.

    Returns:
        Three tensors (batch · heads, length, depth), and length, batch and depth.
    """
    length, batch, width = op.shape()
    depth = width // (3 * heads)
    parts = op.emit(R.reshape(op[0], (length, batch * heads, 3, depth)))
    split = [
        R.reshape(R.strided_slice(parts, [2], [part], [part + 1]), (length, batch * heads, depth))
        for part in range(3)
    ]
    return [R.permute_dims(part, [1, 0, 2]) for part in split], (length, batch, depth)


def _self_attention_scores(op: Op) -> Expr:
    """`contrib.interleaved_matmul_selfatt_qk`: `Q Kᵀ / sqrt(depth)` of each head."""
    (query, key, _), (_, _, depth) = _split_heads(op, op.integer("heads"))
    scaled = query / op.scalar(math.sqrt(depth))
    return R.matmul(scaled, R.permute_dims(key, [0, 2, 1]))


def _self_attention_values(op: Op) -> Expr:
    """`contrib.interleaved_matmul_selfatt_valatt`: attention weights times the values of each head."""
    heads = op.integer("heads")
    (_, _, value), (length, batch, depth) = _split_heads(op, heads)
    mixed = R.permute_dims(R.matmul(op[1], value), [1, 0, 2])
    return R.reshape(mixed, (length, batch, heads * depth))


def _div_sqrt_dim(op: Op) -> Expr:
    return op[0] / op.scalar(math.sqrt(op.shape()[-1]))


CONVERTERS: Final[dict[str, Converter]] = {
    "_contrib_div_sqrt_dim": _div_sqrt_dim,
    "_contrib_interleaved_matmul_selfatt_qk": _self_attention_scores,
    "_contrib_interleaved_matmul_selfatt_valatt": _self_attention_values,
    "_linalg_gemm2": _gemm2,
    "batch_dot": _batch_dot,
    "dot": _dot,
    "linalg_gemm2": _gemm2,
}
