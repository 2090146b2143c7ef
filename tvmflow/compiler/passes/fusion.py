"""Rewrites around fusion: limits, branches as functions, size variables, reshapes, merged pixels."""

from __future__ import annotations

import functools
import itertools
import math
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.relax.utils import copy_with_new_vars
from tvm.s_tir import SBlock, SBlockRealize

from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.contraction import candidates
from tvmflow.compiler.contraction.candidates import Contraction, multiply_add
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.graph import ir, rewriter
from tvmflow.graph.dynamic_shapes import (
    IrSize,
    TuningSizes,
    is_dynamic,
    list_symbols,
    make_analyzer,
    plain,
    read_dimensions,
    same_size,
    simplify,
    sizes_of,
)

_PATTERN: Final = "op_pattern"
# TVM's kElemWise, kBroadcast and kInjective.
_FUSED_PATTERNS: Final = (0, 1, 2)


def limit_fusion(mod: tvm.IRModule) -> tvm.IRModule:
    """Begin a kernel with each operator that broadcasts the result of a convolution or a matmul.

    Squeeze-and-excitation multiplies an image by a convolution's result of one pixel. In the convolution's epilogue,
    the image would be computed with the schedule for one pixel. The pass runs after AnnotateTIROpPattern.
    """
    limited = ir.copy_module(mod)
    products: set[Any] = set()
    tuning_sizes = TuningSizes(mod["main"])
    for var, value in ir.DataFlow(mod["main"]).values.items():
        call = ir.as_call(value, "relax.call_tir")
        shape = tuning_sizes.shape(var)
        if call is None or shape is None:
            continue
        kernel = mod[call.args[0]]
        pattern = int(kernel.attrs.get(_PATTERN, -1))
        sources = [source for source in ir.list_variables(call.args[1]) if source in products]
        if pattern == rewriter.TAKES_EPILOGUE[_PATTERN] or (pattern in _FUSED_PATTERNS and sources):
            products.add(var)
        sizes = [math.prod(tuning_sizes.shape(source) or ()) for source in sources]
        if pattern in _FUSED_PATTERNS and any(size < math.prod(shape) for size in sizes):
            limited[call.args[0]] = kernel.with_attrs(rewriter.TAKES_EPILOGUE)
    return limited


def give_empty_buffers_room(mod: tvm.IRModule) -> tvm.IRModule:
    """Enlarge empty tensors inside kernels to one element, which nothing reads: LLVM allocates no 0 bytes."""

    def rewrite(function: tirx.PrimFunc) -> tirx.PrimFunc:
        larger = {}
        for block in ir.find_nodes(function.body, SBlock):
            for buffer in block.alloc_buffers:
                sizes = list(map(plain, buffer.shape))
                if 0 in (size for size in sizes if isinstance(size, int)):
                    shape = [max(size, 1) if isinstance(size, int) else size for size in sizes]
                    larger[buffer] = ir.with_shape(buffer, shape)
        body = function.body
        return function.with_body(ir.replace_variables(body, larger)) if larger else function

    return ir.rewrite_kernels(mod, rewrite)


def outline_branches(mod: tvm.IRModule) -> tvm.IRModule:
    """Replace each branch of an If by a call of a private function, innermost branches first.

    TVM fuses the operators of functions, but not the operators of branches. It would also let one branch use memory
    that only the other one allocates.
    """
    return rewriter.rewrite_main(mod, _Outliner) if ir.has_branches(mod) else mod


class _Outliner(rewriter.MainRewriter):
    def visit_if_(self, op: relax.If) -> Any:
        rewritten = super().visit_if_(op)
        return relax.If(rewritten.cond, *map(self._outline, ir.branches_of(rewritten)))

    def _outline(self, branch: relax.SeqExpr) -> relax.SeqExpr:
        captured = [
            var for var in relax.analysis.free_vars(branch) if not isinstance(var, tvm.ir.GlobalVar)
        ]
        function = relax.Function(captured, branch, branch.ty)
        callee = self.builder_.add_func(copy_with_new_vars(function), "branch")
        result = relax.Var("result", branch.ty)
        block = relax.BindingBlock([relax.VarBinding(result, relax.Call(callee, captured))])
        return relax.SeqExpr([block], result)


