"""Converters of MXNet's arithmetic: element by element, with scalars, reductions, products.

Comparisons give 1 and 0 in the dtype of their data, and a full reduction gives shape (1,), as in MXNet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Final

import numpy as np
from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op

R = relax.op

_Binary = Callable[[Expr, Expr], Expr]


def _zero(value: Expr) -> Expr:
    return relax.const(0, _dtype(value))


def _dtype(value: Expr) -> str:
    return str(value.ty.dtype)


# -- element by element --------------------------------------------------------------------


def _unary(function: Callable[[Expr], Expr]) -> Converter:
    return lambda op: function(op[0])


def _scaled(function: Callable[[Expr], Expr], factor: float) -> Converter:
    """`factor · f(x)`."""
    return lambda op: R.multiply(function(op[0]), op.scalar(factor))


def _identity(value: Expr) -> Expr:
    return value


def _rint(op: Op) -> Expr:
    """To the nearest integer; halves go to the lower one, as MXNet has it."""
    return R.ceil(R.subtract(op[0], op.scalar(0.5)))


def _round(op: Op) -> Expr:
    """To the nearest integer; halves go away from zero."""
    return R.multiply(R.sign(op[0]), R.floor(R.add(R.abs(op[0]), op.scalar(0.5))))


def _cube_root(op: Op) -> Expr:
    return R.multiply(R.sign(op[0]), R.power(R.abs(op[0]), op.scalar(1 / 3)))


def _hard_sigmoid(op: Op) -> Expr:
    line = R.add(
        R.multiply(op[0], op.scalar(op.number("alpha", 0.2))), op.scalar(op.number("beta", 0.5))
    )
    return R.clip(line, 0, 1)


def _smooth_l1(op: Op) -> Expr:
    """`0.5 (σx)²` below `1/σ²`, `|x| − 0.5/σ²` above."""
    square = op.number("scalar", 1.0) ** 2
    size = op.emit(R.abs(op[0]))
    inner = R.multiply(R.multiply(size, size), op.scalar(0.5 * square))
    outer = R.subtract(size, op.scalar(0.5 / square))
    return R.where(R.less(size, op.scalar(1 / square)), inner, outer)


def _clip(op: Op) -> Expr:
    low, high = op.number("a_min"), op.number("a_max")
    return R.minimum(R.maximum(op[0], op.scalar(low)), op.scalar(high))


def _logical_not(op: Op) -> Expr:
    return R.astype(R.equal(op[0], _zero(op[0])), op.dtype())


# -- two tensors, or a tensor and a scalar ---------------------------------------------------


def _same_dtype(function: _Binary) -> _Binary:
    """A comparison that answers in the dtype of its data."""
    return lambda a, b: R.astype(function(a, b), _dtype(a))


def _logical(function: _Binary) -> _Binary:
    def apply(a: Expr, b: Expr) -> Expr:
        return R.astype(
            function(R.not_equal(a, _zero(a)), R.not_equal(b, _zero(b))),
            _dtype(a),
        )

    return apply


def _modulo(a: Expr, b: Expr) -> Expr:
    """The remainder with the divisor's sign; 0 when the divisor is 0."""
    zero = _zero(b)
    safe = R.where(R.equal(b, zero), R.add(b, relax.const(1, _dtype(b))), b)
    rest = R.subtract(a, R.multiply(safe, R.floor(R.divide(a, safe))))
    return R.where(R.equal(b, zero), R.multiply(zero, a), rest)


def _hypotenuse(a: Expr, b: Expr) -> Expr:
    return R.sqrt(R.add(R.multiply(a, a), R.multiply(b, b)))


_BINARY: Final[dict[str, _Binary]] = {
    "add": R.add,
    "sub": R.subtract,
    "mul": R.multiply,
    "div": R.divide,
    "mod": _modulo,
    "power": R.power,
    "maximum": R.maximum,
    "minimum": R.minimum,
    "hypot": _hypotenuse,
    "equal": _same_dtype(R.equal),
    "not_equal": _same_dtype(R.not_equal),
    "greater": _same_dtype(R.greater),
    "greater_equal": _same_dtype(R.greater_equal),
    "lesser": _same_dtype(R.less),
    "lesser_equal": _same_dtype(R.less_equal),
    "logical_and": _logical(R.logical_and),
    "logical_or": _logical(R.logical_or),
    "logical_xor": _logical(R.logical_xor),
}
# Division and roots of integers round in ways that differ between MXNet's versions
_FLOAT_ONLY: Final = frozenset({"div", "mod", "power", "hypot"})


