"""The bindings of the imported `main` that each kernel of its lowered form came from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax

from tvmflow.compiler import ir
from tvmflow.compiler.marks import NO_MARKS, Marks, complete, mark_bindings, read_marks, write_marks
from tvmflow.compiler.passes.lift_weights import WEIGHTS_FUNCTION

_PRIMITIVE: Final = "Primitive"
_KERNEL_CALLS: Final = frozenset(
    ("relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed")
)

KernelNodes = dict[str, list[list[int]]]
"""Kernel -> the bindings of the imported `main` that each of its calls came from, by their places."""


class NodeTracker:
    """Follows the bindings of an imported model through the passes that lower it.

    Args:
        mod: The imported model, whose bindings get marks.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        mark_bindings(mod)
        self._mod = mod
        self._marks: dict[Any, Marks] = {}
        self.follow(mod)

    def follow(self, after: tvm.IRModule) -> None:
        """Take over a module that a pass has returned, and mark those of its calls that lack it."""
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
        """Return the bindings that each call of each kernel and library function that the module calls."""
        kernels: KernelNodes = defaultdict(list)
        for binding in _list_bindings(self._mod):
            call = binding.value
            if ir.operator_name(call) in _KERNEL_CALLS:
                callee = call.args[0]
                name = getattr(callee, "name_hint", None) or callee.global_symbol
                kernels[str(name)].append(sorted(self._marks[binding.var]))
        return {name: kernels[name] for name in sorted(kernels)}

    def _match_groups(self, after: tvm.IRModule) -> dict[Any, Marks]:
        """Return the marks of calls of fused functions, from the calls that have the same operands.

        Equal functions are one after fusion, so that their bodies do not tell them apart.
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
        """Add what is no longer computed to the first value that is and that depended on it.

        Folded constants are such.
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
        """Return the marks of the nearest variables that depend on one and are still computed."""
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
    """Give the functions of the graph by name: `main` and what branches became."""
    for var, function in mod.functions_items():
        is_graph = isinstance(function, relax.Function) and var.name_hint != WEIGHTS_FUNCTION
        if is_graph and _PRIMITIVE not in function.attrs:
            yield str(var.name_hint), function


def _list_bindings(mod: tvm.IRModule) -> Iterator[Any]:
    for _, function in _list_functions(mod):
        yield from ir.list_bindings(function.body)


def _list_readers(mod: tvm.IRModule) -> dict[Any, list[Any]]:
    """Return the variables that are computed from each variable directly."""
    readers: dict[Any, list[Any]] = defaultdict(list)
    for binding in _list_bindings(mod):
        value = binding.value
        for source in ir.list_variables(value.cond if isinstance(value, relax.If) else value):
            readers[source].append(binding.var)
    return readers


# ---------------------------------------------------------------- fused functions


def _fused_function(mod: tvm.IRModule, value: Any) -> relax.Function | None:
    """Return the fused function that an expression calls; None for other expressions."""
    callee = value.op if isinstance(value, relax.Call) else None
    if not isinstance(callee, tvm.ir.GlobalVar):
        return None
    function = mod[callee]
    is_fused = isinstance(function, relax.Function) and _PRIMITIVE in function.attrs
    return function if is_fused else None


def _number_calls(mod: tvm.IRModule, numbers: dict[Any, int]) -> Iterator[tuple[Any, list[int]]]:
    """Give each variable of the graph with the numbers of the calls that compute it.

    Args:
        mod: The module, of which fused functions count as their bodies.
        numbers: The numbers of expressions by operator and numbers of operands, which this extends.
    """
    for name, function in _list_functions(mod):
        numbering = _Numbering(mod, numbers)
        for place, param in enumerate(function.params):
            numbering.variables[param] = numbering.intern("param", name, place)
        for binding in ir.list_bindings(function.body):
            numbering.members = []
            numbering.variables[binding.var] = numbering.number(binding.value)
            yield binding.var, numbering.members


class _Numbering:
    """Numbers expressions, so that equal ones have equal numbers in a module and in its fused form.

    Attributes:
        variables: The number of each variable.
        members: The numbers of all calls since it was set.
    """

    def __init__(self, mod: tvm.IRModule, numbers: dict[Any, int]) -> None:
        self._mod = mod
        self._numbers = numbers
        self.variables: dict[Any, int] = {}
        self.members: list[int] = []

    def intern(self, *key: Any) -> int:
        """Return the number of a key."""
        return self._numbers.setdefault(key, len(self._numbers))

    def number(self, expr: Any) -> int:
        """Return the number of an expression."""
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
