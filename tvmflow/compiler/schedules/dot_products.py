"""Dot product instructions of CPUs as tensor intrinsics of TVM.

Each adds some products of narrow numbers to each of its sums.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule, TensorIntrin
from tvm.script import tirx as T

from tvmflow.compiler import ir
from tvmflow.compiler.cpu_model import (
    BFLOAT16_INSTRUCTIONS,
    DOT_INSTRUCTIONS,
    MATRIX_INSTRUCTION,
    PAIR_INSTRUCTIONS,
    CpuModel,
)
from tvmflow.compiler.schedules.blocks import Block, find_loads
from tvmflow.compiler.tir_kernels import bfloat16
from tvmflow.compiler.tir_kernels.dot_products import (
    BFLOAT16,
    INTEGERS,
    MATRICES,
    PAIRS,
    TAPS,
    Products,
)

_PRODUCTS: Final = {
    products.name: products for products in (INTEGERS, PAIRS, TAPS, MATRICES, BFLOAT16)
}
_IMPORT: Final = "pragma_import_llvm"
"""TVM's annotation of a loop that needs functions in LLVM's language."""


def find_products(block: Block) -> Products | None:
    """Return the products that a block sums, several at once; None for other blocks."""
    return _PRODUCTS.get(str(block.stmt.name_hint))


def register_intrinsics() -> None:
    """Register the intrinsics that recorded schedules may name."""
    for dtype, lanes in DOT_INSTRUCTIONS:
        _load_intrinsic(dtype, lanes)
    for lanes in PAIR_INSTRUCTIONS:
        _load_narrow_intrinsic(lanes)
    _load_pairs_intrinsic()
    _load_taps_intrinsic()
    _load_matrices_intrinsic()
    for _, lanes in BFLOAT16_INSTRUCTIONS:
        _load_bfloat16_intrinsic(lanes)


def replace_vnni() -> None:
    """Replace TVM's intrinsic for VNNI, which MetaSchedule tries.

    LLVM 22 rejects its operands (apache-tvm 0.27).

    TVM's own must be registered before, because it replaces none.
    """
    _register("dot_16x4_vnni", "uint8", 16, "global")


@functools.cache
def _load_intrinsic(dtype: str, lanes: int) -> str:
    """Return the name of the intrinsic for data of a dtype and a number of sums."""
    name = f"tvmflow.dot_{dtype}_{lanes}x{INTEGERS.terms}"
    _register(name, dtype, lanes, "local")
    return name


@functools.cache
def _load_narrow_intrinsic(lanes: int) -> str:
    """Return the name of the intrinsic for weights from -64 to 64 and a number of sums."""
    name = f"tvmflow.narrow_dot_uint8_{lanes}x{INTEGERS.terms}"
    _register_narrow(name, lanes)
    return name


@functools.cache
def _load_pairs_intrinsic() -> str:
    """Return the name of the intrinsic that adds two products of bytes to each of four sums."""
    name = f"tvmflow.dot_int8_4x{PAIRS.terms}"
    _register_pairs(name)
    return name


@functools.cache
def _load_taps_intrinsic() -> str:
    """Return the name of the intrinsic that adds four products of bytes of pixels to each of four sums."""
    name = f"tvmflow.dot_taps_4x{TAPS.terms}"
    _register_taps(name)
    return name


@functools.cache
def _load_matrices_intrinsic() -> str:
    """Return the name of the intrinsic that multiplies matrices of bytes."""
    name = "tvmflow.dot_int8_2x4x8"
    _register_matrices(name)
    return name


@functools.cache
def _load_bfloat16_intrinsic(lanes: int) -> str:
    """Return the name of the intrinsic for a number of sums of products of bfloat16."""
    name = f"tvmflow.dot_bfloat16_{lanes}x{BFLOAT16.terms}"
    _register_bfloat16(name, lanes)
    return name


def use_instruction(
    schedule: Schedule, block: Block, outermost: Any, loop: Any, lanes: int, cpu: CpuModel
) -> None:
    """Replace a loop over sums, and that over products within it, by one instruction.

    Args:
        schedule: The schedule of the kernel.
        block: The block that sums the products.
        outermost: A loop around all of them.
        loop: The loop over sums; that over two points where matrices are multiplied.
        lanes: The number of sums.
        cpu: The CPU.
    """
    if find_products(block) is BFLOAT16:
        instruction = BFLOAT16_INSTRUCTIONS[cpu.bfloat16_arch, lanes]
        schedule.annotate(outermost, _IMPORT, _define_bfloat16_dot(instruction, lanes))
        schedule.tensorize(loop, _load_bfloat16_intrinsic(lanes))
        return
    if find_products(block) is PAIRS:
        schedule.tensorize(loop, _load_pairs_intrinsic())
        return
    if find_products(block) is TAPS:
        schedule.tensorize(loop, _load_taps_intrinsic())
        return
    if find_products(block) is MATRICES:
        schedule.tensorize(loop, _load_matrices_intrinsic())
        return
    if cpu.has_narrow_dots:
        schedule.tensorize(loop, _load_narrow_intrinsic(lanes))
        return
    dtype = str(block.stmt.reads[0].source.dtype)
    schedule.tensorize(loop, _load_intrinsic(dtype, lanes))


def _define_bfloat16_dot(instruction: str, lanes: int) -> str:
    """Return a function in LLVM's language that adds products to sums.

    TVM has no type for its operands (apache-tvm 0.27).
    """
    sums, words, numbers = f"<{lanes} x float>", f"<{lanes} x i32>", f"<{2 * lanes} x bfloat>"
    return f"""
