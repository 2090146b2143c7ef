"""The activation functions of recurrent layers, by their names in ONNX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tvm import tirx

from tvmflow.graph.ir_operators import Activation

_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "affine": lambda x, a, b, _, __: a * x + b,
    "elu": lambda x, a, _, zero, one: tirx.Select(x >= zero, x, a * (tirx.exp(x) - one)),
    "hardsigmoid": lambda x, a, b, zero, one: tirx.min(tirx.max(a * x + b, zero), one),
    "leakyrelu": lambda x, a, _, zero, __: tirx.Select(x >= zero, x, a * x),
    "relu": lambda x, _, __, zero, ___: tirx.max(x, zero),
    "scaledtanh": lambda x, a, b, _, __: a * tirx.tanh(b * x),
    "sigmoid": lambda x, *_: tirx.sigmoid(x),
    # log(1 + eˣ) without overflow for large x
    "softplus": lambda x, _, __, zero, one: (
        tirx.max(x, zero) + tirx.log(one + tirx.exp(zero - tirx.abs(x)))
    ),
    "softsign": lambda x, _, __, ___, one: x / (one + tirx.abs(x)),
    "tanh": lambda x, *_: tirx.tanh(x),
    "thresholdedrelu": lambda x, a, _, zero, __: tirx.Select(x >= a, x, zero),
}


def apply_activation(function: Activation, x: Any, dtype: str) -> Any:
    """Return the function of a value of that dtype."""
    alpha, beta, zero, one = (
        tirx.const(number, dtype) for number in (function.alpha, function.beta, 0, 1)
    )
    return _FUNCTIONS[function.name](x, alpha, beta, zero, one)
