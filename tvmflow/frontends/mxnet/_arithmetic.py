"""Converters of arithmetic, activations, reductions and matrix multiplications.

As in MXNet, comparisons return 1 and 0 in the dtype of their data, and full reductions have the shape (1,).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from tvmflow.frontends._onnx_graph import Value
from tvmflow.frontends.mxnet._op import DTYPES, Converter, Op, shown
from tvmflow.graph.dynamic_shapes import IrSize

# ---------------------------------------------------------------- elementwise


_Binary = Callable[[Op, Value, Value], Value]


def _unary(operator: str) -> Converter:
    return lambda op: op.add(operator, op[0])


def _with_scalar(operator: str, scalar: float) -> Converter:
    return lambda op: op.add(operator, op[0], scalar)


def _cube_root(op: Op) -> Value:
    root = op.add("Pow", op.add("Abs", op[0]), op.scalar(1 / 3))
    return op.add("Mul", op.add("Sign", op[0]), root)


def _truncate(op: Op) -> Value:
    is_negative = op.add("Less", op[0], 0)
    return op.add("Where", is_negative, op.add("Ceil", op[0]), op.add("Floor", op[0]))


def _round(op: Op) -> Value:
    """Convert `round`, which rounds halves away from 0."""
    size = op.add("Floor", op.add("Add", op.add("Abs", op[0]), 0.5))
    return op.add("Mul", op.add("Sign", op[0]), size)


def _smooth_l1(op: Op) -> Value:
    """Convert `smooth_l1`: `0.5 (σx)²` where `|x| < 1/σ²`, else `|x| − 0.5/σ²`."""
    square = op.number("scalar", 1.0) ** 2
    size = op.add("Abs", op[0])
    inner = op.add("Mul", op.add("Mul", size, size), 0.5 * square)
    outer = op.add("Sub", size, 0.5 / square)
    return op.add("Where", op.add("Less", size, 1 / square), inner, outer)


def _clip(op: Op) -> Value:
    low, high = op.number("a_min"), op.number("a_max")
    return op.add("Clip", op[0], low, high)


def _is_set(op: Op, value: Value) -> Value:
    """Return a mask of nonzero elements."""
    return op.add("Not", op.add("Equal", value, 0))


def _operator(name: str) -> _Binary:
    return lambda op, a, b: op.add(name, a, b)


def _comparison(name: str) -> _Binary:
    """Return a comparison whose result has the dtype of its data."""
    return lambda op, a, b: op.graph.cast(op.add(name, a, b), a.dtype)


def _logical(name: str) -> _Binary:
    return lambda op, a, b: op.graph.cast(op.add(name, _is_set(op, a), _is_set(op, b)), a.dtype)


def _modulo(op: Op, a: Value, b: Value) -> Value:
    """Return the remainder with the divisor's sign, or 0 for a division by 0."""
    is_zero = op.add("Equal", b, 0)
    safe = op.add("Where", is_zero, op.add("Add", b, 1), b)
    rest = op.add("Sub", a, op.add("Mul", safe, op.add("Floor", op.add("Div", a, safe))))
    return op.add("Where", is_zero, op.add("Mul", a, 0), rest)


_BINARY: Final[dict[str, _Binary]] = {
    "add": _operator("Add"),
    "sub": _operator("Sub"),
    "mul": _operator("Mul"),
    "div": _operator("Div"),
    "mod": _modulo,
    "power": _operator("Pow"),
    "maximum": _operator("Max"),
    "minimum": _operator("Min"),
    "hypot": lambda op, a, b: op.add(
        "Sqrt", op.add("Add", op.add("Mul", a, a), op.add("Mul", b, b))
    ),
    "equal": _comparison("Equal"),
    "not_equal": lambda op, a, b: op.graph.cast(op.add("Not", op.add("Equal", a, b)), a.dtype),
    "greater": _comparison("Greater"),
    "greater_equal": _comparison("GreaterOrEqual"),
    "lesser": _comparison("Less"),
    "lesser_equal": _comparison("LessOrEqual"),
    "logical_and": _logical("And"),
    "logical_or": _logical("Or"),
    "logical_xor": _logical("Xor"),
}
# Function -> its name in MXNet's operators, if that differs.
_SPELLINGS: Final = {"add": "plus", "sub": "minus"}
# Functions with capitalized operator names in files of MXNet 0.x.
_ARITHMETIC: Final = frozenset("add sub mul div mod power maximum minimum".split())
# Functions with an additional operator for a scalar on the left.
_NOT_COMMUTATIVE: Final = frozenset({"sub", "div", "mod", "power"})
# Versions of MXNet round divisions and roots of integers differently.
_FLOAT_ONLY: Final = frozenset({"div", "mod", "power", "hypot"})