# ---------------------------------------------------------------- size variables
# If a tensor's height is `(h - 1) // 4 + 1`, its kernel needs `h`, which no buffer binds, so each call passes it. With a
# variable instead of the expression, the buffers bind the variable, kernels of all stages of a network are alike, and
# they do not depend on the order in which TVM collects variables.

_EXPRESSIONS: Final = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.Min, tirx.Max)


def order_sizes(mod: tvm.IRModule) -> tvm.IRModule:
    """Let kernels take dimensions in the order of their shapes, because TVM collects them in any order."""
    return _rewrite_kernels(mod, lambda kernel: kernel)


def give_kernel_symbols(mod: tvm.IRModule) -> tvm.IRModule:
    """Give each kernel its own size variables; run after fusion, which compares the shapes of kernels."""
    return _rewrite_kernels(mod, lambda kernel: _merge_dynamic_pixels(_replace_sizes(kernel)))


def _rewrite_kernels(mod: tvm.IRModule, rewrite: Callable[[Any], Any]) -> tvm.IRModule:
    """Rewrite the kernels with dynamic shapes; the same module where no dimension is dynamic."""
    if not read_dimensions(mod["main"]):
        return mod
    kernels = {
        var: kernel
        for var, kernel in ir.kernels_of(mod).items()
        if any(map(is_dynamic, _list_sizes(kernel)))
    }
    # the kernels are left out, so that their new names do not depend on the number of TVM's kernels
    others = {var: function for var, function in mod.functions_items() if var not in kernels}
    rest = tvm.IRModule(others, mod.attrs, mod.global_infos)
    # functions of branches call kernels, too
    callers = [var for var, function in others.items() if isinstance(function, relax.Function)]
    callers.sort(key=lambda variable: (variable.name_hint != "main", str(variable.name_hint)))
    return rewriter.rewrite_functions(rest, callers, _KernelRewriter, kernels, rewrite)


class _KernelRewriter(rewriter.MainRewriter):
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
            # TVM appends digits to a name that is taken
            name = str(variable.name_hint).rstrip(string.digits)
            # added once, because TVM looks for an equal function each time
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

    def replace(node: Any) -> Any:
        """Return an expression of dimensions as a size variable plus a constant, others unchanged."""
        symbols = list_symbols(node)
        if symbols and dimensions.issuperset(symbols):
            for size, variable in sizes:
                rest = simplify(node - size)
                if isinstance(rest, int):
                    return variable + rest if rest else variable
        return node

    return tvm_ffi.structural_map(kernel, (_EXPRESSIONS, replace), order="pre")


