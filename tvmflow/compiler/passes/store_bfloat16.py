"""Stores what convolutions and matrix products read as bfloat16 only as bfloat16, so that it takes half the memory traffic."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.operators import bfloat16
from tvmflow.compiler.passes._rewriter import NARROWS, MainRewriter, rewrite_main


def store_bfloat16(mod: tvm.IRModule) -> tvm.IRModule:
    """Have all readers of data that are also rounded to bfloat16 read these."""
    return rewrite_main(mod, _Bfloat16Storer)


class _Bfloat16Storer(MainRewriter):
    """Rounds data where they are computed, and widens them where they are read."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._rounded = {
            call.args[1].fields[0]
            for call in self.flow.values.values()
            if _is_narrowing(mod, call)
        }
        self._stored = self.new_memo()

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Round what a binding computes, if a kernel reads it as bfloat16."""
        super().visit_var_binding_(binding)
        if binding.var in self._rounded:
            self._stored[binding.var] = self.narrow_data(super().visit_var_(binding.var))

    def visit_call_(self, call: relax.Call) -> Any:
        """Rewrite a call; one that rounds data has nothing left to do."""
        if _is_narrowing(self.builder_.get(), call):
            source = call.args[1].fields[0]
            if source in self._stored:
                return self._stored[source]
        return super().visit_call_(call)

    def visit_var_(self, var: relax.Var) -> Any:
        """Widen data next to each reader, whose kernel then does it."""
        if var not in self._stored:
            return super().visit_var_(var)
        return self.kernel(bfloat16.widen_data, "from_bfloat16", self._stored[var], pattern=None)

    def visit_dataflow_var_(self, var: relax.DataflowVar) -> Any:
        """Widen data next to each reader, whose kernel then does it."""
        return self.visit_var_(var)


def _is_narrowing(mod: tvm.IRModule, value: Any) -> bool:
    call = ir.as_call(value, "relax.call_tir")
    return call is not None and NARROWS.items() <= dict(mod[call.args[0]].attrs).items()