def _binary(name: str, operands: Callable[[Op], tuple[Value, Value]]) -> Converter:
    def convert(op: Op) -> Value:
        dtypes = {op.dtype(index) for index in range(len(op))}
        if len(dtypes) > 1:
            op.refuse(f"its inputs have different dtypes: {', '.join(sorted(dtypes))}")
        if name in _FLOAT_ONLY and not op.dtype().startswith("float"):
            op.refuse(f"{op.dtype()} data are not supported, only floating point")
        return _BINARY[name](op, *operands(op))

    return convert


def _two_tensors(op: Op) -> tuple[Value, Value]:
    return op[0], op[1]


def _tensor_and_scalar(op: Op) -> tuple[Value, Value]:
    value, is_int = op.number("scalar", 1.0), op.flag("is_int", True)
    if not op.dtype().startswith("float") and not (is_int and value.is_integer()):
        op.refuse(f"{op.dtype()} data with the scalar {value} are not supported")
    return op[0], op.scalar(value)


def _scalar_and_tensor(op: Op) -> tuple[Value, Value]:
    return _tensor_and_scalar(op)[::-1]


def _where(op: Op) -> Value:
    """Convert `where`, in which a 1-D condition selects rows."""
    condition = _is_set(op, op[0])
    if op.rank() == 1 and op.rank(1) > 1:
        ones = [1] * (op.rank(1) - 1)
        condition = op.graph.reshape(condition, [*op.sizes(), *ones])
    return op.add("Where", condition, op[1], op[2])


def _cast(op: Op) -> Value:
    return op.graph.cast(op[0], op.choice("dtype", "", (*DTYPES, "bool")))


def _multicast(op: Op) -> list[Value]:
    """Convert `amp_multicast`: cast all inputs to their widest or (`cast_narrow`) narrowest dtype."""
    dtypes = [np.dtype(op.dtype(index)) for index in range(len(op))]
    narrow = op.flag("cast_narrow", False)
    op.ignore("num_outputs")
    common = (min if narrow else max)(dtypes, key=lambda dtype: dtype.itemsize).name
    return [op.graph.cast(op[index], common) for index in range(len(op))]


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


# Functions with the same name in ONNX, except for the capital letter.
_SAME_NAMES: Final = (
    "abs ceil cos cosh erf exp floor log relu sigmoid sign sin sinh softsign sqrt tan tanh".split()
)
# Functions with inverses, named `arccos` … in MXNet and `Acos` … in ONNX.
_WITH_INVERSES: Final = "cos cosh sin sinh tan tanh".split()


# ---------------------------------------------------------------- activations and losses


_ACTIVATIONS: Final[dict[str, Converter]] = {
    "relu": _unary("Relu"),
    "sigmoid": _unary("Sigmoid"),
    "tanh": _unary("Tanh"),
    "softrelu": _unary("Softplus"),
    "softsign": _unary("Softsign"),
}


def _leaky_relu(op: Op) -> Value | list[Value]:
    op.ignore("lower_bound", "upper_bound", "slope")
    return op.lookup("act_type", "leaky", _LEAKY)(op)


def _prelu(op: Op) -> Value:
    """Convert PReLU: `max(x, 0) + gamma · min(x, 0)` with one gamma, or one per channel."""
    gamma, axis = op[1], min(1, op.rank() - 1)
    if op.ranges.are_equal(op.shape(1), (op.sizes()[axis],)):
        gamma = op.along(gamma, axis)
    elif math.prod(op.shape(1)) == 1:
        gamma = op.graph.reshape(gamma, [1])
    else:
        op.refuse(f"gamma of shape {op.shape(1)} does not fit data of shape {shown(op.sizes())}")
    return op.add("PRelu", op[0], gamma)


