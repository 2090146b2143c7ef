"""`precision: float16`: convolutions and matrix products in float16, on CPUs that add it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, tirx

from tests.support.kernels import FAST
from tests.support.tuning import model, relu
from tests.unit.compiler.networks import biased, convolution, depthwise
from tvmflow.compiler import lowering
from tvmflow.graph import ir

N1 = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-n1", "num-cores": 4}
NARROW = replace(FAST, precision="float16")


def added_dtypes(mod: tvm.IRModule) -> dict[str, set[str]]:
    """Return the dtypes of additions of floats in each kernel."""
    return {
        str(var.name_hint): {
            str(node.a.ty.dtype).partition("x")[0]
            for node in ir.find_nodes(function.body, tirx.Add)
            if str(node.a.ty.dtype).startswith("float")
        }
        for var, function in mod.functions_items()
        if isinstance(function, tirx.PrimFunc)
    }


def mean(value: Any, _: Any) -> Any:
    return relax.op.mean(value, [2, 3], keepdims=True)


def test_products_are_added_in_float16_and_means_in_float32() -> None:
    """Data become float16 once; the results of the model are float32."""
    mod = model(
        convolution(32, (1, 1)),
        biased,
        relu,
        depthwise((3, 3), padding=1),
        mean,
        shape=(1, 16, 12, 12),
    )
    lowered = lowering.lower(mod, tvm.target.Target(N1), NARROW)
    added = added_dtypes(lowered.mod)
    assert all(added[name] == {"float16"} for name in added if "conv" in name), added
    (of_mean,) = (name for name in added if "mean" in name)
    assert added[of_mean] == {"float32"}
    assert ir.dtype_of(lowered.mod["main"].body.body) == "float32"