declare {sums} @{instruction}({sums}, {numbers}, {numbers})

define {sums} @{_bfloat16_function(lanes)}({sums} %sums, {words} %data, {words} %weights) alwaysinline {{
  %x = bitcast {words} %data to {numbers}
  %w = bitcast {words} %weights to {numbers}
  %result = call {sums} @{instruction}({sums} %sums, {numbers} %x, {numbers} %w)
  ret {sums} %result
}}
"""


def _bfloat16_function(lanes: int) -> str:
    return f"tvmflow_dot_bfloat16_{lanes}"


def expand_dot_products(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module with loops in place of the instructions.

    It is for code generators without LLVM's intrinsics.
    """
    expanded = ir.copy_module(mod)
    for var, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc):
            body = tvm_ffi.structural_map(function.body, (tirx.BufferStore, _expand))
            expanded[var] = tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)
    return expanded


def _expand(store: Any) -> Any:
    calls = map(ir.operator_name, ir.find_nodes(store.value, tvm.ir.Call))
    if "tirx.call_llvm_pure_intrin" not in calls:
        return store
    operands = {str(load.source.name): load.source for load in find_loads(store.value)}
    if "A" not in operands:
        raise ValueError("weights in groups are multiplied by instructions of the target's CPU")
    data, weights = operands["A"], operands["B"]
    sums, lane, term = store.buffer, tirx.Var("lane", "int32"), tirx.Var("term", "int32")
    lanes, *terms = weights.shape
    loops = [(lane, lanes), (term, terms[-1])]
    place, weight = [lane], weights[lane, term]
    if len(terms) > 1:
        # matrices: a point of two blocks, each with its terms
        point, half = store.indices[0], tirx.Var("half", "int32")
        loops.append((half, terms[0]))
        place, weight = [point, lane], weights[lane, half, term]
        value = data[half, 0, point, term]
    else:
        # data of taps have channels of their own
        value = data[term] if len(data.shape) == 1 else data[term, lane]
    product = value.astype("int32") * weight.astype("int32")
    body: Any = tirx.BufferStore(sums, sums[tuple(place)] + product, place)
    for var, extent in reversed(loops):
        body = tirx.For(var, 0, extent, tirx.ForKind.SERIAL, body)
    return body


