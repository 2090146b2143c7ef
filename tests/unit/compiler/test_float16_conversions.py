"""Conversions of float16 on CPUs without instructions for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import te

from tests.support.kernels import level
from tvmflow.compiler.code_generation import build_kernels
from tvmflow.compiler.contraction.machine import CpuModel, converts_float16
from tvmflow.compiler.schedules import rules

WITHOUT_F16C = "x86-64-v2"


def convert(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return what a kernel makes of numbers that it converts, most of them in vectors."""
    target = level(WITHOUT_F16C)
    cpu = CpuModel.from_target(target)
    assert cpu is not None
    x = te.placeholder(values.shape, str(values.dtype), name="x")
    function = te.create_prim_func([x, te.compute(values.shape, lambda i: x[i].astype(dtype))])
    kernel = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    choice = rules.choose_schedule(kernel, cpu)
    assert choice is not None
    library = build_kernels(choice.schedule.mod, tvm.target.Target(target))
    out = tvm.runtime.tensor(np.zeros(values.shape, dtype))
    library["main"](tvm.runtime.tensor(values), out)
    result: np.ndarray[Any, Any] = out.numpy()
    return result


def test_every_float16_number_is_widened_exactly() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    widened = convert(values, "float32")
    expected = values.astype(np.float32)
    is_nan = np.isnan(expected)
    assert np.isnan(widened[is_nan]).all()
    np.testing.assert_array_equal(
        widened[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32)
    )


def test_float32_numbers_are_rounded_to_the_nearest_float16_number() -> None:
    """Those between two numbers to the even one; below the smallest number, above the largest, infinities and NaN."""
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (finite[1:] + finite[:-1]) / 2
    near = [np.nextafter(middles, np.float32(way)) for way in (-np.inf, np.inf)]
    bits = np.random.default_rng(0).integers(0, 1 << 32, 50_001, dtype=np.uint32)
    limits = [0, 65504, 65519.996, 65520, 1e9, np.inf, np.nan, 1e-45, 2.0**-25, 2.0**-26]
    ends = np.array(limits, np.float32)
    positive = np.concatenate([finite, middles, *near, ends])
    values = np.concatenate([positive, -positive, bits.view(np.float32)])
    rounded = convert(values, "float16")
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    is_nan = np.isnan(expected)
    assert np.isnan(rounded[is_nan]).all()
    np.testing.assert_array_equal(
        rounded[~is_nan].view(np.uint16), expected[~is_nan].view(np.uint16)
    )


def test_cpus_that_convert_float16_have_f16c_or_are_aarch64() -> None:
    def converts(**attributes: Any) -> bool:
        return converts_float16(tvm.target.Target({"kind": "llvm", **attributes}))

    assert converts(mtriple="x86_64-linux-gnu", mcpu="x86-64-v3")
    assert converts(mtriple="aarch64-linux-gnu", mcpu="cortex-a53")
    assert not converts(mtriple="x86_64-linux-gnu", mcpu=WITHOUT_F16C)
    assert not converts(mtriple="wasm32-wasi", mcpu="generic", mattr=["+simd128"])