def _check_dtypes(op: Op, name: str) -> None:
    dtypes = {op.dtype(index) for index in range(len(op))}
    if len(dtypes) > 1:
        op.refuse(f"its inputs have different dtypes: {', '.join(sorted(dtypes))}")
    if name in _FLOAT_ONLY and not op.dtype().startswith("float"):
        op.refuse(f"{op.dtype()} data are not supported, only floating point")


def _binary(name: str) -> Converter:
    def convert(op: Op) -> Expr:
        _check_dtypes(op, name)
        return _BINARY[name](op[0], op[1])

    return convert


def _with_scalar(name: str, *, swapped: bool = False) -> Converter:
    def convert(op: Op) -> Expr:
        _check_dtypes(op, name)
        value = op.number("scalar", 1.0)
        whole = op.flag("is_int", True)
        if not op.dtype().startswith("float") and not (whole and value.is_integer()):
            op.refuse(f"{op.dtype()} data with the scalar {value} are not supported")
        scalar = op.scalar(value)
        return _BINARY[name](scalar, op[0]) if swapped else _BINARY[name](op[0], scalar)

    return convert


def _sum_of_all(op: Op) -> Expr:
    return functools.reduce(R.add, op.all_inputs())


def _where(op: Op) -> Expr:
    condition = R.not_equal(op[0], _zero(op[0]))
    if op.rank() == 1 and op.rank(1) > 1:
        condition = R.expand_dims(condition, list(range(1, op.rank(1))))
    return R.where(condition, op[1], op[2])


# -- reductions --------------------------------------------------------------------------------


def _axes(op: Op) -> list[int]:
    """The axes that a reduction removes, in order."""
    given = [op.axis(axis) for axis in op.optional_integers("axis") or ()]
    every = range(op.rank())
    if op.flag("exclude", False):
        return [axis for axis in every if axis not in given] if given else list(every)
    return sorted(given) or list(every)


def _reduced(op: Op, function: Callable[..., Expr], value: Expr, axes: list[int]) -> Expr:
    keep = op.flag("keepdims", False)
    out = function(value, axes, keepdims=keep)
    # MXNet has no tensor of rank 0
    return R.reshape(out, (1,)) if len(axes) == op.rank() and not keep else out


def _reduction(function: Callable[..., Expr]) -> Converter:
    return lambda op: _reduced(op, function, op[0], _axes(op))


def _norm(op: Op) -> Expr:
    order = op.integer("ord", 2)
    if order not in (1, 2):
        op.refuse(f"ord={order} is not supported, only 1 and 2")
    op.require("out_dtype", op.dtype(), "the dtype cannot change")
    axes = _axes(op)
    if order == 1:
        return _reduced(op, R.sum, R.abs(op[0]), axes)
    return R.sqrt(_reduced(op, R.sum, R.multiply(op[0], op[0]), axes))


def _arg_reduction(function: Callable[..., Expr]) -> Converter:
    """The index comes in the dtype of the data; the first of equal values wins."""

    def convert(op: Op) -> Expr:
        axis = op.optional_integer("axis")
        keep = op.flag("keepdims", False)
        if axis is None:
            flat = R.reshape(op[0], (math.prod(op.shape()),))
            index = R.reshape(function(flat, axis=0), (1,) * op.rank() if keep else (1,))
        else:
            index = function(op[0], axis=op.axis(axis), keepdims=keep)
            if op.rank() == 1 and not keep:
                index = R.reshape(index, (1,))
        return R.astype(index, op.dtype())

    return convert


def _argmax_channel(op: Op) -> Expr:
    if op.rank() != 2:
        op.refuse(f"its data has {op.rank()} dimensions, 2 are needed")
    return R.astype(R.argmax(op[0], axis=1), op.dtype())


# -- products --------------------------------------------------------------------------------------


def _swap_last(value: Expr, rank: int) -> Expr:
    axes = list(range(rank))
    return R.permute_dims(value, [*axes[:-2], axes[-1], axes[-2]])


