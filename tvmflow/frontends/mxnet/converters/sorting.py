"""Converters of sorting operators. The sort is stable: equal values keep the order of the data."""

from __future__ import annotations

import math
from typing import Final

from tvm import relax

from tvmflow.compiler.open_sizes import known_sizes
from tvmflow.frontends.mxnet._op import DTYPES, Converter, Expr, Op

R = relax.op


def _sorted_axis(op: Op) -> tuple[Expr, int]:
    """Return the data and the axis to sort; without an axis MXNet sorts the flattened data."""
    axis = op.optional_integer("axis", -1)
    if axis is None:
        return op.emit(R.reshape(op[0], (math.prod(op.sizes()),))), 0
    return op.emit(op[0]), op.axis(axis)


def _sort(op: Op) -> Expr:
    data, axis = _sorted_axis(op)
    return R.sort(data, axis=axis, descending=not op.flag("is_ascend", True))


def _argsort(op: Op) -> Expr:
    data, axis = _sorted_axis(op)
    dtype = op.choice("dtype", "float32", DTYPES)
    order = R.argsort(data, axis=axis, descending=not op.flag("is_ascend", True), dtype="int32")
    return R.astype(order, dtype)


def _top_k(op: Op) -> list[Expr]:
    """`topk`: values, indices or both of the k largest (or smallest) entries; k below 1 means all."""
    data, axis = _sorted_axis(op)
    [size], count = op.fixed([known_sizes(data)[axis]]), op.integer("k", 1)
    count = size if count < 1 else min(count, size)
    dtype = op.choice("dtype", "float32", DTYPES)
    returned = op.choice("ret_typ", "indices", ("indices", "value", "both"))
    largest = not op.flag("is_ascend", False)
    both = op.emit(R.topk(data, k=count, axis=axis, largest=largest, dtype="int32"))
    values, indices = both[0], R.astype(both[1], dtype)
    return {"indices": [indices], "value": [values], "both": [values, indices]}[returned]


CONVERTERS: Final[dict[str, Converter]] = {"argsort": _argsort, "sort": _sort, "topk": _top_k}
