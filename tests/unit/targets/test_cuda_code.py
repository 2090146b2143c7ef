"""Code of kernels for NVIDIA GPUs that needs the driver alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import te, tirx

from tests.support.gpu import ptxas
from tvmflow.compiler import schedules
from tvmflow.compiler.c_program.device_program import DeviceProgram, lower_device_kernels
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.targets.backends import BACKENDS
from tvmflow.targets.backends.cuda import device_code, gpu

pytestmark = pytest.mark.skipif(
    ptxas.ASSEMBLER is None, reason="needs the package nvidia-cuda-nvcc-cu12"
)


EXCHANGE = """
@T.prim_func(s_tir=True)
def exchange(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float16")):
    T.func_attr({"global_symbol": "exchange", "tirx.noalias": True})
    for block in T.thread_binding(1, thread="blockIdx.x"):
        for lane in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("exchange"):
                T.reads(a[0:64], b[0:64])
                T.writes(a[0:64], b[0:64])
                a[lane] = T.tvm_warp_shuffle_down(-1, a[lane], 4, 16, 32)
                b[lane] = T.tvm_warp_shuffle_up(-1, b[lane], 1, 32, 32)
"""


def make_target(arch: str) -> tvm.target.Target:
    host = {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
    return tvm.target.Target(
        BACKENDS["cuda"].complete_target({"kind": "cuda", "arch": arch, "host": host})
    )


def products() -> dict[str, tirx.PrimFunc]:
    """A matrix product with tiles in shared memory, functions of libdevice behind it, and sums of rows."""
    # sizes of 64 bits, as models have them
    rows, columns, depth = (tirx.IntImm("int64", size) for size in (64, 96, 128))
    a, b = te.placeholder((rows, depth), name="a"), te.placeholder((depth, columns), name="b")
    k, k2 = te.reduce_axis((0, depth), "k"), te.reduce_axis((0, depth), "k2")
    c = te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    d = te.compute((rows, columns), lambda i, j: tirx.erf(c[i, j]) + tirx.exp(c[i, j]), name="d")
    sums = te.compute((rows,), lambda i: te.sum(a[i, k2], axis=k2), name="sums")
    functions = {"product": te.create_prim_func([a, b, d]), "sums": te.create_prim_func([a, sums])}
    return {
        name: function.with_attr("global_symbol", name).with_attr("tirx.noalias", True)
        for name, function in functions.items()
    }


def lower(arch: str) -> DeviceProgram:
    target = make_target(arch)
    scheduled = schedules.schedule_untuned(tvm.IRModule(products()), target.export(), 1).mod
    kernels = {str(var.name_hint): function for var, function in scheduled.functions_items()}
    return lower_device_kernels(kernels, device_code.lowering_target(target))


@pytest.mark.parametrize(
    "arch",
    [
        *("sm_53", "sm_62", "sm_72"),
        *(pytest.param(f"sm_{arch}", marks=pytest.mark.slow) for arch in (50, 52, 60, 61, 70)),
    ],
)
def test_ptx_for_old_gpus_has_every_kernel(arch: str, tmp_path: Path) -> None:
    """The driver of CUDA 10 reads it, and blocks of each kernel find registers on the GPU."""
    program = lower(arch)
    ptx = device_code.generate_ptx(program.functions, arch)
    assert b".version 6.3" in ptx and f".target {arch}".encode() in ptx
    usages = ptxas.assemble(ptx, arch, tmp_path)
    launches = [launch for kernel in program.kernels.values() for launch in kernel.launches]
    assert sorted(usages) == sorted(launch.function for launch in launches)
    for launch in launches:
        x, y, z = launch.block
        assert f".maxntid {x * y * z}\n".encode() in ptx
        assert x * y * z * usages[launch.function].registers <= 32768
    assert all(usage.spilled == 0 and usage.shared > 0 for usage in usages.values())


def test_the_same_kernels_give_the_same_code() -> None:
    """Names that LLVM makes of addresses are not part of it."""
    first, second = (device_code.generate_ptx(lower("sm_62").functions, "sm_62") for _ in range(2))
    assert first == second


def test_threads_of_a_warp_exchange_values(tmp_path: Path) -> None:
    """Of segments, too; TVM passes the number of threads where the hardware takes a mask and a lane."""

    program = lower_device_kernels(
        {"exchange": tvm.script.from_source(EXCHANGE)},
        device_code.lowering_target(make_target("sm_62")),
    )
    ptx = device_code.generate_ptx(program.functions, "sm_62")
    # 16 << 8 | 31: segments of 16 threads
    assert b"shfl.sync.down.b32" in ptx and b", 4, 4127, -1;" in ptx
    assert b"shfl.sync.up.b32" in ptx and b", 1, 0, -1;" in ptx
    assert list(ptxas.assemble(ptx, "sm_62", tmp_path)) == ["exchange_kernel"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_functions_have_code_for_old_gpus(dtype: str, tmp_path: Path) -> None:
    """Of vectors and of float16, too, of which TVM has no calls of libdevice."""
    a = te.placeholder((64,), dtype, name="a")
    one = tirx.const(1, dtype)
    functions = [tirx.exp, tirx.log2, tirx.erf, tirx.acos, tirx.rsqrt, tirx.ceil, tirx.round]

    def compute(i: Any) -> Any:
        values = [*(function(a[i]) for function in functions), tirx.pow(a[i], one)]
        zeros = tirx.clz(a[i].astype("int32")) + tirx.popcount(a[i].astype("int32"))
        return sum(values, tirx.sqrt(tirx.abs(a[i])) + zeros.astype(dtype))

    schedule = tvm.s_tir.Schedule(te.create_prim_func([a, te.compute((64,), compute, name="b")]))
    outer, inner = schedule.split(*schedule.get_loops("b"), [32, 2])
    schedule.bind(outer, "threadIdx.x")
    schedule.vectorize(inner)
    kernels = {"functions": schedule.mod["main"]}
    program = lower_device_kernels(kernels, device_code.lowering_target(make_target("sm_53")))
    ptx = device_code.generate_ptx(program.functions, "sm_53")
    assert list(ptxas.assemble(ptx, "sm_53", tmp_path)) == ["functions_kernel"]


def test_a_missing_libdevice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install."""
    monkeypatch.setattr(gpu, "find_packaged", lambda *_: None)
    with pytest.raises(EnvironmentProblem, match="libdevice") as caught:
        device_code.generate_ptx(tvm.IRModule({}), "sm_62")
    assert caught.value.fix == "pip install 'tvmflow[cuda]'"
