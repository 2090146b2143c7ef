"""Dot product instructions of CPUs as tensor intrinsics of TVM: sums of int32 plus four products of bytes each."""

from __future__ import annotations

import functools
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import Schedule, TensorIntrin
from tvm.script import tirx as T

from tvmflow.compiler import ir
from tvmflow.compiler.cpu_model import DOT_INSTRUCTIONS
from tvmflow.compiler.operators import integer
from tvmflow.compiler.schedules.blocks import Block, find_loads


def is_dot_product(block: Block) -> bool:
    """Return whether a block sums products of bytes, four by four."""
    return str(block.stmt.name_hint) == integer.NAME


def register_intrinsics() -> None:
    """Register the intrinsics that recorded schedules may name."""
    for dtype, lanes in DOT_INSTRUCTIONS:
        _load_intrinsic(dtype, lanes)


def replace_vnni() -> None:
    """Replace TVM's intrinsic for VNNI, which MetaSchedule tries: LLVM 22 rejects its operands (apache-tvm 0.27).

    TVM's own must be registered before, because it replaces none.
    """
    _register("dot_16x4_vnni", "uint8", 16, "global")


@functools.cache
def _load_intrinsic(dtype: str, lanes: int) -> str:
    """Return the name of the intrinsic for data of a dtype and a number of sums."""
    name = f"tvmflow.dot_{dtype}_{lanes}x{integer.DOT}"
    _register(name, dtype, lanes, "local")
    return name


def use_instruction(schedule: Schedule, block: Block, loop: Any, lanes: int) -> None:
    """Replace a loop over sums, and that over products within it, by one instruction."""
    dtype = str(block.stmt.reads[0].source.dtype)
    schedule.tensorize(loop, _load_intrinsic(dtype, lanes))


def expand_dot_products(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module with loops in place of the instructions, for code generators without LLVM's intrinsics."""
    expanded = ir.copy_module(mod)
    for var, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc):
            body = tvm_ffi.structural_map(function.body, (tirx.BufferStore, _expand))
            expanded[var] = tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)
    return expanded


def _expand(store: Any) -> Any:
    if ir.operator_name(store.value) != "tirx.call_llvm_pure_intrin":
        return store
    data, weights = (load.source for load in find_loads(store.value)[1:])
    sums, lane, term = store.buffer, tirx.Var("lane", "int32"), tirx.Var("term", "int32")
    product = data[term].astype("int32") * weights[lane, term].astype("int32")
    update = tirx.BufferStore(sums, sums[lane] + product, [lane])
    inner = tirx.For(term, 0, integer.DOT, tirx.ForKind.SERIAL, update)
    return tirx.For(lane, 0, sums.shape[0], tirx.ForKind.SERIAL, inner)


def _register(name: str, dtype: str, lanes: int, scope: str) -> None:
    """Register an intrinsic of TVM.

    Args:
        name: The name of the intrinsic.
        dtype: The dtype of the data.
        lanes: The number of sums.
        scope: TVM's storage scope of the sums.
    """
    instruction = DOT_INSTRUCTIONS[dtype, lanes]
    sums, data = f"int32x{lanes}", f"{dtype}x{integer.DOT * lanes}"
    weights = f"int8x{integer.DOT * lanes}"
    data_word = f"{dtype}x{integer.DOT}"

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator] # TVM has no types for it
    def description(a: T.handle, b: T.handle, c: T.handle) -> None:
        A = T.match_buffer(a, (4,), dtype=dtype, offset_factor=1)
        B = T.match_buffer(b, (lanes, 4), dtype="int8", offset_factor=1)
        C = T.match_buffer(c, (lanes,), dtype="int32", offset_factor=1, scope=scope)
        with T.sblock("root"):
            T.reads(C[0:lanes], A[0:4], B[0:lanes, 0:4])
            T.writes(C[0:lanes])
            for i in T.serial(0, lanes):
                for k in T.serial(0, 4):
                    with T.sblock("update"):
                        vi, vk = T.axis.remap("SR", [i, k])
                        C[vi] = C[vi] + T.cast(A[vk], "int32") * T.cast(B[vi, vk], "int32")

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
                T.reinterpret(
                    T.broadcast(T.reinterpret(A.vload([0], data_word), dtype="int32"), lanes),
                    dtype=data,
                ),
                B.vload([0, 0], dtype=weights),
                dtype=sums,
            )

    TensorIntrin.register(name, description, implementation, override=True)
