"""Checks of indices and divisors at run time, if their values are unknown at build time.

TVM's kernels read and write at any index, and a CPU traps at an integer division by zero. On CPUs, a small kernel tests
such an operand before the kernel that uses it, and fails with a message. On GPUs, which report no failures, indices are
clamped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Final

import tvm
from tvm import relax, te, tirx
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.context import LoweringContext, TargetRewriter
from tvmflow.compiler.contraction.packed import allocate_registers
from tvmflow.compiler.passes.reductions import ARGREDUCTIONS
from tvmflow.compiler.tir_kernels.definitions import define_flat_kernel
from tvmflow.core.errors import StageError
from tvmflow.graph import ir
from tvmflow.graph.counts import SIZES_NEEDED
from tvmflow.graph.dynamic_shapes import (
    IrSize,
    is_dynamic,
    known_sizes,
    list_symbols,
    plain,
    sizes_of,
    with_kernel_symbols,
)
from tvmflow.graph.operands import CHECKED_OPERATORS, NODES, Bound, find_sources, list_bounds
from tvmflow.graph.rewriter import ELEMENTWISE, rewrite_main

FAILURE: Final = "tvmflow.failure"
"""The attribute of a kernel that fails if an operand has a wrong value; it has the message."""
_SELECTION: Final = "relax.vision.all_class_non_max_suppression"


def check_operands(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Check the indices and integer divisors that a model computes from its inputs.

    Raises:
        StageError: A constant has a wrong value.
    """
    if not context.options.checks or not ir.calls_operator(mod, *CHECKED_OPERATORS, *ARGREDUCTIONS):
        return mod
    # problems are collected, because TVM would replace an error that a rewriter raises
    problems: list[str] = []
    rewritten = rewrite_main(mod, _CheckRewriter, context, problems)
    if problems:
        raise StageError(f"{problems[0]}: it is a constant of the model", fix="correct the model")
    return rewritten


def _list_selected(flow: ir.DataFlow) -> set[Any]:
    """Return the variables that depend on NMS results: their types have more rows than at run time."""
    selected: set[Any] = set()
    for variable, value in flow.values.items():
        is_selection = ir.operator_name(value) == _SELECTION
        if is_selection or not selected.isdisjoint(ir.list_variables(value)):
            selected.add(variable)
    return selected


