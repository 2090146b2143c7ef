"""Converters of pooling layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op
from tvmflow.frontends.mxnet.converters._common import per_axis, spatial_rank

R = relax.op

_MAX_POOL: Final = {1: R.nn.max_pool1d, 2: R.nn.max_pool2d, 3: R.nn.max_pool3d}
_AVG_POOL: Final = {1: R.nn.avg_pool1d, 2: R.nn.avg_pool2d, 3: R.nn.avg_pool3d}


def _pooling(op: Op) -> Expr:
    """`Pooling`: max, average, sum or p-norm over windows in 1 to 3 dimensions."""
    return _pool(op, _POOLS)


def _pooling_v1(op: Op) -> Expr:
    """`Pooling_v1`: divides every average by the size of the full window, also at the border."""
    return _pool(op, {**_POOLS, "avg": lambda op, windows: windows.mean(op[0])})


def _pool(op: Op, pools: Mapping[str, _Pool]) -> Expr:
    dims = spatial_rank(op)
    size = op.shape()[2:]
    if op.flag("global_pool", False):
        op.ignore("kernel", "stride", "pad", "pooling_convention")
        kernel, stride, before, out = size, (1,) * dims, (0,) * dims, (1,) * dims
    else:
        if not op.has("kernel"):
            op.refuse("the attribute kernel is missing")
        kernel = per_axis(op, "kernel", dims, 1)
        stride, before = per_axis(op, "stride", dims, 1), per_axis(op, "pad", dims, 0)
        convention = op.choice("pooling_convention", "valid", tuple(_OUTPUT_SIZES))
        out = tuple(map(_OUTPUT_SIZES[convention], size, kernel, stride, before))
    # Zeros after the data complete the last window, so that no rounding mode is needed.
    after = tuple(
        max((o - 1) * s + k - n - b, 0)
        for o, s, k, n, b in zip(out, stride, kernel, size, before, strict=True)
    )
    windows = _Windows(size, kernel, stride, before, after, out)
    kind = op.choice("pool_type", "max", tuple(pools))
    if kind != "lp":
        op.ignore("p_value")
    if kind != "avg":
        op.ignore("count_include_pad")
    return pools[kind](op, windows)


class _Windows(NamedTuple):
    """The windows of a pooling: one number for each spatial dimension, `out` of them in total."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    out: tuple[int, ...]

    def pool(self, operator: Mapping[int, Any], data: Expr, **options: Any) -> Expr:
        """Return the result of a Relax pooling over these windows."""
        padding = self.before + self.after
        return operator[len(self.kernel)](data, self.kernel, self.stride, padding, **options)

    def mean(self, data: Expr) -> Expr:
        """Return the mean of each window, in which padding counts as zeros."""
        return self.pool(_AVG_POOL, data, count_include_pad=True)

    def counts(self, padded: Sequence[int], dtype: str) -> np.ndarray[Any, Any]:
        """Return how many positions of each window lie within the data and `padded` positions around it."""
        counts = np.ones((), dtype)
        for n, k, s, b, o, p in zip(
            self.size, self.kernel, self.stride, self.before, self.out, padded, strict=True
        ):
            starts = np.arange(o) * s - b
            inside = np.minimum(starts + k, n + p) - np.maximum(starts, -p)
            counts = np.multiply.outer(counts, np.maximum(inside, 1).astype(dtype))
        return counts


def _average_pool(op: Op, windows: _Windows) -> Expr:
    """Divide by the positions within the data and its declared padding; `full` convention adds none."""
    padded = windows.before if op.flag("count_include_pad", True) else (0,) * len(windows.kernel)
    counts = windows.counts(padded, op.dtype())
    window_size = math.prod(windows.kernel)
    if (counts == window_size).all():
        return windows.mean(op[0])
    return windows.mean(op[0]) * relax.const(window_size / counts)


def _sum_pool(op: Op, windows: _Windows) -> Expr:
    return windows.mean(op[0]) * op.scalar(math.prod(windows.kernel))


def _lp_pool(op: Op, windows: _Windows) -> Expr:
    """Return `(Σ |x|^p)^(1/p)` of each window."""
    power = op.integer("p_value")
    if power not in (1, 2, 3):
        op.refuse(f"p_value={power} is not supported, only 1, 2 and 3")
    size = R.abs(op[0])
    mean = windows.mean(R.power(size, op.scalar(power)) if power > 1 else size)
    total = mean * op.scalar(math.prod(windows.kernel))
    return R.power(total, op.scalar(1 / power)) if power > 1 else total


_Pool = Callable[[Op, _Windows], Expr]


_POOLS: Final[dict[str, _Pool]] = {
    "max": lambda op, windows: windows.pool(_MAX_POOL, op[0]),
    "avg": _average_pool,
    "sum": _sum_pool,
    "lp": _lp_pool,
}


# The number of windows by convention: (size, kernel, stride, padding) -> count.
_OUTPUT_SIZES: Final[dict[str, Callable[[int, int, int, int], int]]] = {
    "valid": lambda n, k, s, p: (n + 2 * p - k) // s + 1,
    "full": lambda n, k, s, p: -((k - n - 2 * p) // s) + 1,
}


def _adaptive_avg_pooling(op: Op) -> Expr:
    """`contrib.AdaptiveAvgPooling2D`: a single number in `output_size` is for both dimensions."""
    size = op.integers("output_size", (1,)) or (1,)
    return R.nn.adaptive_avg_pool2d(op[0], output_size=size if len(size) == 2 else size * 2)


CONVERTERS: Final[dict[str, Converter]] = {
    "Pooling": _pooling,
    "Pooling_v1": _pooling_v1,
    "_contrib_AdaptiveAvgPooling2D": _adaptive_avg_pooling,
}
