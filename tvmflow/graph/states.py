"""States in a graph: the attributes of inputs and kernels, and the dtype of a state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax

from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import sizes_of

_STATES: Final = "tvmflow.states"

ROLE: Final = "tvmflow.state_role"
"""The attribute of a kernel with its role, one of the constants below."""
ENTER: Final = "enter"
APPEND: Final = "append"
EXIT: Final = "exit"


class GrowingState(NamedTuple):
    """A state: the indices of its input and its output, and the axis along which it grows."""

    input: int
    output: int
    axis: int


def with_states(function: relax.Function, states: Iterable[GrowingState]) -> relax.Function:
    """Return `main` with its growing states as an attribute."""
    entries = [list(state) for state in states]
    return function.with_attr(_STATES, entries) if entries else function


def read_states(function: relax.Function) -> list[GrowingState]:
    """Return the growing states of `main`; empty for a model without any."""
    entries = (function.attrs or {}).get(_STATES, ())
    return [GrowingState(*map(int, entry)) for entry in entries]


def find_append(flow: ir.DataFlow, param: Any, result: Any, axis: int) -> tuple[Any, Any] | None:
    """Return the concatenation of a state and new rows that computes `result`, and these rows.

    None if another operator computes the result, or if anything else reads the state.
    """
    call = flow.find_call(flow.resolve(result), "relax.concat")
    parts: Sequence[Any] = ()
    if call is not None:
        parts = getattr(flow.values.get(call.args[0], call.args[0]), "fields", ())
    rank = len(sizes_of(call) or ()) if call is not None else 0
    if len(parts) != 2 or not rank or int(call.attrs.axis) % rank != axis:
        return None
    is_state = flow.resolve(parts[0]).same_as(param) and flow.count_uses(param) == 1
    return (call, parts[1]) if is_state else None


class NotAppended(Exception):
    """`main` does not append to a state, or reads it before it appends; `input` is its index."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.input = index


def store_states(
    mod: tvm.IRModule, nodes: Sequence[str], states: Sequence[GrowingState], dtype: str
) -> tuple[tvm.IRModule, tuple[str, ...]]:
    """Let `main` take and return float32 states in another dtype.

    A step casts new rows as it appends them. Everything else reads all rows, cast back to float32.

    Args:
        mod: The model.
        nodes: The node of each binding of `main`.
        states: The states.
        dtype: Their new dtype.

    Returns:
        The module, and the node of each of its bindings.

    Raises:
        NotAppended: with the index of an input to which `main` does not append.
    """
    main, builder = mod["main"], relax.BlockBuilder()
    flow, params, result = ir.DataFlow(main), list(main.params), main.body.body
    fields = list(getattr(flow.values.get(result, result), "fields", ()))
    replaced: dict[Any, list[relax.VarBinding]] = {}

    def bind(name: str, value: Any) -> relax.VarBinding:
        value = builder.normalize(value)
        return relax.VarBinding(relax.Var(name, value.ty), value)

    for state in states:
        param = params[state.input]
        found = find_append(flow, param, fields[state.output], state.axis) if fields else None
        if found is None:
            raise NotAppended(state.input)
        present, (call, rows) = flow.resolve(fields[state.output]), found
        if isinstance(call.args[0], relax.Var):
            replaced[call.args[0]] = []
        stored = relax.Var(param.name, relax.TensorType(param.ty.shape, dtype))
        new = bind("rows", relax.op.astype(rows, dtype))
        all_rows = bind("stored", relax.op.concat([stored, new.var], state.axis))
        back = builder.normalize(relax.op.astype(all_rows.var, ir.dtype_of(present)))
        replaced[present] = [new, all_rows, relax.VarBinding(present, back)]
        params[state.input], fields[state.output] = stored, all_rows.var
    results = bind("results", relax.Tuple(fields))
    if isinstance(result, relax.Var):
        replaced[result] = [results]
    blocks = [
        type(block)([new for old in block.bindings for new in replaced.get(old.var, [old])])
        for block in main.body.blocks
    ]
    end = results.var if isinstance(result, relax.Var) else results.value
    body = builder.normalize(relax.SeqExpr(blocks, end))
    function = relax.Function(params, body, results.value.ty, main.is_pure).with_attrs(main.attrs)
    changed = ir.copy_module(mod)
    changed[mod.get_global_var("main")] = function
    node_of = dict(zip((old.var for old in ir.list_bindings(main.body)), nodes, strict=False))
    node_of |= {new.var: node_of.get(old, "") for old in replaced for new in replaced[old]}
    return changed, tuple(node_of.get(binding.var, "") for binding in ir.list_bindings(body))
