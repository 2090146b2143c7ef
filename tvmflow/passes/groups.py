"""Grouped convolutions whose groups are narrower than a vector: some groups become one, with zeros between."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.passes._function import (
    Facts,
    is_depthwise,
    is_float,
    kind_of,
    rewritten,
    shape_of,
)

# Multiplications with zeros that a road in vectors is worth, for each with a weight.
_MOST_WASTE: Final = 4
_CONVOLUTIONS: Final = {
    "relax.nn.conv2d": (relax.op.nn.conv2d, "OIHW"),
    "relax.nn.conv2d_transpose": (relax.op.nn.conv2d_transpose, "IOHW"),
}
_KEPT: Final = (
    *("strides", "padding", "output_padding", "dilation"),
    *("data_layout", "kernel_layout", "out_layout"),
)


def widen_groups(mod: tvm.IRModule, block: int, plain: Collection[str] = ()) -> tvm.IRModule:
    """The module with groups of convolutions joined until each fills vectors of `block` lanes, where few have to be.

    Those of the kinds in `plain` stay as they are.
    """
    return rewritten(mod, _Widener(mod, Facts(mod["main"]), block, plain))


@mutator
class _Widener(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, facts: Facts, block: int, plain: Collection[str]) -> None:
        super().__init__(mod)
        self._facts = facts
        self._block = block
        self._plain = plain

    def visit_call_(self, call: relax.Call) -> Any:
        made = super().visit_call_(call)
        function, layout = _CONVOLUTIONS.get(getattr(call.op, "name", ""), (None, ""))
        if function is None or call.attrs.kernel_layout != layout:
            return made
        groups, joined = int(call.attrs.groups), self._joined(call)
        if joined == 1:
            return made
        kernel = self._wider(made.args[1], groups, joined)
        kept = {name: getattr(call.attrs, name) for name in _KEPT if hasattr(call.attrs, name)}
        return function(made.args[0], kernel, groups=groups // joined, **kept)

    def _joined(self, call: Any) -> int:
        """How many groups become one; 1 where they stay as they are."""
        groups = int(call.attrs.groups)
        data, kernel, result = (shape_of(each) for each in (*call.args, call))
        if data is None or kernel is None or result is None:
            return 1
        sides = (data[1] // groups, result[1] // groups)
        if (
            groups == 1
            or is_depthwise(call)
            or kind_of(call) in self._plain
            or not self._facts.is_weight(call.args[1])
            or not is_float(call)
        ):
            return 1
        for joined in range(1, min(groups, _MOST_WASTE) + 1):
            if groups % joined == 0 and not any(joined * side % self._block for side in sides):
                return joined
        return 1

    def _wider(self, kernel: Any, groups: int, joined: int) -> Any:
        """Weights (o, i/groups, h, w), or (i, o/groups, h, w), with a diagonal of blocks for each new group."""
        emit = self.builder_.emit
        first, second, height, width = shape_of(kernel)  # type: ignore[misc]
        per_group = first // groups
        apart = [groups // joined, joined, per_group, 1, second, height, width]
        diagonal = np.eye(joined, dtype=np.float32).reshape(1, joined, 1, joined, 1, 1, 1)
        spread = relax.op.multiply(
            emit(relax.op.reshape(kernel, relax.ShapeExpr(apart))), relax.const(diagonal)
        )
        shape = relax.ShapeExpr([first, joined * second, height, width])
        return emit(relax.op.reshape(emit(spread), shape))
