"""Converters of activations, softmax, and the outputs that training adds a loss to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from tvm import relax

from tvmflow.frontends.mxnet._op import Converter, Expr, Op
from tvmflow.frontends.mxnet.converters._common import broadcast_along, identity

R = relax.op


def _activation(op: Op) -> Expr:
    kind = op.choice("act_type", "", tuple(_ACTIVATIONS))
    return _ACTIVATIONS[kind](op)


_ACTIVATIONS: Final[dict[str, Converter]] = {
    "relu": lambda op: R.nn.relu(op[0]),
    "sigmoid": lambda op: R.sigmoid(op[0]),
    "tanh": lambda op: R.tanh(op[0]),
    "softrelu": lambda op: R.nn.softplus(op[0]),
    "softsign": lambda op: op[0] / (R.abs(op[0]) + op.scalar(1.0)),
}


def _leaky_relu(op: Op) -> Expr:
    """`LeakyReLU`: one of several activations, by `act_type`."""
    op.ignore("lower_bound", "upper_bound", "slope")
    return _LEAKY[op.choice("act_type", "leaky", tuple(_LEAKY))](op)


def _prelu(op: Op) -> Expr:
    """PReLU: `max(x, 0) + gamma · min(x, 0)` with one gamma, or one per channel."""
    gamma = op[1]
    if op.shape(1) == (op.shape()[min(1, op.rank() - 1)],):
        gamma = broadcast_along(gamma, min(1, op.rank() - 1), op.rank())
    elif math.prod(op.shape(1)) != 1:
        op.refuse(f"gamma of shape {op.shape(1)} does not fit data of shape {op.shape()}")
    zero = op.scalar(0.0)
    return R.maximum(op[0], zero) + gamma * R.minimum(op[0], zero)


def _elu(op: Op) -> Expr:
    """ELU: `max(x, 0) + slope · (exp(min(x, 0)) − 1)`."""
    zero = op.scalar(0.0)
    negative = R.exp(R.minimum(op[0], zero)) - op.scalar(1.0)
    return R.maximum(op[0], zero) + op.scalar(op.number("slope", 0.25)) * negative


def _rrelu(op: Op) -> Expr:
    """RReLU: in inference the slope is the mean of its bounds."""
    slope = (op.number("lower_bound", 0.125) + op.number("upper_bound", 0.334)) / 2
    return R.nn.leakyrelu(op[0], slope)


_LEAKY: Final[dict[str, Converter]] = {
    "leaky": lambda op: R.nn.leakyrelu(op[0], op.number("slope", 0.25)),
    "elu": _elu,
    "selu": lambda op: R.nn.selu(op[0]),
    "gelu": lambda op: R.nn.gelu(op[0]),
    "prelu": _prelu,
    "rrelu": _rrelu,
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


def _softmax_activation(op: Op) -> Expr:
    """`SoftmaxActivation`: mode `instance` is over the last axis in MXNet's code, not over the instance."""
    channel = op.choice("mode", "instance", ("instance", "channel")) == "channel"
    return R.nn.softmax(op[0], axis=1 if channel else -1)


_LOSS_KEYS: Final = ("grad_scale", "normalization", "valid_thresh")


def _softmax_output(op: Op) -> Expr:
    """`SoftmaxOutput`: the softmax alone; over the channels with `multi_output`, else over the instance."""
    op.ignore(*_LOSS_KEYS, "ignore_label", "use_ignore", "out_grad", "smooth_alpha")
    if op.flag("multi_output", False):
        op.ignore("preserve_shape")
        return R.nn.softmax(op[0], axis=1)
    if op.flag("preserve_shape", False) or op.rank() == 2:
        return R.nn.softmax(op[0], axis=-1)
    shape = op.shape()
    rows = R.reshape(op[0], (shape[0], math.prod(shape[1:])))
    return R.reshape(R.nn.softmax(rows, axis=-1), shape)


def _pass_through(function: Callable[[Expr], Expr], *unused: str) -> Converter:
    """Return the converter of a loss or training operator, which in inference only applies a function."""

    def convert(op: Op) -> Expr:
        op.ignore(*_LOSS_KEYS, *unused)
        return function(op[0])

    return convert


_IDENTITIES: Final = (
    "BlockGrad LinearRegressionOutput MAERegressionOutput MakeLoss make_loss stop_gradient".split()
)

CONVERTERS: Final[dict[str, Converter]] = {
    **dict.fromkeys(_IDENTITIES, _pass_through(identity)),
    "Activation": _activation,
    "Dropout": _pass_through(identity, "p", "mode", "axes"),
    "IdentityAttachKLSparseReg": _pass_through(identity, "sparseness_target", "penalty"),
    "LeakyReLU": _leaky_relu,
    "LogisticRegressionOutput": _pass_through(R.sigmoid),
    "SVMOutput": _pass_through(identity, "margin", "regularization_coefficient", "use_linear"),
    "Softmax": _softmax_output,
    "SoftmaxActivation": _softmax_activation,
    "SoftmaxOutput": _softmax_output,
    "log_softmax": _softmax(R.nn.log_softmax),
    "softmax": _softmax(R.nn.softmax),
    "softmin": _softmax(R.nn.softmax, sign=-1.0),
}