def _describe(products: Products, dtype: str, lanes: int, scope: str) -> tirx.PrimFunc:
    """Return the loops of an instruction that adds products of bytes to sums."""
    terms = products.terms

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (terms,), dtype=dtype, offset_factor=1)
        B = T.match_buffer(b, (lanes, terms), dtype="int8", offset_factor=1)
        C = T.match_buffer(c, (lanes,), dtype="int32", offset_factor=1, scope=scope)
        with T.sblock("root"):
            T.reads(C[0:lanes], A[0:terms], B[0:lanes, 0:terms])
            T.writes(C[0:lanes])
            for i in T.serial(0, lanes):
                for k in T.serial(0, terms):
                    with T.sblock("update"):
                        vi, vk = T.axis.remap("SR", [i, k])
                        C[vi] = C[vi] + T.cast(A[vk], "int32") * T.cast(B[vi, vk], "int32")

    return description


def _register(name: str, dtype: str, lanes: int, scope: str) -> None:
    """Register an intrinsic of TVM.

    Args:
        name: The name of the intrinsic.
        dtype: The dtype of the data.
        lanes: The number of sums.
        scope: TVM's storage scope of the sums.
    """
    instruction = DOT_INSTRUCTIONS[dtype, lanes]
    sums, data = f"int32x{lanes}", f"{dtype}x{INTEGERS.terms * lanes}"
    weights = f"int8x{INTEGERS.terms * lanes}"
    data_word = f"{dtype}x{INTEGERS.terms}"

    def order_factors(data: Any, weights: Any) -> tuple[Any, Any]:
        # the one that may be a lane of a vector comes last
        return (weights, data) if dtype == "int8" else (data, weights)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (4,), dtype=dtype, offset_factor=1)
        B = T.match_buffer(b, (lanes, 4), dtype="int8", offset_factor=1)
        C = T.match_buffer(c, (lanes,), dtype="int32", offset_factor=1, scope=scope)
        with T.sblock("root"):
            T.reads(C[0:lanes], A[0:4], B[0:lanes, 0:4])
            T.writes(C[0:lanes])
            C[T.ramp(T.int32(0), 1, lanes)] = T.call_llvm_pure_intrin(
                T.llvm_lookup_intrinsic_id(instruction),
                C.vload([0], dtype=sums),
                *order_factors(
                    T.reinterpret(
                        T.broadcast(T.reinterpret(A.vload([0], data_word), dtype="int32"), lanes),
                        dtype=data,
                    ),
                    B.vload([0, 0], dtype=weights),
                ),
                dtype=sums,
            )

    description = _describe(INTEGERS, dtype, lanes, scope)
    TensorIntrin.register(name, description, implementation, override=True)


