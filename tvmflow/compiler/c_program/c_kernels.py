"""Kernels as plain C functions: pointers to tensors in, an error code out, no packed arguments.

TVM's `MakePackedAPI` wraps every kernel in checks of packed arguments. A C library passes only tensors that it has
planned itself, so the checks are dropped: each kernel is `int32_t kernel(void *tensor, ..., int64_t size, ...)`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.s_tir import SBlock

from tvmflow.compiler import code_generation
from tvmflow.compiler.c_sources import compile_c_sources
from tvmflow.compiler.code_generation import (
    CPU_PASSES,
    keep_dynamic_indices_on_stack,
    keep_small_buffers_on_stack,
    split_loops_where_indices_repeat,
)
from tvmflow.compiler.contraction.machine import SHARED_LANES, is_cpu
from tvmflow.core.types import Array, Size
from tvmflow.graph.dynamic_shapes import list_symbols, size_text
from tvmflow.graph.ir import (
    find_nodes,
    is_size,
    list_weights,
    node_pass,
    operator_name,
    replace_variables,
)
from tvmflow.targets.linking import ALIGNMENT

_CPU: Final = 1
_C_CALL: Final = 0
_HALF_OF_DOUBLE: Final = ["float16", "float64"]


@node_pass(tirx.Cast)
def _round_doubles_to_half(cast: tirx.Cast) -> tirx.Expr:
    """Cast float64 to float16 without `__truncdfhf2`, which only recent systems have.

    Rounding to odd to float32 first gives the same float16 as rounding directly (Boldo and Melquiond, 2008).
    """
    dtypes = [str(expr.ty.dtype) for expr in (cast, cast.value)]
    return tirx.Cast("float16", _round_to_odd(cast.value)) if dtypes == _HALF_OF_DOUBLE else cast


def _round_to_odd(value: tirx.Expr) -> tirx.Expr:
    """Round a float64 to odd: if it is between two float32 values, to the one whose last bit is 1."""
    nearest = tirx.Cast("float32", value)
    back = tirx.Cast("float64", nearest)
    bits = tirx.reinterpret("uint32", nearest)
    one, zero = tirx.const(1, "uint32"), tirx.const(0, "uint32")
    is_larger = tirx.abs(back) > tirx.abs(value)
    odd = (bits - tirx.Select(is_larger, one, zero)) | one
    # both comparisons are false for a NaN, which stays a NaN
    is_between = tirx.any(back < value, back > value)
    return tirx.reinterpret("float32", tirx.Select(is_between, odd, bits))


# TVM's pipeline without its last pass, `MakePackedAPI`.
_PASSES: Final = (_round_doubles_to_half, *CPU_PASSES, tirx.transform.SplitHostDevice)
_ALLOCATION_PASSES: Final = (
    tirx.transform.FP8StorageLegalize,
    tirx.transform.BF16StorageLegalize,
    keep_small_buffers_on_stack,
    split_loops_where_indices_repeat,
    tirx.transform.LowerTVMBuiltin,
)


def list_size_parameters(function: tirx.PrimFunc) -> tuple[Any, ...]:
    """Return the variables of a kernel's sizes, which its C function takes after its tensors."""
    found: list[Any] = []
    for param in function.params:
        if is_size(param):
            found.append(param)
        else:
            found += [symbol for size in param.ty.shape for symbol in list_symbols(size)]
    return tuple(dict.fromkeys(found))


def named_size_text(size: Any, names: Mapping[Any, str]) -> Size:
    """Return a size as an expression of a kernel's named variables; NoSize if it has further terms."""
    variables = {variable: tirx.Var(name, variable.ty.dtype) for variable, name in names.items()}
    return size_text(replace_variables(size, variables))


