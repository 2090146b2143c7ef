"""Makes kernels of operators: TVM's, and for CPUs those of our own that take less time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import tvm
from tvm import relax, te, tirx

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.ir_operators import RoundedData
from tvmflow.compiler.passes.vector_math import exp_of_negative


def make_operator_kernels(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Make kernels of all operators."""
    own = {RoundedData.NAME: _legalize_rounding}
    if context.has_vector_math():
        own |= _LEGALIZATIONS
    return relax.transform.LegalizeOps(own)(mod)


def _legalize_rounding(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    return builder.call_te(round_data, *call.args)


def round_data(x: Any, *operands: Any) -> Any:
    """Return the numbers in place of data, see `RoundedData`."""

    def element(*place: Any) -> Any:
        kept, inverse, low, high, scale = (_read_broadcast(own, place) for own in operands)
        steps = tirx.round(tirx.Min(tirx.Max(x(*place) * inverse, low), high))
        return x(*place) * kept + steps * scale

    return te.compute(x.shape, element, name="rounding")


def _read_broadcast(tensor: Any, place: Sequence[Any]) -> Any:
    """Return the element of a tensor that is broadcast to another one, at a place in that."""
    own = place[len(place) - len(tensor.shape) :]
    return tensor(
        *(0 if size == 1 else index for size, index in zip(tensor.shape, own, strict=True))
    )


def _legalize_softmax(builder: relax.BlockBuilder, call: relax.Call) -> Any:
    """Return the kernel of a softmax; TVM's for other numbers than float32."""
    if not ir.is_float32(call):
        return relax.transform.legalize_ops.nn._nn_softmax(builder, call)
    return builder.call_te(softmax, call.args[0], int(call.attrs.axis))


def softmax(x: Any, axis: int) -> Any:
    """Return the softmax of float32 data along an axis, at most 4 units in the last place off.

    No exponential is of a positive number, and results are multiplied by the inverse of their sum.
    """
    shape = list(x.shape)
    axis %= len(shape)
    outer = [*shape[:axis], *shape[axis + 1 :]]

    def reduce(data: Any, combine: Callable[..., Any], name: str) -> Any:
        along = te.reduce_axis((0, shape[axis]), name="k")

        def element(*place: Any) -> Any:
            return combine(data(*place[:axis], along, *place[axis:]), axis=along)

        return te.compute(outer, element, name=name)

    def row(place: Sequence[Any]) -> list[Any]:
        return [*place[:axis], *place[axis + 1 :]]

    largest = reduce(x, te.max, "softmax_largest")
    exponentials = te.compute(
        shape, lambda *i: exp_of_negative(x(*i) - largest(*row(i))), name="softmax_exp"
    )
    total = reduce(exponentials, te.sum, "softmax_total")
    inverse = te.compute(
        outer, lambda *i: tirx.const(1.0, "float32") / total(*i), name="softmax_inverse"
    )
    return te.compute(shape, lambda *i: exponentials(*i) * inverse(*row(i)), name="softmax")


_LEGALIZATIONS: Final = {"relax.nn.softmax": _legalize_softmax}
