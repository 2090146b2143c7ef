"""int8 and bfloat16 dot product instructions of CPUs, as tensor intrinsics of TVM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import tvm
from tvm import tirx
from tvm.s_tir import Schedule, TensorIntrin
from tvm.script import tirx as T

from tvmflow.compiler.contraction.machine import (
    BFLOAT16_INSTRUCTIONS,
    DOT_INSTRUCTIONS,
    MATRIX_INSTRUCTION,
    PAIR_INSTRUCTIONS,
    CpuModel,
)
from tvmflow.compiler.schedules.blocks import Block, find_loads
from tvmflow.compiler.tir_kernels.blocked import (
    BFLOAT16,
    DEPTHWISE,
    INTEGERS,
    MATRICES,
    PAIRS,
    PRODUCTS,
    ROWS,
    Products,
)
from tvmflow.compiler.tir_kernels.definitions import add_pair_products, call_llvm
from tvmflow.graph import ir

_IMPORT: Final = "pragma_import_llvm"
"""TVM's annotation of a loop that calls functions written in LLVM IR."""


def find_products(block: Block) -> Products | None:
    """Return the kind of dot product that a block computes; None for other blocks."""
    return PRODUCTS.get(str(block.stmt.name_hint))


def register_intrinsics() -> None:
    """Register the intrinsics that recorded schedules may name."""
    for dtype, lanes in DOT_INSTRUCTIONS:
        _load_intrinsic(dtype, lanes)
    for lanes in PAIR_INSTRUCTIONS:
        _load_pair_intrinsic(lanes)
    for load in _LOADERS.values():
        load()
    for _, lanes in BFLOAT16_INSTRUCTIONS:
        _load_bfloat16_intrinsic(lanes)


def replace_vnni() -> None:
    """Replace TVM's intrinsic for VNNI, which MetaSchedule tries: LLVM 22 rejects its operands.

    TVM's own must be registered before, because TVM's registration does not override another (apache-tvm 0.27).
    """
    _register_bytes("dot_16x4_vnni", "uint8", 16, "global")


@functools.cache
def _load_intrinsic(dtype: str, lanes: int) -> str:
    """Return the intrinsic's name for the dtype of data and the number of accumulators (`lanes`)."""
    return _register_bytes(f"tvmflow.dot_{dtype}_{lanes}x{INTEGERS.terms}", dtype, lanes, "local")


@functools.cache
def _load_pair_intrinsic(lanes: int) -> str:
    """Return the intrinsic's name for weights from -64 to 64 and `lanes` accumulators."""

    def add(accumulators: Any, words: Any, weights: Any) -> Any:
        data = tirx.reinterpret(f"uint8x{4 * lanes}", words)
        return add_pair_products(accumulators, data, weights, lanes)

    name = f"tvmflow.narrow_dot_uint8_{lanes}x{INTEGERS.terms}"
    return _register_words(name, INTEGERS, ("uint8", "int8", "int32"), lanes, add)


@functools.cache
def _load_pairs_intrinsic() -> str:
    """Return the name of the intrinsic that adds two int8 products to each of four accumulators."""

    def add(accumulators: Any, words: Any, weights: Any) -> Any:
        data = tirx.reinterpret("int8x8", words)
        products = call_llvm("llvm.aarch64.neon.smull.v8i16", "int16x8", weights, data)
        return accumulators + call_llvm("llvm.aarch64.neon.saddlp.v4i32.v8i16", "int32x4", products)

    name = f"tvmflow.dot_int8_4x{PAIRS.terms}"
    return _register_words(name, PAIRS, ("int8", "int8", "int32"), 4, add)


