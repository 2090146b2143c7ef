"""Recurrent layers as they are quantized.

The product of all inputs becomes an operator of its own, which is quantized as any other one. The weights that multiply the state become int8 with a scale for each unit of each gate. Where a CPU multiplies bytes, the state is
rounded too: that of most layers lies between -1 and 1, so that its scale is known.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.ir_operators import (
    NOTHING,
    STATE_STEPS,
    Activation,
    Recurrent,
    RecurrentOperands,
)
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main

EXACT: Final = np.array([1, 0], np.float32)
"""The operand `rounding` with which products read the state as it is."""
ROUNDED: Final = np.array([0, 1], np.float32)
"""The same for a rounded state."""

LARGEST_STATE: Final = 1 + 0.5 / STATE_STEPS
"""The largest absolute value of a state whose limit to 1 costs no more than its rounding."""

# Operators whose results are the numbers that they read first.
_COPIES: Final = frozenset(
    f"relax.{name}"
    for name in ("broadcast_to", "reshape", "permute_dims", "expand_dims", "squeeze")
)
# Functions whose results lie between 0 and 1, and between -1 and 1.
_SHARES: Final = frozenset({"sigmoid", "hardsigmoid"})
_BOUNDED: Final = _SHARES | {"tanh", "softsign"}


def split_input_products(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose recurrent layers read products of their inputs, where their weights are known."""
    if not ir.calls_operator(mod, Recurrent.NAME):
        return mod
    return rewrite_main(mod, _Splitter)


def find_state_weights(call: Any, flow: ir.DataFlow) -> Any:
    """Return the weights that a call of a recurrent layer multiplies with its state; None for other calls."""
    if ir.as_call(call, Recurrent.NAME) is None:
        return None
    operands = RecurrentOperands(*call.args)
    is_split = isinstance(operands.weights, relax.Tuple) and flow.is_weight(operands.recurrent)
    return operands.recurrent if is_split else None


def has_bounded_state(call: Any) -> bool:
    """Return whether the state of a layer stays between -1 and 1, unless it begins elsewhere."""
    operator = Recurrent.read(call)
    return all(_is_bounded(operator.kind, functions) for functions in operator.activations)


def find_initial_state(call: Any, flow: ir.DataFlow) -> Any:
    """Return the tensor with the hidden state that a layer begins with; None for zeros."""
    hidden = ir.resolve_alias(RecurrentOperands(*call.args).hidden, flow.values.get)
    while ir.operator_name(value := flow.values.get(hidden)) in _COPIES:
        assert value is not None
        hidden = ir.resolve_alias(value.args[0], flow.values.get)
    return None if isinstance(hidden, relax.Tuple) else hidden


def _is_bounded(kind: str, functions: tuple[Activation, ...]) -> bool:
    # of an LSTM, the state is the result of a gate times that of the last function
    names = [function.name for function in functions]
    gates, results = (names[:1], names[2:]) if kind == "LSTM" else (names[:-1], names[-1:])
    return _SHARES.issuperset(gates) and _BOUNDED.issuperset(results)


class _Splitter(MainRewriter):
    """Makes products of the inputs of recurrent layers."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        if ir.as_call(call, Recurrent.NAME) is None:
            return rewritten
        known = RecurrentOperands(*call.args)
        weights = (known.weights, known.recurrent)
        if not all(self.flow.is_weight(own) and ir.is_float32(own) for own in weights):
            return rewritten
        operands = RecurrentOperands(*rewritten.args)
        of_inputs, of_state = (self._flatten(w) for w in (operands.weights, operands.recurrent))
        product = relax.op.matmul(operands.x, self.emit(relax.op.permute_dims(of_inputs)))
        operands = operands._replace(x=self.emit(product), weights=NOTHING, recurrent=of_state)
        return relax.Call(call.op, list(operands), call.attrs, call.ty_args)

    def _flatten(self, weights: Any) -> Any:
        directions, rows, size = ir.known_shape(weights)
        return self.reshape(weights, [directions * rows, size])
