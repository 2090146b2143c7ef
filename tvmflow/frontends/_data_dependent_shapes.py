"""Pad data-dependent shapes to their upper bound, and return the number of valid rows.

A kernel that selects rows, such as non-maximum suppression, returns its maximum number of rows, and the number of valid
rows. Later operators compute with all rows; valid rows are correct as long as rows do not affect each other. A model
that mixes rows needs data-dependent shapes, which only TVM's runtime supports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax, tirx

from tvmflow.core.errors import StageError
from tvmflow.graph import ir, marks
from tvmflow.graph.counts import OutputCount, write_counts
from tvmflow.graph.ir_operators import NonMaxSuppression


class MixedRows(StageError):
    """A model mixes valid rows with padding; only the outputs in `bounded` keep rows apart.

    The message says why the model needs TVM's runtime.
    """

    def __init__(self, operator: str, bounded: Sequence[OutputCount] = ()) -> None:
        super().__init__(f"sizes that are known only when it runs, which {operator} needs")
        self.bounded = tuple(bounded)


class _Count(NamedTuple):
    """The number of valid rows of a padded axis: int64 of shape [1], at most `limit` unless that is None."""

    axis: int
    var: Any
    limit: int | None = None


class _WrongShape(NamedTuple):
    """A tensor that contains a shape with a padded dimension."""

    axis: int


class _Mixed(Exception):
    """An operator mixes rows."""


_Fact = _Count | _WrongShape | None


def count_outputs(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose `main` also returns the number of valid rows of each padded output."""
    if not ir.calls_operator(mod, NonMaxSuppression.NAME):
        return mod
    return _Analysis(mod).rewrite()


