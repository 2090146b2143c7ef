"""Marks of Relax calls: the nodes of the user's model that each call computes.

The marks of a call are in its span, because no structural equality, key or generated code depends on spans. TVM's
passes copy spans, or keep the variable that a call is bound to.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax

from tvmflow.graph import ir

Marks = frozenset[int]

NO_MARKS: Final[Marks] = frozenset()


@functools.cache
def _span_setter() -> Callable[[Any, Any], None]:
    """Return the setter of a call's span.

    It changes the call in place: a copy with another span would be a different object for other passes.
    """
    info: Any = relax.Call.__tvm_ffi_type_info__
    fields: dict[str, Any] = {}
    while info is not None:
        fields |= {field.name: field for field in info.fields}
        info = info.parent_type_info
    setter: Callable[[Any, Any], None] = fields["span"].setter
    return setter


def read_marks(expr: Any) -> Marks:
    """Return the marks of a call; empty for an unmarked call or another expression."""
    span = expr.span if isinstance(expr, relax.Call) else None
    if span is None:
        return NO_MARKS
    return frozenset(int(word) for word in span.source_name.name.split() if word.isdigit())


def write_marks(expr: Any, marks: Iterable[int]) -> None:
    """Set the marks of a call; do nothing for other expressions, which have no marks."""
    if isinstance(expr, relax.Call):
        text = " ".join(map(str, sorted(marks)))
        span = tvm.ir.Span(tvm.ir.SourceName(text), 0, 0, 0, 0) if text else None
        _span_setter()(expr, span)


def mark_new(expr: Any, marks: Marks, lookup: Callable[[Any], Any]) -> None:
    """Mark a new expression and the unmarked values that it is computed from.

    The search stops at marked values. `lookup` returns the value of a variable; None for a parameter.
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
    """Give each unmarked binding the marks of its readers, or if they have none, of its operands."""
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
    """Return the marks of each binding of `main`, in order, and remove them from the calls."""
    bindings = ir.list_bindings(mod["main"].body)
    marks = {binding.var: read_marks(binding.value) for binding in bindings}
    complete(marks, bindings)
    for binding in bindings:
        write_marks(binding.value, ())
    return list(marks.values())


def mark_bindings(mod: tvm.IRModule) -> None:
    """Mark each binding of `main` with its index."""
    for index, binding in enumerate(ir.list_bindings(mod["main"].body)):
        write_marks(binding.value, (index,))


# ---------------------------------------------------------------- tracking
# Finds the bindings of the imported `main` that each kernel of the lowered model came from.

_PRIMITIVE: Final = "Primitive"
_KERNEL_CALLS: Final = frozenset(
    ("relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed")
)

KernelNodes = dict[str, list[list[int]]]
"""Kernel -> the bindings of the imported `main` that each of its calls came from, by index."""


class NodeTracker:
    """Marks the bindings of an imported model, and follows them through the passes that lower it."""

    def __init__(self, mod: tvm.IRModule) -> None:
        mark_bindings(mod)
        self._mod = mod
        self._marks: dict[Any, Marks] = {}
        self.follow(mod)

    def follow(self, after: tvm.IRModule) -> None:
        """Continue with the module that a pass returned, and mark its unmarked calls."""
        marks = {}
        groups: Mapping[Any, Marks] | None = None
        bindings = list(_list_bindings(after))
        for binding in bindings:
            var, value = binding.var, binding.value
            marks[var] = self._marks.get(var) or read_marks(value)
            if not marks[var] and _fused_function(after, value) is not None:
                groups = self._match_groups(after) if groups is None else groups
                marks[var] = groups.get(var, NO_MARKS)
        complete(marks, bindings)
        self._attach_lost(marks)
        for binding in bindings:
            if marks[binding.var] and read_marks(binding.value) != marks[binding.var]:
                write_marks(binding.value, marks[binding.var])
        self._mod, self._marks = after, marks

    def list_kernels(self) -> KernelNodes:
        """Return, for each kernel and library function, the bindings that each of its calls came from."""
        kernels: KernelNodes = defaultdict(list)
        for binding in _list_bindings(self._mod):
            call = binding.value
            if ir.operator_name(call) in _KERNEL_CALLS:
                callee = call.args[0]
                name = getattr(callee, "name_hint", None) or callee.global_symbol
                kernels[str(name)].append(sorted(self._marks[binding.var]))
        return {name: kernels[name] for name in sorted(kernels)}

    def _match_groups(self, after: tvm.IRModule) -> dict[Any, Marks]:
        """Return the marks of calls of fused functions, matched by operands with the calls before fusion.

        Fusion merges equal functions, so that calls cannot be distinguished by the bodies of their functions.
        """
        numbers: dict[Any, int] = {}
        marks: dict[int, Marks] = defaultdict(frozenset)
        for var, members in _number_calls(self._mod, numbers):
            for number in members:
                marks[number] |= self._marks.get(var, NO_MARKS)
        return {
            var: frozenset().union(*(marks[number] for number in members))
            for var, members in _number_calls(after, numbers)
        }

    def _attach_lost(self, marks: dict[Any, Marks]) -> None:
        """Add marks of values that are no longer computed to the nearest remaining values that use them.

        Folded constants, for example, are no longer computed.
        """
        present = NO_MARKS.union(*marks.values())
        lost = NO_MARKS.union(*self._marks.values()) - present
        if not lost:
            return
        inherited: dict[int, set[int]] = defaultdict(set)
        readers = _list_readers(self._mod)
        for var, own in self._marks.items():
            for heir in self._find_heirs(var, present, readers) if own & lost else ():
                inherited[heir] |= own & lost
        for var, own in marks.items():
            marks[var] = own.union(*(inherited[mark] for mark in own if mark in inherited))

    def _find_heirs(self, var: Any, present: Marks, readers: Mapping[Any, list[Any]]) -> Marks:
        """Return the marks of the nearest variables that depend on `var` and are still computed."""
        level, seen = [var], {var}
        while level:
            nearest = present & NO_MARKS.union(
                *(self._marks.get(entry, NO_MARKS) for entry in level)
            )
            if nearest:
                return nearest
            level = [reader for entry in level for reader in readers.get(entry, ())]
            level = [entry for entry in dict.fromkeys(level) if entry not in seen]
            seen.update(level)
        return NO_MARKS


