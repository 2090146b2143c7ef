"""Kernels, and checks of the schedules that rules give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from tvm import te

from tvmflow.compiler.code_generation import build_kernels
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.schedules import rules

Array = np.ndarray[Any, Any]


def kernel(*tensors: Any) -> tvm.IRModule:
    function = te.create_prim_func(list(tensors)).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function})


def choose(mod: tvm.IRModule, target: dict[str, Any]) -> rules.ScheduleChoice:
    cpu = CpuModel.from_target(target)
    assert cpu is not None
    choice = rules.choose_schedule(mod, cpu)
    assert choice is not None
    return choice


def check(
    mod: tvm.IRModule, rule: str, target: dict[str, Any], reference: Callable[..., Array]
) -> None:
    """Check that a kernel gets its schedule from a rule, and computes what `reference` does."""
    choice = choose(mod, target)
    assert choice.rule == rule
    library = build_kernels(choice.schedule.mod, tvm.target.Target(target))
    *inputs, output = ([int(extent) for extent in param.ty.shape] for param in mod["main"].params)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in inputs]
    result = tvm.runtime.tensor(np.full(output, np.nan, np.float32))
    library["main"](*map(tvm.runtime.tensor, arrays), result)
    expected = reference(*arrays)
    atol = max(1e-4, 2e-6 * float(np.abs(expected).max()))
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=atol)
