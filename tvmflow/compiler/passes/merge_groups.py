"""Merges groups of grouped convolutions that are narrower than a vector, with zero weights between them."""

from __future__ import annotations

import logging
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.passes._rewriter import MainRewriter, rewrite_main

_log = logging.getLogger(__name__)

# Vectorized kernels are worth so many multiplications with zeros for each one with a weight.
_MAX_MERGED: Final = 4
_CONVOLUTIONS: Final = {
    "relax.nn.conv2d": (relax.op.nn.conv2d, "OIHW"),
    "relax.nn.conv2d_transpose": (relax.op.nn.conv2d_transpose, "IOHW"),
}
_ATTRIBUTES: Final = (
    *("strides", "padding", "output_padding", "dilation"),
    *("data_layout", "kernel_layout", "out_layout"),
)


def merge_groups(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Merge groups of convolutions until each fills vectors, where merging a few is enough."""
    return rewrite_main(mod, _GroupMerger, context)


class _GroupMerger(MainRewriter):
    """Rewrites grouped convolutions."""

    def __init__(self, mod: tvm.IRModule, context: LoweringContext) -> None:
        super().__init__(mod)
        self._context = context

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        function, layout = _CONVOLUTIONS.get(ir.operator_name(call), (None, ""))
        if function is None or call.attrs.kernel_layout != layout:
            return rewritten
        groups, merged = int(call.attrs.groups), self._count_merged(call)
        if merged == 1:
            return rewritten
        _log.debug("%d of %d groups are merged", merged, groups)
        kernel = self._merge_kernel(rewritten.args[1], groups, merged)
        attributes = {
            name: getattr(call.attrs, name) for name in _ATTRIBUTES if hasattr(call.attrs, name)
        }
        return function(rewritten.args[0], kernel, groups=groups // merged, **attributes)

    def _count_merged(self, call: Any) -> int:
        """Return how many groups become one; 1 where they stay as they are."""
        groups = int(call.attrs.groups)
        if (
            groups == 1
            or any(ir.shape_of(expr) is None for expr in (*call.args, call))
            or ir.is_depthwise(call)
            or self._context.is_plain(ir.convolution_kind(call))
            or not self.flow.is_weight(call.args[1])
            or not ir.is_float32(call)
        ):
            return 1
        channels = [ir.known_shape(expr)[1] // groups for expr in (call.args[0], call)]
        for merged in range(1, min(groups, _MAX_MERGED) + 1):
            fills_vectors = not any(merged * count % self._context.lanes for count in channels)
            if groups % merged == 0 and fills_vectors:
                return merged
        return 1

    def _merge_kernel(self, kernel: Any, groups: int, merged: int) -> Any:
        """Emit weights (o, i/groups, h, w), or (i, o/groups, h, w), with a block diagonal for each new group."""
        first, second, height, width = ir.known_shape(kernel)
        split = [groups // merged, merged, first // groups, 1, second, height, width]
        diagonal = np.eye(merged, dtype=np.float32).reshape(1, merged, 1, merged, 1, 1, 1)
        spread = relax.op.multiply(self.reshape(kernel, split), relax.const(diagonal))
        return self.reshape(self.emit(spread), [first, merged * second, height, width])