def lower_kernels(
    functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc],
    target: tvm.target.Target,
    observe: Callable[[tvm.IRModule], None] | None = None,
    layouts: KernelLayouts = MappingProxyType({}),
) -> tvm.IRModule:
    """Lower kernels to C functions named by their `global_symbol`, ready for code generation.

    `observe` receives the kernels after memory allocation; `layouts` are the layouts of weights that ISA levels share.
    """
    mod = compile_c_sources(tvm.IRModule(functions), target)
    mod = tirx.transform.BindTarget(target.with_host(target))(mod)
    passes = [make() for make in _PASSES]
    if layouts:
        passes.insert(_PASSES.index(tirx.transform.FlattenBuffer), read_shared(layouts))
    mod = ir.transform.Sequential(passes)(mod)
    mod = tvm.IRModule(
        {var: _to_c_function(function, target) for var, function in mod.functions_items()}
    )
    mod = ir.transform.Sequential([make() for make in _ALLOCATION_PASSES])(mod)
    if observe:
        observe(mod)
    return tirx.transform.LowerIntrin()(keep_dynamic_indices_on_stack()(mod))


def compile_kernels(mod: tvm.IRModule, target: tvm.target.Target, output: Path) -> None:
    """Write an object file with lowered kernels."""
    generate_code(mod, target).write_to_file(str(output), "o")


