"""Variables of expressions become buffers on the stack, because LLVM's code generator in TVM analyzes them in place.

It simplifies the value of every let with the values of all variables in it put in their places, apache-tvm 0.27:
time doubles with each let that another one's value reads twice, and `log` of `log` took 11 s to compile. It does not
look into buffers, and LLVM makes registers of them.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvmflow.compiler.ir import IF_THEN_ELSE, find_nodes, operator_name


def keep_lets_on_stack() -> tvm.transform.Pass:
    """Return a pass that stores the values of lets in buffers of one element before the store that reads them."""

    def transform(function: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        if not find_nodes(function.body, tirx.Let):
            return function
        return function.with_body(
            tvm_ffi.structural_map(function.body, (tirx.BufferStore, _store_lets_first))
        )

    return tirx.transform.prim_func_pass(transform, opt_level=0, name="KeepLetsOnStack")


def _store_lets_first(store: tirx.BufferStore) -> tirx.Stmt:
    """Return the stores of the lets in the value of a store, and the store itself."""
    lets = _Lets(store.value)
    value = lets.take_out(store.value)
    if not lets.stores:
        return store
    last = tirx.BufferStore(store.buffer, value, store.indices)
    return tirx.SeqStmt([*lets.stores, last])


class _Lets:
    """Collects the stores of lets, each after those of the variables that its value reads."""

    def __init__(self, value: Any) -> None:
        self.stores: list[tirx.Stmt] = []
        self._loads: dict[Any, Any] = {}
        # their values may not be computed where the condition is false
        self._conditional = {
            let.var
            for call in find_nodes(value, tvm.ir.Call)
            if operator_name(call) == IF_THEN_ELSE
            for branch in call.args[1:]
            for let in find_nodes(branch, tirx.Let)
        }

    def take_out(self, expr: Any) -> Any:
        """Return an expression without lets that are always evaluated."""
        callbacks = ((tirx.Let, self._replace), (tirx.Var, self._load))
        return tvm_ffi.structural_map(expr, callbacks, order="pre")

    def _replace(self, let: Any) -> Any:
        while isinstance(let, tirx.Let) and let.var not in self._conditional:
            buffer = tirx.decl_buffer((1,), let.value.ty.dtype, let.var.name, scope="local")
            store = tirx.BufferStore(buffer, self.take_out(let.value), [0])
            self.stores += [tirx.AllocBuffer(buffer), store]
            self._loads[let.var] = tirx.BufferLoad(buffer, [0])
            let = let.body
        return self._load(let)

    def _load(self, expr: Any) -> Any:
        return self._loads.get(expr, expr) if isinstance(expr, tirx.Var) else expr
