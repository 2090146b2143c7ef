"""Kernels of products with block-quantized weights have the instructions that bandwidth of memory needs."""

from __future__ import annotations

import pytest
import tvm

from tvmflow.compiler.code_generation import build_kernels
from tvmflow.compiler.contraction.machine import cpu_model_for, list_features
from tvmflow.compiler.options import SCHEDULES_VERSION
from tvmflow.compiler.tir_kernels.block_quantized import BlockQuantizedMatmul, Machine, make_kernel

X86 = "x86_64-linux-gnu"
ARM = "aarch64-linux-gnu"


def assemble(triple: str, mcpu: str, rows: int) -> str:
    """Return the assembly of a product of float data with weights of 4 bits in groups of 32."""
    attributes = {"kind": "llvm", "mtriple": triple, "mcpu": mcpu, "num-cores": 2}
    target = tvm.target.Target(attributes)
    cpu = cpu_model_for(attributes, SCHEDULES_VERSION)
    assert cpu is not None
    machine = Machine.of(cpu, list_features(target))
    product = BlockQuantizedMatmul(rows=rows, depth=128, columns=72, bits=4, group=32, zero=8)
    kernel = make_kernel(product, machine, rounds_data=False)
    mod = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    assembly: str = build_kernels(mod, target).inspect_source("asm")
    return assembly


@pytest.mark.parametrize("mcpu", ["x86-64-v2", "x86-64-v3", "skylake-avx512"])
def test_a_single_row_is_multiplied_as_bytes_without_dot_products(mcpu: str) -> None:
    """Several rows share the conversion of weights to float32."""
    assert "pmaddubsw" in assemble(X86, mcpu, 1)
    assert "pmaddubsw" not in assemble(X86, mcpu, 3)


@pytest.mark.parametrize(
    ("triple", "mcpu", "instruction"),
    [
        (X86, "x86-64-v3", "pmaddubsw"),
        (X86, "znver4", "vpdpbusd"),
        (ARM, "neoverse-n1", "sdot"),
        (ARM, "cortex-a72", "fmla"),
    ],
)
def test_weights_are_prefetched_on_x86(triple: str, mcpu: str, instruction: str) -> None:
    assembly = assemble(triple, mcpu, 1)
    assert instruction in assembly
    assert ("prefetcht0" in assembly) == (triple == X86)
    assert "prfm" not in assembly
