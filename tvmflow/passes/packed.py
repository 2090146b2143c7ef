"""Matrix products with weights: the weights are packed into columns of vectors when the library is built."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvmflow.passes import compute
from tvmflow.passes._function import TAKES_EPILOGUE, Facts, is_float, kept_as, rewritten, shape_of
from tvmflow.passes.quantised import whole_dtype


def pack_matmuls(mod: tvm.IRModule, block: int, kept: str = "float32") -> tvm.IRModule:
    """The module with the weights (k, n) of its matrix products as (⌈n/b⌉, k, b), kept in the dtype `kept` or as whole numbers."""
    return rewritten(mod, _Packer(mod, Facts(mod["main"]), block, kept))


@mutator
class _Packer(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: tvm.IRModule, facts: Facts, block: int, kept: str) -> None:
        super().__init__(mod)
        self._facts = facts
        self._block = block
        self._kept = kept

    def visit_call_(self, call: relax.Call) -> Any:
        made = super().visit_call_(call)
        if getattr(call.op, "name", "") != "relax.matmul":
            return made
        rows, weights = shape_of(call.args[0]), shape_of(call.args[1])
        if (
            rows is None
            or weights is None
            or (len(rows) < 2 or len(weights) != 2)
            or not all(is_float(each) for each in (*call.args, call))
            or not self._facts.is_weight(call.args[1])
            or self._facts.is_weight(call.args[0])
        ):
            return made
        emit, (depth, columns) = self.builder_.emit, weights
        packed = made.args[1]
        if missing := -columns % self._block:
            packed = emit(relax.op.nn.pad(packed, [0, 0, 0, missing]))
        shape = [depth, (columns + missing) // self._block, self._block]
        packed = emit(relax.op.reshape(packed, relax.ShapeExpr(shape)))
        packed = emit(relax.op.permute_dims(packed, [1, 0, 2]))
        kept = whole_dtype(self._facts, call.args[1]) or self._kept
        packed = kept_as(self.builder_, packed, kept)
        return self.builder_.call_te(
            compute.dense,
            made.args[0],
            packed,
            columns,
            primfunc_name_hint="dense_pack",
            primfunc_attrs=TAKES_EPILOGUE,
        )