def _order_sizes(kernel: tirx.PrimFunc, inputs: int) -> tuple[tirx.PrimFunc, list[int]]:
    """Return a kernel whose dimensions have the order of its shapes, and the positions of its arguments.

    A call passes the first `inputs` parameters; the others are results.
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


# ---------------------------------------------------------------- reshapes
# Dynamic reshapes are split into groups of axes. If `h` is a multiple of 8 (`multiple_of`), an image of `h // 2` rows
# has `h // 8` windows of 4 rows. TVM does not know that `h` is divisible. So it divides the linear index of each element
# by all sizes, and does not fuse such a kernel.

_Group = tuple[list[int], list[int]]
"""Axes of a tensor, and the axes with as many elements that replace them."""


def group_dynamic_reshapes(mod: tvm.IRModule) -> tvm.IRModule:
    """Convert dynamic reshapes whose element counts are equal only because of `multiple_of`."""
    has_multiples = any(entry.multiple_of > 1 for entry in read_dimensions(mod["main"]))
    return rewriter.rewrite_main(mod, _ReshapeRewriter) if has_multiples else mod


class _ReshapeRewriter(rewriter.MainRewriter):
    OPERATORS = ("relax.reshape",)

    def _rewrite(self, call: Any, rewritten: Any) -> Any:
        before, after = sizes_of(call.args[0]), sizes_of(call)
        if not before or not after or not any(map(is_dynamic, (*before, *after))):
            return None
        groups = self._group_axes(before, after)
        if groups is None or all(same_size(*_counts(group, before, after)) for group in groups):
            return None
        # not emitted, because that binds a second variable, at which fusion ends
        operands = rewritten.args[0], list(after), groups
        options = {"primfunc_name_hint": "reshape", "primfunc_attrs": rewriter.INJECTIVE}
        return self.builder_.call_te(_reshape, *operands, **options)

    def _group_axes(self, before: Sequence[IrSize], after: Sequence[IrSize]) -> list[_Group] | None:
        """Return the smallest groups, in order; None if there is only one, or dimensions are unknown."""
        analyzer, is_known = make_analyzer((*before, *after), self.dimensions)
        if not is_known:
            return None
        groups: list[_Group] = []
        left = list(range(len(before))), list(range(len(after)))
        is_whole = True
        while any(left):
            if is_whole and all(left):
                groups.append(([], []))
            own, other = map(self.tuning_sizes.size, _counts(groups[-1], before, after))
            side = 0 if left[0] and (own <= other or not left[1]) else 1
            groups[-1][side].append(left[side].pop(0))
            counts = _counts(groups[-1], before, after)
            is_whole = all(groups[-1]) and bool(analyzer.can_prove_equal(*counts))
        return groups if is_whole and len(groups) > 1 else None


def _counts(
    group: _Group, before: Sequence[IrSize], after: Sequence[IrSize]
) -> tuple[IrSize, IrSize]:
    """Return the number of elements on each side of a group."""
    return math.prod(before[axis] for axis in group[0]), math.prod(after[axis] for axis in group[1])


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


# ---------------------------------------------------------------- pixels
# Height and width of pointwise convolutions become one axis of pixels. Then an image has one tail tile instead of one
# in each row, and narrow images are computed in whole tiles. The loop over the height keeps one iteration, and the width
# index runs over all pixels of the image. Tensors are contiguous, so the position in memory is the same.

# For fixed shapes, merging height and width must raise the estimated speed at least by this factor.
_MIN_GAIN: Final = 1.03
# Images, blocks of channels, height, width, lanes.
_RANK: Final = 5


def merge_fixed_pixels(mod: tvm.IRModule, context: LoweringContext) -> tvm.IRModule:
    """Merge the pixels of pointwise convolutions with fixed shapes, if tiles fit one axis better."""
    cpu = context.cpu
    # with 32 registers, tiles are larger, and rows are as fast as merged pixels (measured with AVX-512)
    if cpu is None or not cpu.broadcasts_first:
        return mod
    fits = functools.partial(_gains, cpu)
    return ir.rewrite_kernels(mod, lambda kernel: _merge(kernel, fits))


def _merge_dynamic_pixels(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a kernel with one axis of pixels, if height and width of its reduction are dynamic."""

    def is_dynamic_image(realize: SBlockRealize) -> bool:
        return all(isinstance(size, tirx.Var) for size in _image_of(realize))

    return _merge(kernel, is_dynamic_image)


def _image_of(realize: SBlockRealize) -> list[Any]:
    """Return height and width of a block's result; fewer than two sizes if it is not an image."""
    return list(realize.block.writes[0].source.shape)[-3:-1]


def _gains(cpu: CpuModel, realize: SBlockRealize) -> bool:
    """Return whether one axis of pixels makes the estimate of a pointwise convolution faster."""
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
    """Return the row and column axes of a block that reads and writes images pixel by pixel, else None."""
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

    # the indices that remain must not use the row or the column
    parts = [part for part in (block.body, block.init) if part is not None]
    rest = [ir.rewrite_indices(part, check) for part in parts]
    used = ir.find_nodes(rest, tvm.ir.Var)
    return pairs[0] if is_at_pixel and row not in used and column not in used else None


def _are_same(sizes: Iterable[Any], others: Sequence[Any]) -> bool:
    sizes = list(sizes)
    return len(sizes) == len(others) and all(map(tvm_ffi.structural_equal, sizes, others))


def _with_lengths(
    kernel: tirx.PrimFunc, lengths: Mapping[Any, Any], image: Sequence[Any]
) -> tirx.PrimFunc:
    """Return a kernel with other lengths of some axes, and with its inner images in one row."""
    loops: dict[Any, Any] = {}
    own: dict[Any, Any] = {}
    for realize in ir.find_nodes(kernel.body, SBlockRealize):
        block = realize.block
        pairs = zip(block.iter_vars, realize.iter_values, strict=True)
        loops |= {value: lengths[axis.var] for axis, value in pairs if axis.var in lengths}
        for buffer in block.alloc_buffers:
            if _are_same(buffer.shape[-3:-1], image):
                row = [tirx.IntImm("int64", 1), image[0] * image[1]]
                own[buffer] = ir.with_shape(buffer, [*buffer.shape[:-3], *row, buffer.shape[-1]])

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
