"""Products of float16 on tensor cores: their CUDA C on this machine, and their registers on the GPU."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from tests.support import opencl
from tests.support.gpu import kernels, ptxas
from tests.support.onnx_models import draw, load
from tests.unit.compiler.schedules.gpu_kernels import Made, conv, one, product
from tvmflow.compiler import lowering
from tvmflow.compiler.contraction import gpu_tiles
from tvmflow.compiler.contraction.gpu_tiles import Tile
from tvmflow.compiler.options import LoweringOptions
from tvmflow.compiler.schedules import gpu
from tvmflow.targets.backends import BACKENDS
from tvmflow.targets.backends.cuda import nvrtc

HOST = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
MODELS: dict[str, Made] = {
    "conv": conv((1, 16, 9, 11), (20, 16, 3, 3), pads=[1] * 4),
    "stride": conv((2, 24, 17, 13), (40, 24, 3, 3), strides=[2, 2], pads=[1, 0, 1, 0]),
    "few_channels": conv((1, 3, 33, 31), (24, 3, 5, 5), strides=[2, 2], pads=[2] * 4),
    "dilated": conv((1, 16, 15, 15), (32, 16, 3, 3), dilations=[2, 3], pads=[2, 3, 2, 3]),
    "groups": conv((2, 64, 8, 8), (48, 16, 3, 3), group=4, pads=[1] * 4),
    "conv_1x1": conv((1, 32, 14, 14), (64, 32, 1, 1)),
    "many_channels": conv((1, 48, 24, 24), (130, 48, 1, 1), bias=False, then=""),
    "conv1d": conv((1, 20, 33), (40, 20, 3), pads=[1, 1]),
    "transposed": one("ConvTranspose", (1, 24, 7, 9), {"w": draw(24, 16, 2, 2)}, strides=[2, 2]),
    "product": one("MatMul", (1, 33, 48), {"w": draw(48, 70)}, then="Relu"),
    "rows": one("Gemm", (70, 50), {"w": draw(34, 50)}, transB=1, then="Sigmoid"),
    "columns": one("Gemm", (50, 66), {"w": draw(50, 34)}, transA=1),
    "inputs": product((2, 3, 65, 64), (2, 3, 64, 40)),
    "large": one("MatMul", (1, 300, 100), {"w": draw(100, 260)}),
}


def make_target(arch: str) -> tvm.target.Target:
    return tvm.target.Target(
        BACKENDS["cuda"].complete_target({"kind": "cuda", "arch": arch, "host": HOST})
    )


def schedule_products(
    name: str, arch: str, folder: Path
) -> list[tuple[tirx.PrimFunc, tirx.PrimFunc]]:
    """Return the kernels that the rule schedules: without a schedule, and with it."""
    target = make_target(arch)
    options = LoweringOptions(precision="mixed")
    lowered = lowering.lower(load(MODELS[name][0], folder).mod, target, options).mod
    scheduled, rules = gpu.schedule_for_gpu(lowered, target)
    return [
        (lowered[kernel], scheduled[kernel])
        for kernel, rule in rules.items()
        if rule == "tensor_cores"
    ]


def run_source(made: opencl.Generated, arrays: list[Any], folder: Path) -> None:
    """Run a kernel's CUDA C: arguments in the order of the kernel's."""
    library = folder / "kernels.so"
    library.write_bytes(kernels.compile_source(made.source))
    (launch,) = made.launches

    class Function(ctypes.Structure):
        _fields_ = (("run", ctypes.c_void_p), ("parameters", ctypes.c_int))

    function = Function.in_dll(ctypes.CDLL(str(library)), f"{launch.function}__function")
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(function.run)
    pointers = [ctypes.c_void_p(arrays[place].ctypes.data) for place in launch.arguments]
    values = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(each) for each in pointers))
    run(values, (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(*launch.block))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("conv", "product") else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
    ],
)
def test_kernels_compute_what_their_loops_do(name: str, tmp_path: Path) -> None:
    """In CUDA C for this machine: squares are whole matrices there, aligned as the hardware asks for."""
    found = schedule_products(name, "sm_80", tmp_path)
    assert found
    for function, scheduled in found:
        random = np.random.default_rng(1)
        arrays = [
            random.uniform(-1, 1, [int(extent) for extent in param.ty.shape]).astype(
                str(param.ty.dtype)
            )
            for param in function.params
        ]
        arrays[-1][...] = np.nan
        made = opencl.generate(scheduled, make_target("sm_80"), "product")
        assert "wmma::mma_sync" in made.source
        run_source(made, arrays, tmp_path)
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        tvm.compile(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), "llvm")[
            "main"
        ](*tensors)
        expected = tensors[-1].numpy().astype("float32")
        actual = arrays[-1].astype("float32")
        # a result may be rounded to float16 once more, to one of two neighbors
        np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-3)


def multiply(rows: Any, columns: Any, depth: Any) -> tirx.PrimFunc:
    """Return a product of float16 that is added up in float32, with indices of int64 as models have."""
    rows, columns, depth = (tirx.IntImm("int64", size) for size in (rows, columns, depth))
    a, b = (
        te.placeholder(shape, "float16", name=name)
        for name, shape in (("a", (rows, depth)), ("b", (depth, columns)))
    )
    k = te.reduce_axis((0, depth), "k")
    return te.create_prim_func(
        [
            a,
            b,
            te.compute(
                (rows, columns),
                lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), axis=k),
                name="c",
            ),
        ]
    )


@pytest.mark.parametrize("target", ["sm_72", "opencl"])
def test_other_gpus_compute_as_before(target: str) -> None:
    """LLVM has no tensor cores for TVM's code, and OpenCL none at all."""
    other = opencl.TARGET if target == "opencl" else make_target(target).export()
    mod = tvm.IRModule({"product": multiply(64, 64, 64)})
    assert gpu.schedule_for_gpu(mod, tvm.target.Target(other)).rules == {
        "product": "tiled_products"
    }


