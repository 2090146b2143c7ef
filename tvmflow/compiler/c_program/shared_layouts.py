"""Layouts of weights that code for several levels of CPUs shares, and kernels that read these.

Blocks of channels are as wide as vectors, so that each level has weights of its own. Here they are
stored in the blocks of the widest vectors for all levels: a kernel with narrower vectors reads parts of
these blocks, and is the same otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.s_tir import SBlock

from tvmflow.compiler import ir
from tvmflow.compiler.cpu_model import SHARED_LANES
from tvmflow.compiler.ir import find_nodes

Array = np.ndarray[Any, Any]

# Smaller weights are not worth other code.
_MIN_BYTES: Final = 4096
# The rows and columns of Winograd's transformed kernels, F(2×2), F(4×2) and F(4×4).
_EDGES: Final = (4, 6)


class SharedLayout(NamedTuple):
    """A tensor whose last axis is a block of channels, with wider blocks.

    Attributes:
        shape: Its shape.
        axes: The axes that number its blocks, with the axes that are these blocks.
        padded: An axis whose length becomes a multiple of `ratio`; -1 for none.
        ratio: How many blocks become one.
    """

    shape: tuple[int, ...]
    axes: tuple[tuple[int, int], ...]
    padded: int
    ratio: int

    @property
    def shared_shape(self) -> tuple[int, ...]:
        """The shape with wider blocks."""
        shape = list(self.shape)
        if self.padded >= 0:
            shape[self.padded] = -(-shape[self.padded] // self.ratio) * self.ratio
        for number, block in self.axes:
            shape[number] = -(-shape[number] // self.ratio)
            shape[block] *= self.ratio
        return tuple(shape)

    def place(self, indices: Sequence[Any]) -> list[Any]:
        """Return the indices with wider blocks of an element; they may be expressions."""
        placed = list(indices)
        for number, block in self.axes:
            placed[number] = indices[number] // self.ratio
            placed[block] = indices[number] % self.ratio * self.shape[block] + indices[block]
        return placed

    def store(self, array: Array) -> Array:
        """Return an array with wider blocks, and zeros where these are not full."""
        stored = np.zeros(self.shared_shape, array.dtype)
        grids = np.meshgrid(*map(np.arange, self.shape), indexing="ij", sparse=True)
        stored[tuple(self.place(grids))] = array
        return stored

    @classmethod
    def of(cls, array: Array) -> SharedLayout | None:
        """Return the layout of weights; None where they stay as they are.

        Any layout is right: one that is not that of other levels only takes memory.
        """
        shape = array.shape
        ratio = SHARED_LANES // shape[-1] if shape and shape[-1] in (4, 8) else 1
        if ratio == 1 or array.nbytes < _MIN_BYTES or len(shape) < 3:
            return None
        last = len(shape) - 1
        is_winograd = len(shape) == 7 and {*shape[:2]} <= {*_EDGES}
        out, inner = (2, 4) if is_winograd else (0, 1)
        axes, padded = [(out, last)], -1
        if len(shape) > 4 and shape[-2] == shape[-1]:
            # blocks next to each other are one wide block already
            if prod(shape[inner + 1 : -2]) == 1:
                padded = inner
            else:
                axes.append((inner, last - 1))
        elif shape[0] == 1:
            return None
        return cls(shape, tuple(axes), padded, ratio)


KernelLayouts = Mapping[str, Mapping[int, SharedLayout]]
"""The layouts of weights by kernel and parameter."""


def share_weights(
    mod: tvm.IRModule, weights: Sequence[Array]
) -> tuple[list[Array], dict[str, dict[int, SharedLayout]]]:
    """Return the weights of a lowered model in layouts that other levels have, too.

    Returns:
        The weights, and the layouts in which kernels must read them.
    """
    variables = ir.list_weights(mod["main"])
    layouts = {
        var: layout
        for var, weight in zip(variables, weights, strict=True)
        if (layout := SharedLayout.of(weight))
    }
    calls = list(_list_calls(mod))
    counts: dict[Any, int] = {}
    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            for var in find_nodes(function.body, relax.Var):
                counts[var] = counts.get(var, 0) + 1
    for _, arguments in calls:
        for argument in arguments:
            if argument in layouts:
                counts[argument] -= 1
    shared = {var: layout for var, layout in layouts.items() if not counts.get(var)}
    readable = {name: _list_readable(mod[name]) for name in {name for name, _ in calls}}
    while True:
        places: dict[tuple[str, int], SharedLayout | None] = {}
        for name, arguments in calls:
            for place, argument in enumerate(arguments):
                layout = shared.get(argument)
                is_fine = place in readable[name] and places.get((name, place), layout) == layout
                places[name, place] = layout if is_fine else None
        refused = {
            argument
            for name, arguments in calls
            for place, argument in enumerate(arguments)
            if argument in shared and not places[name, place]
        }
        kept = {var: layout for var, layout in shared.items() if var not in refused}
        if len(kept) == len(shared):
            break
        shared = kept
    found: dict[str, dict[int, SharedLayout]] = {}
    for (name, place), known in places.items():
        if known:
            found.setdefault(name, {})[place] = known
    stored = [
        shared[var].store(weight) if var in shared else weight
        for var, weight in zip(variables, weights, strict=True)
    ]
    return stored, found


def _list_calls(mod: tvm.IRModule) -> Iterator[tuple[str, list[Any]]]:
    """Yield the name of the kernel and the arguments of each call in a module."""
    for _, function in mod.functions_items():
        if isinstance(function, relax.Function):
            for call in find_nodes(function.body, tvm.ir.Call):
                if ir.operator_name(call) == "relax.call_tir":
                    operand = call.args[1]
                    is_tuple = isinstance(operand, relax.Tuple)
                    yield (
                        str(call.args[0].name_hint),
                        list(operand.fields) if is_tuple else [operand],
                    )


def _list_readable(kernel: tirx.PrimFunc) -> set[int]:
    """Return the parameters of a kernel that it only loads from, by their indices."""
    if len(kernel.params) < 3:
        # a copy may become a view
        return set()
    blocks = find_nodes(kernel.body, SBlock)
    regions = [region.source for block in blocks for region in (*block.reads, *block.writes)]
    loads = [load.source for load in find_nodes(kernel.body, tvm.ir.TensorLoad)]
    known = [*regions, *loads]
    variables = find_nodes(kernel.body, tvm.ir.Var)
    matched = [match.source.source for block in blocks for match in block.match_buffers]

    def count(param: Any, found: Sequence[Any]) -> int:
        return sum(param.same_as(other) for other in found)

    return {
        place
        for place, param in enumerate(kernel.params[:-1])
        if count(param, variables) == count(param, known) and not count(param, matched)
    }


def read_shared(layouts: KernelLayouts) -> tvm.transform.Pass:
    """Return a pass that lets kernels read weights in shared layouts, once they have loops and no blocks."""

    def transform(kernel: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        known = layouts.get(str((kernel.attrs or {}).get("global_symbol", "")))
        if not known:
            return kernel
        params = list(kernel.params)
        own = {}
        for place, layout in known.items():
            old = params[place]
            params[place] = tirx.decl_buffer(layout.shared_shape, old.ty.dtype, old.name)
            own[old] = params[place], layout

        def load(node: Any) -> Any:
            if node.source not in own:
                return node
            buffer, layout = own[node.source]
            return tirx.BufferLoad(buffer, layout.place(node.indices))

        body = tvm_ffi.structural_map(kernel.body, (tvm.ir.TensorLoad, load))
        return tirx.PrimFunc(params, body, kernel.ret_type, kernel.attrs)

    return tirx.transform.prim_func_pass(transform, opt_level=0, name="ReadShared")
