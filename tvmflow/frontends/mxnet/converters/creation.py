"""Converters of operators that create constants."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op
from tvmflow.frontends.mxnet.converters._common import DTYPES

R = relax.op


def _fill(value: float) -> Converter:
    def convert(op: Op) -> Expr:
        shape = op.integers("shape", ()) or (1,)
        dtype = op.choice("dtype", "float32", DTYPES)
        return R.full(shape, relax.const(value, dtype), dtype)

    return convert


def _full(op: Op) -> Expr:
    return _fill(op.number("value"))(op)


def _fill_like(value: float) -> Converter:
    return lambda op: R.full(op.shape(), op.scalar(value), op.dtype())


def _arange_values(start: float, step: float, count: int, repeat: int, dtype: str) -> Any:
    # MXNet computes each element from its index, in the dtype of the result.
    steps = np.arange(count).astype(dtype) * np.dtype(dtype).type(step)
    return np.repeat(np.dtype(dtype).type(start) + steps, repeat).astype(dtype)


def _arange(op: Op) -> Expr:
    """`arange`: without `stop`, from 0 to `start`; each value `repeat` times."""
    start, step, repeat = op.number("start"), op.number("step", 1.0), op.integer("repeat", 1)
    op.require("infer_range", "false", "stop must be set")
    stop = op.number("stop", math.nan)
    if math.isnan(stop):
        start, stop = 0.0, start
    count = max(math.ceil((stop - start) / step), 0)
    op.check_constant(count * max(repeat, 1))
    dtype = op.choice("dtype", "float32", DTYPES)
    return relax.const(_arange_values(start, step, count, repeat, dtype), dtype)


def _arange_like(op: Op) -> Expr:
    """`contrib.arange_like`: as many values as the data or one of its axes has."""
    axis, repeat = op.optional_integer("axis"), op.integer("repeat", 1)
    shape = op.shape() if axis is None else (op.shape()[op.axis(axis)],)
    total = math.prod(shape)
    op.check_constant(total)
    values = _arange_values(
        op.number("start", 0.0), op.number("step", 1.0), -(-total // repeat), repeat, op.dtype()
    )
    return relax.const(values[:total].reshape(shape), op.dtype())


def _eye(op: Op) -> Expr:
    rows, offset = op.integer("N"), op.integer("k", 0)
    columns = op.integer("M", 0) or rows
    op.check_constant(rows * columns)
    dtype = op.choice("dtype", "float32", DTYPES)
    return relax.const(np.eye(rows, columns, offset, dtype=dtype), dtype)


def _shape_array(op: Op) -> Expr:
    return relax.const(np.array(op.shape(), "int64"), "int64")


def _size_array(op: Op) -> Expr:
    return relax.const(np.array([math.prod(op.shape())], "int64"), "int64")


CONVERTERS: Final[dict[str, Converter]] = {
    "_arange": _arange,
    "_contrib_arange_like": _arange_like,
    "_eye": _eye,
    "_full": _full,
    "_ones": _fill(1.0),
    "_zeros": _fill(0.0),
    "_zeros_without_dtype": _fill(0.0),
    "ones_like": _fill_like(1.0),
    "shape_array": _shape_array,
    "size_array": _size_array,
    "zeros_like": _fill_like(0.0),
}
