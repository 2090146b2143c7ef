"""Models with optimized and with plain kernels, compiled and run on this machine."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tvmflow.compiler import lowering
from tvmflow.compiler.options import LoweringOptions
from tvmflow.frontends.base import LoadedModel
from tvmflow.graph import ir
from tvmflow.targets.host import read_host
from tvmflow.targets.tvm_target import make_target

Arrays = list[np.ndarray[Any, Any]]

FAST = LoweringOptions()
"""The options that a recipe has by default."""
PLAIN = LoweringOptions(layout="plain", weights="plain", math="libm")
"""TVM's own kernels; `run` leaves them without a schedule."""
_REQUIRED_FLAGS = {"x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "x86-64-v4": "avx512f"}
LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
LEVELS_HERE = tuple(mcpu for mcpu in LEVELS if _REQUIRED_FLAGS[mcpu] in read_host().flags) or LEVELS
"""The levels of this machine; all of them, to be skipped, on one that has none."""


DOT_TARGETS = {"avx512_vnni": ("x86-64-v4", "+avx512vnni"), "avx_vnni": ("x86-64-v3", "+avxvnni")}
"""The flag of a CPU with dot products of bytes, of vectors of 512 and of 256 bits -> its level and the feature of the target."""


def level(mcpu: str) -> dict[str, Any]:
    """Return the target of an x86-64 level; skip the test on a machine that lacks it."""
    host = read_host()
    if platform.machine() != "x86_64" or _REQUIRED_FLAGS[mcpu] not in host.flags:
        pytest.skip(f"this machine cannot run {mcpu}")
    return {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu, "num-cores": 2}


def host_level() -> dict[str, Any]:
    """Return the target of the highest level of this machine."""
    return level(LEVELS_HERE[-1])


def dot_target(flag: str) -> dict[str, Any]:
    """Return a target with an instruction for dot products; skip the test on a machine that lacks it."""
    if flag not in read_host().flags:
        pytest.skip(f"this machine lacks {flag}")
    mcpu, feature = DOT_TARGETS[flag]
    return {**level(mcpu), "mattr": [feature]}


def reference_target(target: Mapping[str, Any], options: LoweringOptions) -> dict[str, Any]:
    """Return the target to compile for with these options: `PLAIN` ones are those of references."""
    return without_optimization(target) if options == PLAIN else dict(target)


def without_optimization(target: Mapping[str, Any]) -> dict[str, Any]:
    """Return a target whose code LLVM does not optimize: for references, which it compiles in a third of the time."""
    return {**target, "opt-level": 0}


def weights_of(mod: tvm.IRModule) -> dict[str, np.ndarray[Any, Any]]:
    """Return random weights for a model, by name."""
    main = mod["main"]
    random = np.random.default_rng(0)
    return {
        var.name: random.standard_normal([int(n) for n in var.ty.shape]).astype(np.float32)
        for var in main.params[int(main.attrs["num_input"]) :]
    }


def kernels_of(
    mod: tvm.IRModule, target: dict[str, Any], options: LoweringOptions = FAST
) -> list[str]:
    """Return the names of the kernels that a model is lowered to."""
    return ir.list_kernels(lowering.lower(mod, make_target(target), options).mod)


def outputs(
    model: LoadedModel,
    feed: Mapping[str, np.ndarray[Any, Any]],
    target: dict[str, Any] | None = None,
    options: LoweringOptions = FAST,
) -> Arrays:
    """Return the outputs of an imported model, compiled with a recipe's defaults, untuned; by default for the highest level."""
    library = (
        lowering.lower(model.mod, make_target(target or host_level()), options)
        .schedule_untuned(model.params, target or host_level(), 1)
        .compile()
    )
    values = [np.asarray(feed[spec.name], order="C") for spec in model.inputs]
    result = relax.VirtualMachine(library, tvm.cpu())["main"](*map(tvm.runtime.tensor, values))
    return [tensor.numpy() for tensor in ([result] if hasattr(result, "numpy") else list(result))]


def run(mod: tvm.IRModule, target: dict[str, Any], options: LoweringOptions, data: Any) -> Arrays:
    """Return what a model computes."""
    target, rules = reference_target(target, options), int(options != PLAIN)
    library = (
        lowering.lower(mod, make_target(target), options)
        .schedule_untuned(weights_of(mod), target, rules)
        .compile()
    )
    result = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(data))
    tensors = [result] if hasattr(result, "numpy") else list(result)
    return [tensor.numpy() for tensor in tensors]


def check_alike(mod: tvm.IRModule, target: dict[str, Any], atol: float = 1e-5) -> None:
    """Check that the default options compute what the plain ones do, relative to the largest output."""
    shape = [int(n) for n in mod["main"].params[0].ty.shape]
    data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for fast, plain in zip(
        run(mod, target, FAST, data), run(mod, target, PLAIN, data), strict=True
    ):
        largest = float(np.abs(plain).max()) or 1.0
        np.testing.assert_allclose(fast / largest, plain / largest, rtol=0, atol=atol)
