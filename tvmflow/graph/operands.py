"""Operands that are indices or integer divisors, and the values that are valid for them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax

from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import IrSize, is_dynamic, sizes_of

NODES: Final = "tvmflow.checked_nodes"
"""The attribute of an imported `main`: variable that a checked operator computes -> its node, as JSON."""


class Bound(NamedTuple):
    """The valid values of an operand.

    Attributes:
        sizes: The indexed axis' size, or a size for each position in the operand's last axis (None there allows any
            value); None for a divisor, which must not be 0.
        from_end: Whether a negative index counts from the end.
        is_length: Whether only the axis is checked: it must not be empty, and the value does not matter.
    """

    sizes: tuple[IrSize | None, ...] | None
    from_end: bool = False
    is_length: bool = False


_Bounds = Iterator[tuple[int, Bound]]


def list_bounds(value: Any) -> _Bounds:
    """Yield index and bound of each checked operand of a value."""
    if (rule := CHECKED_OPERATORS.get(ir.operator_name(value))) is not None:
        yield from rule(value)


def _take(call: relax.Call) -> _Bounds:
    sizes = sizes_of(call.args[0])
    if sizes is None or str(call.attrs.mode) not in ("fast", ""):
        return
    axis = call.attrs.axis
    yield 1, Bound((math.prod(sizes) if axis is None else sizes[int(axis)],))


def _elements(call: relax.Call) -> _Bounds:
    if (sizes := sizes_of(call.args[0])) is not None:
        from_end = ir.operator_name(call) == "relax.scatter_elements"
        yield 1, Bound((sizes[int(call.attrs.axis)],), from_end)


def _coordinates(call: relax.Call) -> _Bounds:
    sizes, shape = map(sizes_of, call.args[:2])
    first = int(call.attrs.batch_dims) if ir.operator_name(call) == "relax.gather_nd" else 0
    if sizes is not None and shape and not is_dynamic(shape[-1]):
        yield 1, Bound(tuple(sizes[first : first + int(shape[-1])]))


def _index_tensor(call: relax.Call) -> _Bounds:
    if (sizes := sizes_of(call.args[0])) is not None:
        yield 1, Bound(tuple(sizes), from_end=True)


def _roi(call: relax.Call) -> _Bounds:
    """Each region begins with the index of its image in the batch."""
    if (sizes := sizes_of(call.args[0])) is not None and sizes_of(call.args[1]) is not None:
        yield 1, Bound((sizes[0], None, None, None, None))


def _divide(call: relax.Call) -> _Bounds:
    divisor = call.args[1]
    is_tensor = isinstance(divisor.ty, relax.TensorType)
    if is_tensor and ir.dtype_of(divisor).startswith(("int", "uint")):
        yield 1, Bound(None)


CHECKED_OPERATORS: Final[Mapping[str, Callable[[relax.Call], _Bounds]]] = {
    f"relax.{name}": rule
    for name, rule in {
        "take": _take,
        **dict.fromkeys(("gather_elements", "scatter_elements"), _elements),
        **dict.fromkeys(("gather_nd", "scatter_nd"), _coordinates),
        **dict.fromkeys(("index_tensor", "index_put"), _index_tensor),
        **dict.fromkeys(("vision.roi_align", "vision.roi_pool"), _roi),
        **dict.fromkeys(("divide", "floor_divide", "mod", "floor_mod"), _divide),
    }.items()
}
"""Operators with checked operands -> the function that yields index and bound of each such operand."""
_KEEP_VALUES: Final = ir.operators(
    "astype reshape expand_dims squeeze permute_dims broadcast_to flatten concat strided_slice",
    "stack shape_to_tensor",
)
"""Operators whose results contain only values of their operands."""


def find_input_bounds(main: relax.Function) -> list[tuple[Any, Bound]]:
    """Return the inputs of an imported `main` that are used as indices or integer divisors, with bounds."""
    flow, inputs = ir.DataFlow(main), set(main.params[: int(main.attrs["num_input"])])
    found = []
    for binding in ir.list_bindings(main.body):
        call = binding.value
        for position, bound in list_bounds(call):
            operand = call.args[position]
            value = flow.values.get(operand, operand)
            fields = [(operand, bound)]
            if isinstance(value, relax.Tuple) and bound.sizes is not None:
                fields = [
                    (field, Bound((size,), bound.from_end))
                    for field, size in zip(value.fields, bound.sizes, strict=False)
                ]
            found += [
                (var, own) for field, own in fields for var in find_sources(flow, inputs, field)
            ]
    return found


def has_computed_operands(mod: tvm.IRModule) -> bool:
    """Return whether a model may compute indices or integer divisors; True for any with a loop."""
    main = mod["main"]
    flow, inputs = ir.DataFlow(main), set(main.params[: int(main.attrs["num_input"])])
    operands = (
        call.args[position] for call in flow.values.values() for position, _ in list_bounds(call)
    )
    return len(mod.functions) > 1 or any(
        not flow.is_weight(operand) and not find_sources(flow, inputs, operand)
        for operand in operands
    )


def name_checked_nodes(mod: tvm.IRModule, nodes: Sequence[str]) -> tvm.IRModule:
    """Store the nodes of checked operators in the attribute `NODES`; `nodes` names one for each binding."""
    main = mod["main"]
    names = {
        str(binding.var.name): node
        for binding, node in zip(ir.list_bindings(main.body), nodes, strict=False)
        if node and ir.operator_name(binding.value) in CHECKED_OPERATORS
    }
    if not names:
        return mod
    named = ir.copy_module(mod)
    named.update_func(named.get_global_var("main"), main.with_attr(NODES, json.dumps(names)))
    return named


def find_sources(flow: ir.DataFlow, inputs: Collection[Any], operand: Any) -> list[Any]:
    """Return the inputs whose values an operand consists of; empty if it has computed values, too."""
    found: dict[Any, None] = {}
    left, seen = [operand], set()
    while left:
        expr = left.pop()
        is_tensor = isinstance(expr, relax.Var) and not ir.is_size(expr)
        if not is_tensor or expr in seen or flow.is_weight(expr):
            continue
        seen.add(expr)
        if expr in inputs:
            found[expr] = None
            continue
        value: Any = flow.values.get(expr)
        if ir.operator_name(value) == "relax.where":
            # `where(i < 0, i + size, i)` makes negative indices count from the end: `i + size` is not followed
            sums = [ir.as_call(flow.values.get(v, v), "relax.add") for v in value.args[1:]]
            left += [
                v
                for v, total in zip(value.args[1:], sums, strict=True)
                if total is None or not total.args[0].same_as(value.args[2])
            ]
        elif isinstance(value, relax.Var | relax.Tuple):
            left += list(getattr(value, "fields", [value]))
        elif (name := ir.operator_name(value)) in _KEEP_VALUES:
            left += ir.list_variables(value)
        elif value is not None and name == "relax.take":
            left.append(value.args[0])
        elif name != "relax.shape_of":
            return []
    return list(found)
