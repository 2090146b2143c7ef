"""Dot product instructions of CPUs as tensor intrinsics of TVM.

Each adds some products of narrow numbers to each of its sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    ROWS,
    TAPS,
    Products,
)

_PRODUCTS: Final = {
    products.name: products for products in (INTEGERS, PAIRS, TAPS, MATRICES, ROWS, BFLOAT16)
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
    _load_rows_intrinsic()
    for _, lanes in BFLOAT16_INSTRUCTIONS:
        _load_bfloat16_intrinsic(lanes)


def replace_vnni() -> None:
    """Replace TVM's intrinsic for VNNI, which MetaSchedule tries.

    LLVM 22 rejects its operands (apache-tvm 0.27).

    TVM's own must be registered before, because it replaces none.
    """
    _register_bytes("dot_16x4_vnni", "uint8", 16, "global")


@functools.cache
def _load_intrinsic(dtype: str, lanes: int) -> str:
    """Return the name of the intrinsic for data of a dtype and a number of sums."""
    name = f"tvmflow.dot_{dtype}_{lanes}x{INTEGERS.terms}"
    _register_bytes(name, dtype, lanes, "local")
    return name


@functools.cache
def _load_narrow_intrinsic(lanes: int) -> str:
    """Return the name of the intrinsic for weights from -64 to 64 and a number of sums.

    It adds four products of bytes to each sum, pairs of them as int16.
    """
    name = f"tvmflow.narrow_dot_uint8_{lanes}x{INTEGERS.terms}"
    instructions = PAIR_INSTRUCTIONS[lanes]

    def add(sums: Any, words: Any, weights: Any) -> Any:
        data = tirx.reinterpret(f"uint8x{4 * lanes}", words)
        pairs = _call(instructions.multiply, f"int16x{2 * lanes}", data, weights)
        ones = T.broadcast(T.int16(1), 2 * lanes)
        return sums + _call(instructions.widen, f"int32x{lanes}", pairs, ones)

    _register(name, INTEGERS, ("uint8", "int8", "int32"), lanes, add)
    return name


@functools.cache
def _load_pairs_intrinsic() -> str:
    """Return the name of the intrinsic that adds two products of bytes to each of four sums."""
    name = f"tvmflow.dot_int8_4x{PAIRS.terms}"

    def add(sums: Any, words: Any, weights: Any) -> Any:
        data = tirx.reinterpret("int8x8", words)
        products = _call("llvm.aarch64.neon.smull.v8i16", "int16x8", weights, data)
        return sums + _call("llvm.aarch64.neon.saddlp.v4i32.v8i16", "int32x4", products)

    _register(name, PAIRS, ("int8", "int8", "int32"), 4, add)
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
def _load_rows_intrinsic() -> str:
    """Return the name of the intrinsic that multiplies two rows of a matrix of bytes."""
    name = "tvmflow.dot_int8_rows_2x4x8"
    _register_rows(name)
    return name


@functools.cache
def _load_bfloat16_intrinsic(lanes: int) -> str:
    """Return the name of the intrinsic for a number of float32 sums of products of bfloat16."""
    name = f"tvmflow.dot_bfloat16_{lanes}x{BFLOAT16.terms}"

    def add(sums: Any, words: Any, weights: Any) -> Any:
        operands = (sums, words, tirx.reinterpret(f"int32x{lanes}", weights))
        return T.call_pure_extern(f"float32x{lanes}", _bfloat16_function(lanes), *operands)

    _register(name, BFLOAT16, ("uint16", "uint16", "float32"), lanes, add, bfloat16.to_float32)
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
    if find_products(block) is ROWS:
        schedule.tensorize(loop, _load_rows_intrinsic())
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
    elif len(sums.shape) > 1:
        # rows of a matrix
        point = store.indices[0]
        place, value = [point, lane], data[point, term]
    else:
        # data of taps have channels of their own
        value = data[term] if len(data.shape) == 1 else data[term, lane]
    product = value.astype("int32") * weight.astype("int32")
    body: Any = tirx.BufferStore(sums, sums[tuple(place)] + product, place)
    for var, extent in reversed(loops):
        body = tirx.For(var, 0, extent, tirx.ForKind.SERIAL, body)
    return body


def _register_bytes(name: str, dtype: str, lanes: int, scope: str) -> None:
    """Register an intrinsic that adds four products of bytes to each sum, by one instruction.

    Args:
        name: The name of the intrinsic.
        dtype: The dtype of the data.
        lanes: The number of sums.
        scope: TVM's storage scope of the sums.
    """

    def add(sums: Any, words: Any, weights: Any) -> Any:
        data = tirx.reinterpret(f"{dtype}x{INTEGERS.terms * lanes}", words)
        # the one that may be a lane of a vector comes last
        factors = (weights, data) if dtype == "int8" else (data, weights)
        return _call(DOT_INSTRUCTIONS[dtype, lanes], f"int32x{lanes}", sums, *factors)

    _register(name, INTEGERS, (dtype, "int8", "int32"), lanes, add, scope=scope)


def _call(instruction: str, dtype: str, *operands: Any) -> Any:
    return T.call_llvm_pure_intrin(T.llvm_lookup_intrinsic_id(instruction), *operands, dtype=dtype)


def _as_integer(number: Any) -> Any:
    return T.cast(number, "int32")


def _register(
    name: str,
    products: Products,
    dtypes: tuple[str, str, str],
    lanes: int,
    add: Callable[[Any, Any, Any], Any],
    widen: Callable[[Any], Any] = _as_integer,
    scope: str = "local",
) -> None:
    """Register an intrinsic of TVM that adds products of the same data to each of some sums.

    Args:
        name: The name of the intrinsic.
        products: How many products are added to each sum.
        dtypes: The dtypes of data, weights and sums.
        lanes: The number of sums.
        add: Returns the vector of sums after the instruction, given those before it, the data as one word in each
            lane, and the vector of weights.
        widen: Returns a number as one of the sums.
        scope: TVM's storage scope of the sums.
    """
    terms, (dtype, weight, total) = products.terms, dtypes
    word = f"int{terms * tvm.DataType(dtype).bits}"
    sums, weights, data = f"{total}x{lanes}", f"{weight}x{terms * lanes}", f"{dtype}x{terms}"

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (terms,), dtype=dtype, offset_factor=1)
        B = T.match_buffer(b, (lanes, terms), dtype=weight, offset_factor=1)
        C = T.match_buffer(c, (lanes,), dtype=total, offset_factor=1, scope=scope)
        with T.sblock("root"):
            T.reads(C[0:lanes], A[0:terms], B[0:lanes, 0:terms])
            T.writes(C[0:lanes])
            for i in T.serial(0, lanes):
                for k in T.serial(0, terms):
                    with T.sblock("update"):
                        vi, vk = T.axis.remap("SR", [i, k])
                        C[vi] = C[vi] + widen(A[vk]) * widen(B[vi, vk])

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (terms,), dtype=dtype, offset_factor=1)
        B = T.match_buffer(b, (lanes, terms), dtype=weight, offset_factor=1)
        C = T.match_buffer(c, (lanes,), dtype=total, offset_factor=1, scope=scope)
        with T.sblock("root"):
            T.reads(C[0:lanes], A[0:terms], B[0:lanes, 0:terms])
            T.writes(C[0:lanes])
            C[T.ramp(T.int32(0), 1, lanes)] = add(
                C.vload([0], dtype=sums),
                T.broadcast(T.reinterpret(A.vload([0], data), dtype=word), lanes),
                B.vload([0, 0], dtype=weights),
            )

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


def _register_rows(name: str) -> None:
    """Register an intrinsic that multiplies eight bytes of two rows with those of four results.

    It leaves sums as that for pixels does.
    """

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        s0, s1 = T.int32(), T.int32()
        A = T.match_buffer(a, (2, 8), dtype="int8", offset_factor=1, strides=[s0, 1])
        B = T.match_buffer(b, (4, 8), dtype="int8", offset_factor=1)
        C = T.match_buffer(
            c, (2, 4), dtype="int32", offset_factor=1, strides=[s1, 1], scope="local"
        )
        with T.sblock("root"):
            T.reads(C[0:2, 0:4], A[0:2, 0:8], B[0:4, 0:8])
            T.writes(C[0:2, 0:4])
            for i, j, k in T.grid(2, 4, 8):
                with T.sblock("update"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    C[vi, vj] = C[vi, vj] + T.cast(A[vi, vk], "int32") * T.cast(B[vj, vk], "int32")

    def multiply(sums: Any, first: Any, second: Any, weights: Any) -> Any:
        data = tirx.Shuffle([first, second], list(range(16)))
        number = T.llvm_lookup_intrinsic_id(MATRIX_INSTRUCTION)
        return T.call_llvm_pure_intrin(number, sums, data, weights, dtype="int32x4")

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def implementation(a: T.handle, b: T.handle, c: T.handle) -> None:
        s0, s1 = T.int32(), T.int32()
        A = T.match_buffer(a, (2, 8), dtype="int8", offset_factor=1, strides=[s0, 1])
        B = T.match_buffer(b, (4, 8), dtype="int8", offset_factor=1)
        C = T.match_buffer(
            c, (2, 4), dtype="int32", offset_factor=1, strides=[s1, 1], scope="local"
        )
        with T.sblock("root"):
            T.reads(C[0:2, 0:4], A[0:2, 0:8], B[0:4, 0:8])
            T.writes(C[0:2, 0:4])
            C[0, T.ramp(T.int32(0), 1, 4)] = multiply(
                C.vload([0, 0], dtype="int32x4"),
                A.vload([0, 0], dtype="int8x8"),
                A.vload([1, 0], dtype="int8x8"),
                B.vload([0, 0], dtype="int8x16"),
            )
            C[1, T.ramp(T.int32(0), 1, 4)] = multiply(
                C.vload([1, 0], dtype="int32x4"),
                A.vload([0, 0], dtype="int8x8"),
                A.vload([1, 0], dtype="int8x8"),
                B.vload([2, 0], dtype="int8x16"),
            )

    TensorIntrin.register(name, description, implementation, override=True)
