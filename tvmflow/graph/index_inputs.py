"""Tensors that indices are computed from.

Small errors in them change the indices, counts and flags that a model returns or selects by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tvm import relax

from tvmflow.graph import ir

# Elementwise operators from floats to flags or integers. Their operands matter only if the result is returned or
# selects data.
_ELEMENTWISE: Final = ir.operators(
    "astype equal not_equal less less_equal greater greater_equal isnan isinf isfinite"
)
# Operators on the order of elements: int8 operands matter, too.
_ORDERS: Final = ir.operators("argmax argmin argsort topk")
_SELECTIONS: Final = ir.operators("take gather_elements gather_nd dynamic_strided_slice")


class FoundIndices(NamedTuple):
    """The indices of a model.

    Attributes:
        inputs: The variables that indices are computed from, in the order of their computation.
        outputs: The positions of the outputs that are indices.
        selects: Whether an index selects data that the model uses or returns.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    selects: bool


def find_indices(main: relax.Function) -> FoundIndices:
    """Return the tensors that indices in an imported `main` are computed from.

    Comparing these tensors shows more than comparing indices (which of ten scores is the largest) or selected values.
    Variables that are inputs, weights or outputs are left out.
    """
    values = ir.DataFlow(main).values
    order = {binding.var: index for index, binding in enumerate(ir.list_bindings(main.body))}
    outputs = ir.list_outputs(main)
    indices = tuple(
        index
        for index, var in enumerate(outputs)
        if isinstance(var, relax.Var) and _is_index(var) and _find_inputs(values, [var])[0]
    )
    found, selected = _find_inputs(values, outputs)
    variables = (var for var in found | selected if var in order and var not in set(outputs))
    inputs = tuple(sorted(variables, key=order.__getitem__))
    return FoundIndices(inputs, indices, bool(selected))


def _find_inputs(values: Mapping[Any, Any], outputs: Sequence[Any]) -> tuple[set[Any], set[Any]]:
    """Return the operands of the outputs' indices, and the data in which those indices select."""
    into_indices: set[Any] = set()
    selected: set[Any] = set()

    def visit(var: Any, value: Any, is_index: bool) -> Iterator[tuple[Any, bool]]:
        """Record what a value reads; yield each operand, and whether it is part of an index."""
        for branch in ir.branches_of(value):
            yield from ((result, is_index) for result in ir.list_variables(branch.body))
        operands = ir.list_variables(value.cond if isinstance(value, relax.If) else value)
        name = ir.operator_name(value)
        numbers = [operand for operand in operands if _is_number(operand, name)]
        if name in _SELECTIONS and len(operands) > 1:
            selected.update(numbers)
        if numbers and _is_index(var) and (is_index or name not in _ELEMENTWISE):
            into_indices.update(numbers)
        selects = is_index or name in _SELECTIONS or isinstance(value, relax.If)
        for operand in operands:
            yield operand, selects and _is_index(operand)

    left = [(var, isinstance(var, relax.Var) and _is_index(var)) for var in outputs]
    seen = set()
    while left:
        index = var, is_index = left.pop()
        if index in seen or not isinstance(var, relax.Var) or var not in values:
            continue
        seen.add(index)
        left += visit(var, values[var], is_index)
    return into_indices, selected if into_indices else set()


def _list_dtypes(expr: Any) -> list[str]:
    ty = expr.ty
    fields = ty.fields if isinstance(ty, relax.TupleType) else [ty]
    return [str(field.dtype.dtype) for field in fields if isinstance(field, relax.TensorType)]


def _is_index(expr: Any) -> bool:
    """Return whether a tensor, or a field of a tuple, is boolean or of integers wider than 8 bits.

    8-bit integers are quantized values, not indices.
    """
    return any(dtype == "bool" or _is_wide_integer(dtype) for dtype in _list_dtypes(expr))


def _is_wide_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint")) and not dtype.endswith("int8")


def _is_number(expr: Any, reader: str) -> bool:
    dtypes = _list_dtypes(expr)
    kinds = ("float", "bfloat", "int8", "uint8") if reader in _ORDERS else ("float", "bfloat")
    return len(dtypes) == 1 and dtypes[0].startswith(kinds)


def find_quantized(main: relax.Function) -> list[Any]:
    """Return, in order, the variables of an imported `main` that are float data rounded to 8 bits.

    Quantized weights are left out.
    """
    flow = ir.DataFlow(main)
    return [
        binding.var
        for binding in ir.list_bindings(main.body)
        if ir.operator_name(binding.value) in ("relax.quantize", "relax.astype")
        and not flow.is_weight(binding.value.args[0])
        and not flow.is_weight(binding.var)
        and _list_dtypes(binding.value.args[0])[0].startswith(("float", "bfloat"))
        and _list_dtypes(binding.var)[0] in ("int8", "uint8")
    ]


def find_nodes_of(
    main: relax.Function, variables: Sequence[Any], nodes: Sequence[str]
) -> dict[Any, str]:
    """Return, for variables of an imported `main`, the nodes of the user's model that compute them.

    For bindings that an importer adds in front of a node, that is the node that computes their operand.
    """
    values = ir.DataFlow(main).values
    names = {
        binding.var: node for binding, node in zip(ir.list_bindings(main.body), nodes, strict=True)
    }
    readers: dict[Any, set[str]] = {}
    for var, value in values.items():
        for operand in ir.list_variables(value):
            readers.setdefault(operand, set()).add(names[var])
    names_of: dict[Any, str] = {}
    for variable in variables:
        var = variable
        while var in values and (not names[var] or readers.get(var, set()) == {names[var]}):
            operands = ir.list_variables(values[var])
            var = operands[0] if operands else None
        if var in values:
            names_of[variable] = names[var]
    return names_of
