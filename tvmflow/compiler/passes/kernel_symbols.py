"""Sizes of dynamic kernels: variables of their own, and reshapes by the multiples of dimensions.

A tensor whose height is `(h - 1) // 4 + 1` gives a kernel an expression of a dimension that no buffer
has, and that each call passes. With a variable in place of the expression, the buffers bind it, kernels
of all stages of a network are alike, and they do not depend on the order in which TVM collects variables.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import relax, te, tirx

from tvmflow.compiler.passes.pixels import merge_dynamic_pixels
from tvmflow.graph import ir
from tvmflow.graph.dynamic_shapes import (
    IrSize,
    is_dynamic,
    list_symbols,
    make_analyzer,
    plain,
    read_dimensions,
    same_size,
    simplify,
    sizes_of,
)
from tvmflow.graph.rewriter import INJECTIVE, MainRewriter, rewrite_functions, rewrite_main

_EXPRESSIONS: Final = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.Min, tirx.Max)


def order_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """Let kernels take dimensions in the order of their shapes: TVM collects them in any order."""
    return _rewrite_kernels(mod, lambda kernel: kernel)


def give_kernel_symbols(mod: tvm.IRModule) -> tvm.IRModule:
    """Rename the size variables of each kernel, so that no two kernels share one.

    TVM fuses kernels only while their shapes are those of the model's tensors.
    """
    return _rewrite_kernels(mod, lambda kernel: merge_dynamic_pixels(_replace_sizes(kernel)))


def _rewrite_kernels(mod: tvm.IRModule, rewrite: Callable[[Any], Any]) -> tvm.IRModule:
    """Rewrite the kernels with dynamic shapes; the same module where no dimension is dynamic."""
    if not read_dimensions(mod["main"]):
        return mod
    kernels = {
        variable: function
        for variable, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc) and any(map(is_dynamic, _list_sizes(function)))
    }
    # without them, so that names do not depend on how many TVM has made
    others = {var: function for var, function in mod.functions_items() if var not in kernels}
    rest = tvm.IRModule(others, mod.attrs, mod.global_infos)
    # those of branches call kernels, too
    callers = [var for var, function in others.items() if isinstance(function, relax.Function)]
    callers.sort(key=lambda variable: (variable.name_hint != "main", str(variable.name_hint)))
    return rewrite_functions(rest, callers, _KernelRewriter, kernels, rewrite)


class _KernelRewriter(MainRewriter):
    OPERATORS = ("relax.call_tir",)

    def __init__(
        self, mod: tvm.IRModule, kernels: Mapping[Any, tirx.PrimFunc], rewrite: Callable[[Any], Any]
    ) -> None:
        super().__init__(mod)
        self._kernels, self._change = kernels, rewrite
        self._made: dict[Any, tuple[Any, list[int]]] = {}

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        variable, arguments = rewritten.args[:2]
        if variable not in self._kernels:
            return None
        if variable not in self._made:
            kernel = self._change(self._kernels[variable])
            kernel, positions = _order_sizes(kernel, len(arguments.fields))
            # without the number that TVM appends to a name that is taken
            name = str(variable.name_hint).rstrip(string.digits)
            # each time, TVM would look for an equal one
            self._made[variable] = self.builder_.add_func(kernel, name), positions
        made, positions = self._made[variable]
        operands = [made, relax.Tuple([arguments.fields[position] for position in positions])]
        return relax.Call(call.op, operands, call.attrs, rewritten.ty_args)


def _list_sizes(kernel: tirx.PrimFunc) -> Iterator[IrSize]:
    for param in kernel.params:
        yield from map(plain, getattr(param.ty, "shape", ()))


def _replace_sizes(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a kernel with a variable in place of each size that its parameters do not bind."""
    bound = {size for size in _list_sizes(kernel) if isinstance(size, tvm.ir.Var)}
    sizes: list[tuple[Any, Any]] = []
    for size in _list_sizes(kernel):
        is_bound = bound.issuperset(list_symbols(size))
        if not is_bound and not any(same_size(size, known) for known, _ in sizes):
            sizes.append((size, tirx.Var("size", "int64")))
    dimensions = {symbol for size, _ in sizes for symbol in list_symbols(size)} | bound
    return tvm_ffi.structural_map(
        kernel, (_EXPRESSIONS, lambda node: _replace(node, sizes, dimensions)), order="pre"
    )