@functools.cache
def _load_depthwise_intrinsic() -> str:
    """Return the name of the intrinsic of four channels, four pixels and four kernel positions."""
    order = [4 * term + lane for lane in range(4) for term in range(4)]

    def compute(data: Any, weights: Any, accumulators: Any) -> None:
        kernel_row = weights.vload([0, 0], dtype="int8x16")
        factors = tirx.Shuffle([data.vload([0, 0], dtype="int8x16")], order)
        before = accumulators.vload([0], dtype="int32x4")
        value = call_llvm(DOT_INSTRUCTIONS["int8", 4], "int32x4", before, kernel_row, factors)
        T.buffer_store(accumulators, value, [T.ramp(T.int32(0), 1, 4)])

    operands = (
        _Operand((4, 4), "int8", lambda lane, term: (term, lane)),
        _Operand((4, 4), "int8", lambda lane, term: (lane, term)),
        _Operand((4,), "int32", lambda lane, term: (lane,)),
    )
    return _register(f"tvmflow.dot_taps_4x{DEPTHWISE.terms}", operands, (4, 4), compute)


@functools.cache
def _load_matrices_intrinsic() -> str:
    """Return the name of the intrinsic that multiplies 2×8 (pixels) and 8×4 (results) int8 matrices.

    It stores the first two results of both pixels, then the last two. The pass `order_matrix_accumulators` adapts
    other accesses to the accumulators.
    """

    def join(first: Any, second: Any) -> Any:
        halves = [tirx.reinterpret("int32x2", half) for half in (first, second)]
        return tirx.reinterpret("int8x16", tirx.Shuffle(halves, [0, 2, 1, 3]))

    operands = (
        _Operand((2, 1, 2, 4), "int8", lambda i, j, h, k: (h, 0, i, k), (None, None, 4, 1)),
        _Operand((4, 2, 4), "int8", lambda i, j, h, k: (j, h, k)),
        _Operand((2, 4), "int32", lambda i, j, h, k: (i, j)),
    )
    return _register_matrices("tvmflow.dot_int8_2x4x8", operands, (2, 4, 2, 4), join)


@functools.cache
def _load_rows_intrinsic() -> str:
    """Return the name of the same intrinsic for rows of a matrix, whose bytes are contiguous."""
    operands = (
        _Operand((2, 8), "int8", lambda i, j, k: (i, k), (None, 1)),
        _Operand((4, 8), "int8", lambda i, j, k: (j, k)),
        _Operand((2, 4), "int32", lambda i, j, k: (i, j), (None, 1)),
    )

    def join(first: Any, second: Any) -> Any:
        return tirx.Shuffle([first, second], list(range(16)))

    return _register_matrices("tvmflow.dot_int8_rows_2x4x8", operands, (2, 4, 8), join)


@functools.cache
def _load_bfloat16_intrinsic(lanes: int) -> str:
    """Return the intrinsic's name for bfloat16 products with `lanes` float32 accumulators."""

    def add(accumulators: Any, words: Any, weights: Any) -> Any:
        operands = (accumulators, words, tirx.reinterpret(f"int32x{lanes}", weights))
        return T.call_pure_extern(f"float32x{lanes}", _bfloat16_function(lanes), *operands)

    name, dtypes = f"tvmflow.dot_bfloat16_{lanes}x{BFLOAT16.terms}", ("uint16", "uint16", "float32")
    return _register_words(name, BFLOAT16, dtypes, lanes, add)


_LOADERS: Final = {
    PAIRS: _load_pairs_intrinsic,
    DEPTHWISE: _load_depthwise_intrinsic,
    MATRICES: _load_matrices_intrinsic,
    ROWS: _load_rows_intrinsic,
}
"""The kinds of dot products with a single intrinsic."""


def use_instruction(
    schedule: Schedule, block: Block, outermost: Any, loop: Any, lanes: int, cpu: CpuModel
) -> None:
    """Replace a loop over accumulators, and the inner loop over products, by one instruction.

    `outermost` is a loop around all of them. For matrix instructions, `loop` is the loop over two points.
    """
    products = find_products(block)
    if products is BFLOAT16:
        instruction = BFLOAT16_INSTRUCTIONS[cpu.bfloat16_arch, lanes]
        schedule.annotate(outermost, _IMPORT, _define_bfloat16_dot(instruction, lanes))
        name = _load_bfloat16_intrinsic(lanes)
    elif products in _LOADERS:
        name = _LOADERS[products]()
    elif cpu.has_pair_dots:
        name = _load_pair_intrinsic(lanes)
    else:
        name = _load_intrinsic(str(block.stmt.reads[0].source.dtype), lanes)
    schedule.tensorize(loop, name)


