"""Assembly for people: instructions, constants and used labels, for every system."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tvm
from tvm import te, tirx

from tvmflow.compiler.c_program.c_kernels import make_assembly


def product() -> Any:
    """Return a scheduled kernel: y = exp(x) * 3 in a parallel loop."""
    x = te.placeholder((64, 64), name="x")
    y = te.compute((64, 64), lambda i, j: te.exp(x[i, j]) * tirx.const(3.25, "float32"), name="y")
    mod = tvm.IRModule({"main": te.create_prim_func([x, y])})
    schedule = tvm.s_tir.Schedule(mod)
    rows, columns = schedule.get_loops(schedule.get_sblock("y"))
    schedule.parallel(rows)
    schedule.vectorize(columns)
    return schedule.mod["main"].with_attr("global_symbol", "scale")


@pytest.mark.parametrize(
    ("triple", "label", "instruction"),
    [
        ("x86_64-linux-gnu", "scale:", "mulps"),
        ("x86_64-pc-windows-msvc", "scale:", "mulps"),
        ("arm64-apple-macos13", "_scale:", "fmul"),
        ("aarch64-linux-gnu", "scale:", "fmul"),
        ("wasm32-wasi", "scale:", "f32.mul"),
        ("riscv64-linux-gnu", "scale:", "__mulsf3"),
    ],
)
def test_the_code_of_a_kernel_is_all_that_is_left(
    triple: str, label: str, instruction: str
) -> None:
    """Its parallel part and its constants, too; nothing for debuggers, and no label that nothing uses."""
    target = tvm.target.Target({"kind": "llvm", "mtriple": triple})
    text = make_assembly(product(), target, is_plain_c=True)
    lines = text.splitlines()
    assert label in lines and instruction in text
    assert any("parallel_lambda" in line and line.endswith(":") for line in lines)
    assert not re.search(r"debug|DWARF|\.cfi|\.loc\b|Ltmp|func_begin|\.asciz", text)
    labels = [line[:-1] for line in lines if line.endswith(":")]
    for name in labels:
        assert f"{name}:" == label or text.count(name) > 1, name


def test_a_function_of_the_runtime_has_its_checks() -> None:
    """Libraries for TVM's runtime have kernels that take packed arguments."""
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu"})
    text = make_assembly(product(), target, is_plain_c=False)
    assert "__tvm_ffi_scale:" in text.splitlines() and "mulps" in text
