"""Kernels of float16 compute with float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tvm
from tvm import te, topi

from tests.support.kernels import LEVELS, level
from tvmflow.compiler.code_generation import build_kernels
from tvmflow.compiler.contraction.machine import CpuModel
from tvmflow.compiler.passes.float16 import promote_float16
from tvmflow.compiler.passes.vector_math import vectorize_math
from tvmflow.compiler.schedules import rules
from tvmflow.targets.presets import PRESETS

KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "softmax": topi.nn.softmax,
    "maximum of rows": lambda x: topi.max(x, -1),
    "maximum of columns": lambda x: topi.max(x, 0),
    "square root of sums": lambda x: topi.sqrt(topi.sum(topi.multiply(x, x), -1)),
    "tanh or zero": lambda x: topi.where(
        topi.greater(x, topi.full_like(x, 0.0)), topi.tanh(x), topi.full_like(x, 0.0)
    ),
    "product": lambda x: topi.matmul(x, topi.transpose(x)),
    "padding": lambda x: topi.nn.pad(x, [1, 1]),
}


def make(name: str, shape: tuple[int, int]) -> tvm.IRModule:
    x = te.placeholder(shape, "float16", name="x")
    function = te.create_prim_func([x, KERNELS[name](x)]).with_attr("global_symbol", "main")
    return tvm.IRModule({"main": function})


def build(mod: tvm.IRModule, target: dict[str, Any]) -> tvm.runtime.Module:
    cpu = CpuModel.from_target(target)
    assert cpu is not None
    choice = rules.choose_schedule(vectorize_math(promote_float16(mod)), cpu)
    assert choice is not None
    return build_kernels(choice.schedule.mod, tvm.target.Target(target))


def compute(name: str, x: np.ndarray[Any, Any], target: dict[str, Any]) -> Any:
    mod = make(name, (x.shape[0], x.shape[1]))
    shape = [int(extent) for extent in mod["main"].params[1].ty.shape]
    out = tvm.runtime.tensor(np.zeros(shape, np.float16))
    build(mod, target)["main"](tvm.runtime.tensor(x), out)
    return out.numpy()


def reference(name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    exact = x.astype(np.float64)
    powers = np.exp(exact - exact.max(-1, keepdims=True))
    results: dict[str, np.ndarray[Any, Any]] = {
        "softmax": powers / powers.sum(-1, keepdims=True),
        "maximum of rows": exact.max(-1),
        "maximum of columns": exact.max(0),
        "square root of sums": np.sqrt((exact * exact).sum(-1)),
        "tanh or zero": np.where(exact > 0, np.tanh(exact), 0),
        "product": exact @ exact.T,
        "padding": np.pad(exact, 1),
    }
    return results[name]


@pytest.mark.parametrize("mcpu", LEVELS[:2])
@pytest.mark.parametrize("name", KERNELS)
def test_results_are_rounded_once(name: str, mcpu: str) -> None:
    """Sums of 1,031 float16 values would be off by many more units in the last place."""
    x = np.random.default_rng(0).uniform(-1, 2, (7, 1031)).astype(np.float16)
    expected = reference(name, x)
    unit = np.spacing(np.maximum(np.abs(expected), 2.0**-14).astype(np.float16)).astype(np.float64)
    assert (np.abs(compute(name, x, level(mcpu)) - expected) <= 0.51 * unit).all()


@pytest.mark.parametrize("name", KERNELS)
def test_rows_that_no_vector_divides_compile_for_webassembly(name: str, tmp_path: Path) -> None:
    """LLVM does not end for vectors of float16 that it compares, and else calls a function for each number."""
    preset = PRESETS["wasm32-wasi"].tvm
    assert preset is not None
    library = build(make(name, (13, 97)), dict(preset))
    library.write_to_file(str(tmp_path / "kernel.s"), "s")
    text = (tmp_path / "kernel.s").read_text()
    assert "v128." in text


def test_what_is_only_moved_or_converted_stays_as_it_is() -> None:
    x = te.placeholder((5, 7), "float16", name="x")
    for result in (topi.transpose(x), topi.nn.pad(x, [1, 1]), topi.cast(x, "float32")):
        mod = tvm.IRModule({"main": te.create_prim_func([x, result])})
        assert promote_float16(mod)["main"].same_as(mod["main"])


def test_conversions_round_and_overflow_within_kernels() -> None:
    """A norm beyond float16 is infinite also where a fused kernel divides by it, as the model says."""
    x = te.placeholder((2, 8), "float16", name="x")
    wide = x.astype("float32")
    norm = topi.sqrt(topi.sum(topi.multiply(wide, wide), -1, keepdims=True)).astype("float16")
    function = te.create_prim_func([x, topi.divide(x, norm)]).with_attr("global_symbol", "main")
    mod = tvm.IRModule({"main": function})
    data = np.array([[3, 4, 0, 0, 0, 0, 0, 0], [60_000] * 8], np.float16)
    out = tvm.runtime.tensor(np.ones((2, 8), np.float16))
    build(mod, level(LEVELS[0]))["main"](tvm.runtime.tensor(data), out)
    expected = np.array([[0.6, 0.8, 0, 0, 0, 0, 0, 0], [0] * 8], np.float16)
    np.testing.assert_array_equal(out.numpy(), expected)