_LEAKY: Final[dict[str, Converter]] = {
    "leaky": lambda op: op.add("LeakyRelu", op[0], alpha=op.number("slope", 0.25)),
    "elu": lambda op: op.add("Elu", op[0], alpha=op.number("slope", 0.25)),
    "selu": _unary("Selu"),
    "gelu": _unary("Gelu"),
    "prelu": _prelu,
    # Inference uses the mean of the slope's bounds.
    "rrelu": lambda op: op.add(
        "LeakyRelu",
        op[0],
        alpha=(op.number("lower_bound", 0.125) + op.number("upper_bound", 0.334)) / 2,
    ),
}


def _softmax(operator: str, sign: float = 1.0) -> Converter:
    def convert(op: Op) -> Value:
        if op.flag("use_length", False):
            op.refuse("use_length=True is not supported")
        dtype = op.choice("dtype", op.dtype(), ("float16", "float32", "float64"))
        divisor = op.number("temperature", 1.0) * sign
        value = op[0] if divisor == 1.0 else op.add("Div", op[0], divisor)
        return op.graph.cast(op.add(operator, value, axis=op.axis(op.integer("axis", -1))), dtype)

    return convert


_LOSS_KEYS: Final = ("grad_scale", "normalization", "valid_thresh")


def _softmax_output(op: Op) -> Value:
    """Convert `SoftmaxOutput`: softmax over channels with `multi_output`, else over the instance."""
    op.ignore(*_LOSS_KEYS, "ignore_label", "use_ignore", "out_grad", "smooth_alpha")
    if op.flag("multi_output", False):
        op.ignore("preserve_shape")
        return op.add("Softmax", op[0], axis=1)
    shape = op.sizes()
    if op.flag("preserve_shape", False) or len(shape) == 2:
        return op.add("Softmax", op[0], axis=-1)
    rows = op.graph.reshape(op[0], (shape[0], math.prod(shape[1:])))
    return op.graph.reshape(op.add("Softmax", rows, axis=-1), shape)


def _pass_through(*unused: str) -> Converter:
    """Return the converter of a loss or training operator, which is the identity in inference."""

    def convert(op: Op) -> Value:
        op.ignore(*_LOSS_KEYS, *unused)
        return op[0]

    return convert


def _logistic_output(op: Op) -> Value:
    op.ignore(*_LOSS_KEYS)
    return op.add("Sigmoid", op[0])


_IDENTITIES: Final = (
    "BlockGrad LinearRegressionOutput MAERegressionOutput MakeLoss make_loss stop_gradient".split()
)


# ---------------------------------------------------------------- reductions


def _reduced_axes(op: Op) -> list[int]:
    """Return the sorted axes of a reduction; with `exclude`, all axes except `axis`."""
    listed = [op.axis(axis) for axis in op.optional_integers("axis") or ()]
    all_axes = range(op.rank())
    if op.flag("exclude", False):
        return [axis for axis in all_axes if axis not in listed] if listed else list(all_axes)
    return sorted(listed) or list(all_axes)


def _reduce(op: Op, operator: str) -> Value:
    axes, keep = _reduced_axes(op), op.flag("keepdims", False)
    out = op.reduce(operator, op[0], axes, keep=keep) if axes else op[0]
    # MXNet has no tensors of rank 0.
    return op.graph.reshape(out, (1,)) if len(axes) == op.rank() and not keep else out


def _reduction(operator: str) -> Converter:
    return lambda op: _reduce(op, operator)


def _norm(op: Op) -> Value:
    order = op.integer("ord", 2)
    if order not in (1, 2):
        op.refuse(f"ord={order} is not supported, only 1 and 2")
    op.require("out_dtype", op.dtype(), "the dtype cannot change")
    return _reduce(op, f"ReduceL{order}")


def _arg_reduction(operator: str) -> Converter:
    """Return the converter of argmax or argmin, whose index has the data's dtype and is the first on ties."""

    def convert(op: Op) -> Value:
        axis, data = op.optional_integer("axis"), op[0]
        keep = op.flag("keepdims", False)
        if axis is None:
            data, axis = op.graph.reshape(data, (math.prod(op.sizes()),)), 0
            shape = [1] * op.rank() if keep else [1]
            index = op.graph.reshape(op.add(operator, data, axis=0, keepdims=0), shape)
        else:
            index = op.add(operator, data, axis=op.axis(axis), keepdims=int(keep))
            index = index if index.rank else op.graph.reshape(index, [1])
        return op.graph.cast(index, op.dtype())

    return convert


