"""Gives each kernel variables of its own for its open sizes.

A tensor whose height is `(h - 1) // 4 + 1` gives a kernel an expression of a dimension that no buffer
has, and that each call passes. With a variable in place of the expression, the buffers bind it, kernels
of all stages of a network are alike, and they do not depend on the order in which TVM collects variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvmflow.compiler import ir
from tvmflow.compiler.open_sizes import (
    IrSize,
    is_open,
    list_symbols,
    plain,
    read_dimensions,
    same_size,
    simplify,
)
from tvmflow.compiler.passes.rewriter import MainRewriter, rewrite_functions

_CALL: Final = "relax.call_tir"
_EXPRESSIONS: Final = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.Min, tirx.Max)
# The number that TVM appends to a name that is taken.
_NUMBER: Final = re.compile(r"\d+$")


def order_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """Let kernels take dimensions in the order of their shapes: TVM collects them in any order."""
    return _rewrite_kernels(mod, lambda kernel: kernel)


def give_own_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """Give each kernel variables of its own for sizes.

    TVM fuses kernels only while their shapes are those of the model's tensors.
    """
    return _rewrite_kernels(mod, _replace_sizes)


def _rewrite_kernels(mod: tvm.IRModule, rewrite: Callable[[Any], Any]) -> tvm.IRModule:
    """Rewrite the kernels with open sizes; the same module where no dimension is open."""
    if not read_dimensions(mod["main"]):
        return mod
    kernels = {
        variable: function
        for variable, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc) and any(map(is_open, _list_sizes(function)))
    }
    # without them, so that names do not depend on how many TVM has made
    others = {var: function for var, function in mod.functions_items() if var not in kernels}
    rest = tvm.IRModule(others, mod.attrs, mod.global_infos)
    return rewrite_functions(rest, _KernelRewriter, kernels, rewrite)


class _KernelRewriter(MainRewriter):
    """Rewrites the calls of kernels with open sizes."""

    def __init__(
        self,
        mod: tvm.IRModule,
        kernels: Mapping[Any, tirx.PrimFunc],
        rewrite: Callable[[Any], Any],
    ) -> None:
        super().__init__(mod)
        self._kernels, self._rewrite = kernels, rewrite
        self._made: dict[Any, _OwnKernel] = {}

    def visit_call_(self, call: relax.Call) -> Any:
        call = super().visit_call_(call)
        if ir.operator_name(call) != _CALL or call.args[0] not in self._kernels:
            return call
        variable, arguments = call.args[:2]
        if variable not in self._made:
            kernel = self._rewrite(self._kernels[variable])
            self._made[variable] = _order_sizes(kernel, len(arguments.fields))
        own = self._made[variable]
        name = _NUMBER.sub("", str(variable.name_hint))
        values = [arguments.fields[position] for position in own.arguments]
        operands = [self.builder_.add_func(own.kernel, name), relax.Tuple(values)]
        return relax.Call(call.op, operands, call.attrs, call.ty_args)


class _OwnKernel(NamedTuple):
    """A kernel with variables of its own.

    Attributes:
        kernel: The kernel.
        arguments: The positions of the arguments that it still takes.
    """

    kernel: tirx.PrimFunc
    arguments: list[int]


def _list_sizes(kernel: tirx.PrimFunc) -> Iterator[IrSize]:
    """Yield the sizes of the parameters of a kernel."""
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


def _order_sizes(kernel: tirx.PrimFunc, inputs: int) -> _OwnKernel:
    """Return a kernel that takes its dimensions in the order of its shapes, and no others.

    Args:
        kernel: The kernel.
        inputs: How many of its parameters are arguments of a call.
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
    return _OwnKernel(tirx.PrimFunc(params, kernel.body, kernel.ret_type, kernel.attrs), taken)


def _replace(node: Any, sizes: list[tuple[Any, Any]], dimensions: set[Any]) -> Any:
    """Return an expression of dimensions as a size plus a number; itself where it is none."""
    symbols = list_symbols(node)
    if symbols and dimensions.issuperset(symbols):
        for size, variable in sizes:
            rest = simplify(node - size)
            if isinstance(rest, int):
                return variable + rest if rest else variable
    return node
