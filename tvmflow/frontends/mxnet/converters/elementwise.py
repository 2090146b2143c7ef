"""Converters of elementwise arithmetic. Comparisons return 1 and 0 in the dtype of their data, as in MXNet."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Final

import numpy as np
from tvm import relax

from tvmflow.frontends._hyperbolic import make_cosh, make_sinh
from tvmflow.frontends.mxnet._op import Converter, Expr, Op
from tvmflow.frontends.mxnet.converters._common import DTYPES, identity

R = relax.op

_Binary = Callable[[Expr, Expr], Expr]


def _zero(value: Expr) -> Expr:
    return relax.const(0, _dtype(value))


def _dtype(value: Expr) -> str:
    return str(value.ty.dtype)


def _unary(function: Callable[[Expr], Expr]) -> Converter:
    return lambda op: function(op[0])


def _scaled(function: Callable[[Expr], Expr], factor: float) -> Converter:
    """Return the converter of `factor · f(x)`."""
    return lambda op: function(op[0]) * op.scalar(factor)


def _rint(op: Op) -> Expr:
    """`rint`: rounds halves down, as MXNet does."""
    return R.ceil(op[0] - op.scalar(0.5))


def _round(op: Op) -> Expr:
    """`round`: rounds halves away from zero."""
    return R.sign(op[0]) * R.floor(R.abs(op[0]) + op.scalar(0.5))


def _cube_root(op: Op) -> Expr:
    return R.sign(op[0]) * R.power(R.abs(op[0]), op.scalar(1 / 3))


def _hard_sigmoid(op: Op) -> Expr:
    line = op[0] * op.scalar(op.number("alpha", 0.2)) + op.scalar(op.number("beta", 0.5))
    return R.clip(line, 0, 1)


def _smooth_l1(op: Op) -> Expr:
    """`smooth_l1`: `0.5 (σx)²` where `|x| < 1/σ²`, else `|x| − 0.5/σ²`."""
    square = op.number("scalar", 1.0) ** 2
    size = op.emit(R.abs(op[0]))
    inner = size * size * op.scalar(0.5 * square)
    outer = size - op.scalar(0.5 / square)
    return R.where(size < op.scalar(1 / square), inner, outer)


def _clip(op: Op) -> Expr:
    low, high = op.number("a_min"), op.number("a_max")
    return R.minimum(R.maximum(op[0], op.scalar(low)), op.scalar(high))


def _logical_not(op: Op) -> Expr:
    return R.astype(R.equal(op[0], _zero(op[0])), op.dtype())


def _same_dtype(function: _Binary) -> _Binary:
    """Return a comparison whose result has the dtype of its data."""
    return lambda a, b: R.astype(function(a, b), _dtype(a))


def _logical(function: _Binary) -> _Binary:
    def apply(a: Expr, b: Expr) -> Expr:
        result = function(R.not_equal(a, _zero(a)), R.not_equal(b, _zero(b)))
        return R.astype(result, _dtype(a))

    return apply


def _modulo(a: Expr, b: Expr) -> Expr:
    """Return the remainder with the sign of the divisor; 0 where the divisor is 0."""
    zero = _zero(b)
    safe = R.where(R.equal(b, zero), b + relax.const(1, _dtype(b)), b)
    rest = a - safe * R.floor(a / safe)
    return R.where(R.equal(b, zero), zero * a, rest)


def _hypot(a: Expr, b: Expr) -> Expr:
    return R.sqrt(a * a + b * b)


_BINARY: Final[dict[str, _Binary]] = {
    "add": R.add,
    "sub": R.subtract,
    "mul": R.multiply,
    "div": R.divide,
    "mod": _modulo,
    "power": R.power,
    "maximum": R.maximum,
    "minimum": R.minimum,
    "hypot": _hypot,
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
# How MXNet's operators spell a function, where that is not its name.
_SPELLINGS: Final = {"add": "plus", "sub": "minus"}
# Functions whose operators had capitals in files of MXNet 0.x.
_ARITHMETIC: Final = frozenset("add sub mul div mod power maximum minimum".split())
# Functions with an operator for a scalar on the left.
_NOT_COMMUTATIVE: Final = frozenset({"sub", "div", "mod", "power"})
# Versions of MXNet round divisions and roots of integers differently.
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
        is_int = op.flag("is_int", True)
        if not op.dtype().startswith("float") and not (is_int and value.is_integer()):
            op.refuse(f"{op.dtype()} data with the scalar {value} are not supported")
        scalar = op.scalar(value)
        return _BINARY[name](scalar, op[0]) if swapped else _BINARY[name](op[0], scalar)

    return convert


def _add_n(op: Op) -> Expr:
    return functools.reduce(R.add, op.all_inputs())


def _where(op: Op) -> Expr:
    """`where`: a vector as the condition chooses rows."""
    condition = R.not_equal(op[0], _zero(op[0]))
    if op.rank() == 1 and op.rank(1) > 1:
        condition = R.expand_dims(condition, list(range(1, op.rank(1))))
    return R.where(condition, op[1], op[2])


def _cast(op: Op) -> Expr:
    dtype = op.choice("dtype", "", (*DTYPES, "bool"))
    return op[0] if dtype == op.dtype() else R.astype(op[0], dtype)


def _multicast(op: Op) -> list[Expr]:
    """`amp_multicast`: casts all inputs to the widest of their dtypes, or with `cast_narrow` the narrowest."""
    dtypes = [np.dtype(op.dtype(index)) for index in range(len(op))]
    narrow = op.flag("cast_narrow", False)
    op.ignore("num_outputs")
    common = (min if narrow else max)(dtypes, key=lambda dtype: dtype.itemsize).name
    return [
        op[index] if op.dtype(index) == common else R.astype(op[index], common)
        for index in range(len(op))
    ]


def _binary_converters() -> dict[str, Converter]:
    """Return the converters of all functions of two operands, by every name of their operators."""
    converters: dict[str, Converter] = {}
    for name in _BINARY:
        spelling = _SPELLINGS.get(name, name)
        for stem in (name, spelling):
            converters[f"_{stem}"] = converters[f"broadcast_{stem}"] = _binary(name)
        converters[f"_{spelling}_scalar"] = _with_scalar(name)
        if name in _ARITHMETIC:
            converters[f"_{spelling.title()}"] = _binary(name)
            converters[f"_{spelling.title()}Scalar"] = _with_scalar(name)
        if name in _NOT_COMMUTATIVE:
            swapped = _with_scalar(name, swapped=True)
            converters[f"_r{spelling}_scalar"] = converters[f"_R{spelling.title()}Scalar"] = swapped
    return converters


# Functions that have the same name in Relax.
_SAME_NAMES: Final = (
    "abs ceil cos erf exp floor log negative sigmoid sign sin sqrt square tan tanh trunc"
).split()
# Functions whose inverses are `arccos` … in MXNet and `acos` … in Relax.
_WITH_INVERSES: Final = "cos cosh sin sinh tan tanh".split()

CONVERTERS: Final[dict[str, Converter]] = {
    **{name: _unary(getattr(R, name)) for name in _SAME_NAMES},
    **{f"arc{name}": _unary(getattr(R, f"a{name}")) for name in _WITH_INVERSES},
    **_binary_converters(),
    **{f"elemwise_{name}": _binary(name) for name in ("add", "sub", "mul", "div")},
    **dict.fromkeys(("Cast", "amp_cast", "cast"), _cast),
    **dict.fromkeys(("ElementWiseSum", "add_n"), _add_n),
    "_grad_add": _binary("add"),
    "amp_multicast": _multicast,
    "cbrt": _cube_root,
    "clip": _clip,
    "cosh": lambda op: make_cosh(op[0], op.scalar),
    "degrees": _scaled(identity, 180 / math.pi),
    "expm1": lambda op: R.exp(op[0]) - op.scalar(1.0),
    "fix": _unary(R.trunc),
    "hard_sigmoid": _hard_sigmoid,
    "log10": _scaled(R.log, 1 / math.log(10)),
    "log1p": lambda op: R.log(op[0] + op.scalar(1.0)),
    "log2": _scaled(R.log, 1 / math.log(2)),
    "logical_not": _logical_not,
    "radians": _scaled(identity, math.pi / 180),
    "rcbrt": lambda op: op.scalar(1.0) / _cube_root(op),
    "reciprocal": lambda op: op.scalar(1.0) / op[0],
    "relu": _unary(R.nn.relu),
    "rint": _rint,
    "round": _round,
    "rsqrt": lambda op: op.scalar(1.0) / R.sqrt(op[0]),
    "sinh": lambda op: make_sinh(op[0], op.scalar, op.emit),
    "smooth_l1": _smooth_l1,
    "softsign": lambda op: op[0] / (R.abs(op[0]) + op.scalar(1.0)),
    "where": _where,
}