def _define_bfloat16_dot(instruction: str, lanes: int) -> str:
    """Return the dot product as a function in LLVM IR, because TVM has no type for its operands."""
    floats, words, bfloats = (f"<{lanes} x float>", f"<{lanes} x i32>", f"<{2 * lanes} x bfloat>")
    return f"""
declare {floats} @{instruction}({floats}, {bfloats}, {bfloats})

define {floats} @{_bfloat16_function(lanes)}({floats} %sums, {words} %data, {words} %weights) alwaysinline {{
  %x = bitcast {words} %data to {bfloats}
  %w = bitcast {words} %weights to {bfloats}
  %result = call {floats} @{instruction}({floats} %sums, {bfloats} %x, {bfloats} %w)
  ret {floats} %result
}}
"""


def _bfloat16_function(lanes: int) -> str:
    return f"tvmflow_dot_bfloat16_{lanes}"


def expand_dot_products(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module with loops in place of LLVM's intrinsics, for other code generators."""
    return ir.rewrite_kernels(
        mod, lambda kernel: ir.rewrite_nodes(kernel, tirx.BufferStore, _expand)
    )


def _expand(store: Any) -> Any:
    calls = map(ir.operator_name, ir.find_nodes(store.value, tvm.ir.Call))
    if "tirx.call_llvm_pure_intrin" not in calls:
        return store
    operands = {str(load.source.name): load.source for load in find_loads(store.value)}
    if "A" not in operands:
        raise ValueError("block-quantized weights need the instructions of the target CPU")
    data, weights = operands["A"], operands["B"]
    accumulators, lane, term = store.buffer, tirx.Var("lane", "int32"), tirx.Var("term", "int32")
    lanes, *terms = weights.shape
    loops = [(lane, lanes), (term, terms[-1])]
    position, weight = [lane], weights[lane, term]
    if len(terms) > 1:
        # matrices: the terms of a point are in two blocks
        point, half = store.indices[0], tirx.Var("half", "int32")
        loops.append((half, terms[0]))
        position, weight = [point, lane], weights[lane, half, term]
        value = data[half, 0, point, term]
    elif len(accumulators.shape) > 1:
        # rows of a matrix
        point = store.indices[0]
        position, value = [point, lane], data[point, term]
    else:
        # depthwise convolutions: each lane has its own data
        value = data[term] if len(data.shape) == 1 else data[term, lane]
    product = value.astype("int32") * weight.astype("int32")
    body: Any = tirx.BufferStore(accumulators, accumulators[tuple(position)] + product, position)
    for var, extent in reversed(loops):
        body = tirx.For(var, 0, extent, tirx.ForKind.SERIAL, body)
    return body


# ---------------------------------------------------------------- registering


class _Operand(NamedTuple):
    """A buffer of an intrinsic: data, weights or accumulators.

    `offset_of` maps the loop variables to the indices of an element. A stride of None accepts any stride; `strides` is
    empty for a compact buffer.
    """

    shape: tuple[int, ...]
    dtype: str
    offset_of: Callable[..., tuple[Any, ...]]
    strides: tuple[int | None, ...] = ()

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(0, extent) for extent in self.shape)

    def layout(self) -> dict[str, Any]:
        """Return the buffer's arguments for `T.match_buffer`."""
        strides = [T.int32() if stride is None else stride for stride in self.strides]
        return {"dtype": self.dtype, "offset_factor": 1, "strides": strides or None}


