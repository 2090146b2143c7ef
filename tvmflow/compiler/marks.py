"""Marks of Relax calls: the nodes of the user's model that each one computes.

The marks of a call are numbers in its span, which no structural equality, key or generated code
depends on. TVM's passes copy spans, or keep the variable that a call is bound to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import tvm
from tvm import relax

from tvmflow.compiler import ir

Marks = frozenset[int]

NO_MARKS: Final[Marks] = frozenset()


@functools.cache
def _span_setter() -> Callable[[Any, Any], None]:
    """Return the setter of a call's span.

    A call that is made again would be another object for other passes.
    """
    info: Any = relax.Call.__tvm_ffi_type_info__
    fields: dict[str, Any] = {}
    while info is not None:
        fields |= {field.name: field for field in info.fields}
        info = info.parent_type_info
    setter: Callable[[Any, Any], None] = fields["span"].setter
    return setter


def read_marks(expr: Any) -> Marks:
    """Return the marks of an expression; none for one that is no call, or has none."""
    span = expr.span if isinstance(expr, relax.Call) else None
    if span is None:
        return NO_MARKS
    return frozenset(int(word) for word in span.source_name.name.split() if word.isdigit())


def write_marks(expr: Any, marks: Iterable[int]) -> None:
    """Set the marks of a call; other expressions have none."""
    if isinstance(expr, relax.Call):
        text = " ".join(map(str, sorted(marks)))
        span = tvm.ir.Span(tvm.ir.SourceName(text), 0, 0, 0, 0) if text else None
        _span_setter()(expr, span)


def mark_new(expr: Any, marks: Marks, lookup: Callable[[Any], Any]) -> None:
    """Mark a new expression, and all that it is computed from, up to what has marks.

    Args:
        expr: The expression.
        marks: Its marks.
        lookup: Returns the value of a variable; None for a parameter.
    """
    pending, seen = [expr], set()
    while pending:
        value = pending.pop()
        if isinstance(value, relax.Var) and value not in seen:
            seen.add(value)
            pending.append(lookup(value))
        elif isinstance(value, relax.Call) and value.span is None:
            write_marks(value, marks)
            pending.extend(value.args)
        elif isinstance(value, relax.Tuple):
            pending.extend(value.fields)
        elif isinstance(value, relax.TupleGetItem):
            pending.append(value.tuple_value)


def complete(marks: dict[Any, Marks], bindings: Sequence[Any]) -> None:
    """Give each binding without marks those of its readers, or else of what it reads.

    Args:
        marks: The marks of each variable, which this changes.
        bindings: The bindings of these variables in their order.
    """
    missing = {var for var, own in marks.items() if not own}
    if not missing:
        return
    sources = {b.var: [v for v in ir.list_variables(b.value) if v in marks] for b in bindings}
    for binding in reversed(bindings):
        for source in missing.intersection(sources[binding.var]):
            marks[source] |= marks[binding.var]
    for binding in bindings:
        if not marks[binding.var]:
            marks[binding.var] = NO_MARKS.union(*(marks[v] for v in sources[binding.var]))


def take_marks(mod: tvm.IRModule) -> list[Marks]:
    """Return the marks of each binding of `main` in their order, and remove them."""
    bindings = ir.list_bindings(mod["main"].body)
    marks = {binding.var: read_marks(binding.value) for binding in bindings}
    complete(marks, bindings)
    for binding in bindings:
        write_marks(binding.value, ())
    return list(marks.values())


def mark_bindings(mod: tvm.IRModule) -> None:
    """Mark each binding of `main` with its place in it."""
    for index, binding in enumerate(ir.list_bindings(mod["main"].body)):
        write_marks(binding.value, (index,))
