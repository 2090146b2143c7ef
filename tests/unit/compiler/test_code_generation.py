"""Code generation: where kernels keep their buffers, and which loops become vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
import tvm.script
from tvm import relax, tirx

from tests.support.kernels import FAST, check_alike, host_level, level
from tests.support.tuning import model
from tvmflow.compiler import lowering
from tvmflow.compiler.c_program.c_kernels import lower_kernels
from tvmflow.compiler.code_generation import build_kernels
from tvmflow.compiler.contraction.machine import cpu_model_for
from tvmflow.compiler.schedules.rules import schedule_for_cpu
from tvmflow.targets.tvm_target import make_target

ALLOCATOR = "TVMBackendAllocWorkspace"


SOURCE = """
@T.prim_func(s_tir=True)
def main(source: T.Buffer((8, {0}), "float32"), target: T.Buffer((8, {0}), "float32")):
    T.func_attr({{"tirx.noalias": True, "tirx.is_scheduled": True}})
    for row in T.parallel(8):
        with T.sblock("row"):
            local = T.sblock_alloc_buffer(({0},), scope="local")
            for column in range({0}):
                local[column] = source[row, column] + T.float32(1)
            for column in range({0}):
                target[row, column] = local[{0} - 1 - column]
"""


def make_kernel(length: int) -> tvm.IRModule:
    """A kernel that adds 1 by way of a buffer of so many numbers in each task."""
    return tvm.IRModule({"main": tvm.script.from_source(SOURCE.format(length))})


@pytest.mark.parametrize(("length", "is_allocated"), [(7, False), (1024, False), (1025, True)])
def test_small_buffers_are_on_the_stack(length: int, is_allocated: bool) -> None:
    """Up to 4 KiB a buffer costs nothing; a larger one is allocated. Both give the right numbers."""
    target = tvm.target.Target({"kind": "llvm"})
    library = build_kernels(make_kernel(length), target)
    assert (ALLOCATOR in library.inspect_source("s")) == is_allocated
    source = np.random.default_rng(0).normal(size=(8, length)).astype("float32")
    result = tvm.runtime.tensor(np.zeros_like(source))
    library["main"](tvm.runtime.tensor(source), result)
    assert np.array_equal(result.numpy(), (source + np.float32(1))[:, ::-1])


@pytest.mark.parametrize("columns", [97, 1002])
def test_rows_that_no_vector_divides_are_computed_in_vectors(columns: int) -> None:
    """Only the last numbers of a row are computed one by one; lowering narrows the variables of loops, which models have in 64 bits."""
    target = level("x86-64-v3")
    mod = model(lambda x, _: relax.op.sum(x, -1), shape=(5, columns))
    lowered = lowering.lower(mod, make_target(target), FAST).mod
    scheduled = schedule_for_cpu(lowered, cpu_model_for(target, 1)).mod
    kernels = {
        var: function.with_attr("global_symbol", str(var.name_hint))
        for var, function in scheduled.functions_items()
        if isinstance(function, tirx.PrimFunc)
    }
    llvm = tvm.target.Target(target)
    assert "T.Ramp(" in lower_kernels(kernels, llvm).script()
    assert "%ymm" in build_kernels(tvm.IRModule(kernels), llvm).inspect_source("asm")


@pytest.mark.parametrize("rows", [3, 5])
def test_activations_of_joined_rows_are_computed(rows: int) -> None:
    """Where a vector would span both parts, TVM makes none, and refuses the variables of the activation."""

    def gate(x: Any, weight: Any) -> Any:
        joined = relax.op.concat([x, weight((2, 3, 7))], axis=1)
        return relax.op.sigmoid(joined) * joined * relax.const(2.0)

    check_alike(model(gate, shape=(2, rows, 7)), host_level())


@pytest.mark.parametrize(
    "operator",
    [
        lambda left, _: relax.op.logical_not(left),
        relax.op.logical_and,
        relax.op.logical_or,
        relax.op.logical_xor,
        lambda left, right: relax.op.logical_not(relax.op.logical_or(left, right)),
        lambda left, right: relax.op.where(left, right, relax.op.logical_not(right)),
    ],
    ids=["not", "and", "or", "xor", "nor", "where"],
)
def test_vectors_of_bool_hold_0_or_1(operator: Any) -> None:
    """Conditions that a row keeps in a buffer are counted, as in a mask of padding; TVM made -2 and -1 of false and true."""

    def count(x: Any, _: Any) -> Any:
        left = relax.op.greater(x, relax.const(0.5, "float32"))
        right = relax.op.less(x, relax.const(0.25, "float32"))
        return relax.op.sum(relax.op.astype(operator(left, right), "int64"), -1)

    check_alike(model(count, shape=(5, 64)), host_level())


RAGGED = """
@T.prim_func(s_tir=True)
def main(source: T.Buffer((4, 24), "float32"), target: T.Buffer((4, 24), "float32")):
    T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
    squares = T.sblock_alloc_buffer((4, 24))
    for row, column in T.grid(4, 24):
        with T.sblock("squares"):
            i, j = T.axis.remap("SS", [row, column])
            squares[i, j] = source[i, j] * source[i, j]
    for fused in range(8):
        for lane in T.vectorized(16):
            with T.sblock("target"):
                i = T.axis.spatial(4, fused % 4)
                j = T.axis.spatial(24, fused // 4 * 16 + lane)
                T.where(fused % 8 // 4 * 16 + lane < 24)
                target[i, j] = squares[i, j] + T.float32(1)
"""


def test_conditions_of_fused_loops() -> None:
    """A condition may have a remainder by the length of a loop, as in a kernel of SEW that could not be built."""
    kernel = tvm.IRModule({"main": tvm.script.from_source(RAGGED)})
    source = np.random.default_rng(0).normal(size=(4, 24)).astype("float32")
    result = tvm.runtime.tensor(np.zeros_like(source))
    build_kernels(kernel, tvm.target.Target({"kind": "llvm"}))["main"](
        tvm.runtime.tensor(source), result
    )
    np.testing.assert_allclose(result.numpy(), source**2 + 1, rtol=1e-6)