def _argmax_channel(op: Op) -> Value:
    op.expect_rank(2)
    return op.graph.cast(op.add("ArgMax", op[0], axis=1, keepdims=0), op.dtype())


# ---------------------------------------------------------------- products of matrices, and attention


def _dot(op: Op) -> Value:
    """Convert `dot`, which contracts the first input's last axis with the second input's first axis."""
    op.require("forward_stype", "default", "results are dense")
    ranks = op.rank(0), op.rank(1)
    if ranks == (2, 2):
        return op.add("MatMul", *_matrices(op))
    if op.flag("transpose_a", False) or op.flag("transpose_b", False):
        op.refuse(f"transposed data of {ranks[0]} and {ranks[1]} dimensions are not supported")
    (*rows, inner), (_, *columns) = op.sizes(0), op.sizes(1)
    left = op.graph.reshape(op[0], (math.prod(rows), inner))
    right = op.graph.reshape(op[1], (inner, math.prod(columns)))
    return op.graph.reshape(op.add("MatMul", left, right), (*rows, *columns) or (1,))


def _batch_dot(op: Op) -> Value:
    op.require("forward_stype", "default", "results are dense")
    return op.add("MatMul", *_matrices(op))


def _matrices(op: Op) -> list[Value]:
    matrices = [op[0], op[1]]
    for index, key in enumerate(("transpose_a", "transpose_b")):
        if op.flag(key, False):
            matrices[index] = _transposed(op, op[index])
    return matrices


def _transposed(op: Op, value: Value) -> Value:
    *batch, rows, columns = range(value.rank)
    return op.graph.transpose(value, [*batch, columns, rows])


def _gemm2(op: Op) -> Value:
    """Convert `linalg.gemm2`: alpha times the matmul over the last two axes."""
    op.require("axis", "-2", "matrices must be the last two axes")
    product = op.add("MatMul", *_matrices(op))
    alpha = op.number("alpha", 1.0)
    return product if alpha == 1.0 else op.add("Mul", product, alpha)


def _split_heads(
    op: Op, heads: int, wanted: Sequence[int]
) -> tuple[list[Value], tuple[IrSize, IrSize, int]]:
    """Split interleaved projections (length, batch, heads · 3 · depth) into queries, keys and values.

    Returns:
        The `wanted` ones of these tensors (batch · heads, length, depth), and (length, batch, depth).
    """
    (length, batch, _), width = op.sizes(), op.size(2)
    depth, graph = width // (3 * heads), op.graph
    parts = graph.reshape(op[0], (length, batch * heads, 3, depth))
    split = [
        graph.reshape(graph.cut(parts, {2: slice(part, part + 1)}), (length, batch * heads, depth))
        for part in wanted
    ]
    return [graph.transpose(part, [1, 0, 2]) for part in split], (length, batch, depth)


def _self_attention_scores(op: Op) -> Value:
    """Convert `contrib.interleaved_matmul_selfatt_qk`: `Q Kᵀ / sqrt(depth)` of each head."""
    (query, key), (_, _, depth) = _split_heads(op, op.integer("heads"), (0, 1))
    return op.add("MatMul", op.add("Div", query, math.sqrt(depth)), _transposed(op, key))


def _self_attention_values(op: Op) -> Value:
    """Convert `contrib.interleaved_matmul_selfatt_valatt`: attention weights times values of each head."""
    heads = op.integer("heads")
    [value], (length, batch, depth) = _split_heads(op, heads, (2,))
    mixed = op.graph.transpose(op.add("MatMul", op[1], value), [1, 0, 2])
    return op.graph.reshape(mixed, (length, batch, heads * depth))


def _add_all(op: Op) -> Value:
    return functools.reduce(lambda a, b: op.add("Add", a, b), op.all_inputs())


