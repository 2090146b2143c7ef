"""Stores the weights of convolutions on GPUs so that the channels of a tap are neighbors.

A GPU computes a convolution as a matrix product over taps and channels
(`schedules/gpu/products.py`). With the channels of one tap after the other, threads find the place
of a pixel and its padding once for many channels, and load weights in vectors.
"""

from __future__ import annotations

import math
from typing import Any, Final

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main

_CONVOLUTIONS: Final = {f"relax.nn.conv{rank}d": rank for rank in (1, 2, 3)}
# The depth of a tile: fewer channels do not fill one.
_MIN_CHANNELS: Final = 16


def move_tap_weights(mod: tvm.IRModule) -> tvm.IRModule:
    """Move the input channels of convolutions' weights behind their taps."""
    operators = {ir.operator_name(value) for value in ir.DataFlow(mod["main"]).values.values()}
    return rewrite_main(mod, _WeightsRewriter) if operators & set(_CONVOLUTIONS) else mod


class _WeightsRewriter(MainRewriter):
    """Rewrites convolutions with computed or constant weights of many channels and more than one tap."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        rank = _CONVOLUTIONS.get(ir.operator_name(call))
        if rank is None:
            return rewritten
        layout = str(call.attrs.kernel_layout)
        shape = ir.shape_of(call.args[1])
        if (
            not layout.startswith("OI")
            or len(layout) != rank + 2
            or shape is None
            or shape[1] < _MIN_CHANNELS
            or math.prod(shape[2:]) == 1
            or not self.flow.is_weight(call.args[1])
        ):
            return rewritten
        data, weights = rewritten.args
        axes = [0, *range(2, rank + 2), 1]
        moved = self.emit(relax.op.permute_dims(weights, axes))
        attrs = call.attrs
        return getattr(relax.op.nn, f"conv{rank}d")(
            data,
            moved,
            strides=attrs.strides,
            padding=attrs.padding,
            dilation=attrs.dilation,
            groups=attrs.groups,
            data_layout=attrs.data_layout,
            kernel_layout="".join(layout[axis] for axis in axes),
            out_layout=attrs.out_layout,
            out_dtype=attrs.out_dtype,
        )
