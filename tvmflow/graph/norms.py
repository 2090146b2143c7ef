"""Folding of batch norms, scales and shifts into the weights of the convolution before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import tvm
from tvm import relax

from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import known_sizes, sizes_of
from tvmflow.graph.rewriter import MainRewriter, rewrite_main

_ADD: Final = "relax.add"
_MULTIPLY: Final = "relax.multiply"
_NORM: Final = "relax.nn.batch_norm"

# A norm after a bias adds, multiplies and adds: one round folds the multiplication, the next merges the additions.
_ROUNDS: Final = 2


def fold_norms(mod: tvm.IRModule) -> tvm.IRModule:
    """Turn batch norms into scales and shifts, and fold these into convolutions without other readers."""
    operators = ir.list_operators(mod)
    if _NORM in operators:
        mod = rewrite_main(mod, _NormSimplifier)
    if operators & ir.CONVOLUTIONS.keys():
        for _ in range(_ROUNDS):
            mod = rewrite_main(mod, _ScaleFolder)
    return mod


class _NormSimplifier(MainRewriter):
    """Rewrites batch norms to `x·s + (β − μ·s)` with `s = γ / √(σ² + ε)`, which depends only on weights."""

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        norm = self.flow.find_call(item.tuple_value, _NORM)
        shape = sizes_of(norm.args[0]) if norm is not None else None
        if shape is None or item.index != 0 or not all(map(self.flow.is_weight, norm.args[1:])):
            return super().visit_tuple_getitem_(item)
        data, *weights = (self.visit_expr(argument) for argument in norm.args)
        emit, dtype = self.emit, ir.dtype_of(norm.args[0])
        # Compute in float32, because float16 variances may be as small as the epsilon.
        wide = "float64" if dtype == "float64" else "float32"
        gamma, beta, mean, variance = (self.cast(weight, wide) for weight in weights)
        epsilon = relax.const(float(norm.attrs.epsilon), wide)
        scale = emit(relax.op.rsqrt(emit(relax.op.add(variance, epsilon))))
        if norm.attrs.scale:
            scale = emit(relax.op.multiply(scale, gamma))
        shift = emit(relax.op.negative(emit(relax.op.multiply(mean, scale))))
        if norm.attrs.center:
            shift = emit(relax.op.add(shift, beta))
        axis = int(norm.attrs.axis) % len(shape)
        broadcast = [extent if position == axis else 1 for position, extent in enumerate(shape)]
        scale, shift = (self.cast(factor, dtype) for factor in (scale, shift))
        scaled = emit(relax.op.multiply(data, self.reshape(scale, broadcast)))
        return relax.op.add(scaled, self.reshape(shift, broadcast))


class _ScaleFolder(MainRewriter):
    """Rewrites scales and shifts of convolutions.

    `conv(x, w)·s` becomes `conv(x, w·s)`, `(conv + b)·s` becomes `conv·s + b·s`, and `(y + b) + c`
    becomes `y + (b + c)`.
    """

    OPERATORS = (_MULTIPLY, _ADD)

    def _replace(self, call: Any) -> Any:
        fold = self._fold_scale if ir.operator_name(call) == _MULTIPLY else self._merge_shifts
        operands = self._match_channels(call)
        return fold(*operands) if operands else None

    def _match_channels(self, call: Any) -> tuple[Any, Any] | None:
        """Return the operands data (n, c, …) and weights of one value for each channel; None for others."""
        if call is None:
            return None
        for data, weights in (tuple(call.args), tuple(call.args)[::-1]):
            is_weight = self.flow.is_weight(weights) and not self.flow.is_weight(data)
            if is_weight and has_value_for_each_channel(weights, sizes_of(data) or ()):
                return data, weights
        return None

    def _fold_scale(self, data: Any, factor: Any) -> Any:
        operands = self._match_channels(self.flow.find_call_used_once(data, _ADD))
        if operands and self.flow.find_call_used_once(operands[0], *ir.CONVOLUTIONS) is not None:
            scaled = self._fold_scale(operands[0], factor)
            bias = relax.op.multiply(self.visit_expr(operands[1]), self.visit_expr(factor))
            return None if scaled is None else relax.op.add(self.emit(scaled), self.emit(bias))
        conv = self.flow.find_call_used_once(data, *ir.CONVOLUTIONS)
        is_folded = conv is not None and ir.has_default_layouts(conv)
        if not is_folded or not self.flow.is_weight(conv.args[1]):
            return None
        _, channels, *size = known_sizes(data)
        scale = self.reshape(self.visit_expr(factor), [channels, 1, *(1 for _ in size)])
        kernel = self.emit(relax.op.multiply(self.visit_expr(conv.args[1]), scale))
        return relax.Call(conv.op, [self.visit_expr(conv.args[0]), kernel], conv.attrs)

    def _merge_shifts(self, data: Any, shift: Any) -> Any:
        operands = self._match_channels(self.flow.find_call_used_once(data, _ADD))
        if not operands:
            return None
        merged = relax.op.add(self.visit_expr(operands[1]), self.visit_expr(shift))
        return relax.op.add(self.visit_expr(operands[0]), self.emit(merged))


def has_value_for_each_channel(weights: Any, shape: Sequence[Any]) -> bool:
    """Return whether weights have one value for each channel of data (n, c, …)."""
    channels = (*shape[1:2], *(1 for _ in shape[2:]))
    return len(shape) > 2 and ir.shape_of(weights) in ((1, *channels), channels)