class _CheckRewriter(TargetRewriter):
    """Puts a check before each operand that may have a wrong value."""

    OPERATORS = (*CHECKED_OPERATORS, *ARGREDUCTIONS)

    def __init__(self, mod: tvm.IRModule, context: LoweringContext, problems: list[str]) -> None:
        super().__init__(mod, context)
        self._problems = problems
        main = mod["main"]
        self._inputs = set(main.params[: int(main.attrs["num_input"])])
        self._selected = _list_selected(self.flow) if SIZES_NEEDED in main.attrs else set()
        self._nodes: dict[str, str] = json.loads(str(dict(main.attrs).get(NODES, "{}")))
        self._node = ""

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self._node = self._nodes.get(str(binding.var.name), "")
        super().visit_var_binding_(binding)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        if ir.operator_name(call) in ARGREDUCTIONS:
            return self._check_extremes(call, rewritten)
        args = list(rewritten.args)
        for position, bound in list_bounds(call):
            args[position] = self._check(call, call.args[position], args[position], bound)
        if all(new.same_as(old) for new, old in zip(args, rewritten.args, strict=True)):
            return None
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)

    def _check_extremes(self, call: Any, rewritten: Any) -> Any:
        """Return argmax or argmin with a check that fails if the axis is empty at run time."""
        sizes, axis = sizes_of(call.args[0]), call.attrs.axis
        if sizes is None or not self._context.is_cpu():
            return None
        size = math.prod(sizes) if axis is None else sizes[int(axis)]
        if not is_dynamic(size):
            return None
        name, axis_text = ir.operator_name(call).removeprefix("relax."), f"an axis of {plain(size)}"
        message = f"{name} looks for an extreme among 0 elements, along {axis_text}"
        return _call_check(self, self.emit(rewritten), Bound((size,), is_length=True), message)

    def _check(self, call: relax.Call, original: Any, operand: Any, bound: Bound) -> Any:
        """Return an operand, checked (on GPUs: clamped) to have only values within its bound."""
        if isinstance(original.ty, relax.TupleType):
            value = self.flow.values.get(original, original)
            if not isinstance(value, relax.Tuple) or bound.sizes is None:
                return operand
            fields = [
                self._check(call, field, self.visit_expr(field), Bound((size,), bound.from_end))
                for field, size in zip(value.fields, bound.sizes, strict=False)
            ]
            rest = [self.visit_expr(field) for field in value.fields[len(fields) :]]
            return relax.Tuple([*fields, *rest])
        if sizes_of(operand) is None or original in self._selected:
            return operand
        if self._is_known(original):
            self._find_wrong(call, original, bound)
            return operand
        if not self._context.is_cpu():
            return operand if bound.sizes is None else self._clamp(operand, bound)
        return _call_check(self, operand, bound, self._describe(call, original, bound))

    def _is_known(self, operand: Any) -> bool:
        """Return whether an operand depends only on constants, weights and sizes."""
        left, seen = [operand], set()
        while left:
            expr = left.pop()
            if expr in seen or self.flow.is_weight(expr):
                continue
            seen.add(expr)
            value = self.flow.values.get(expr, expr)
            if ir.operator_name(value) == "relax.shape_of":
                continue
            is_call = isinstance(value, relax.Call | relax.Tuple | relax.TupleGetItem)
            if not (is_call or (value is not expr and isinstance(value, relax.Var))):
                return False
            left += [var for var in ir.list_variables(value) if not ir.is_size(var)]
        return True

    def _find_wrong(self, call: relax.Call, operand: Any, bound: Bound) -> None:
        value = self.flow.values.get(operand, operand)
        if ir.operator_name(value) == "relax.where":
            # an importer's choice between a constant index and the same index from the end
            operand, bound = value.args[2], bound._replace(from_end=True)
        values, sizes = ir.constant_array(operand), bound.sizes
        if values is None:
            return
        is_wrong = values == 0
        if sizes is not None:
            size = plain(sizes[0]) if len(sizes) == 1 else None
            if not isinstance(size, int):
                return
            is_wrong = (values >= size) | (values < (-size if bound.from_end else 0))
        if is_wrong.any():
            self._problems.append(self._describe(call, operand, bound))

    def _describe(self, call: relax.Call, operand: Any, bound: Bound) -> str:
        operator = self._node or ir.operator_name(call).removeprefix("relax.")
        inputs = find_sources(self.flow, self._inputs, operand)
        what = f"input '{inputs[0].name}'" if len(inputs) == 1 else "a computed tensor"
        if bound.sizes is None:
            return f"{what} has a 0 by which {operator} divides"
        sizes = list(dict.fromkeys(str(plain(s)) for s in bound.sizes if s is not None))
        return f"{what} has an index out of range for {operator}, whose axis has {' or '.join(sizes)} elements"

    def _clamp(self, indices: Any, bound: Bound) -> Any:

        def clamp(data: Any) -> Any:
            dtype = str(data.dtype)

            def element(*position: Any) -> Any:
                value = data(*position)
                for column, size in _list_columns(bound):
                    limit = tirx.Cast(dtype, size) if is_dynamic(size) else size
                    own = tirx.Select(value < 0, value + limit, value) if bound.from_end else value
                    own = tirx.max(tirx.min(own, tirx.Cast(dtype, size - 1)), 0)
                    if column is not None:
                        own = tirx.Select(position[-1] == column, own, value)
                    value = own
                return value

            return te.compute(data.shape, element, name="clamped")

        return self.kernel(clamp, "clamp_indices", indices, pattern=ELEMENTWISE)


def _list_columns(bound: Bound) -> list[tuple[int | None, IrSize]]:
    """Return (position in the last axis of the indices, axis size) pairs; position None stands for all."""
    sizes = bound.sizes or ()
    if len(sizes) == 1 and sizes[0] is not None:
        return [(None, sizes[0])]
    return [(column, size) for column, size in enumerate(sizes) if size is not None]


