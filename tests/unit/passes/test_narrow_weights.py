"""Weights of float16: half the bytes, everything computed in float32, nothing else changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.kernels import FAST, PLAIN, host_level, kernels_of, run, weights_of
from tests.support.tuning import conv, dense, model, relu
from tvmflow import schedules
from tvmflow.passes._function import Facts
from tvmflow.stages import _lowering

MIXED = {**FAST, "precision": "mixed"}
GPU = {"kind": "cuda", "arch": "sm_90", "host": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}}


def depthwise(value: Any, weight: Any) -> Any:
    channels = int(value.ty.shape[1])
    return relax.op.nn.conv2d(value, weight((channels, 1, 3, 3)), groups=channels, padding=1)


def transposed(value: Any, weight: Any) -> Any:
    return relax.op.nn.conv2d_transpose(value, weight((int(value.ty.shape[1]), 8, 2, 2)), strides=2)


def dtypes(mod: tvm.IRModule, target: dict[str, Any], kernels: dict[str, Any]) -> set[str]:
    """Those of the weights in a library."""
    made = _lowering.make_target(target)
    return {str(each.dtype) for each in _lowering.fold_weights(mod, weights_of(mod), made, kernels)}


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
def test_weights_of_float16_give_what_those_of_float32_do(
    shape: tuple[int, ...], layers: list[Any]
) -> None:
    """Within the 11 bits that a weight has; inputs, outputs and kernels are the same."""
    mod, target = model(*layers, shape=shape), host_level()
    assert dtypes(mod, target, FAST) == {"float32"}
    assert dtypes(mod, target, MIXED) == {"float16"}
    assert kernels_of(mod, target, MIXED) == kernels_of(mod, target)
    data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    [half], [plain] = run(mod, target, MIXED, data), run(mod, target, PLAIN, data)
    assert half.dtype == np.float32
    assert 0 < np.abs(half - plain).max() < np.abs(plain).max() / 2**10


def test_kernels_with_weights_of_float16_have_the_same_schedules() -> None:
    """Nothing falls back to loops one by one."""
    mod, target = model(conv(32), relu, conv(16, 1), shape=(1, 16, 12, 12)), host_level()
    machine = schedules.machine_of(target, 1)

    def roads(kernels: dict[str, Any]) -> dict[str, str]:
        lowered = _lowering.lower(mod, _lowering.make_target(target), kernels)
        return schedules.schedule_rest(lowered, machine)[1]

    assert roads(MIXED) == roads(FAST)


def test_a_gpu_multiplies_in_float16() -> None:
    """Data are converted there too; sums, inputs and outputs stay float32."""
    mod = model(conv(32), relu, shape=(1, 16, 12, 12))
    lowered = _lowering.lower(mod, _lowering.make_target(GPU), MIXED)
    main = lowered["main"]
    assert dtypes(mod, GPU, MIXED) == {"float16"}
    assert [str(each.dtype.dtype) for each in (main.params[0].ty, main.ret_ty)] == ["float32"] * 2
    [name] = [each for each in _lowering.kernel_names(lowered) if "conv2d" in each]
    data, weights, *_ = (param.ty.dtype for param in lowered[name].params)
    assert data == weights == "float16"


def test_a_deep_model_is_followed_to_its_end() -> None:
    """More bindings one after another than Python's stack holds."""
    facts = Facts(model(*[relu] * 1200)["main"])
    assert not any(map(facts.is_weight, facts.values))