def _order_sizes(kernel: tirx.PrimFunc, inputs: int) -> tuple[tirx.PrimFunc, list[int]]:
    """Return a kernel that takes its dimensions in the order of its shapes, and its arguments.

    A call passes this many of its parameters; the positions are of the remaining ones.
    """
    symbols = [symbol for size in _list_sizes(kernel) for symbol in list_symbols(size)]
    own = {
        symbol: tirx.Var(f"size{position}", "int64")
        for position, symbol in enumerate(dict.fromkeys(symbols))
    }
    kernel = tvm_ffi.structural_map(kernel, (tvm.ir.Var, lambda var: own.get(var, var)))
    bound = {size for size in _list_sizes(kernel) if isinstance(size, tvm.ir.Var)}
    arguments = list(enumerate(kernel.params[:inputs]))
    tensors = [position for position, param in arguments if hasattr(param.ty, "shape")]
    used: list[Any] = []
    if len(tensors) < len(arguments):
        used = list(dict.fromkeys([*own.values(), *ir.find_nodes(kernel.body, tvm.ir.Var)]))
    scalars = [
        position
        for position, param in arguments
        if position not in tensors and param in used and param not in bound
    ]
    taken = tensors + sorted(scalars, key=lambda position: used.index(kernel.params[position]))
    params = [*(kernel.params[position] for position in taken), *kernel.params[inputs:]]
    return tirx.PrimFunc(params, kernel.body, kernel.ret_type, kernel.attrs), taken


def _replace(node: Any, sizes: list[tuple[Any, Any]], dimensions: set[Any]) -> Any:
    """Return an expression of dimensions as a size plus a constant; itself if it is none."""
    symbols = list_symbols(node)
    if symbols and dimensions.issuperset(symbols):
        for size, variable in sizes:
            rest = simplify(node - size)
            if isinstance(rest, int):
                return variable + rest if rest else variable
    return node


# ---------------------------------------------------------------- reshapes
# Dynamic reshapes, split into groups of axes. Divisions are exact because of `multiple_of`.
#
# If `h` is a multiple of 8, an image of `h // 2` rows has `h // 8` windows of 4 rows. TVM has no divisibility
# constraints: it divides the linear index of each element by all sizes, and does not fuse such a kernel.


class _Group(NamedTuple):
    """Axes of a tensor, and the axes with as many elements that replace them."""

    before: list[int]
    after: list[int]


def group_dynamic_reshapes(mod: tvm.IRModule) -> tvm.IRModule:
    """Convert dynamic reshapes whose element counts are equal because of `multiple_of`."""
    has_multiples = any(entry.multiple_of > 1 for entry in read_dimensions(mod["main"]))
    return rewrite_main(mod, _ReshapeRewriter) if has_multiples else mod


class _ReshapeRewriter(MainRewriter):
    OPERATORS = ("relax.reshape",)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        before, after = sizes_of(call.args[0]), sizes_of(call)
        if not before or not after or not any(map(is_dynamic, (*before, *after))):
            return None
        groups = self._group_axes(before, after)
        if groups is None or all(same_size(*_counts(group, before, after)) for group in groups):
            return None
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
        """Return the smallest groups in their order; None if there is only one, or none is known."""
        analyzer, is_known = make_analyzer((*before, *after), self.dimensions)
        if not is_known:
            return None
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
    sides = ((before, group.before), (after, group.after))
    first, second = (math.prod(sizes[axis] for axis in axes) for sizes, axes in sides)
    return first, second


def _reshape(tensor: Any, sizes: Sequence[Any], groups: Sequence[Sequence[Sequence[int]]]) -> Any:
    """Return a tensor in another shape, whose groups of axes keep their positions."""

    def read(*positions: Any) -> Any:
        indices: list[Any] = []
        for before, after in groups:
            position = positions[after[0]]
            for axis in after[1:]:
                position = position * sizes[axis] + positions[axis]
            own: list[Any] = []
            for axis in reversed(before[1:]):
                own.append(position % tensor.shape[axis])
                position = position // tensor.shape[axis]
            indices += [position, *reversed(own)]
        return tensor(*indices)

    return te.compute(sizes, read, name="T_reshape")
