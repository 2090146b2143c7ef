"""Merge height and width of pointwise convolutions to one axis of pixels.

An image has one tail tile then, where it had one in each row, and narrow images are computed in whole tiles. The axis
of the rows keeps one iteration, so that the last index of a pixel goes on beyond its row. Tensors are contiguous: the
position in memory is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlockRealize

from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction import candidates
from tvmflow.compiler.contraction.candidates import Contraction, multiply_add
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.graph import ir

# One axis must be faster by this factor than two of fixed lengths, by the estimate.
_MIN_GAIN: Final = 1.03
# Images, blocks of channels, height, width, lanes.
_RANK: Final = 5


def merge_fixed_pixels(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Merge the pixels of pointwise convolutions of fixed shapes, where their tiles fit one axis better."""
    cpu = context.cpu
    # the larger tiles of 32 registers are as fast in rows (measured with AVX-512)
    if cpu is None or not cpu.broadcasts_first:
        return mod
    return ir.rewrite_kernels(
        mod, lambda kernel: _merge(kernel, lambda realize: _gains(realize, cpu))
    )


def merge_dynamic_pixels(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a kernel with one axis of pixels, if height and width of its reduction are dynamic."""
    return _merge(
        kernel, lambda realize: all(isinstance(size, tirx.Var) for size in _image_of(realize))
    )


def _image_of(realize: SBlockRealize) -> list[Any]:
    """Return height and width of a block's result; fewer sizes if it has no image."""
    return list(realize.block.writes[0].source.shape)[-3:-1]


def _gains(realize: SBlockRealize, cpu: CpuModel) -> bool:
    """Return whether the estimate of a pointwise convolution is faster with one axis of pixels."""
    output = realize.block.writes[0].source
    if len(output.shape) != _RANK or not all(isinstance(n, tirx.IntImm) for n in output.shape):
        return False
    _, blocks, height, width, lanes = map(int, output.shape)
    if str(output.dtype) != "float32" or lanes != cpu.lanes or min(height, width) < 2:
        return False
    depths = [
        int(axis.dom.extent)
        for axis in realize.block.iter_vars
        if axis.iter_type == tirx.IterVar.CommReduce and int(axis.dom.extent) > 1
    ]
    if not depths:
        return False

    def find_speed(rows: int) -> float:
        how = multiply_add(cpu)
        problem = Contraction.over(depths, rows=rows, vectors=blocks, arithmetic=how)
        return candidates.rank_tiles(problem, cpu)[0][0]

    return find_speed(height * width) >= _MIN_GAIN * find_speed(width)


def _merge(kernel: tirx.PrimFunc, fits: Callable[[SBlockRealize], bool]) -> tirx.PrimFunc:
    """Return a kernel with one axis of pixels, if its reduction fits and reads one pixel at a time."""
    blocks = [
        realize
        for realize in ir.find_nodes(kernel.body, SBlockRealize)
        if not ir.find_nodes(realize.block.body, SBlockRealize)
    ]
    reductions = [realize for realize in blocks if realize.block.init is not None]
    image = _image_of(reductions[0]) if len(reductions) == 1 else []
    if len(image) < 2 or not fits(reductions[0]):
        return kernel
    pixels = [_find_pixel(realize, image) for realize in blocks]
    if None in pixels:
        return kernel
    lengths, count = {}, tvm.sym.Analyzer().simplify(image[0] * image[1])
    for row, column in filter(None, pixels):
        lengths[row.var], lengths[column.var] = tirx.IntImm("int64", 1), count
    return _with_lengths(kernel, lengths, image)


def _find_pixel(realize: SBlockRealize, image: Sequence[Any]) -> tuple[Any, Any] | None:
    """Return the axes of rows and columns of a block that reads and writes images only at one pixel."""
    block = realize.block
    axes = list(block.iter_vars)
    pairs = [
        pair
        for pair in itertools.pairwise(axes)
        if all(axis.iter_type == tirx.IterVar.DataPar for axis in pair)
        and _are_same([axis.dom.extent for axis in pair], image)
    ]
    is_loop = all(isinstance(value, tirx.Var) for value in realize.iter_values)
    if len(pairs) != 1 or not is_loop or not isinstance(realize.predicate, tirx.IntImm):
        return None
    units = {
        axis.var: axis.dom.min
        for axis in axes
        if isinstance(axis.dom.extent, tirx.IntImm) and int(axis.dom.extent) == 1
    }
    simplify = tvm.sym.Analyzer().simplify
    row, column = (axis.var for axis in pairs[0])
    is_at_pixel = True

    def check(buffer: Any, indices: Sequence[Any]) -> list[Any]:
        nonlocal is_at_pixel
        at = [simplify(ir.replace_variables(index, units)) for index in indices]
        if _are_same(buffer.shape[-3:-1], image):
            is_at_pixel = is_at_pixel and at[-3].same_as(row) and at[-2].same_as(column)
            at[-3:-1] = [tirx.IntImm("int64", 0)] * 2
            return at
        sizes = ir.find_nodes(list(buffer.shape), tvm.ir.Var)
        is_at_pixel = is_at_pixel and not any(size in sizes for size in image)
        return at

    # the remaining indices use no pixel
    rest = [
        ir.rewrite_indices(part, check) for part in (block.body, block.init) if part is not None
    ]
    used = ir.find_nodes(rest, tvm.ir.Var)
    return pairs[0] if is_at_pixel and row not in used and column not in used else None


def _are_same(sizes: Iterable[Any], others: Sequence[Any]) -> bool:
    sizes = list(sizes)
    return len(sizes) == len(others) and all(map(tvm_ffi.structural_equal, sizes, others))


def _with_lengths(
    kernel: tirx.PrimFunc, lengths: Mapping[Any, Any], image: Sequence[Any]
) -> tirx.PrimFunc:
    """Return a kernel with other lengths of some axes, and with images of its own in one row."""
    loops: dict[Any, Any] = {}
    own: dict[Any, Any] = {}
    for realize in ir.find_nodes(kernel.body, SBlockRealize):
        block = realize.block
        pairs = zip(block.iter_vars, realize.iter_values, strict=True)
        loops |= {value: lengths[axis.var] for axis, value in pairs if axis.var in lengths}
        for buffer in block.alloc_buffers:
            if _are_same(buffer.shape[-3:-1], image):
                row = [tirx.IntImm("int64", 1), image[0] * image[1]]
                shape = [*buffer.shape[:-3], *row, buffer.shape[-1]]
                own[buffer] = tirx.decl_buffer(
                    shape, buffer.dtype, buffer.name, scope=buffer.scope()
                )

    def change_loop(loop: tirx.For) -> tirx.For:
        if loop.loop_var not in loops:
            return loop
        return tirx.For(loop.loop_var, loop.min, loops[loop.loop_var], loop.kind, loop.body)

    def change_axis(axis: tirx.IterVar) -> tirx.IterVar:
        if axis.var not in lengths:
            return axis
        dom = tvm.ir.Range.from_min_extent(axis.dom.min, lengths[axis.var])
        return tirx.IterVar(dom, axis.var, axis.iter_type)

    rules = ((tirx.For, change_loop), (tirx.IterVar, change_axis))
    body = tvm_ffi.structural_map(kernel.body, rules)
    return kernel.with_body(ir.replace_variables(body, own) if own else body)
