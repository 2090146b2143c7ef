"""Converters of arithmetic, activations, reductions and products of matrices.

Comparisons return 1 and 0 in the dtype of their data, and full reductions have the shape (1,), as in MXNet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Final

import numpy as np
from tvm import relax

from tvmflow.frontends._emission import make_cosh, make_sinh
from tvmflow.frontends.mxnet._op import DTYPES, Converter, Expr, Op, broadcast_along, shown
from tvmflow.graph.dynamic_shapes import IrSize
from tvmflow.graph.ir import dtype_of

R = relax.op


# ---------------------------------------------------------------- elementwise


_Binary = Callable[[Expr, Expr], Expr]


def _zero(value: Expr) -> Expr:
    return relax.const(0, dtype_of(value))


def _unary(function: Callable[[Expr], Expr]) -> Converter:
    return lambda op: function(op[0])


def _cube_root(op: Op) -> Expr:
    return R.sign(op[0]) * R.power(R.abs(op[0]), op.scalar(1 / 3))


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


def _same_dtype(function: _Binary) -> _Binary:
    """Return a comparison whose result has the dtype of its data."""
    return lambda a, b: R.astype(function(a, b), dtype_of(a))


def _logical(function: _Binary) -> _Binary:
    def apply(a: Expr, b: Expr) -> Expr:
        result = function(R.not_equal(a, _zero(a)), R.not_equal(b, _zero(b)))
        return R.astype(result, dtype_of(a))

    return apply


def _modulo(a: Expr, b: Expr) -> Expr:
    """Return the remainder with the sign of the divisor; 0 if the divisor is 0."""
    zero = _zero(b)
    safe = R.where(R.equal(b, zero), b + relax.const(1, dtype_of(b)), b)
    rest = a - safe * R.floor(a / safe)
    return R.where(R.equal(b, zero), zero * a, rest)


_BINARY: Final[dict[str, _Binary]] = {
    "add": R.add,
    "sub": R.subtract,
    "mul": R.multiply,
    "div": R.divide,
    "mod": _modulo,
    "power": R.power,
    "maximum": R.maximum,
    "minimum": R.minimum,
    "hypot": lambda a, b: R.sqrt(a * a + b * b),
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


def _binary(name: str, operands: Callable[[Op], tuple[Expr, Expr]]) -> Converter:
    def convert(op: Op) -> Expr:
        dtypes = {op.dtype(index) for index in range(len(op))}
        if len(dtypes) > 1:
            op.refuse(f"its inputs have different dtypes: {', '.join(sorted(dtypes))}")
        if name in _FLOAT_ONLY and not op.dtype().startswith("float"):
            op.refuse(f"{op.dtype()} data are not supported, only floating point")
        return _BINARY[name](*operands(op))

    return convert


def _two_tensors(op: Op) -> tuple[Expr, Expr]:
    return op[0], op[1]


def _tensor_and_scalar(op: Op) -> tuple[Expr, Expr]:
    value, is_int = op.number("scalar", 1.0), op.flag("is_int", True)
    if not op.dtype().startswith("float") and not (is_int and value.is_integer()):
        op.refuse(f"{op.dtype()} data with the scalar {value} are not supported")
    return op[0], op.scalar(value)


def _scalar_and_tensor(op: Op) -> tuple[Expr, Expr]:
    return _tensor_and_scalar(op)[::-1]


def _where(op: Op) -> Expr:
    """`where`: a 1-D condition selects rows."""
    condition = R.not_equal(op[0], _zero(op[0]))
    if op.rank() == 1 and op.rank(1) > 1:
        condition = R.expand_dims(condition, list(range(1, op.rank(1))))
    return R.where(condition, op[1], op[2])


def _cast(op: Op) -> Expr:
    dtype = op.choice("dtype", "", (*DTYPES, "bool"))
    return op[0] if dtype == op.dtype() else R.astype(op[0], dtype)


def _multicast(op: Op) -> list[Expr]:
    """`amp_multicast`: casts all inputs to their widest dtype, or with `cast_narrow` to the narrowest."""
    dtypes = [np.dtype(op.dtype(index)) for index in range(len(op))]
    narrow = op.flag("cast_narrow", False)
    op.ignore("num_outputs")
    common = (min if narrow else max)(dtypes, key=lambda dtype: dtype.itemsize).name
    return [
        op[index] if op.dtype(index) == common else R.astype(op[index], common)
        for index in range(len(op))
    ]


def _binary_converters() -> dict[str, Converter]:
    converters: dict[str, Converter] = {}
    for name in _BINARY:
        spelling = _SPELLINGS.get(name, name)
        plain, with_scalar = _binary(name, _two_tensors), _binary(name, _tensor_and_scalar)
        for stem in (name, spelling):
            converters[f"_{stem}"] = converters[f"broadcast_{stem}"] = plain
        converters[f"_{spelling}_scalar"] = with_scalar
        if name in _ARITHMETIC:
            converters[f"_{spelling.title()}"] = plain
            converters[f"_{spelling.title()}Scalar"] = with_scalar
        if name in _NOT_COMMUTATIVE:
            swapped = _binary(name, _scalar_and_tensor)
            converters[f"_r{spelling}_scalar"] = converters[f"_R{spelling.title()}Scalar"] = swapped
    return converters


# Functions that have the same name in Relax.
_SAME_NAMES: Final = (
    "abs ceil cos erf exp floor log negative sigmoid sign sin sqrt square tan tanh trunc".split()
)
# Functions whose inverses are `arccos` … in MXNet and `acos` … in Relax.
_WITH_INVERSES: Final = "cos cosh sin sinh tan tanh".split()


# ---------------------------------------------------------------- activations and losses


def _soft_sign(op: Op) -> Expr:
    return op[0] / (R.abs(op[0]) + op.scalar(1.0))


_ACTIVATIONS: Final[dict[str, Converter]] = {
    "relu": lambda op: R.nn.relu(op[0]),
    "sigmoid": lambda op: R.sigmoid(op[0]),
    "tanh": lambda op: R.tanh(op[0]),
    "softrelu": lambda op: R.nn.softplus(op[0]),
    "softsign": _soft_sign,
}


def _leaky_relu(op: Op) -> Expr:
    op.ignore("lower_bound", "upper_bound", "slope")
    return op.lookup("act_type", "leaky", _LEAKY)(op)


def _prelu(op: Op) -> Expr:
    """PReLU: `max(x, 0) + gamma · min(x, 0)` with one gamma, or one per channel."""
    gamma = op[1]
    if op.ranges.are_equal(op.shape(1), (op.sizes()[min(1, op.rank() - 1)],)):
        gamma = broadcast_along(gamma, min(1, op.rank() - 1), op.rank())
    elif math.prod(op.shape(1)) != 1:
        op.refuse(f"gamma of shape {op.shape(1)} does not fit data of shape {shown(op.sizes())}")
    zero = op.scalar(0.0)
    return R.maximum(op[0], zero) + gamma * R.minimum(op[0], zero)


def _elu(op: Op) -> Expr:
    """ELU: `max(x, 0) + slope · (exp(min(x, 0)) − 1)`."""
    zero = op.scalar(0.0)
    negative = R.exp(R.minimum(op[0], zero)) - op.scalar(1.0)
    return R.maximum(op[0], zero) + op.scalar(op.number("slope", 0.25)) * negative


_LEAKY: Final[dict[str, Converter]] = {
    "leaky": lambda op: R.nn.leakyrelu(op[0], op.number("slope", 0.25)),
    "elu": _elu,
    "selu": lambda op: R.nn.selu(op[0]),
    "gelu": lambda op: R.nn.gelu(op[0]),
    "prelu": _prelu,
    # In inference, the slope is the mean of its bounds.
    "rrelu": lambda op: R.nn.leakyrelu(
        op[0], (op.number("lower_bound", 0.125) + op.number("upper_bound", 0.334)) / 2
    ),
}


def _softmax(function: Callable[..., Expr], sign: float = 1.0) -> Converter:
    def convert(op: Op) -> Expr:
        if op.flag("use_length", False):
            op.refuse("use_length=True is not supported")
        dtype = op.choice("dtype", op.dtype(), ("float16", "float32", "float64"))
        divisor = op.number("temperature", 1.0) * sign
        value = op[0] if divisor == 1.0 else op[0] / op.scalar(divisor)
        out = function(value, axis=op.axis(op.integer("axis", -1)))
        return out if dtype == op.dtype() else R.astype(out, dtype)

    return convert


_LOSS_KEYS: Final = ("grad_scale", "normalization", "valid_thresh")


def _softmax_output(op: Op) -> Expr:
    """`SoftmaxOutput`: a softmax, over channels with `multi_output`, else over the instance."""
    op.ignore(*_LOSS_KEYS, "ignore_label", "use_ignore", "out_grad", "smooth_alpha")
    if op.flag("multi_output", False):
        op.ignore("preserve_shape")
        return R.nn.softmax(op[0], axis=1)
    if op.flag("preserve_shape", False) or op.rank() == 2:
        return R.nn.softmax(op[0], axis=-1)
    shape = op.sizes()
    rows = R.reshape(op[0], (shape[0], math.prod(shape[1:])))
    return R.reshape(R.nn.softmax(rows, axis=-1), shape)


def _pass_through(*unused: str) -> Converter:
    """Return the converter of a loss or training operator, which inference leaves out."""

    def convert(op: Op) -> Expr:
        op.ignore(*_LOSS_KEYS, *unused)
        return op[0]

    return convert


def _logistic_output(op: Op) -> Expr:
    op.ignore(*_LOSS_KEYS)
    return R.sigmoid(op[0])


_IDENTITIES: Final = (
    "BlockGrad LinearRegressionOutput MAERegressionOutput MakeLoss make_loss stop_gradient".split()
)


# ---------------------------------------------------------------- reductions


def _reduced_axes(op: Op) -> list[int]:
    """Return the axes that a reduction removes, in order; with `exclude`, all others than `axis`."""
    listed = [op.axis(axis) for axis in op.optional_integers("axis") or ()]
    all_axes = range(op.rank())
    if op.flag("exclude", False):
        return [axis for axis in all_axes if axis not in listed] if listed else list(all_axes)
    return sorted(listed) or list(all_axes)


def _reduce(op: Op, function: Callable[..., Expr], value: Expr, axes: list[int]) -> Expr:
    keep = op.flag("keepdims", False)
    out = function(value, axes, keepdims=keep)
    # MXNet has no tensors of rank 0.
    return R.reshape(out, (1,)) if len(axes) == op.rank() and not keep else out


def _reduction(function: Callable[..., Expr]) -> Converter:
    return lambda op: _reduce(op, function, op[0], _reduced_axes(op))


def _norm(op: Op) -> Expr:
    order = op.integer("ord", 2)
    if order not in (1, 2):
        op.refuse(f"ord={order} is not supported, only 1 and 2")
    op.require("out_dtype", op.dtype(), "the dtype cannot change")
    axes = _reduced_axes(op)
    if order == 1:
        return _reduce(op, R.sum, R.abs(op[0]), axes)
    return R.sqrt(_reduce(op, R.sum, op[0] * op[0], axes))


def _arg_reduction(function: Callable[..., Expr]) -> Converter:
    """Return the converter of argmax or argmin.

    The index has the dtype of the data, and is the first of equal values.
    """

    def convert(op: Op) -> Expr:
        axis = op.optional_integer("axis")
        keep = op.flag("keepdims", False)
        if axis is None:
            flat = R.reshape(op[0], (math.prod(op.sizes()),))
            index = R.reshape(function(flat, axis=0), (1,) * op.rank() if keep else (1,))
        else:
            index = function(op[0], axis=op.axis(axis), keepdims=keep)
            if op.rank() == 1 and not keep:
                index = R.reshape(index, (1,))
        return R.astype(index, op.dtype())

    return convert


def _argmax_channel(op: Op) -> Expr:
    op.expect_rank(2)
    return R.astype(R.argmax(op[0], axis=1), op.dtype())


# ---------------------------------------------------------------- products of matrices, and attention


def _dot(op: Op) -> Expr:
    """`dot`: sums over the last axis of the first input and the first axis of the second."""
    op.require("forward_stype", "default", "results are dense")
    ranks = op.rank(0), op.rank(1)
    if ranks == (2, 2):
        return R.matmul(*_matrices(op))
    if op.flag("transpose_a", False) or op.flag("transpose_b", False):
        op.refuse(f"transposed data of {ranks[0]} and {ranks[1]} dimensions are not supported")
    (*rows, inner), (_, *columns) = op.sizes(0), op.sizes(1)
    left = R.reshape(op[0], (math.prod(rows), inner))
    product = R.matmul(left, R.reshape(op[1], (inner, math.prod(columns))))
    return R.reshape(product, (*rows, *columns) or (1,))


def _batch_dot(op: Op) -> Expr:
    op.require("forward_stype", "default", "results are dense")
    return R.matmul(*_matrices(op))


def _matrices(op: Op) -> list[Expr]:
    """Return both inputs, transposed as the attributes say."""
    matrices = [op[0], op[1]]
    for index, key in enumerate(("transpose_a", "transpose_b")):
        if op.flag(key, False):
            *batch, rows, columns = range(op.rank(index))
            matrices[index] = R.permute_dims(op[index], [*batch, columns, rows])
    return matrices


def _gemm2(op: Op) -> Expr:
    """`linalg.gemm2`: alpha times the product of the last two axes."""
    op.require("axis", "-2", "matrices must be the last two axes")
    product = R.matmul(*_matrices(op))
    alpha = op.number("alpha", 1.0)
    return product if alpha == 1.0 else product * op.scalar(alpha)


def _split_heads(op: Op, heads: int) -> tuple[list[Expr], tuple[IrSize, IrSize, int]]:
    """Split interleaved projections (length, batch, heads · 3 · depth) into queries, keys and values.

    Returns:
        Three tensors (batch · heads, length, depth), and length, batch and depth.
    """
    (length, batch, _), width = op.sizes(), op.size(2)
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


CONVERTERS: Final[dict[str, Converter]] = {
    **{name: _unary(getattr(R, name)) for name in _SAME_NAMES},
    **{f"arc{name}": _unary(getattr(R, f"a{name}")) for name in _WITH_INVERSES},
    **_binary_converters(),
    **{f"elemwise_{name}": _binary(name, _two_tensors) for name in ("add", "sub", "mul", "div")},
    **dict.fromkeys(("Cast", "amp_cast", "cast"), _cast),
    **dict.fromkeys(
        ("ElementWiseSum", "add_n"), lambda op: functools.reduce(R.add, op.all_inputs())
    ),
    "_grad_add": _binary("add", _two_tensors),
    "amp_multicast": _multicast,
    "cbrt": _cube_root,
    "clip": _clip,
    "cosh": lambda op: make_cosh(op[0]),
    "degrees": lambda op: op[0] * op.scalar(180 / math.pi),
    "expm1": lambda op: R.exp(op[0]) - op.scalar(1.0),
    "fix": _unary(R.trunc),
    "hard_sigmoid": lambda op: R.clip(
        op[0] * op.scalar(op.number("alpha", 0.2)) + op.scalar(op.number("beta", 0.5)), 0, 1
    ),
    "log10": lambda op: R.log(op[0]) * op.scalar(1 / math.log(10)),
    "log1p": lambda op: R.log(op[0] + op.scalar(1.0)),
    "log2": lambda op: R.log(op[0]) * op.scalar(1 / math.log(2)),
    "logical_not": lambda op: R.astype(R.equal(op[0], _zero(op[0])), op.dtype()),
    "radians": lambda op: op[0] * op.scalar(math.pi / 180),
    "rcbrt": lambda op: op.scalar(1.0) / _cube_root(op),
    "reciprocal": lambda op: op.scalar(1.0) / op[0],
    "relu": _unary(R.nn.relu),
    "rint": lambda op: R.ceil(op[0] - op.scalar(0.5)),
    "round": lambda op: R.sign(op[0]) * R.floor(R.abs(op[0]) + op.scalar(0.5)),
    "rsqrt": lambda op: op.scalar(1.0) / R.sqrt(op[0]),
    "sinh": lambda op: make_sinh(op[0], op.emit),
    "smooth_l1": _smooth_l1,
    "softsign": _soft_sign,
    "where": _where,
    **dict.fromkeys(_IDENTITIES, _pass_through()),
    "Activation": lambda op: op.lookup("act_type", "", _ACTIVATIONS)(op),
    "Dropout": _pass_through("p", "mode", "axes"),
    "IdentityAttachKLSparseReg": _pass_through("sparseness_target", "penalty"),
    "LeakyReLU": _leaky_relu,
    "LogisticRegressionOutput": _logistic_output,
    "SVMOutput": _pass_through("margin", "regularization_coefficient", "use_linear"),
    "Softmax": _softmax_output,
    # Mode `instance` is over the last axis in MXNet's code, not over the instance.
    "SoftmaxActivation": lambda op: R.nn.softmax(
        op[0], axis=op.lookup("mode", "instance", {"instance": -1, "channel": 1})
    ),
    "SoftmaxOutput": _softmax_output,
    "log_softmax": _softmax(R.nn.log_softmax),
    "softmax": _softmax(R.nn.softmax),
    "softmin": _softmax(R.nn.softmax, sign=-1.0),
    **dict.fromkeys(("max", "max_axis"), _reduction(R.max)),
    **dict.fromkeys(("min", "min_axis"), _reduction(R.min)),
    **dict.fromkeys(("sum", "sum_axis"), _reduction(R.sum)),
    "argmax": _arg_reduction(R.argmax),
    "argmax_channel": _argmax_channel,
    "argmin": _arg_reduction(R.argmin),
    "mean": _reduction(R.mean),
    "norm": _norm,
    "prod": _reduction(R.prod),
    "_contrib_div_sqrt_dim": lambda op: op[0] / op.scalar(math.sqrt(op.size(-1))),
    "_contrib_interleaved_matmul_selfatt_qk": _self_attention_scores,
    "_contrib_interleaved_matmul_selfatt_valatt": _self_attention_values,
    "_linalg_gemm2": _gemm2,
    "batch_dot": _batch_dot,
    "dot": _dot,
    "linalg_gemm2": _gemm2,
}