def _register_narrow(name: str, lanes: int) -> None:
    """Register an intrinsic that adds four products of bytes to each sum, pairs of them as int16."""
    instructions = PAIR_INSTRUCTIONS[lanes]
    multiply, widen = instructions.multiply, instructions.widen
    sums, pairs, data = f"int32x{lanes}", f"int16x{2 * lanes}", f"uint8x{4 * lanes}"
    weights = f"int8x{4 * lanes}"

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (4,), dtype="uint8", offset_factor=1)
        B = T.match_buffer(b, (lanes, 4), dtype="int8", offset_factor=1)
        C = T.match_buffer(c, (lanes,), dtype="int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:lanes], A[0:4], B[0:lanes, 0:4])
            T.writes(C[0:lanes])
            C[T.ramp(T.int32(0), 1, lanes)] = C.vload([0], dtype=sums) + T.call_llvm_pure_intrin(
                T.llvm_lookup_intrinsic_id(widen),
                T.call_llvm_pure_intrin(
                    T.llvm_lookup_intrinsic_id(multiply),
                    T.reinterpret(
                        T.broadcast(T.reinterpret(A.vload([0], "uint8x4"), dtype="int32"), lanes),
                        dtype=data,
                    ),
                    B.vload([0, 0], dtype=weights),
                    dtype=pairs,
                ),
                T.broadcast(T.int16(1), 2 * lanes),
                dtype=sums,
            )

    description = _describe(INTEGERS, "uint8", lanes, "local")
    TensorIntrin.register(name, description, implementation, override=True)


def _register_pairs(name: str) -> None:
    """Register an intrinsic that multiplies bytes, and adds two products of 16 bits to each sum."""

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (2,), dtype="int8", offset_factor=1)
        B = T.match_buffer(b, (4, 2), dtype="int8", offset_factor=1)
        C = T.match_buffer(c, (4,), dtype="int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:4], A[0:2], B[0:4, 0:2])
            T.writes(C[0:4])
            C[T.ramp(T.int32(0), 1, 4)] = C.vload([0], dtype="int32x4") + T.call_llvm_pure_intrin(
                T.llvm_lookup_intrinsic_id("llvm.aarch64.neon.saddlp.v4i32.v8i16"),
                T.call_llvm_pure_intrin(
                    T.llvm_lookup_intrinsic_id("llvm.aarch64.neon.smull.v8i16"),
                    B.vload([0, 0], dtype="int8x8"),
                    T.reinterpret(
                        T.broadcast(T.reinterpret(A.vload([0], "int8x2"), dtype="int16"), 4),
                        dtype="int8x8",
                    ),
                    dtype="int16x8",
                ),
                dtype="int32x4",
            )

    description = _describe(PAIRS, "int8", 4, "local")
    TensorIntrin.register(name, description, implementation, override=True)


def _register_taps(name: str) -> None:
    """Register an intrinsic that multiplies four channels of four pixels with four taps of each channel."""
    order = [4 * term + lane for lane in range(4) for term in range(4)]

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (4, 4), dtype="int8", offset_factor=1)
        B = T.match_buffer(b, (4, 4), dtype="int8", offset_factor=1)
        C = T.match_buffer(c, (4,), dtype="int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:4], A[0:4, 0:4], B[0:4, 0:4])
            T.writes(C[0:4])
            for i in T.serial(0, 4):
                for k in T.serial(0, 4):
                    with T.sblock("update"):
                        vi, vk = T.axis.remap("SR", [i, k])
                        C[vi] = C[vi] + T.cast(A[vk, vi], "int32") * T.cast(B[vi, vk], "int32")

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (4, 4), dtype="int8", offset_factor=1)
        B = T.match_buffer(b, (4, 4), dtype="int8", offset_factor=1)
        C = T.match_buffer(c, (4,), dtype="int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:4], A[0:4, 0:4], B[0:4, 0:4])
            T.writes(C[0:4])
            C[T.ramp(T.int32(0), 1, 4)] = T.call_llvm_pure_intrin(
                T.llvm_lookup_intrinsic_id(DOT_INSTRUCTIONS["int8", 4]),
                C.vload([0], dtype="int32x4"),
                B.vload([0, 0], dtype="int8x16"),
                T.Shuffle([A.vload([0, 0], dtype="int8x16")], order),
                dtype="int32x4",
            )

    TensorIntrin.register(name, description, implementation, override=True)


def _register_matrices(name: str) -> None:
    """Register an intrinsic that multiplies eight bytes of two pixels with those of four results.

    It leaves sums as the instruction does: the first two of both pixels, then the last two. The pass
    `order_matrix_sums` lets others read them so.
    """

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        s0, s1 = T.int32(), T.int32()
        A = T.match_buffer(a, (2, 1, 2, 4), dtype="int8", offset_factor=1, strides=[s0, s1, 4, 1])
        B = T.match_buffer(b, (4, 2, 4), dtype="int8", offset_factor=1)
        C = T.match_buffer(c, (2, 4), dtype="int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:2, 0:4], A[0:2, 0, 0:2, 0:4], B[0:4, 0:2, 0:4])
            T.writes(C[0:2, 0:4])
            for i, j, h, k in T.grid(2, 4, 2, 4):
                with T.sblock("update"):
                    vi, vj, vh, vk = T.axis.remap("SSRR", [i, j, h, k])
                    C[vi, vj] = C[vi, vj] + T.cast(A[vh, 0, vi, vk], "int32") * T.cast(
                        B[vj, vh, vk], "int32"
                    )

    def multiply(sums: Any, first: Any, second: Any, weights: Any) -> Any:
        halves = [tirx.reinterpret("int32x2", half) for half in (first, second)]
        data = tirx.reinterpret("int8x16", tirx.Shuffle(halves, [0, 2, 1, 3]))
        number = T.llvm_lookup_intrinsic_id(MATRIX_INSTRUCTION)
        return T.call_llvm_pure_intrin(number, sums, data, weights, dtype="int32x4")

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        s0, s1 = T.int32(), T.int32()
        A = T.match_buffer(a, (2, 1, 2, 4), dtype="int8", offset_factor=1, strides=[s0, s1, 4, 1])
        B = T.match_buffer(b, (4, 2, 4), dtype="int8", offset_factor=1)
        C = T.match_buffer(c, (2, 4), dtype="int32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:2, 0:4], A[0:2, 0, 0:2, 0:4], B[0:4, 0:2, 0:4])
            T.writes(C[0:2, 0:4])
            C[0, T.ramp(T.int32(0), 1, 4)] = multiply(
                C.vload([0, 0], dtype="int32x4"),
                A.vload([0, 0, 0, 0], dtype="int8x8"),
                A.vload([1, 0, 0, 0], dtype="int8x8"),
                B.vload([0, 0, 0], dtype="int8x16"),
            )
            C[1, T.ramp(T.int32(0), 1, 4)] = multiply(
                C.vload([1, 0], dtype="int32x4"),
                A.vload([0, 0, 0, 0], dtype="int8x8"),
                A.vload([1, 0, 0, 0], dtype="int8x8"),
                B.vload([2, 0, 0], dtype="int8x16"),
            )

    TensorIntrin.register(name, description, implementation, override=True)


def _register_bfloat16(name: str, lanes: int) -> None:
    """Register an intrinsic of TVM that adds two products of bfloat16 to each of some float32 sums."""
    sums, words, weights = f"float32x{lanes}", f"int32x{lanes}", f"uint16x{2 * lanes}"
    function = _bfloat16_function(lanes)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (2,), dtype="uint16", offset_factor=1)
        B = T.match_buffer(b, (lanes, 2), dtype="uint16", offset_factor=1)
        C = T.match_buffer(c, (lanes,), dtype="float32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:lanes], A[0:2], B[0:lanes, 0:2])
            T.writes(C[0:lanes])
            for i in T.serial(0, lanes):
                for k in T.serial(0, 2):
                    with T.sblock("update"):
                        vi, vk = T.axis.remap("SR", [i, k])
                        C[vi] = C[vi] + bfloat16.to_float32(A[vk]) * bfloat16.to_float32(B[vi, vk])

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (2,), dtype="uint16", offset_factor=1)
        B = T.match_buffer(b, (lanes, 2), dtype="uint16", offset_factor=1)
        C = T.match_buffer(c, (lanes,), dtype="float32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(C[0:lanes], A[0:2], B[0:lanes, 0:2])
            T.writes(C[0:lanes])
            C[T.ramp(T.int32(0), 1, lanes)] = T.call_pure_extern(
                sums,
                function,
                C.vload([0], dtype=sums),
                T.broadcast(T.reinterpret(A.vload([0], "uint16x2"), dtype="int32"), lanes),
                T.reinterpret(B.vload([0, 0], dtype=weights), dtype=words),
            )

    TensorIntrin.register(name, description, implementation, override=True)