def generate_code(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    """Return the machine code of lowered kernels."""
    return tvm.get_global_func(f"target.build.{target.kind.name}")(mod, target)


def _to_c_function(function: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """Return a kernel that takes a pointer for each tensor, then the sizes, and returns 0."""
    declarations, pointers = [], []
    sizes = list_size_parameters(function)
    for param in function.params:
        if is_size(param):
            continue
        dtype, name = str(param.ty.dtype.dtype), param.name
        pointer = tvm.ir.Var(name, ir.PointerType(ir.PrimType(dtype), "global"))
        pointers.append(pointer)
        if isinstance(offset := param.ty.elem_offset, ir.Var):
            declarations.append(tirx.Bind(offset, tirx.const(0, str(offset.ty.dtype))))
        declarations.append(tirx.DeclBuffer(param, data=pointer))
    # Assertions are removed, because the C code of the program checks whether a kernel failed.
    body = tvm_ffi.structural_map(function.body, (tirx.AssertStmt, lambda _: tirx.Evaluate(0)))
    # LowerTVMBuiltin and the code generator expect these attributes around a kernel.
    for pointer in pointers:
        body = tirx.AttrStmt(pointer, "storage_alignment", tirx.const(ALIGNMENT, "int32"), body)
    for key, value in (("device_id", 0), ("device_type", _CPU)):
        body = tirx.AttrStmt(ir.StringImm("default"), key, tirx.const(value, "int32"), body)
    # Workspaces are freed at the end of their scope. Without this inner scope, that would be after the return.
    body = tirx.AttrStmt(ir.StringImm("kernel"), "tvmflow.scope", tirx.const(0, "int32"), body)
    body = tirx.SeqStmt([*declarations, body, tirx.Return(tirx.const(0, "int32"))])
    attributes = {
        "global_symbol": function.attrs["global_symbol"],
        "target": target,
        "calling_conv": _C_CALL,
        "tirx.noalias": True,
    }
    return tirx.PrimFunc([*pointers, *sizes], body, ir.PrimType("int32")).with_attrs(attributes)


# ---------------------------------------------------------------- code as text
# Assembly for a CPU, without debugging information; CUDA C for a GPU.

_LABEL: Final = re.compile(r"([^\s:#\"]+):\s*$")
_DIRECTIVE: Final = re.compile(r"\s*\.(\w+)")
_FUNCTION: Final = re.compile(r"^[ \t]*\.(?:globl|weak|type|def)\s+([^\s,;]+)", re.MULTILINE)
_WORD: Final = re.compile(r"[\w.$@?]+")
_SECTIONS: Final = ("section", "text", "data", "bss")
# Sections with code or constants; all others are left out.
_KEPT_SECTIONS: Final = re.compile(r"\.text\b|\.rodata|\.rdata|__TEXT,__(text|const|literal)")
_DATA: Final = frozenset(
    "byte short value word hword long quad xword zero space skip ascii asciz string int8 int16 int32 int64".split()
)


def make_assembly(kernel: tirx.PrimFunc, target: tvm.target.Target, *, is_plain_c: bool) -> str:
    """Compile a scheduled kernel as `build` does, and return its assembly."""
    symbol = str(kernel.attrs["global_symbol"])
    functions = {tvm.ir.GlobalVar(symbol): kernel}
    if is_plain_c:
        library = generate_code(lower_kernels(functions, target), target)
    else:
        library = code_generation.build_kernels(tvm.IRModule(functions), target)
    if is_cpu(target):
        return strip_assembly(library.inspect_source("asm"), symbol)
    return "\n".join(module.inspect_source() for module in library.imports)


def strip_assembly(text: str, symbol: str) -> str:
    """Return the assembly of a function and its callees: instructions, constants, used labels.

    The function's name may have a prefix from the system or TVM.
    """
    functions = set(_FUNCTION.findall(text))
    lines = list(_keep_code(text.splitlines()))
    words = set(_WORD.findall("\n".join(line for line in lines if not _LABEL.match(line))))
    # relocations append to a name: `.Lconstant@PAGEOFF`
    used = words | {word.partition("@")[0] for word in words}
    is_kept, section, kept = True, "", []
    for line in lines:
        label = _LABEL.match(line)
        directive = _DIRECTIVE.match(line)
        if directive and directive[1] in _SECTIONS:
            section = line
            continue
        if label and label[1] in functions:
            is_kept = label[1] in used or label[1].endswith(symbol)
        if is_kept and (not label or label[1] in functions or label[1] in used):
            kept += [text.expandtabs(8).rstrip() for text in (section, line) if text]
            section = ""
    return "\n".join(kept) + "\n"


def _keep_code(lines: list[str]) -> Iterator[str]:
    """Yield the lines of sections with code or constants: the section's directive, labels, code, data."""
    section, is_kept, is_new = "", True, False
    for line in lines:
        directive = _DIRECTIVE.match(line)
        if directive and directive[1] in _SECTIONS:
            is_kept = bool(_KEPT_SECTIONS.search(line))
            is_new, section = line != section, line
            continue
        # keep instructions and data; drop empty lines, assignments and other directives
        is_code = directive[1] in _DATA if directive else bool(line.strip()) and " = " not in line
        if is_kept and (is_code or _LABEL.match(line)):
            if is_new:
                yield section
            is_new = False
            yield line


# ---------------------------------------------------------------- layouts of weights
# Blocks of channels are as wide as vectors, whose widths differ between ISA levels. All levels share weights in blocks
# of the widest vectors: a kernel with narrower vectors reads parts of these blocks.

# Smaller weights keep their layout, because sharing them saves too little.
_MIN_BYTES: Final = 4096
# The rows and columns of Winograd's transformed kernels, F(2×2), F(4×2) and F(4×4).
_EDGES: Final = (4, 6)


class SharedLayout(NamedTuple):
    """The layout of a tensor whose last axis is a block of channels, with each `ratio` blocks joined.

    `axes` holds pairs of axes: the index of a block, and the position in the block. The axis `padded` (-1 for none) is
    padded to a multiple of `ratio`.
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

    def stored_index(self, indices: Sequence[Any]) -> list[Any]:
        """Return an element's indices in the layout with wider blocks; `indices` may be expressions."""
        stored = list(indices)
        for number, block in self.axes:
            stored[number] = indices[number] // self.ratio
            stored[block] = indices[number] % self.ratio * self.shape[block] + indices[block]
        return stored

    def store(self, array: Array) -> Array:
        """Return an array in the layout with wider blocks, padded with zeros."""
        stored = np.zeros(self.shared_shape, array.dtype)
        grids = np.meshgrid(*map(np.arange, self.shape), indexing="ij", sparse=True)
        stored[tuple(self.stored_index(grids))] = array
        return stored

    @classmethod
    def of(cls, array: Array) -> SharedLayout | None:
        """Return the layout of weights that ISA levels share; None to keep the present one."""
        shape = array.shape
        ratio = SHARED_LANES // shape[-1] if shape and shape[-1] in (4, 8) else 1
        if ratio == 1 or array.nbytes < _MIN_BYTES or len(shape) < 3:
            return None
        last = len(shape) - 1
        is_winograd = len(shape) == 7 and {*shape[:2]} <= {*_EDGES}
        out, inner = (2, 4) if is_winograd else (0, 1)
        axes, padded = [(out, last)], -1
        if len(shape) > 4 and shape[-2] == shape[-1]:
            # adjacent blocks already form one wide block
            if prod(shape[inner + 1 : -2]) == 1:
                padded = inner
            else:
                axes.append((inner, last - 1))
        elif shape[0] == 1:
            return None
        return cls(shape, tuple(axes), padded, ratio)


KernelLayouts = Mapping[str, Mapping[int, SharedLayout]]
"""The layouts of weights by kernel and index of the parameter."""


def share_weights(
    mod: tvm.IRModule, weights: Sequence[Array]
) -> tuple[list[Array], dict[str, dict[int, SharedLayout]]]:
    """Return a lowered model's weights in layouts that ISA levels share, and the layouts by kernel."""
    variables = list_weights(mod["main"])
    layouts = {
        var: layout
        for var, weight in zip(variables, weights, strict=True)
        if (layout := SharedLayout.of(weight))
    }
    uses: dict[tuple[str, int], set[Any]] = {}
    functions = [own for _, own in mod.functions_items() if isinstance(own, relax.Function)]
    # uses of variables other than as operands of kernel calls
    others = Counter(var for own in functions for var in find_nodes(own.body, relax.Var))
    for call in (call for own in functions for call in find_nodes(own.body, tvm.ir.Call)):
        if operator_name(call) != "relax.call_tir":
            continue
        operands = list(getattr(call.args[1], "fields", call.args[1:2]))
        others.subtract(operand for operand in operands if operand in layouts)
        for index, operand in enumerate(operands):
            uses.setdefault((str(call.args[0].name_hint), index), set()).add(operand)
    readable = {name: _list_readable(mod[name]) for name in {name for name, _ in uses}}
    shared = {var: layout for var, layout in layouts.items() if not others[var]}
    while True:
        chosen: dict[tuple[str, int], SharedLayout | None] = {}
        for (name, index), arguments in uses.items():
            own = {shared.get(argument) for argument in arguments}
            is_fine = index in readable[name] and len(own) == 1
            chosen[name, index] = own.pop() if is_fine else None
        refused = {argument for use in uses if not chosen[use] for argument in uses[use]}
        kept = {var: layout for var, layout in shared.items() if var not in refused}
        if len(kept) == len(shared):
            break
        shared = kept
    found: dict[str, dict[int, SharedLayout]] = {}
    for (name, index), known in chosen.items():
        if known:
            found.setdefault(name, {})[index] = known
    stored = [
        shared[var].store(weight) if var in shared else weight
        for var, weight in zip(variables, weights, strict=True)
    ]
    return stored, found


def _list_readable(kernel: tirx.PrimFunc) -> set[int]:
    """Return the indices of the parameters that a kernel only loads from."""
    if len(kernel.params) < 3:
        # a kernel that copies its input may become a view of it
        return set()
    blocks = find_nodes(kernel.body, SBlock)
    known = [region.source for block in blocks for region in (*block.reads, *block.writes)]
    known += [load.source for load in find_nodes(kernel.body, tvm.ir.TensorLoad)]
    variables = find_nodes(kernel.body, tvm.ir.Var)
    matched = [match.source.source for block in blocks for match in block.match_buffers]

    def count(param: Any, found: Sequence[Any]) -> int:
        return sum(param.same_as(other) for other in found)

    return {
        index
        for index, param in enumerate(kernel.params[:-1])
        if count(param, variables) == count(param, known) and not count(param, matched)
    }


def read_shared(layouts: KernelLayouts) -> tvm.transform.Pass:
    """Return a pass that makes kernels read weights in shared layouts; it runs after blocks are lowered."""

    def transform(kernel: tirx.PrimFunc, *_: Any) -> tirx.PrimFunc:
        known = layouts.get(str((kernel.attrs or {}).get("global_symbol", "")))
        if not known:
            return kernel
        params = list(kernel.params)
        own = {}
        for index, layout in known.items():
            old = params[index]
            params[index] = tirx.decl_buffer(layout.shared_shape, old.ty.dtype, old.name)
            own[old] = params[index], layout

        def load(node: Any) -> Any:
            if node.source not in own:
                return node
            buffer, layout = own[node.source]
            return tirx.BufferLoad(buffer, layout.stored_index(node.indices))

        body = tvm_ffi.structural_map(kernel.body, (tvm.ir.TensorLoad, load))
        return tirx.PrimFunc(params, body, kernel.ret_type, kernel.attrs)

    return tirx.transform.prim_func_pass(transform, opt_level=0, name="ReadShared")
