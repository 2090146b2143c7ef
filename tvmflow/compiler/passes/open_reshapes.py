"""Keeps reshapes of open sizes by groups of axes, which fit by the multiples of dimensions.

A window of 4 rows of an image of `h // 2` rows, `h` being a multiple of 8, is one of `h // 8`. TVM knows no multiples:
it divides the place of each element in the whole tensor by all sizes, and fuses such a kernel with no other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import tvm
from tvm import relax, te

from tvmflow.compiler import ir
from tvmflow.compiler.open_sizes import (
    IrSize,
    is_open,
    limit_to_dimension,
    list_symbols,
    read_dimensions,
    same_size,
    sizes_of,
)
from tvmflow.compiler.passes.rewriter import INJECTIVE, MainRewriter, rewrite_main

_RESHAPE: Final = "relax.reshape"


class _Group(NamedTuple):
    """Axes of a tensor that become other axes of as many elements.

    Attributes:
        before: The axes of the tensor.
        after: The axes of the result.
    """

    before: list[int]
    after: list[int]


def group_open_reshapes(mod: tvm.IRModule) -> tvm.IRModule:
    """Convert reshapes whose sizes are the same by the multiples of dimensions."""
    if all(entry.multiple_of == 1 for entry in read_dimensions(mod["main"])):
        return mod
    return rewrite_main(mod, _ReshapeRewriter) if ir.calls_operator(mod, _RESHAPE) else mod


class _ReshapeRewriter(MainRewriter):
    """Rewrites reshapes of open sizes."""

    def visit_call_(self, call: relax.Call) -> Any:
        rewritten = super().visit_call_(call)
        if ir.operator_name(call) != _RESHAPE:
            return rewritten
        before, after = sizes_of(call.args[0]), sizes_of(call)
        if not before or not after or not any(map(is_open, (*before, *after))):
            return rewritten
        groups = self._group_axes(before, after)
        if groups is None or all(same_size(*_counts(group, before, after)) for group in groups):
            return rewritten
        # no variable of its own: fusion ends at a second name
        return self.builder_.call_te(
            _reshape,
            rewritten.args[0],
            list(after),
            groups,
            primfunc_name_hint="reshape",
            primfunc_attrs=INJECTIVE,
        )

    def _group_axes(self, before: Sequence[IrSize], after: Sequence[IrSize]) -> list[_Group] | None:
        """Return the smallest groups in their order; None where there is only one, or none is known."""
        analyzer = tvm.sym.Analyzer()
        named = {entry.name: entry for entry in self.dimensions}
        for var in dict.fromkeys(v for size in (*before, *after) for v in list_symbols(size)):
            if str(var.name) not in named:
                return None
            limit_to_dimension(analyzer, var, named[str(var.name)])
        groups: list[_Group] = []
        left = list(range(len(before))), list(range(len(after)))
        is_whole = True
        while any(left):
            if is_whole and all(left):
                groups.append(_Group([], []))
            own, other = map(self.numbers.size, _counts(groups[-1], before, after))
            side = 0 if left[0] and (own <= other or not left[1]) else 1
            groups[-1][side].append(left[side].pop(0))
            counts = _counts(groups[-1], before, after)
            is_whole = all(groups[-1]) and bool(analyzer.can_prove_equal(*counts))
        return groups if is_whole and len(groups) > 1 else None


def _counts(
    group: _Group, before: Sequence[IrSize], after: Sequence[IrSize]
) -> tuple[IrSize, IrSize]:
    """Return the elements of both sides of a group."""
    return math.prod(before[axis] for axis in group.before), math.prod(
        after[axis] for axis in group.after
    )


def _reshape(tensor: Any, sizes: Sequence[Any], groups: Sequence[Sequence[Sequence[int]]]) -> Any:
    """Return a tensor in another shape, whose groups of axes keep their places."""

    def read(*places: Any) -> Any:
        indices: list[Any] = []
        for before, after in groups:
            place = places[after[0]]
            for axis in after[1:]:
                place = place * sizes[axis] + places[axis]
            own: list[Any] = []
            for axis in reversed(before[1:]):
                own.append(place % tensor.shape[axis])
                place = place // tensor.shape[axis]
            indices += [place, *reversed(own)]
        return tensor(*indices)

    return te.compute(sizes, read, name="T_reshape")