def _call_check(rewriter: TargetRewriter, operand: Any, bound: Bound, message: str) -> Any:
    """Emit the call of a kernel that copies an operand, and fails if a value is wrong."""
    shape, dtype = known_sizes(operand), ir.dtype_of(operand)
    kernel = _make_kernel(shape, dtype, bound, message)
    used = [symbol for _, size in _list_columns(bound) for symbol in list_symbols(size)]
    function, sizes = with_kernel_symbols(kernel, used, 2)
    variable = rewriter.builder_.add_func(function, "check_operand")
    results = [relax.TensorType(shape, dtype), relax.TensorType([1], "int32")]
    call = rewriter.emit(relax.call_tir(variable, [operand, *sizes], results))
    return rewriter.emit(relax.TupleGetItem(call, 0))


def _make_kernel(
    shape: Sequence[IrSize], dtype: str, bound: Bound, message: str
) -> tvm.tirx.PrimFunc:
    """Return the kernel; its parameters are the operand, its copy, and a flag that is 1 if it fails."""
    parameters = {"operand": (shape, dtype), "checked": (shape, dtype), "failed": ((1,), "int32")}
    columns = _list_columns(bound)
    width = 1 if not columns or columns[0][0] is None else plain(shape[-1])
    with define_flat_kernel("check_operand", parameters) as (builder, buffers):
        operand, checked, failed = buffers
        wrong = allocate_registers(1, dtype="int32")
        wrong[0] = tirx.const(0, "int32")
        with T.serial(math.prod(shape) // width) as row:
            for column in range(width):
                position = row * width + column
                value = operand[position]
                size = next((size for own, size in columns if own in (None, column)), None)
                result, is_wrong = _test(value, dtype, size, bound)
                checked[position] = result
                if is_wrong is not None:
                    wrong[0] = wrong[0] | tirx.Cast("int32", is_wrong)
        failed[0] = wrong[0]
        with T.Assert(wrong[0] == 0, message, "ValueError"):
            pass
    return builder.get().with_attr(FAILURE, message)


def _test(value: Any, dtype: str, size: IrSize | None, bound: Bound) -> tuple[Any, Any]:
    """Return a value as the operator reads it, and the condition that it is wrong (None if impossible)."""
    if bound.sizes is None:
        return value, value == tirx.const(0, dtype)
    if size is None:
        return value, None
    limit = tirx.Cast(dtype, size) if is_dynamic(size) else tirx.const(plain(size), dtype)
    zero = tirx.const(0, dtype)
    if bound.is_length:
        return value, limit == zero
    if not bound.from_end:
        # In this form NaN is rejected: for NaN, both comparisons are false.
        return value, tirx.Not(tirx.And(value >= zero, value < limit))
    is_wrong = tirx.Not(tirx.And(value >= zero - limit, value < limit))
    return tirx.Select(value < zero, value + limit, value), is_wrong


# ---------------------------------------------------------------- divisions in kernels


def keep_divisions_from_trapping(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Return a module whose kernels divide integers by data without a trap.

    Padding lanes of vectors may hold any divisor. The smallest integer divided by -1 does not fit its type: the result
    wraps around to the smallest integer, as in two's complement.
    """
    if not context.options.checks:
        return mod
    kinds = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)
    return ir.rewrite_kernels(mod, lambda kernel: ir.rewrite_nodes(kernel, kinds, _divide_safely))


def _divide_safely(division: Any) -> Any:
    dtype = str(division.ty.dtype)
    left, right = division.a, division.b
    if not dtype.startswith(("int", "uint")) or not ir.find_nodes(right, tvm.ir.TensorLoad):
        return division
    zero, one = tirx.const(0, dtype), tirx.const(1, dtype)
    if dtype.startswith("uint"):
        safe = type(division)(left, tirx.max(right, one))
        return tirx.Select(right == zero, zero, safe)
    is_special = tirx.Or(right == zero, right == tirx.const(-1, dtype))
    safe = type(division)(left, tirx.Select(is_special, one, right))
    if isinstance(division, tirx.Mod | tirx.FloorMod):
        return tirx.Select(is_special, zero, safe)
    # negated as an unsigned integer, whose additions wrap around
    flipped = tirx.Cast(f"u{dtype}", left ^ tirx.const(-1, dtype))
    negated = tirx.Cast(dtype, flipped + tirx.const(1, f"u{dtype}"))
    return tirx.Select(is_special, tirx.Select(right == zero, zero, negated), safe)
