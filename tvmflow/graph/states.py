"""States in a graph: the attributes of inputs and kernels, and the dtype of a state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax

from tvmflow.core.types import INT8_ROWS
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import IrSize, same_size, sizes_of
from tvmflow.graph.ir_operators import PackRows, UnpackRows

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


class NotStorable(Exception):
    """A state of `main` cannot be stored in another dtype: the index of its input, and why."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.input, self.reason = index, reason


# Operators whose results attention reads in place (`strided_views`), and factors of the scores.
_VIEWS: Final = ir.operators(
    "reshape expand_dims squeeze permute_dims broadcast_to take strided_slice multiply divide"
)


def _find_other_reader(flow: ir.DataFlow, present: Any, length: IrSize) -> str:
    """Return an operator that does not read whole rows in a matmul, as attention does; else empty."""
    left = [flow.values[present]]
    while left:
        for reader in flow.list_readers(left.pop()):
            name = ir.operator_name(reader)
            sizes = sizes_of(reader) or ()
            is_whole = name in _VIEWS and any(same_size(size, length) for size in sizes)
            if is_whole or isinstance(reader, relax.Var):
                left.append(reader)
            elif name != "relax.matmul" and not isinstance(reader, relax.Tuple):
                return name.removeprefix("relax.") or "another operator"
    return ""


def store_states(
    mod: tvm.IRModule, nodes: Sequence[str], states: Sequence[GrowingState], dtype: str
) -> tuple[tvm.IRModule, tuple[str, ...]]:
    """Let `main` take and return float32 states in another dtype.

    A step casts new rows as it appends them. Everything else reads all rows, cast back to float32. For int8, each row
    along the last axis is quantized with its own scale (`ir_operators.PackRows`).

    Args:
        mod: The model.
        nodes: The node of each binding of `main`.
        states: The states.
        dtype: Their new dtype.

    Returns:
        The module, and the node of each of its bindings.

    Raises:
        NotStorable: `main` does not append to a state, or something other than attention reads int8 rows.
    """
    main, builder = mod["main"], relax.BlockBuilder()
    flow, params, result = ir.DataFlow(main), list(main.params), main.body.body
    fields = list(getattr(flow.values.get(result, result), "fields", ()))
    replaced: dict[Any, list[relax.VarBinding]] = {}
    is_int8 = dtype == INT8_ROWS

    def bind(name: str, value: Any) -> relax.VarBinding:
        value = builder.normalize(value)
        return relax.VarBinding(relax.Var(name, value.ty), value)

    for state in states:
        param = params[state.input]
        found = find_append(flow, param, fields[state.output], state.axis) if fields else None
        if found is None:
            raise NotStorable(state.input, "the model does more with it than to append rows")
        present, (call, rows) = flow.resolve(fields[state.output]), found
        if isinstance(call.args[0], relax.Var):
            replaced[call.args[0]] = []
        new = bind("rows", PackRows().call(rows) if is_int8 else relax.op.astype(rows, dtype))
        *outer, row = sizes_of(param) or ()
        if is_int8 and (name := _find_other_reader(flow, present, row)):
            reason = f"attention has to read its rows as they are, and `{name}` reads it"
            raise NotStorable(state.input, reason)
        width = (sizes_of(new.var) or ())[-1]
        stored = relax.Var(param.name, relax.TensorType([*outer, width], dtype))
        all_rows = bind("stored", relax.op.concat([stored, new.var], state.axis))
        cast = relax.op.astype(all_rows.var, ir.dtype_of(present))
        back = builder.normalize(UnpackRows().call(all_rows.var) if is_int8 else cast)
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