@pytest.mark.slow
@pytest.mark.parametrize("tile", gpu_tiles.WARP_TILES, ids=str)
def test_every_tile_computes_what_numpy_does(
    tile: Tile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in tiles that a result does not fill."""
    monkeypatch.setattr(gpu_tiles, "WARP_TILES", (tile,))
    rows, columns, depth = tile.rows + 9, tile.columns + 11, 61
    target = make_target("sm_80")
    mod = tvm.IRModule({"product": multiply(rows, columns, depth)})
    scheduled, rules = gpu.schedule_for_gpu(mod, target)
    assert list(rules.values()) == ["tensor_cores"]
    (function,) = scheduled.functions.values()
    left, right = (draw(*shape).astype("float16") for shape in ((rows, depth), (depth, columns)))
    result = np.full((rows, columns), np.nan, "float32")
    run_source(opencl.generate(function, target, "product"), [left, right, result], tmp_path)
    np.testing.assert_allclose(
        result, left.astype("float32") @ right.astype("float32"), rtol=1e-4, atol=1e-4
    )


@pytest.mark.cuda
@pytest.mark.skipif(
    ptxas.ASSEMBLER is None or not nvrtc.is_installed(), reason="needs tvmflow[cuda]"
)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90"])
def test_tiles_have_registers_for_their_squares(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tile spills, and a compute unit has registers and memory for 8 warps at least."""
    target = make_target(arch)
    shared = {"sm_75": 65536, "sm_80": 167936, "sm_86": 102400, "sm_90": 233472}[arch]
    for tile in gpu_tiles.WARP_TILES:
        monkeypatch.setattr(gpu_tiles, "WARP_TILES", (tile,))
        function = multiply(2 * tile.rows, 2 * tile.columns, 256)
        scheduled, rules = gpu.schedule_for_gpu(tvm.IRModule({"product": function}), target)
        assert list(rules.values()) == ["tensor_cores"]
        (scheduled_function,) = scheduled.functions.values()
        made = opencl.generate(scheduled_function, target, "product")
        ptx = nvrtc.compile_kernels(made.source, arch, nvrtc.find_toolkit()).ptx
        assert b"wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32" in ptx
        # the assembler is CUDA 12's
        ptx = re.sub(rb"\.version [\d.]+", b".version 8.8", ptx)
        (usage,) = ptxas.assemble(ptx, arch, tmp_path).values()
        warps = tile.threads
        blocks = min(65536 // (usage.registers * 32 * warps), shared // (usage.shared + 1024))
        assert usage.spilled == 0
        assert blocks * warps >= 8