class _Analysis:
    """A dataflow analysis that propagates counts of valid rows through `main`."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        # Tensor -> its fact; tuple -> the facts of its fields.
        self._facts: dict[Any, _Fact | list[_Fact]] = {}
        self._values: dict[Any, Any] = {}
        self._outputs: list[OutputCount] = []
        self._mixing = ""
        self._is_dataflow = True

    def rewrite(self) -> tvm.IRModule:
        main = self._mod["main"]
        result = ir.resolve_alias(main.body.body, ir.DataFlow(main).values.get)
        blocks, added = [], list[Any]()
        for block in main.body.blocks:
            self._is_dataflow = isinstance(block, relax.DataflowBlock)
            bindings: list[Any] = []
            for binding in block.bindings:
                if binding.var.same_as(result):
                    added, result = self._return_counts(binding)
                    bindings += added
                elif not (added and isinstance(binding.value, relax.Var)):
                    bindings += self._follow(binding)
            blocks.append(type(block)(bindings))
        if self._mixing:
            raise MixedRows(self._mixing, self._outputs)
        kind = relax.TupleType([field.ty for field in self._values[result].fields])
        body = relax.SeqExpr(blocks, result)
        function = relax.Function(main.params, body, kind, main.is_pure).with_attrs(main.attrs)
        mod = ir.copy_module(self._mod)
        mod[mod.get_global_var("main")] = write_counts(function, self._outputs)
        return mod

    def _return_counts(self, binding: Any) -> tuple[list[Any], Any]:
        """Append the counts of valid rows to a function's result; return its new bindings and variable."""
        value, bindings = binding.value, list[Any]()
        if not isinstance(value, relax.Tuple):
            inner = self._new_var("output", binding.var.ty)
            bindings += self._follow(relax.VarBinding(inner, value))
            value = relax.Tuple([inner])
        counts: dict[tuple[Any, int | None], Any] = {}
        for index, field in enumerate(value.fields):
            fact = self._fact(field)
            if fact is None:
                continue
            if not isinstance(fact, _Count) or math.prod(ir.known_shape(field)[: fact.axis]) > 1:
                self._refuse("an output of such a shape")
                continue
            key = (fact.var, fact.limit)
            if key not in counts:
                counts[key] = fact.var
                if fact.limit is not None:
                    counts[key] = self._new_var(f"count{len(counts)}", fact.var.ty)
                    limit = relax.const(np.array([fact.limit], np.int64), "int64")
                    least = relax.op.minimum(fact.var, limit)
                    bindings.append(relax.VarBinding(counts[key], least))
            self._outputs.append(OutputCount(index, fact.axis, list(counts).index(key)))
        fields = [*value.fields, *counts.values()]
        made = relax.Tuple(fields)
        var = relax.Var("result", relax.TupleType([field.ty for field in fields]))
        self._values[var] = made
        return [*bindings, relax.VarBinding(var, made)], var

    def _new_var(self, name: str, kind: Any) -> Any:
        return (relax.DataflowVar if self._is_dataflow else relax.Var)(name, kind)

    def _list_facts(self, expr: Any) -> list[_Fact]:
        facts = self._facts.get(expr)
        return facts if isinstance(facts, list) else [facts]

    def _fact(self, expr: Any) -> _Fact:
        """Return the fact of a tensor, or the first fact of a tuple's fields."""
        return next((fact for fact in self._list_facts(expr) if fact is not None), None)

    def _follow(self, binding: Any) -> list[Any]:
        """Record the facts of a binding's value; return the binding or its replacements."""
        value, var = binding.value, binding.var
        self._values[var] = value
        if isinstance(value, tvm.ir.Call):
            return self._follow_call(binding, value, var)
        if isinstance(value, relax.Var):
            self._facts[var] = self._facts.get(value)
        elif isinstance(value, relax.TupleGetItem):
            fields = self._facts.get(value.tuple_value)
            self._facts[var] = fields[value.index] if isinstance(fields, list) else None
        elif isinstance(value, relax.Tuple):
            self._facts[var] = [self._fact(field) for field in value.fields]
        else:
            self._refuse_facts(value, "If" if isinstance(value, relax.If) else type(value).__name__)
        return [binding]

    def _refuse_facts(self, value: Any, operator: str) -> None:
        """Record a refusal if a value reads a padded tensor, or has a counting kernel in a branch."""
        is_read = any(self._fact(var) is not None for var in ir.list_variables(value))
        bindings = [b for branch in ir.branches_of(value) for b in ir.list_bindings(branch)]
        if is_read or any(_is_counting(inner.value) for inner in bindings):
            self._refuse(operator)

    def _refuse(self, operator: str) -> None:
        self._mixing = self._mixing or operator

    def _follow_call(self, binding: Any, call: Any, var: Any) -> list[Any]:
        if _is_counting(call):
            self._refuse_facts(call, "a selection among rows")
            count = self._new_var("count", call.ty.fields[1])
            self._facts[var] = [_Count(0, count), None]
            return [binding, relax.VarBinding(count, relax.TupleGetItem(var, 1))]
        operator = ir.operator_name(call)
        name = operator.removeprefix("relax.").removeprefix("nn.").removeprefix("vision.")
        operands, facts = self._read_operands(call)
        if not any(facts):
            return [binding]
        try:
            fact = _RULES[name](call, operands, facts)
        except (KeyError, _Mixed):
            kernel = getattr(call.args[0], "name_hint", "") if name == "call_tir" else ""
            self._refuse(kernel or name or "a function of its own")
            return [binding]
        is_tuple = isinstance(call.ty, relax.TupleType)
        self._facts[var] = [fact] * len(call.ty.fields) if is_tuple else fact
        return self._bound_indices(binding, name, operands, facts)

    def _read_operands(self, call: Any) -> tuple[list[Any], list[_Fact]]:
        """Return the tensors that a call reads, including fields of tuples, and their facts."""
        operands, facts = list[Any](), list[_Fact]()
        for argument in call.args:
            value = self._values.get(argument, argument)
            if isinstance(value, relax.Tuple):
                operands += list(value.fields)
                facts += [self._fact(field) for field in value.fields]
            else:
                operands.append(argument)
                facts.append(self._fact(argument))
        return operands, facts

    def _bound_indices(
        self, binding: Any, name: str, operands: Sequence[Any], facts: Sequence[_Fact]
    ) -> list[Any]:
        """Return bindings that clamp indices, because invalid rows may have indices out of range."""
        if name not in ("take", "gather_nd") or not isinstance(facts[1], _Count):
            return [binding]
        call, (data, indices) = binding.value, operands
        bindings: list[Any] = []
        if name == "take":
            axis = None if call.attrs.axis is None else int(call.attrs.axis)
            safe = relax.op.take(data, indices, axis, "clip")
        else:
            sizes, dtype = ir.known_shape(data)[: ir.known_shape(indices)[-1]], ir.dtype_of(indices)
            limits = ([0] * len(sizes), [n - 1 for n in sizes])
            for operator, limit in zip((relax.op.maximum, relax.op.minimum), limits, strict=True):
                bounded = operator(indices, relax.const(np.array(limit, dtype), dtype))
                indices = self._new_var("bounded", indices.ty)
                bindings.append(relax.VarBinding(indices, bounded))
            safe = relax.op.gather_nd(data, indices, int(call.attrs.batch_dims))
        marks.write_marks(safe, marks.read_marks(call))
        return [*bindings, relax.VarBinding(binding.var, safe)]


