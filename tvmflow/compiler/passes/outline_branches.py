"""Makes functions of the branches of an If.

TVM fuses the operators of functions and not those of branches, and would give memory that one
branch has allocated to the other one, which then writes to an address that it never got.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from tvmflow.compiler import ir
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main


def outline_branches(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace each branch by a call of a private function."""
    return rewrite_main(mod, _Outliner) if ir.has_branches(mod) else mod


class _Outliner(MainRewriter):
    """Adds a function for each branch, innermost branches first."""

    def visit_if_(self, op: relax.If) -> Any:
        rewritten = super().visit_if_(op)
        return relax.If(rewritten.cond, *map(self._outline, ir.branches_of(rewritten)))

    def _outline(self, branch: relax.SeqExpr) -> relax.SeqExpr:
        captured = [
            var for var in relax.analysis.free_vars(branch) if not isinstance(var, tvm.ir.GlobalVar)
        ]
        function = relax.Function(captured, branch, branch.ty)
        callee = self.builder_.add_func(copy_with_new_vars(function), "branch")
        result = relax.Var("result", branch.ty)
        block = relax.BindingBlock([relax.VarBinding(result, relax.Call(callee, captured))])
        return relax.SeqExpr([block], result)