def _hard_sigmoid(op: Op) -> Value:
    line = op.add("Mul", op[0], op.number("alpha", 0.2))
    return op.add("Clip", op.add("Add", line, op.number("beta", 0.5)), 0.0, 1.0)


CONVERTERS: Final[dict[str, Converter]] = {
    **{name: _unary(name.capitalize()) for name in _SAME_NAMES},
    **{f"arc{name}": _unary(f"A{name}") for name in _WITH_INVERSES},
    **_binary_converters(),
    **{f"elemwise_{name}": _binary(name, _two_tensors) for name in ("add", "sub", "mul", "div")},
    **dict.fromkeys(("Cast", "amp_cast", "cast"), _cast),
    **dict.fromkeys(("ElementWiseSum", "add_n"), _add_all),
    **dict.fromkeys(("fix", "trunc"), _truncate),
    "_grad_add": _binary("add", _two_tensors),
    "amp_multicast": _multicast,
    "cbrt": _cube_root,
    "clip": _clip,
    "degrees": _with_scalar("Mul", 180 / math.pi),
    "expm1": lambda op: op.add("Sub", op.add("Exp", op[0]), 1.0),
    "hard_sigmoid": _hard_sigmoid,
    "log10": lambda op: op.add("Mul", op.add("Log", op[0]), 1 / math.log(10)),
    "log1p": lambda op: op.add("Log", op.add("Add", op[0], 1.0)),
    "log2": lambda op: op.add("Mul", op.add("Log", op[0]), 1 / math.log(2)),
    "logical_not": lambda op: op.graph.cast(op.add("Equal", op[0], 0), op.dtype()),
    "negative": _unary("Neg"),
    "radians": _with_scalar("Mul", math.pi / 180),
    "rcbrt": lambda op: op.add("Div", op.scalar(1.0), _cube_root(op)),
    "reciprocal": lambda op: op.add("Div", op.scalar(1.0), op[0]),
    "rint": lambda op: op.add("Ceil", op.add("Sub", op[0], 0.5)),
    "round": _round,
    "rsqrt": lambda op: op.add("Div", op.scalar(1.0), op.add("Sqrt", op[0])),
    "smooth_l1": _smooth_l1,
    "square": lambda op: op.add("Mul", op[0], op[0]),
    "where": _where,
    **dict.fromkeys(_IDENTITIES, _pass_through()),
    "Activation": lambda op: op.lookup("act_type", "", _ACTIVATIONS)(op),
    "Dropout": _pass_through("p", "mode", "axes"),
    "IdentityAttachKLSparseReg": _pass_through("sparseness_target", "penalty"),
    "LeakyReLU": _leaky_relu,
    "LogisticRegressionOutput": _logistic_output,
    "SVMOutput": _pass_through("margin", "regularization_coefficient", "use_linear"),
    "Softmax": _softmax_output,
    # Despite its name, mode `instance` is over the last axis in MXNet's code.
    "SoftmaxActivation": lambda op: op.add(
        "Softmax", op[0], axis=op.lookup("mode", "instance", {"instance": -1, "channel": 1})
    ),
    "SoftmaxOutput": _softmax_output,
    "log_softmax": _softmax("LogSoftmax"),
    "softmax": _softmax("Softmax"),
    "softmin": _softmax("Softmax", sign=-1.0),
    **dict.fromkeys(("max", "max_axis"), _reduction("ReduceMax")),
    **dict.fromkeys(("min", "min_axis"), _reduction("ReduceMin")),
    **dict.fromkeys(("sum", "sum_axis"), _reduction("ReduceSum")),
    "argmax": _arg_reduction("ArgMax"),
    "argmax_channel": _argmax_channel,
    "argmin": _arg_reduction("ArgMin"),
    "mean": _reduction("ReduceMean"),
    "norm": _norm,
    "prod": _reduction("ReduceProd"),
    "_contrib_div_sqrt_dim": lambda op: op.add("Div", op[0], math.sqrt(op.size(-1))),
    "_contrib_interleaved_matmul_selfatt_qk": _self_attention_scores,
    "_contrib_interleaved_matmul_selfatt_valatt": _self_attention_values,
    "_linalg_gemm2": _gemm2,
    "batch_dot": _batch_dot,
    "dot": _dot,
    "linalg_gemm2": _gemm2,
}