def _is_counting(value: Any) -> bool:
    """Return whether the second result of a call is the number of valid rows of the first."""
    return ir.as_call(value, NonMaxSuppression.NAME) is not None


# ---------------------------------------------------------------- rules

_Rule = Callable[[Any, Sequence[Any], Sequence[_Fact]], _Fact]
"""Returns the fact of a call's result; raises _Mixed if the operator mixes rows."""


def _rank(expr: Any) -> int:
    return len(ir.known_shape(expr))


def _check(keeps_rows: object) -> None:
    if not keeps_rows:
        raise _Mixed


def _find_count(facts: Sequence[_Fact]) -> _Count:
    """Return the common count of operands; _Mixed if they have several counts."""
    _check(not any(isinstance(fact, _WrongShape) for fact in facts))
    counts = [fact for fact in facts if isinstance(fact, _Count)]
    _check(len({(count.var, count.limit) for count in counts}) == 1)
    return counts[0]


def _elementwise(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    """Keep the count of rows; _Mixed unless operands without one broadcast along the padded axis."""
    count, rank = _find_count(facts), _rank(call)
    pairs = list(zip(operands, facts, strict=True))
    axes = {fact.axis + rank - _rank(x) for x, fact in pairs if isinstance(fact, _Count)}
    _check(len(axes) == 1)
    (axis,) = axes
    for operand, fact in pairs:
        shape = ir.shape_of(operand)
        own = axis - (rank - len(shape or ()))
        _check(not shape or fact is not None or own < 0 or shape[own] == 1)
    return count._replace(axis=axis)


def _same_axis(call: Any, _: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    """Keep the count if the operator works along other axes."""
    count = _find_count(facts)
    _check(count.axis not in _read_axes(call, range(_rank(call.args[0]))))
    return count


def _reduction(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    kept = _same_axis(call, operands, facts)
    return kept if call.attrs.keepdims else _squeeze(call, operands, facts)


def _read_axes(call: Any, default: Sequence[int]) -> Sequence[int]:
    axes = call.attrs.axis
    if axes is None:
        return default
    rank = _rank(call.args[0])
    listed = [axes] if isinstance(axes, int | tirx.IntImm) else list(axes)
    return [int(axis) % rank for axis in listed]


def _take(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    data, indices = operands
    fact, index_fact = facts
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % _rank(data)
    if isinstance(fact, _WrongShape):
        # Reading another size of the shape is harmless.
        _check(index_fact is None and isinstance(indices, tvm.ir.Constant))
        _check(fact.axis not in np.atleast_1d(indices.value.numpy()) % ir.known_shape(data)[0])
        return None
    if isinstance(index_fact, _Count):
        _check(not isinstance(fact, _Count) or fact.axis == axis)
        return index_fact._replace(axis=axis + index_fact.axis)
    count = _find_count(facts)
    _check(count.axis != axis)
    moved = count.axis if count.axis < axis else count.axis + _rank(indices) - 1
    return count._replace(axis=moved)


def _gather_nd(call: Any, _: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    count = _find_count(facts[1:])
    _check(facts[0] is None and not int(call.attrs.batch_dims))
    _check(count.axis < _rank(call.args[1]) - 1)
    return count


def _strided_slice(call: Any, _: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    count = _find_count(facts)
    axes, begins, ends, *strides = map(_read_integers, call.args[1:])
    steps = strides[0] if strides else [1] * len(axes)
    size = ir.known_shape(call.args[0])[count.axis]
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        if axis % _rank(call.args[0]) == count.axis:
            _check(begin == 0 and step == 1 and end > 0)
            if end < size:
                count = count._replace(limit=min(end, count.limit or end))
    return count


def _read_integers(expr: Any) -> list[int]:
    """Return a tuple of constant integers; _Mixed for other expressions."""
    try:
        return [int(getattr(field, "value", field)) for field in getattr(expr, "fields", expr)]
    except (TypeError, ValueError):
        raise _Mixed from None


def _squeeze(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    count = _find_count(facts)
    shape = ir.known_shape(operands[0])
    axes = _read_axes(call, [axis for axis, size in enumerate(shape) if size == 1])
    _check(count.axis not in axes)
    return count._replace(axis=count.axis - sum(axis < count.axis for axis in axes))


def _expand_dims(call: Any, _: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    count, rank = _find_count(facts), _rank(call)
    new = {int(axis) % rank for axis in call.attrs.axis}
    kept = [axis for axis in range(rank) if axis not in new]
    return count._replace(axis=kept[count.axis])


def _reshape(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    """Keep the count if an axis of the result has the same size, and the same product of sizes before it."""
    count = _find_count(facts)
    old, new = ir.known_shape(operands[0]), ir.known_shape(call)
    before = math.prod(old[: count.axis])
    for axis, size in enumerate(new):
        if size == old[count.axis] and math.prod(new[:axis]) == before:
            return count._replace(axis=axis)
    raise _Mixed


def _permute(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    count, rank = _find_count(facts), _rank(operands[0])
    axes = call.attrs.axes
    order = list(range(rank))[::-1] if axes is None else [int(axis) % rank for axis in axes]
    return count._replace(axis=order.index(count.axis))


def _concat(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    """Keep the count if all parts have it and are joined along another axis."""
    count = _find_count(facts)
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % _rank(operands[0])
    _check(all(fact == count for fact in facts) and axis != count.axis)
    return count


def _stack(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    count = _find_count(facts)
    _check(all(fact == count for fact in facts))
    axis = int(call.attrs.axis or 0) % _rank(call)
    return count._replace(axis=count.axis + (axis <= count.axis))


def _broadcast(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    count = _find_count(facts[:1])
    return count._replace(axis=count.axis + _rank(call) - _rank(operands[0]))


def _matmul(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    """Keep the count of the left operand's rows; the right operand is shared by all rows."""
    (left, right), count = operands, _find_count(facts[:1])
    _check(facts[1] is None and _rank(right) >= 2 and count.axis == _rank(left) - 2)
    return count._replace(axis=_rank(call) - 2)


def _batched(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    """Keep the count of independent samples."""
    count = _find_count(facts[:1])
    _check(count.axis == 0 and not any(facts[1:]))
    return count


def _regions(call: Any, operands: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    """Keep the count of independent regions of an image."""
    count = _find_count(facts[1:2])
    _check(count.axis == 0 and facts[0] is None)
    return count


def _shape(_: Any, __: Sequence[Any], facts: Sequence[_Fact]) -> _Fact:
    return _WrongShape(_find_count(facts).axis)


def _name(rule: _Rule, names: str) -> dict[str, _Rule]:
    return dict.fromkeys(names.split(), rule)


_RULES: Final[Mapping[str, _Rule]] = {
    **_name(
        _elementwise,
        "abs acos acosh add asin asinh astype atan atanh bitwise_and bitwise_not bitwise_or bitwise_xor ceil clip "
        "cos cosh divide equal erf exp floor floor_divide floor_mod full_like gelu gelu_tanh greater greater_equal "
        "hardsigmoid hardswish isfinite isinf isnan leakyrelu less less_equal log logical_and logical_not logical_or "
        "logical_xor maximum minimum mod multiply negative not_equal ones_like power relu round rsqrt selu sigmoid sign "
        "silu sin sinh softplus sqrt square subtract tan tanh trunc where zeros_like",
    ),
    **_name(_same_axis, "argsort cumprod cumsum log_softmax softmax sort split topk flip"),
    **_name(_reduction, "argmax argmin max mean min prod std sum variance"),
    **_name(
        _batched,
        "adaptive_avg_pool2d avg_pool1d avg_pool2d avg_pool3d conv1d conv2d conv3d conv2d_transpose max_pool1d "
        "max_pool2d max_pool3d",
    ),
    **_name(_regions, "roi_align roi_pool"),
    "broadcast_to": _broadcast,
    "concat": _concat,
    "expand_dims": _expand_dims,
    "gather_nd": _gather_nd,
    "matmul": _matmul,
    "permute_dims": _permute,
    "reshape": _reshape,
    "shape_of": _shape,
    "shape_to_tensor": lambda _, __, facts: facts[0],
    "squeeze": _squeeze,
    "stack": _stack,
    "strided_slice": _strided_slice,
    "take": _take,
}
"""Operator that keeps rows apart -> rule for its result."""
