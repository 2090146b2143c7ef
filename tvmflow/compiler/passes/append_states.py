"""Lets a step append to states that grow, such as KV caches, in place.

Such a state is an input, and an output is the same tensor with more rows along one axis. If this axis is outermost in
memory, the old tensor is a prefix of the new tensor. The kernels emitted here have a role (`graph.states`). A C library
does not run them: its states have this layout, and it appends the new rows to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax, topi

from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import sizes_of
from tvmflow.graph.rewriter import MainRewriter, rewrite_main
from tvmflow.graph.states import APPEND, ENTER, EXIT, ROLE, find_append, read_states


def append_states(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose growing states have the axis along which they grow outermost."""
    if not read_states(mod["main"]):
        return mod
    return rewrite_main(relax.transform.ToNonDataflow()(mod), _StateRewriter)


class _StateRewriter(MainRewriter):
    OPERATORS = ir.operators("concat")

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        main = mod["main"]
        self._result = self.flow.values.get(main.body.body, main.body.body)
        results = [self.flow.resolve(field) for field in getattr(self._result, "fields", ())]
        # concatenation that computes an output -> the state, its new rows, and the axis along which it grows
        self._states: dict[Any, tuple[Any, Any, int]] = {}
        for state in read_states(main) if results else ():
            param, result = main.params[state.input], results[state.output]
            found = find_append(self.flow, param, result, state.axis)
            if found is not None and sum(other.same_as(result) for other in results) == 1:
                call, new = found
                self._states[call] = (param, new, state.axis)
        # output -> the state in the library's layout, and the permutation to the model's layout
        self._exits: dict[Any, tuple[Any, list[int]]] = {}

    def _replace(self, call: Any) -> Any:
        if call not in self._states:
            return None
        param, new, axis = self._states[call]
        rank = len(sizes_of(call) or ())
        inward = [axis, *(other for other in range(rank) if other != axis)]
        outward = [inward.index(other) for other in range(rank)]
        before = self._call(ENTER, functools.partial(topi.transpose, axes=inward), param)
        rows = self.emit(relax.op.permute_dims(self.visit_expr(new), inward))
        after = self._call(APPEND, lambda *parts: topi.concatenate(parts, 0), before, rows)
        inside = self.emit(relax.op.permute_dims(after, outward))
        self._exits[inside] = (after, outward)
        return inside

    def _call(self, role: str, compute: Callable[..., Any], *tensors: Any) -> Any:
        attributes = {**ir.OPAQUE, **ir.SCHEDULED, ROLE: role}
        return self.kernel(compute, f"{role}_state", *tensors, pattern=attributes)

    def visit_tuple_(self, op: relax.Tuple) -> Any:
        """Convert states that are outputs back to the layout of the model."""
        fields = [self.visit_expr(field) for field in op.fields]
        if op.same_as(self._result):
            for index, field in enumerate(fields):
                if exits := self._exits.get(self.resolve(field)):
                    after, outward = exits
                    fields[index] = self._call(
                        EXIT, functools.partial(topi.transpose, axes=outward), after
                    )
        return relax.Tuple(fields)
