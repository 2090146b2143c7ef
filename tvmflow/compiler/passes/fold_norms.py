"""Folds batch norms, and scales and shifts of channels, into the convolution before them.

They become part of its weights.
"""

from __future__ import annotations

from typing import Any, Final

import tvm
from tvm import relax

from tvmflow.compiler import ir, open_sizes
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main

_NORM: Final = "relax.nn.batch_norm"
_CONVOLUTIONS: Final = frozenset(f"relax.nn.conv{rank}d" for rank in (1, 2, 3))
# A norm behind a bias is a sum, a product and a sum: the product moves first, then the sums are merged.
_ROUNDS: Final = 2


def fold_norms(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace batch norms by a product and a sum, and fold these into convolutions.

    Nothing else reads these convolutions.
    """
    operators = {ir.operator_name(value) for value in ir.DataFlow(mod["main"]).values.values()}
    if _NORM in operators:
        mod = rewrite_main(mod, _NormSimplifier)
    if operators & _CONVOLUTIONS:
        for _ in range(_ROUNDS):
            mod = rewrite_main(mod, _ScaleFolder)
    return mod


class _NormSimplifier(MainRewriter):
    """Rewrites batch norms to `x·s + (β − μ·s)` with `s = γ / √(σ² + ε)`, which depends on weights alone."""

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        norm = ir.as_call(self.flow.values.get(item.tuple_value), _NORM)
        shape = open_sizes.sizes_of(norm.args[0]) if norm is not None else None
        if (
            shape is None
            or item.index != 0
            or not all(self.flow.is_weight(argument) for argument in norm.args[1:])
        ):
            return super().visit_tuple_getitem_(item)
        data, *weights = (self.visit_expr(argument) for argument in norm.args)
        emit, dtype = self.emit, ir.dtype_of(norm.args[0])
        # Variances of float16 are as small as the epsilon.
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

    def visit_call_(self, call: relax.Call) -> Any:
        handlers = {"relax.multiply": self._fold_scale, "relax.add": self._merge_shifts}
        handler = handlers.get(ir.operator_name(call))
        operands = self._match_channels(call) if handler else None
        folded = handler(*operands) if handler and operands else None
        return super().visit_call_(call) if folded is None else folded

    def _match_channels(self, call: Any) -> tuple[Any, Any] | None:
        """Return data (n, c, …) and weights with one value for each channel; None for other operands."""
        for data, weights in (tuple(call.args), tuple(call.args)[::-1]):
            shape = open_sizes.sizes_of(data) or ()
            channels = (*shape[1:2], *(1 for _ in shape[2:]))
            if (
                len(shape) > 2
                and self.flow.is_weight(weights)
                and not self.flow.is_weight(data)
                and ir.shape_of(weights) in ((1, *channels), channels)
            ):
                return data, weights
        return None

    def _fold_scale(self, data: Any, factor: Any) -> Any:
        total = self._find_call(data, "relax.add")
        operands = self._match_channels(total) if total is not None else None
        if operands and self._find_call(operands[0], *_CONVOLUTIONS) is not None:
            scaled = self._fold_scale(operands[0], factor)
            bias = relax.op.multiply(self.visit_expr(operands[1]), self.visit_expr(factor))
            return None if scaled is None else relax.op.add(self.emit(scaled), self.emit(bias))
        conv = self._find_call(data, *_CONVOLUTIONS)
        if (
            conv is None
            or not ir.has_default_layouts(conv)
            or not self.flow.is_weight(conv.args[1])
        ):
            return None
        _, channels, *size = open_sizes.known_sizes(data)
        scale = self.reshape(self.visit_expr(factor), [channels, 1, *(1 for _ in size)])
        kernel = self.emit(relax.op.multiply(self.visit_expr(conv.args[1]), scale))
        return relax.Call(conv.op, [self.visit_expr(conv.args[0]), kernel], conv.attrs)

    def _merge_shifts(self, data: Any, shift: Any) -> Any:
        total = self._find_call(data, "relax.add")
        operands = self._match_channels(total) if total is not None else None
        if not operands:
            return None
        merged = relax.op.add(self.visit_expr(operands[1]), self.visit_expr(shift))
        return relax.op.add(self.visit_expr(operands[0]), self.emit(merged))

    def _find_call(self, data: Any, *names: str) -> Any:
        """Return the call of one of some operators that computes data for one reader; None for other data."""
        value = self.flow.value_if_used_once(data)
        return value if ir.operator_name(value) in names else None
