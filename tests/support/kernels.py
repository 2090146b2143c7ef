"""Models on the fast road and on the plain one, compiled and run on this machine."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tvmflow.frontends._base import LoadedModel
from tvmflow.recipe import Kernels
from tvmflow.stages import _lowering
from tvmflow.targets.host import read_host

Arrays = list[np.ndarray[Any, Any]]

FAST = Kernels().model_dump(mode="json")
PLAIN = Kernels(layout="plain", weights="plain", math="libm", schedules="none").model_dump(
    mode="json"
)
_NEEDED = {"x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "x86-64-v4": "avx512f"}
LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
LEVELS_HERE = tuple(mcpu for mcpu in LEVELS if _NEEDED[mcpu] in read_host().flags) or LEVELS
"""The levels of this machine; all of them, to be skipped, on one that has none."""


def level(mcpu: str) -> dict[str, Any]:
    """A target of an x86-64 level that this machine has; else the test is skipped."""
    host = read_host()
    if platform.machine() != "x86_64" or _NEEDED[mcpu] not in host.flags:
        pytest.skip(f"this machine cannot run {mcpu}")
    return {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu, "num-cores": 2}


def host_level() -> dict[str, Any]:
    """The highest level of this machine."""
    return level(LEVELS_HERE[-1])


def weights_of(mod: tvm.IRModule) -> dict[str, np.ndarray[Any, Any]]:
    """Random weights for a model, by name."""
    main = mod["main"]
    random = np.random.default_rng(0)
    return {
        var.name: random.standard_normal([int(n) for n in var.ty.shape]).astype(np.float32)
        for var in main.params[int(main.attrs["num_input"]) :]
    }


def kernels_of(
    mod: tvm.IRModule, target: dict[str, Any], kernels: dict[str, Any] = FAST
) -> list[str]:
    """The names of the kernels that the fast road, or another one, makes of a model."""
    return _lowering.kernel_names(_lowering.lower(mod, _lowering.make_target(target), kernels))


def outputs(model: LoadedModel, feed: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
    """What an imported model gives on this machine, compiled as a recipe with defaults has it, untuned."""
    library = _lowering.compile_untuned(model.mod, model.params, host_level(), FAST, 1)
    values = [np.asarray(feed[spec.name], order="C") for spec in model.inputs]
    result = relax.VirtualMachine(library, tvm.cpu())["main"](*map(tvm.runtime.tensor, values))
    return [each.numpy() for each in ([result] if hasattr(result, "numpy") else list(result))]


def run(mod: tvm.IRModule, target: dict[str, Any], kernels: dict[str, Any], data: Any) -> Arrays:
    """What a model computes."""
    rules = int(kernels["schedules"] == "rules")
    library = _lowering.compile_untuned(mod, weights_of(mod), target, kernels, rules)
    found = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(data))
    results = [found] if hasattr(found, "numpy") else list(found)
    return [each.numpy() for each in results]


def check_alike(mod: tvm.IRModule, target: dict[str, Any], atol: float = 1e-5) -> None:
    """The fast road computes what the plain one does, relative to the largest number that comes out."""
    shape = [int(n) for n in mod["main"].params[0].ty.shape]
    data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for fast, plain in zip(
        run(mod, target, FAST, data), run(mod, target, PLAIN, data), strict=True
    ):
        largest = float(np.abs(plain).max()) or 1.0
        np.testing.assert_allclose(fast / largest, plain / largest, rtol=0, atol=atol)