def _register(
    name: str,
    operands: tuple[_Operand, _Operand, _Operand],
    extents: tuple[int, ...],
    compute: Callable[[Any, Any, Any], None],
    promote: Callable[[Any], Any] = INTEGERS.to_accumulator,
    scope: str = "local",
) -> str:
    """Register an intrinsic of TVM for loops over products of data and weights, and return its name.

    The first loops are over the axes of the accumulators, the others are reductions. `compute` emits the instruction
    for the three buffers. `promote` converts a value to the dtype of accumulators.
    """
    data, weights, accumulators = operands
    kinds = "".join("RS"[axis < len(accumulators.shape)] for axis in range(len(extents)))

    def describe(a: Any, b: Any, c: Any) -> None:
        with T.grid(*extents) as loops, T.sblock("update"):
            axes = T.axis.remap(kinds, list(loops))
            product = promote(a[data.offset_of(*axes)]) * promote(b[weights.offset_of(*axes)])
            own = accumulators.offset_of(*axes)
            T.buffer_store(c, c[own] + product, own)

    def define(body: Callable[[Any, Any, Any], None]) -> Any:
        @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
        def function(a: T.handle, b: T.handle, c: T.handle) -> None:
            A = T.match_buffer(a, data.shape, **data.layout())
            B = T.match_buffer(b, weights.shape, **weights.layout())
            C = T.match_buffer(c, accumulators.shape, scope=scope, **accumulators.layout())
            with T.sblock("root"):
                T.reads(C[accumulators.region], A[data.region], B[weights.region])
                T.writes(C[accumulators.region])
                body(A, B, C)

        return function

    TensorIntrin.register(name, define(describe), define(compute), override=True)
    return name


def _register_words(
    name: str,
    products: Products,
    dtypes: tuple[str, str, str],
    lanes: int,
    add: Callable[[Any, Any, Any], Any],
    scope: str = "local",
) -> str:
    """Register an intrinsic for dot products of one data word with each lane's weights; return its name.

    `add` returns the new accumulators, given the old ones, the data as the same word in each lane, and the weights.
    `dtypes` are the dtypes of data, weights and accumulators.
    """
    terms, (dtype, weight, total) = products.terms, dtypes
    word = f"int{terms * tvm.DataType(dtype).bits}"

    def compute(data: Any, weights: Any, accumulators: Any) -> None:
        values = data.vload([0], dtype=f"{dtype}x{terms}")
        value = add(
            accumulators.vload([0], dtype=f"{total}x{lanes}"),
            T.broadcast(tirx.reinterpret(word, values), lanes),
            weights.vload([0, 0], dtype=f"{weight}x{terms * lanes}"),
        )
        T.buffer_store(accumulators, value, [T.ramp(T.int32(0), 1, lanes)])

    operands = (
        _Operand((terms,), dtype, lambda lane, term: (term,)),
        _Operand((lanes, terms), weight, lambda lane, term: (lane, term)),
        _Operand((lanes,), total, lambda lane, term: (lane,)),
    )
    return _register(name, operands, (lanes, terms), compute, products.to_accumulator, scope)


def _register_bytes(name: str, dtype: str, lanes: int, scope: str) -> str:
    """Register an intrinsic of one instruction that adds four int8 products to each accumulator."""

    def add(accumulators: Any, words: Any, weights: Any) -> Any:
        data = tirx.reinterpret(f"{dtype}x{INTEGERS.terms * lanes}", words)
        # by-element instructions select a lane of their last operand
        factors = (weights, data) if dtype == "int8" else (data, weights)
        return call_llvm(DOT_INSTRUCTIONS[dtype, lanes], f"int32x{lanes}", accumulators, *factors)

    return _register_words(name, INTEGERS, (dtype, "int8", "int32"), lanes, add, scope)


def _register_matrices(
    name: str,
    operands: tuple[_Operand, _Operand, _Operand],
    extents: tuple[int, ...],
    join: Callable[[Any, Any], Any],
) -> str:
    """Register an intrinsic that multiplies int8 matrices of 2×8 (data) and 8×4 (weights).

    `join` makes the instruction's operand from the eight bytes of each row of data.
    """

    def compute(data: Any, weights: Any, accumulators: Any) -> None:
        def load(buffer: Any, first: int, dtype: str) -> Any:
            return buffer.vload([first] + [0] * (len(buffer.shape) - 1), dtype=dtype)

        for half in range(2):
            value = call_llvm(
                MATRIX_INSTRUCTION,
                "int32x4",
                load(accumulators, half, "int32x4"),
                join(load(data, 0, "int8x8"), load(data, 1, "int8x8")),
                load(weights, 2 * half, "int8x16"),
            )
            T.buffer_store(accumulators, value, [half, T.ramp(T.int32(0), 1, 4)])

    return _register(name, operands, extents, compute)
