"""The steps of a lowered model, and the models that need TVM's runtime."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te

from tvmflow.compiler.c_program import c_kernels, compile_program
from tvmflow.compiler.c_program.program import KernelCall, read_program
from tvmflow.compiler.lowering import ScheduledModel


def make_copies(*shapes: tuple[int, ...]) -> tvm.IRModule:
    """A model that copies the first elements of its input to each of these shapes."""
    builder = relax.BlockBuilder()
    data = relax.Var("data", relax.TensorType((1, 1, 4), "float32"))
    with builder.function("main", [data], attrs={"num_input": 1}):
        value = data
        for channels in shapes:
            value = builder.emit_te(
                lambda x, shape=channels: te.compute(
                    shape, lambda n, c, w: x[n, (c * shape[2] + w) // 4, (c * shape[2] + w) % 4]
                ),
                value,
            )
            value = builder.emit_te(lambda x: te.compute(x.shape, lambda *i: x(*i) + 1), value)
        builder.emit_func_output(value)
    return builder.get()


def test_a_copy_of_the_first_elements_is_no_view() -> None:
    """It has the pattern of a reshape, but its result is smaller than what it reads."""
    whole = read_program(make_copies((1, 4, 1)), [])
    assert [len(step.tensors) for step in whole.steps if isinstance(step, KernelCall)] == [2]
    part = read_program(make_copies((1, 3, 1)), [])
    assert [len(step.tensors) for step in part.steps if isinstance(step, KernelCall)] == [2, 2]
    assert [output.bytes for output in part.outputs] == [3 * np.dtype("float32").itemsize]


def test_a_model_that_computes_nothing_has_objects(tmp_path: Path) -> None:
    """Its input is its output, and there is no kernel."""
    builder = relax.BlockBuilder()
    data = relax.Var("data", relax.TensorType((4,), "float32"))
    with builder.function("main", [data], attrs={"num_input": 1}):
        builder.emit_func_output(data)
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu"})
    compile_program(ScheduledModel(builder.get(), [], target), "net_", tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["constants.o", "kernels0.o", "program.c"]
    assert "memcpy(out[0], in[0], 16u);" in (tmp_path / "program.c").read_text()


def test_groups_of_kernels_are_lowered_beside_the_compilation_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No core waits until all kernels are lowered: a thread of the pool takes a group to its object."""
    steps: list[tuple[str, tuple[str, ...], str]] = []

    def observe(name: str, names: tuple[str, ...]) -> None:
        steps.append((name, names, threading.current_thread().name))

    lower, compile_group = c_kernels.lower_kernels, c_kernels.compile_kernels

    def lower_group(functions: Any, *rest: Any) -> tvm.IRModule:
        observe("lower", tuple(var.name_hint for var in functions))
        return lower(functions, *rest)

    def compile_lowered(mod: tvm.IRModule, *rest: Any) -> None:
        observe("compile", tuple(var.name_hint for var in mod.get_global_vars()))
        compile_group(mod, *rest)

    monkeypatch.setattr(c_kernels, "lower_kernels", lower_group)
    monkeypatch.setattr(c_kernels, "compile_kernels", compile_lowered)
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu"})
    compile_program(ScheduledModel(make_copies((1, 3, 1), (1, 2, 1)), [], target), "net_", tmp_path)
    lowered = [(names, thread) for name, names, thread in steps if name == "lower"]
    assert len(lowered) == len(list(tmp_path.glob("kernels*.o"))) == 4
    assert all(len(names) == 1 for names, _ in lowered)
    assert threading.main_thread().name not in {thread for _, thread in lowered}
    assert sorted(lowered) == sorted(row[1:] for row in steps if row[0] == "compile")
