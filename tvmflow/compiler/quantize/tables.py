"""Rounds tables whose rows are looked up, as those of words, to 8 bits with a scale for each row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir, marks
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_main
from tvmflow.compiler.quantize.insertion import add_parameters, free_name, replace_weights
from tvmflow.compiler.quantize.points import Array, FloatModel
from tvmflow.compiler.quantize.weights import GroupedIntegers, Groups, round_groups

_TAKE: Final = "relax.take"
_SHAPE_OF: Final = "relax.shape_of"
_BITS: Final = 8
# Kernels read integers in words of so many bytes.
_WORD: Final = 4
_RANK: Final = 2
# The scale of a number near float32's limit, as a bfloat16, may stand for infinity.
_MOST: Final = 2.0**127


class Table(NamedTuple):
    """A matrix of weights of which nothing but lookups of rows reads numbers.

    Attributes:
        name: The node of the user's model that looks rows up first.
        weights: The name of the parameter.
    """

    name: str
    weights: str


def list_tables(model: FloatModel) -> tuple[Table, ...]:
    """Return the tables of a model whose weights are numbers, in the order of the first lookups."""
    flow = ir.DataFlow(model.main)
    weights = {var: str(var.name) for var in ir.list_weights(model.main)}
    bindings = ir.list_bindings(model.main.body)
    # not every model knows its nodes
    nodes = [*model.nodes, *[""] * len(bindings)]
    others: set[Any] = set(ir.list_variables(model.main.body.body))
    found: dict[Any, str] = {}
    for binding, node in zip(bindings, nodes, strict=False):
        read = ir.list_variables(binding.value)
        if ir.operator_name(binding.value) == _SHAPE_OF:
            # importers of indices that count from the end read sizes, which are known
            continue
        if (var := _find_table(binding.value, weights)) is not None:
            is_known = flow.is_weight(binding.value.args[1])
            others |= {var} if is_known else set()
            found.setdefault(var, node)
            read = [other for other in read if not other.same_as(var)]
        others |= set(read)
    return tuple(
        Table(node or weights[var], weights[var])
        for var, node in found.items()
        if var not in others and _has_numbers_of_one_size(model.params[weights[var]])
    )


def round_tables(model: FloatModel, tables: Collection[Table]) -> dict[str, GroupedIntegers]:
    """Return the integers of tables, by the names of their weights."""
    return {table.weights: _round(model.params[table.weights]) for table in tables}


def insert_tables(model: FloatModel, tables: Mapping[str, GroupedIntegers]) -> FloatModel:
    """Return a model whose lookups read integers.

    Args:
        model: The model.
        tables: The integers by the names of the weights that they replace.
    """
    if not tables:
        return model
    names = {str(var.name) for var in model.main.params}
    own: dict[str, Array] = {}
    params: dict[str, list[Any]] = {}
    for name, table in tables.items():
        params[name] = []
        for what, array in table.pack().items():
            kind = relax.TensorType(array.shape, str(array.dtype))
            params[name].append(var := relax.Var(free_name(f"{name}.{what}", names), kind))
            own[str(var.name)] = array
    mod = add_parameters(model.mod, [], [var for operands in params.values() for var in operands])
    marks.mark_bindings(mod)
    return replace_weights(model, rewrite_main(mod, _Inserter, tables, params), own)


class _Inserter(MainRewriter):
    """Lets lookups read the weights that integers stand for."""

    def __init__(
        self,
        mod: tvm.IRModule,
        tables: Mapping[str, GroupedIntegers],
        params: Mapping[str, Sequence[Any]],
    ) -> None:
        super().__init__(mod)
        self._tables, self._params = tables, params
        self._real = self.new_memo()

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        operator = ir.operator_name(call)
        if operator not in (_TAKE, _SHAPE_OF) or not isinstance(call.args[0], relax.Var):
            return rewritten
        name = str(call.args[0].name)
        if (table := self._tables.get(name)) is None:
            return rewritten
        if operator == _SHAPE_OF:
            return relax.ShapeExpr(ir.known_shape(call.args[0]))
        if name not in self._real:
            self._real[name] = self.emit(table.operator.call(*self._params[name]))
        arguments = [self._real[name], rewritten.args[1]]
        return relax.Call(call.op, arguments, call.attrs, call.ty_args)


def _find_table(value: Any, weights: Collection[Any]) -> Any:
    """Return the weights of which a lookup reads rows; None for anything else."""
    if ir.operator_name(value) != _TAKE or value.attrs.axis is None or int(value.attrs.axis):
        return None
    table = value.args[0]
    if not ir.is_float32(table) or table not in weights:
        return None
    shape = ir.known_shape(table)
    # a row of one number is as large as its scale
    return table if len(shape) == _RANK and shape[1] > 1 else None


def _has_numbers_of_one_size(table: Array) -> bool:
    """Return whether a step of the largest number of each row is no more than most of the others.

    It is more in masks of attention, whose large numbers stand for infinity.
    """
    sizes = np.abs(table)
    largest = sizes.max(axis=1, keepdims=True, initial=0.0)
    if not (largest < _MOST).all():
        return False
    is_lost = (sizes > 0) & (sizes * np.float32(2**_BITS - 2) < largest)
    counts = np.count_nonzero(is_lost, axis=1), np.count_nonzero(sizes, axis=1)
    return bool((2 * counts[0] <= counts[1]).all())


def _round(weights: Array) -> GroupedIntegers:
    size = -(-weights.shape[1] // _WORD) * _WORD
    return round_groups(weights, Groups(_BITS, size))
