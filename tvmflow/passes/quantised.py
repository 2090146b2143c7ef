"""Quantised models: weights stay whole numbers in the library, data between operators are rounded as float32."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.passes import compute
from tvmflow.passes._function import Facts, call_of, is_float, rewritten, shape_of

_CONV2D: Final = "relax.nn.conv2d"
_MATMUL: Final = "relax.matmul"
_WHOLE: Final = "int8"
# Of which float32 holds each sum with a zero point.
_STEPS: Final = ("int8", "uint8", "int16", "uint16")
# How many axes their weights have.
_RANKS: Final = {_CONV2D: 4, _MATMUL: 2}


def keep_whole(mod: tvm.IRModule) -> tvm.IRModule:
    """Convolutions and matrix products with weights s·w, w being of int8, as those with w, multiplied by s."""
    return rewritten(mod, _Keeper(mod, Facts(mod["main"])))


def round_floats(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with float32 rounded as float32 where whole numbers would at once be read as float32 again.

    What comes out is the same, but that a zero may be −0.
    """
    return rewritten(mod, _Rounder(mod, Facts(mod["main"])))


def whole_dtype(facts: Facts, weights: Any) -> str:
    """The dtype of the whole numbers that weights are; empty for others."""
    made = _made_by("relax.astype", weights, facts)
    dtype = str(made.call.args[0].ty.dtype.dtype) if made is not None else ""
    return dtype if dtype == _WHOLE else ""


class _Made(NamedTuple):
    """The call that weights come from, and whether they are a matrix that was turned over since."""

    call: Any
    is_turned: bool


def _made_by(name: str, weights: Any, facts: Facts) -> _Made | None:
    value = facts.values.get(weights)
    turned = call_of(value, "relax.permute_dims")
    if turned is not None and len(shape_of(turned) or ()) == 2:
        axes = turned.attrs.axes
        value = facts.values.get(turned.args[0]) if axes is None or int(axes[0]) else None
    found = call_of(value, name)
    return None if found is None else _Made(found, turned is not None)


@mutator
class _Keeper(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, facts: Facts) -> None:
        super().__init__(mod)
        self._facts = facts

    def visit_call_(self, call: relax.Call) -> Any:
        made = super().visit_call_(call)
        name = getattr(call.op, "name", "")
        if name not in _RANKS or len(shape_of(call.args[1]) or ()) != _RANKS[name]:
            return made
        source = _made_by("relax.dequantize", call.args[1], self._facts)
        if source is None:
            return made
        axis = 0 if name == _CONV2D or source.is_turned else 1
        if not self._is_scaled_along(axis, source.call):
            return made
        whole, scale, _ = source.call.args
        emit = self.builder_.emit
        weights = emit(relax.op.astype(self.visit_expr(whole), "float32"))
        if source.is_turned:
            weights = emit(relax.op.permute_dims(weights))
        product = emit(relax.Call(call.op, [made.args[0], weights], call.attrs))
        factor = scale.value.numpy().reshape(-1, *[1] * (_RANKS[name] - 2))
        return relax.op.multiply(product, relax.const(factor, "float32"))

    def _is_scaled_along(self, axis: int, made: Any) -> bool:
        """Whether weights of int8 are symmetric, with one scale for all or one for each place along an axis."""
        whole, scale, zero = made.args
        if (
            str(whole.ty.dtype.dtype) != _WHOLE
            or not self._facts.is_weight(whole)
            or not all(isinstance(each, tvm.ir.Constant) for each in (scale, zero))
            or zero.value.numpy().any()
        ):
            return False
        shape, count = shape_of(whole) or (), scale.value.numpy().size
        return count == 1 or (int(made.attrs.axis) % len(shape) == axis and count == shape[axis])


class _Step(NamedTuple):
    """Data that are rounded to whole multiples of `scale`, from `least` to `most`."""

    data: Any
    scale: float
    least: int
    most: int


@mutator
class _Rounder(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, facts: Facts) -> None:
        super().__init__(mod)
        self._facts = facts

    def visit_call_(self, call: relax.Call) -> Any:
        step = self._step(call)
        if step is None:
            return super().visit_call_(call)
        data = self.visit_expr(step.data)
        return self.builder_.call_te(compute.rounded, data, *step[1:], primfunc_name_hint="rounded")

    def _step(self, call: Any) -> _Step | None:
        if (back := call_of(call, "relax.dequantize")) is None:
            return None
        there = call_of(self._facts.only_use(back.args[0]), "relax.quantize")
        if there is None or not (is_float(there.args[0]) and is_float(back)):
            return None
        dtype = str(there.ty.dtype.dtype)
        ends = [*there.args[1:], *back.args[1:]]
        if dtype not in _STEPS or not all(isinstance(each, tvm.ir.Constant) for each in ends):
            return None
        scale, zero, *others = (each.value.numpy() for each in ends)
        if scale.size > 1 or zero.size > 1 or not all(map(np.array_equal, (scale, zero), others)):
            return None
        numbers, middle = np.iinfo(dtype), int(zero.item())
        least, most = int(numbers.min) - middle, int(numbers.max) - middle
        return _Step(there.args[0], float(scale.item()), least, most)