def _list_functions(mod: tvm.IRModule) -> Iterator[tuple[str, relax.Function]]:
    """Yield name and function of the graph's functions: `main` and the functions of branches."""
    for var, function in mod.functions_items():
        is_graph = isinstance(function, relax.Function) and var.name_hint != ir.WEIGHTS_FUNCTION
        if is_graph and _PRIMITIVE not in function.attrs:
            yield str(var.name_hint), function


def _list_bindings(mod: tvm.IRModule) -> Iterator[Any]:
    for _, function in _list_functions(mod):
        yield from ir.list_bindings(function.body)


def _list_readers(mod: tvm.IRModule) -> dict[Any, list[Any]]:
    readers: dict[Any, list[Any]] = defaultdict(list)
    for binding in _list_bindings(mod):
        value = binding.value
        for source in ir.list_variables(value.cond if isinstance(value, relax.If) else value):
            readers[source].append(binding.var)
    return readers


# ---------------------------------------------------------------- fused functions


def _fused_function(mod: tvm.IRModule, value: Any) -> relax.Function | None:
    callee = value.op if isinstance(value, relax.Call) else None
    if not isinstance(callee, tvm.ir.GlobalVar):
        return None
    function = mod[callee]
    is_fused = isinstance(function, relax.Function) and _PRIMITIVE in function.attrs
    return function if is_fused else None


def _number_calls(mod: tvm.IRModule, numbers: dict[Any, int]) -> Iterator[tuple[Any, list[int]]]:
    """Yield each variable of the graph with the value numbers of the calls that compute it.

    A fused function counts as the calls in its body. `numbers`: (operator, operands' value numbers) -> value number.
    """
    for name, function in _list_functions(mod):
        numbering = _Numbering(mod, numbers)
        for index, param in enumerate(function.params):
            numbering.variables[param] = numbering.intern("param", name, index)
        for binding in ir.list_bindings(function.body):
            numbering.members = []
            numbering.variables[binding.var] = numbering.number(binding.value)
            yield binding.var, numbering.members


class _Numbering:
    """Value numbering: equal expressions get equal numbers, in a module and after fusion.

    Attributes:
        variables: The value number of each variable.
        members: The value numbers of the calls since the list was last reset.
    """

    def __init__(self, mod: tvm.IRModule, numbers: dict[Any, int]) -> None:
        self._mod = mod
        self._numbers = numbers
        self.variables: dict[Any, int] = {}
        self.members: list[int] = []

    def intern(self, *key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def number(self, expr: Any) -> int:
        if isinstance(expr, relax.Var):
            return self.variables.get(expr, -1)
        if isinstance(expr, relax.Tuple):
            return self.intern("tuple", *map(self.number, expr.fields))
        if isinstance(expr, relax.TupleGetItem):
            return self.intern("item", self.number(expr.tuple_value), int(expr.index))
        if isinstance(expr, relax.If):
            return self.intern("if", self.number(expr.cond))
        if isinstance(expr, tvm.ir.Constant):
            return self.intern("constant", hash(expr))
        if not isinstance(expr, relax.Call):
            return self.intern("other", tvm_ffi.structural_hash(expr))
        operands = [self.number(operand) for operand in expr.args]
        if (function := _fused_function(self._mod, expr)) is not None:
            self.variables.update(zip(function.params, operands, strict=True))
            for binding in ir.list_bindings(function.body):
                self.variables[binding.var] = self.number(binding.value)
            return self.number(function.body.body)
        callee = getattr(expr.op, "name", None) or getattr(expr.op, "name_hint", "")
        number = self.intern("call", str(callee), *operands)
        self.members.append(number)
        return number
