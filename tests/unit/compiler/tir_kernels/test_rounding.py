"""Quantization divides without divisions: to the bit as a division rounds."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import te

from tests.support import onnx_models
from tests.support.kernels import DOT_TARGETS, FAST, LEVELS_HERE, dot_target, level
from tvmflow.compiler import lowering
from tvmflow.compiler.code_generation import build_kernels
from tvmflow.compiler.contraction.machine import CpuModel, cpu_model_for
from tvmflow.compiler.passes import quantization
from tvmflow.compiler.schedules.rules import schedule_for_cpu
from tvmflow.graph.ir import DataFlow, as_call
from tvmflow.targets.tvm_target import make_target

COUNT: Final = 4096


def draw(scale: Any, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return numbers half of which are halfway between two multiples of the scale, or next to that."""
    halves: Any = (random.integers(-70000, 70000, COUNT) + 0.5) * np.float64(scale)
    halves = np.where(random.integers(0, 2, COUNT), halves, np.fmod(halves, 256 * scale))
    numbers: Any = halves.astype(np.float32)
    towards = np.float32(random.choice([-np.inf, np.inf], COUNT))
    numbers = np.where(random.integers(0, 2, COUNT), numbers, np.nextafter(numbers, towards))
    edges: list[Any] = [0.0, -0.0, np.inf, -np.inf, 1e-45, 3e38, -3e38]
    numbers[: len(edges)] = edges
    return np.asarray(numbers, np.float32)


def compute(kernel: Any, data: np.ndarray[Any, Any], dtype: str, target: dict[str, Any]) -> Any:
    """Return what a tensor expression computes of data, with the default schedule."""
    x = te.placeholder(data.shape, "float32", "x")
    mod = tvm.IRModule({"main": te.create_prim_func([x, kernel([x])])})
    scheduled = schedule_for_cpu(mod, cpu_model_for(target, 1)).mod
    result = tvm.runtime.tensor(np.zeros(data.shape, dtype))
    library = build_kernels(scheduled, tvm.target.Target(target))
    library["main"](tvm.runtime.tensor(data), result)
    return result.numpy()


@pytest.mark.parametrize("mcpu", LEVELS_HERE)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_quantization_rounds_as_a_division(dtype: str, mcpu: str) -> None:
    """Halves go to even numbers, infinities to the limits; without fused instructions it does divide."""
    target, random = level(mcpu), np.random.default_rng(len(mcpu) + len(dtype))
    cpu = CpuModel.from_target(target)
    assert cpu is not None and cpu.has_fma == (mcpu != "x86-64-v2")
    limits = np.iinfo(dtype)
    for scale in np.exp(random.uniform(-20, 5, 6)).astype(np.float32):
        data = draw(scale, random)
        zero = int(random.integers(limits.min, limits.max + 1))
        with np.errstate(over="ignore"):
            multiples = np.rint(data / scale)
        expected = np.clip(multiples.astype(np.float64) + zero, limits.min, limits.max)
        rounding = quantization.Rounding(
            float(scale), zero, dtype, has_fma=cpu.has_fma, by_reciprocal=False
        )
        quantize = functools.partial(quantization.quantize, rounding=rounding)
        fake_quantize = functools.partial(quantization.fake_quantize, rounding=rounding)
        assert np.array_equal(compute(quantize, data, dtype, target), expected.astype(dtype))
        rounded = np.float32(expected - zero) * scale
        assert np.array_equal(compute(fake_quantize, data, "float32", target), rounded)


@pytest.mark.parametrize("zero", [3, -4])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_products_with_reciprocals_round_to_the_nearest(dtype: str, zero: int) -> None:
    """They are off by one where the quotient is next to a half alone, and go to the limits of the dtype."""
    target, random = level("x86-64-v3"), np.random.default_rng(zero % 256)
    limits = np.iinfo(dtype)
    zero = max(zero, limits.min)
    for scale in np.array([0.25, 0.0173, 3.1e-7, 900], np.float32):
        data = draw(scale, random)
        quotients = np.clip(data.astype(np.float64) / scale, -1e9, 1e9)
        expected = np.clip(np.rint(quotients) + zero, limits.min, limits.max)
        rounding = quantization.Rounding(
            float(scale), zero, dtype, has_fma=True, by_reciprocal=True
        )
        quantize = functools.partial(quantization.quantize, rounding=rounding)
        result = compute(quantize, data, dtype, target).astype(np.float64)
        fraction = np.abs(np.fmod(quotients, 1))
        is_half = np.abs(fraction - 0.5) <= np.abs(quotients) * 2**-22
        off = np.abs(result - expected)
        # scales that are powers of 2 have exact quotients, whose halves are even
        assert not off[~is_half].any() and (scale != 0.25 or not off.any())
        assert off.max() <= 1
        fake_quantize = functools.partial(quantization.fake_quantize, rounding=rounding)
        assert np.array_equal(
            compute(fake_quantize, data, "float32", target), np.float32(result - zero) * scale
        )


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("flag", DOT_TARGETS)
def test_sums_read_bytes_of_another_convolution(flag: str, is_first: bool, tmp_path: Path) -> None:
    """Where a block of a residual network has a convolution in both branches, neither writes float32 between kernels."""
    node = helper.make_node
    branches = ["main", "skip"] if is_first else ["skip", "main"]
    nodes = [
        node("Conv", ["x", "w"], ["skip"]),
        node("Conv", ["x", "v"], ["inner"]),
        node("Conv", ["inner", "w"], ["main"]),
        node("Add", branches, ["sum"]),
        node("Relu", ["sum"], ["last"]),
        node("Conv", ["last", "v"], ["y"]),
    ]
    weights = {
        "w": onnx_models.draw(32, 32, 1, 1, seed=1),
        "v": onnx_models.draw(32, 32, 1, 1, seed=2),
    }
    data = onnx_models.value("x", (1, 32, 12, 12))
    made = onnx_models.model(nodes, [data], [onnx_models.value("y", None)], weights)
    quantized = onnx_models.quantized(made, tmp_path, signed=False, per_channel=True)
    loaded = onnx_models.load(quantized, tmp_path, {"x": onnx_models.draw(1, 32, 12, 12)})
    lowered = lowering.lower(loaded.mod, make_target(dot_target(flag)), FAST).mod
    calls = [
        as_call(value, "relax.call_tir") for value in DataFlow(lowered["main"]).values.values()
    ]
    dtypes = [str(call.ty_args[0].dtype) for call in calls if call is not None]
    # the data, two kernels before the sum, and that of the sum
    assert dtypes[:4] == ["uint8"] * 4
