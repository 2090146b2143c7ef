"""Batch norms, and other scales and shifts of channels, become weights of the convolution before them."""

from __future__ import annotations

from typing import Any, Final

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.passes._function import Facts, call_of, rewritten, shape_of

_NORM: Final = "relax.nn.batch_norm"
_CONV2D: Final = "relax.nn.conv2d"
# A norm behind a bias is a sum, a scale and a sum: the scale moves first, then the sums become one.
_ROUNDS: Final = 2


def fold_norms(mod: tvm.IRModule) -> tvm.IRModule:
    """Each batch norm as one multiplication and one addition, and as neither where a convolution takes them in.

    A convolution that somebody else reads stays as it is.
    """
    facts = Facts(mod["main"])
    called = {
        str(getattr(value.op, "name", "")) for value in facts.values.values() if _is_call(value)
    }
    if _NORM in called:
        mod = rewritten(mod, _Norms(mod, facts))
    if _CONV2D in called:
        for _ in range(_ROUNDS):
            mod = rewritten(mod, _Scales(mod, Facts(mod["main"])))
    return mod


def _is_call(value: Any) -> bool:
    return isinstance(value, relax.Call)


@mutator
class _Norms(PyExprMutator):  # type: ignore[misc]
    """`x·s + (β − μ·s)` with `s = γ / √(σ² + ε)`, which is computed from weights alone."""

    def __init__(self, mod: tvm.IRModule, facts: Facts) -> None:
        super().__init__(mod)
        self._facts = facts

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> Any:
        norm = call_of(self._facts.values.get(item.tuple_value), _NORM)
        shape = shape_of(norm.args[0]) if norm is not None else None
        if (
            shape is None
            or item.index != 0
            or not all(self._facts.is_weight(each) for each in norm.args[1:])
        ):
            return super().visit_tuple_getitem_(item)
        data, gamma, beta, mean, variance = (self.visit_expr(each) for each in norm.args)
        emit = self.builder_.emit
        epsilon = relax.const(float(norm.attrs.epsilon), "float32")
        scale = emit(relax.op.rsqrt(emit(relax.op.add(variance, epsilon))))
        if norm.attrs.scale:
            scale = emit(relax.op.multiply(scale, gamma))
        shift = emit(relax.op.negative(emit(relax.op.multiply(mean, scale))))
        if norm.attrs.center:
            shift = emit(relax.op.add(shift, beta))
        axis = int(norm.attrs.axis) % len(shape)
        along = [extent if place == axis else 1 for place, extent in enumerate(shape)]
        place = relax.ShapeExpr(along)
        scaled = emit(relax.op.multiply(data, emit(relax.op.reshape(scale, place))))
        return relax.op.add(scaled, emit(relax.op.reshape(shift, place)))


@mutator
class _Scales(PyExprMutator):  # type: ignore[misc]
    """`conv(x, w)·s` as `conv(x, w·s)`, `(conv + b)·s` as `conv·s + b·s`, and `(y + b) + c` as `y + (b + c)`."""

    def __init__(self, mod: tvm.IRModule, facts: Facts) -> None:
        super().__init__(mod)
        self._facts = facts

    def visit_call_(self, call: relax.Call) -> Any:
        for name, road in (("relax.multiply", self._scaled), ("relax.add", self._shifted)):
            if call_of(call, name) is not None and (parts := self._along_channels(call)):
                made = road(*parts)
                if made is not None:
                    return made
        return super().visit_call_(call)

    def _along_channels(self, call: Any) -> tuple[Any, Any] | None:
        """What is scaled or shifted and the weights, one for each channel of four-dimensional data; None for other sums."""
        for data, weights in (tuple(call.args), tuple(call.args)[::-1]):
            shape = shape_of(data)
            if (
                shape is not None
                and len(shape) == 4
                and self._facts.is_weight(weights)
                and not self._facts.is_weight(data)
                and shape_of(weights) in ((1, shape[1], 1, 1), (shape[1], 1, 1))
            ):
                return data, weights
        return None

    def _scaled(self, data: Any, factor: Any) -> Any:
        value, emit = self._facts.only_use(data), self.builder_.emit
        if (sum_ := call_of(value, "relax.add")) is not None:
            parts = self._along_channels(sum_)
            if parts and call_of(self._facts.only_use(parts[0]), _CONV2D) is not None:
                scaled = self._scaled(parts[0], factor)
                bias = relax.op.multiply(self.visit_expr(parts[1]), self.visit_expr(factor))
                return None if scaled is None else relax.op.add(emit(scaled), emit(bias))
        found = call_of(value, _CONV2D)
        if (
            found is None
            or (found.attrs.data_layout, found.attrs.out_layout) != ("NCHW", "NCHW")
            or found.attrs.kernel_layout != "OIHW"
            or not self._facts.is_weight(found.args[1])
        ):
            return None
        channels = shape_of(data)[1]  # type: ignore[index]
        place = relax.ShapeExpr([channels, 1, 1, 1])
        along = emit(relax.op.reshape(self.visit_expr(factor), place))
        kernel = emit(relax.op.multiply(self.visit_expr(found.args[1]), along))
        return relax.Call(found.op, [self.visit_expr(found.args[0]), kernel], found.attrs)

    def _shifted(self, data: Any, shift: Any) -> Any:
        sum_ = call_of(self._facts.only_use(data), "relax.add")
        parts = self._along_channels(sum_) if sum_ is not None else None
        if not parts:
            return None
        both = relax.op.add(self.visit_expr(parts[1]), self.visit_expr(shift))
        return relax.op.add(self.visit_expr(parts[0]), self.builder_.emit(both))
