"""Mixed precision: float16 weights take half the bytes, and everything is computed in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.kernels import FAST, PLAIN, host_level, kernels_of, run, weights_of
from tests.support.tuning import conv, dense, model, relu
from tvmflow.compiler import lowering
from tvmflow.compiler.contraction.machine import cpu_model_for
from tvmflow.compiler.options import LoweringOptions
from tvmflow.compiler.schedules.rules import schedule_for_cpu
from tvmflow.graph import ir
from tvmflow.graph.ir import DataFlow
from tvmflow.targets.tvm_target import make_target

MIXED = replace(FAST, precision="mixed")
GPU = {"kind": "cuda", "arch": "sm_90", "host": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}}


def depthwise(value: Any, weight: Any) -> Any:
    channels = int(value.ty.shape[1])
    return relax.op.nn.conv2d(value, weight((channels, 1, 3, 3)), groups=channels, padding=1)


def transposed(value: Any, weight: Any) -> Any:
    return relax.op.nn.conv2d_transpose(value, weight((int(value.ty.shape[1]), 8, 2, 2)), strides=2)


def dtypes(mod: tvm.IRModule, target: dict[str, Any], options: LoweringOptions) -> set[str]:
    """Return the dtypes of the weights in a library."""
    lowered = lowering.lower(mod, make_target(target), options)
    return {str(weight.dtype) for weight in lowered.compute_weights(weights_of(mod))}


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ((1, 3, 9, 9), [conv(16, 3), relu]),
        ((1, 64, 24, 24), [conv(64), relu]),
        ((1, 16, 7, 7), [depthwise, relu]),
        ((1, 16, 5, 5), [transposed]),
        ((3, 40), [dense(20), relu]),
    ],
    ids=["conv", "tiles", "depthwise", "transposed", "dense"],
)
def test_float16_weights_give_the_results_of_float32(
    shape: tuple[int, ...], layers: list[Any]
) -> None:
    """The error is that of 11 bits; inputs, outputs and kernels are the same."""
    mod, target = model(*layers, shape=shape), host_level()
    assert dtypes(mod, target, FAST) == {"float32"}
    assert dtypes(mod, target, MIXED) == {"float16"}
    assert kernels_of(mod, target, MIXED) == kernels_of(mod, target)
    data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    [half], [plain] = run(mod, target, MIXED, data), run(mod, target, PLAIN, data)
    assert half.dtype == np.float32
    assert 0 < np.abs(half - plain).max() < np.abs(plain).max() / 2**10


def test_kernels_with_float16_weights_have_the_same_schedules() -> None:
    """No kernel falls back to another rule."""
    mod, target = model(conv(32), relu, conv(16, 1), shape=(1, 16, 12, 12)), host_level()
    cpu = cpu_model_for(target, 1)

    def rules(options: LoweringOptions) -> dict[str, str]:
        lowered = lowering.lower(mod, make_target(target), options).mod
        return schedule_for_cpu(lowered, cpu)[1]

    assert rules(MIXED) == rules(FAST)


def test_a_gpu_multiplies_in_float16() -> None:
    """Data are converted as well; sums, inputs and outputs stay float32."""
    mod = model(conv(32), relu, shape=(1, 16, 12, 12))
    lowered = lowering.lower(mod, make_target(GPU), MIXED).mod
    main = lowered["main"]
    assert dtypes(mod, GPU, MIXED) == {"float16"}
    assert [str(value.dtype.dtype) for value in (main.params[0].ty, main.ret_ty)] == ["float32"] * 2
    [name] = [name for name in ir.list_kernels(lowered) if "conv2d" in name]
    data, weights, *_ = (param.ty.dtype for param in lowered[name].params)
    assert data == weights == "float16"


def test_a_deep_model_does_not_exceed_the_stack() -> None:
    """It has more bindings than Python allows recursive calls."""
    flow = DataFlow(model(*[relu] * 1200)["main"])
    assert not any(map(flow.is_weight, flow.values))
