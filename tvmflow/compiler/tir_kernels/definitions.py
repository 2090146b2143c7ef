"""TIR kernels that are written statement by statement with their loops, and need no schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.contraction.machine import PAIR_INSTRUCTIONS
from tvmflow.graph.dynamic_shapes import IrSize, divide_up, is_dynamic

# Every GPU supports blocks of this many threads.
_BLOCK_THREADS: Final = 256


@contextmanager
def define_kernel(name: str) -> Iterator[IRBuilder]:
    """Define a kernel that is not fused with others, and that no rule or search schedules."""
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": 8})
        yield builder


@contextmanager
def define_flat_kernel(
    name: str, parameters: Mapping[str, tuple[Sequence[IrSize], str]], *, has_root: bool = True
) -> Iterator[tuple[IRBuilder, list[Any]]]:
    """Define a kernel with one-dimensional parameters; yield its builder and the parameters.

    TVM looks for copies in functions of one argument, and only within blocks (`has_root`).
    """
    with define_kernel(name) as builder:
        arguments = [T.arg(name, declare_buffer(*kind)) for name, kind in parameters.items()]
        with T.sblock("root") if has_root else nullcontext():
            yield (
                builder,
                [
                    T.buffer_proxy(T.decl_buffer((math.prod(shape),), dtype, data=argument.data))
                    for argument, (shape, dtype) in zip(arguments, parameters.values(), strict=True)
                ],
            )


@contextmanager
def when(condition: Any) -> Iterator[None]:
    """Emit statements that run under a condition, or always if it is True."""
    if condition is True:
        yield
        return
    with T.If(condition), T.Then():
        yield


def if_else(condition: Any, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Emit an If; `then` and `otherwise` emit its branches."""
    with T.If(condition):
        with T.Then():
            then()
        with T.Else():
            otherwise()


ROUNDING: Final = float(3 << 22)
"""The sum of this number and a value below 2²² has the nearest integer in its lowest bits."""
ROUNDING_BITS: Final = 0x4B400000
"""The bits of `ROUNDING` as float32."""


def round_to_integer(number: Any) -> Any:
    """Return the int32 nearest to a float32 value below 2²²; ties round to even."""
    bits = tirx.reinterpret("int32", number + tirx.const(ROUNDING, "float32"))
    return bits - ROUNDING_BITS


def call_llvm(instruction: str, dtype: str, *operands: Any) -> Any:
    """Return the call of an LLVM intrinsic."""
    number = T.llvm_lookup_intrinsic_id(instruction)
    return T.call_llvm_pure_intrin(number, *operands, dtype=dtype)


def add_pair_products(accumulators: Any, data: Any, weights: Any, lanes: int) -> Any:
    """Return int32 accumulators plus four products each, of 8-bit data and 7-bit weights, via int16."""
    instructions = PAIR_INSTRUCTIONS[lanes]
    pairs = call_llvm(instructions.multiply, f"int16x{2 * lanes}", data, weights)
    ones = tirx.Broadcast(tirx.const(1, "int16"), 2 * lanes)
    return accumulators + call_llvm(instructions.promote, f"int32x{lanes}", pairs, ones)


def declare_buffer(shape: Sequence[IrSize], dtype: str) -> Any:
    """Return the declaration of a buffer parameter, with int64 sizes."""
    return T.Buffer(tuple(n if is_dynamic(n) else T.int64(n) for n in shape), dtype)


@contextmanager
def launch_threads(*extents: IrSize) -> Iterator[list[Any]]:
    """Emit a launch on a GPU with a thread for each position of a grid; yield the position."""
    count = math.prod(extents)
    threads = _BLOCK_THREADS if is_dynamic(count) else min(count, _BLOCK_THREADS)
    with (
        T.thread_binding(divide_up(count, threads), thread="blockIdx.x") as block,
        T.thread_binding(threads, thread="threadIdx.x") as thread,
    ):
        index = block * threads + thread
        is_whole = not is_dynamic(count) and count % threads == 0
        with when(is_whole or index < count):
            position: list[Any] = []
            for extent in reversed(extents):
                position.insert(0, index % extent)
                index = index // extent
            yield position