def _dot(op: Op) -> Expr:
    """The last axis of the first with the first axis of the second."""
    op.require("forward_stype", "default", "results are dense")
    flips = op.flag("transpose_a", False), op.flag("transpose_b", False)
    ranks = op.rank(0), op.rank(1)
    if any(flips) and ranks != (2, 2):
        op.refuse(f"transposed data of {ranks[0]} and {ranks[1]} dimensions are not supported")
    left, right = (
        _swap_last(op[index], 2) if flips[index] and ranks[index] == 2 else op[index]
        for index in (0, 1)
    )
    if ranks == (2, 2):
        return R.matmul(left, right)
    inner = op.shape(0)[-1]
    rows, columns = op.shape(0)[:-1], op.shape(1)[1:]
    product = R.matmul(
        R.reshape(left, (math.prod(rows), inner)), R.reshape(right, (inner, math.prod(columns)))
    )
    return R.reshape(product, (*rows, *columns) or (1,))


def _batch_dot(op: Op) -> Expr:
    op.require("forward_stype", "default", "results are dense")
    return R.matmul(*_matrices(op))


def _matrices(op: Op) -> tuple[Expr, Expr]:
    flips = op.flag("transpose_a", False), op.flag("transpose_b", False)
    left, right = (
        _swap_last(op[index], op.rank(index)) if flips[index] else op[index] for index in (0, 1)
    )
    return left, right


def _gemm2(op: Op) -> Expr:
    op.require("axis", "-2", "matrices must be the last two axes")
    product = R.matmul(*_matrices(op))
    alpha = op.number("alpha", 1.0)
    return product if alpha == 1.0 else R.multiply(product, op.scalar(alpha))


# -- dtypes ---------------------------------------------------------------------------------------

_DTYPES: Final = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")


def _cast(op: Op) -> Expr:
    dtype = op.choice("dtype", "", _DTYPES)
    return op[0] if dtype == op.dtype() else R.astype(op[0], dtype)


def _multicast(op: Op) -> list[Expr]:
    """All inputs in the widest of their floating-point types, or the narrowest."""
    dtypes = [np.dtype(op.dtype(index)) for index in range(len(op))]
    narrow = op.flag("cast_narrow", False)
    op.ignore("num_outputs")
    common = (min if narrow else max)(dtypes, key=lambda dtype: dtype.itemsize).name
    return [
        op[index] if op.dtype(index) == common else R.astype(op[index], common)
        for index in range(len(op))
    ]


# -- the tables -----------------------------------------------------------------------------------

_UNARY: Final[dict[str, Converter]] = {
    "abs": _unary(R.abs),
    "arccos": _unary(R.acos),
    "arccosh": _unary(R.acosh),
    "arcsin": _unary(R.asin),
    "arcsinh": _unary(R.asinh),
    "arctan": _unary(R.atan),
    "arctanh": _unary(R.atanh),
    "cbrt": _cube_root,
    "ceil": _unary(R.ceil),
    "clip": _clip,
    "cos": _unary(R.cos),
    "cosh": _unary(R.cosh),
    "degrees": _scaled(_identity, 180 / math.pi),
    "erf": _unary(R.erf),
    "exp": _unary(R.exp),
    "expm1": lambda op: R.subtract(R.exp(op[0]), op.scalar(1.0)),
    "fix": _unary(R.trunc),
    "floor": _unary(R.floor),
    "hard_sigmoid": _hard_sigmoid,
    "log": _unary(R.log),
    "log10": _scaled(R.log, 1 / math.log(10)),
    "log1p": lambda op: R.log(R.add(op[0], op.scalar(1.0))),
    "log2": _scaled(R.log, 1 / math.log(2)),
    "logical_not": _logical_not,
    "negative": _unary(R.negative),
    "radians": _scaled(_identity, math.pi / 180),
    "rcbrt": lambda op: R.divide(op.scalar(1.0), _cube_root(op)),
    "reciprocal": lambda op: R.divide(op.scalar(1.0), op[0]),
    "relu": _unary(R.nn.relu),
    "rint": _rint,
    "round": _round,
    "rsqrt": lambda op: R.divide(op.scalar(1.0), R.sqrt(op[0])),
    "sigmoid": _unary(R.sigmoid),
    "sign": _unary(R.sign),
    "sin": _unary(R.sin),
    "sinh": _unary(R.sinh),
    "smooth_l1": _smooth_l1,
    "softsign": lambda op: R.divide(op[0], R.add(R.abs(op[0]), op.scalar(1.0))),
    "sqrt": _unary(R.sqrt),
    "square": _unary(R.square),
    "tan": _unary(R.tan),
    "tanh": _unary(R.tanh),
    "trunc": _unary(R.trunc),
}

# MXNet's names of the same function: element by element, and what 0.x files call it
_ELEMENTWISE_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "add": ("elemwise_add", "_plus", "_Plus", "_add", "_grad_add", "broadcast_plus"),
    "sub": ("elemwise_sub", "_minus", "_Minus", "_sub", "broadcast_minus"),
    "mul": ("elemwise_mul", "_mul", "_Mul"),
    "div": ("elemwise_div", "_div", "_Div"),
    "mod": ("_mod", "_Mod"),
    "power": ("_power", "_Power"),
    "maximum": ("_maximum", "_Maximum"),
    "minimum": ("_minimum", "_Minimum"),
    "hypot": ("_hypot",),
    "equal": ("_equal",),
    "not_equal": ("_not_equal",),
    "greater": ("_greater",),
    "greater_equal": ("_greater_equal",),
    "lesser": ("_lesser",),
    "lesser_equal": ("_lesser_equal",),
    "logical_and": ("_logical_and",),
    "logical_or": ("_logical_or",),
    "logical_xor": ("_logical_xor",),
}
# (operator, scalar first) -> names
_SCALAR_NAMES: Final[dict[tuple[str, bool], tuple[str, ...]]] = {
    ("add", False): ("_plus_scalar", "_PlusScalar"),
    ("sub", False): ("_minus_scalar", "_MinusScalar"),
    ("sub", True): ("_rminus_scalar", "_RMinusScalar"),
    ("mul", False): ("_mul_scalar", "_MulScalar"),
    ("div", False): ("_div_scalar", "_DivScalar"),
    ("div", True): ("_rdiv_scalar", "_RDivScalar"),
    ("mod", False): ("_mod_scalar", "_ModScalar"),
    ("mod", True): ("_rmod_scalar", "_RModScalar"),
    ("power", False): ("_power_scalar", "_PowerScalar"),
    ("power", True): ("_rpower_scalar", "_RPowerScalar"),
    ("maximum", False): ("_maximum_scalar", "_MaximumScalar"),
    ("minimum", False): ("_minimum_scalar", "_MinimumScalar"),
    ("hypot", False): ("_hypot_scalar",),
    ("equal", False): ("_equal_scalar",),
    ("not_equal", False): ("_not_equal_scalar",),
    ("greater", False): ("_greater_scalar",),
    ("greater_equal", False): ("_greater_equal_scalar",),
    ("lesser", False): ("_lesser_scalar",),
    ("lesser_equal", False): ("_lesser_equal_scalar",),
    ("logical_and", False): ("_logical_and_scalar",),
    ("logical_or", False): ("_logical_or_scalar",),
    ("logical_xor", False): ("_logical_xor_scalar",),
}

CONVERTERS: Final[dict[str, Converter]] = {
    **_UNARY,
    **{f"broadcast_{name}": _binary(name) for name in _BINARY},
    **{alias: _binary(name) for name, names in _ELEMENTWISE_NAMES.items() for alias in names},
    **{
        alias: _with_scalar(name, swapped=swapped)
        for (name, swapped), names in _SCALAR_NAMES.items()
        for alias in names
    },
    "Cast": _cast,
    "ElementWiseSum": _sum_of_all,
    "_linalg_gemm2": _gemm2,
    "add_n": _sum_of_all,
    "amp_cast": _cast,
    "amp_multicast": _multicast,
    "argmax": _arg_reduction(R.argmax),
    "argmax_channel": _argmax_channel,
    "argmin": _arg_reduction(R.argmin),
    "batch_dot": _batch_dot,
    "cast": _cast,
    "dot": _dot,
    "linalg_gemm2": _gemm2,
    "max": _reduction(R.max),
    "max_axis": _reduction(R.max),
    "mean": _reduction(R.mean),
    "min": _reduction(R.min),
    "min_axis": _reduction(R.min),
    "norm": _norm,
    "prod": _reduction(R.prod),
    "sum": _reduction(R.sum),
    "sum_axis": _reduction(R.sum),
    "where": _where,
}
