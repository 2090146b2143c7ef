"""Kernels for GPUs by tvmflow's rules against TVM's DLight, without a GPU.

    python benchmarks/gpu/gpu.py [--net NAME] [--arch sm_80] [--kernels]

Counted for each network and each set of rules:

- `launches`: of an inference;
- `loads`: megabytes that all threads load from the memory of the GPU and store there, as the code
  says (what caches save is left out), and `least`: each tensor of each kernel once;
- `B/FLOP`: these loads for each multiplication and addition of products;
- `registers`, `spills`, `occupancy`: of kernels for `--arch`, by `ptxas -v` of the wheels
  nvidia-cuda-nvcc-cu12 and nvidia-cuda-nvrtc-cu12 (with -runtime- and -cccl-); the greatest number, the
  sum of bytes, and the threads of a compute unit that fit at once, weighted by the loads;
- `error`, `PoCL`: the greatest difference from ONNX Runtime, and the time of all kernels by OpenCL on
  this machine's CPU, for which neither set of rules is made.

What this machine lacks is left out by name.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import _nets  # noqa: E402
import numpy as np  # noqa: E402
import tvm  # noqa: E402
from tvm import tirx  # noqa: E402

from tests.support import opencl  # noqa: E402
from tests.support.onnx_models import load, open_session  # noqa: E402
from tvmflow.compiler import lowering  # noqa: E402
from tvmflow.compiler.c_program.program import KernelCall, read_program  # noqa: E402
from tvmflow.compiler.options import LoweringOptions  # noqa: E402
from tvmflow.compiler.schedules import gpu  # noqa: E402
from tvmflow.graph import ir  # noqa: E402
from tvmflow.targets.tvm_target import make_target  # noqa: E402

NETS: Final[Mapping[str, Callable[[], Any]]] = {
    **_nets.NETS,
    "resnet18": _nets.resnet18,
    "convnext": _nets.convnext,
    "detector": _nets.detector,
    "efficient": _nets.efficient,
}
# What NVRTC, which has no headers of the system, must know.
_PREAMBLE: Final = """\
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
"""


class Kernels(NamedTuple):
    """How kernels are made: rules, and operators that are lowered as TVM does."""

    rules: Mapping[str, gpu.GpuRule]
    options: LoweringOptions = LoweringOptions()


KERNELS: Final = {
    "DLight": Kernels({}, LoweringOptions(plain=("attention",))),
    "tvmflow": Kernels(gpu.GPU_RULES),
}
_HOST: Final = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
_REGISTERS: Final = 65536
_THREADS: Final = 2048
_SHARED: Final = 100 * 1024


class Count(NamedTuple):
    """What one call of a kernel does: bytes that it moves, and bytes of its tensors."""

    moved: int
    least: int


def count(function: tirx.PrimFunc, target: Any) -> Count:
    """Count the accesses of global memory in the code of a kernel, over all threads."""
    mod = tvm.IRModule({"kernel": function.with_attr("global_symbol", "kernel")})
    bound = tirx.transform.BindTarget(target.with_host(tvm.target.Target(target.host)))(mod)
    with target:
        pipeline, _, _ = tirx.get_default_tir_pipeline(target)
        lowered = pipeline(bound)
    moved = 0
    for device in lowered.functions.values():
        if device.attrs.get("tirx.is_global_func"):
            moved += sum(_count_bytes(device.body, 1))
    tensors = [param.ty for param in function.params]
    least = sum(
        int(np.prod([int(size) for size in ty.shape])) * np.dtype(str(ty.dtype)).itemsize
        for ty in tensors
    )
    return Count(moved, least)


def _count_bytes(tree: Any, times: int) -> Iterator[int]:
    """Yield the bytes of each access of global memory, by how often it is executed; conditions count as true."""
    if isinstance(tree, tirx.SeqStmt):
        for part in tree.seq:
            yield from _count_bytes(part, times)
    elif isinstance(tree, tirx.For):
        extent = int(tree.extent) if isinstance(tree.extent, tirx.IntImm) else 1
        yield from _count_bytes(tree.body, times * extent)
    elif isinstance(tree, tirx.AttrStmt):
        extent = int(tree.value) if str(tree.attr_key) == "thread_extent" else 1
        yield from _count_bytes(tree.body, times * extent)
    elif isinstance(tree, tirx.IfThenElse):
        for case in (tree.then_case, tree.else_case):
            if case is not None:
                yield from _count_bytes(case, times)
    elif hasattr(tree, "body"):
        yield from _count_bytes(tree.body, times)
    else:
        for access in ir.find_nodes(tree, tvm.ir.TensorLoad, tirx.BufferStore):
            is_store = isinstance(access, tirx.BufferStore)
            buffer = access.buffer if is_store else access.source
            if str(buffer.scope()) == "global":
                dtype = str((access.value if is_store else access).ty.dtype)
                base, _, lanes = dtype.partition("x")
                yield times * np.dtype(base).itemsize * int(lanes or 1)


def _count_operations(function: tirx.PrimFunc) -> int:
    """Return the multiplications and additions of the products of an unscheduled kernel."""
    total = 0
    for block in ir.find_nodes(function.body, tvm.s_tir.SBlock):
        if any(int(axis.iter_type) == 2 for axis in block.iter_vars) and ir.find_nodes(
            block.body, tirx.Mul
        ):
            total += 2 * int(np.prod([int(axis.dom.extent) for axis in block.iter_vars]))
    return total


# ---------------------------------------------------------------- ptxas


class Usage(NamedTuple):
    """What a kernel uses of a compute unit."""

    registers: int
    spills: int
    occupancy: float


def find_tools() -> tuple[Path, Path, list[Path]] | None:
    """Return ptxas, NVRTC and the folders of headers; None where wheels are missing."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        ptxas, compilers = (
            folder / "cuda_nvcc/bin/ptxas",
            list(folder.glob("cuda_nvrtc/lib/libnvrtc.so.*")),
        )
        headers = [folder / part / "include" for part in ("cuda_runtime", "cuda_cccl")]
        if ptxas.exists() and compilers and all(map(Path.exists, headers)):
            return ptxas, compilers[0], headers
    return None


def measure_usage(function: tirx.PrimFunc, target: Any, tools: Any) -> Usage:
    """Return what a kernel uses, as ptxas says."""
    ptxas, compiler, headers = tools
    generated = opencl.generate(function, target, "kernel")
    arch = str(target.attrs["arch"])
    library = ctypes.CDLL(str(compiler))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = (_PREAMBLE + generated.source).encode()
    library.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None)
    options = [f"--gpu-architecture=compute_{arch.removeprefix('sm_')}", "-default-device"]
    options += [f"-I{folder}" for folder in headers]
    argv = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if library.nvrtcCompileProgram(program, len(options), argv):
        raise SystemExit("NVRTC rejects a kernel")
    library.nvrtcGetPTXSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, code)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.ptx"
        path.write_bytes(code.value)
        command = [str(ptxas), "-v", f"-arch={arch}", str(path), "-o", f"{folder}/kernels.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills, shared = (
        max((int(number) for number in re.findall(pattern, log)), default=0)
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes smem")
    )
    threads = int(np.prod(generated.launches[0].block))
    blocks = min(
        _THREADS // threads,
        _REGISTERS // (-(-registers // 8) * 8 * threads),
        _SHARED // (shared + 1024),
        32,
    )
    return Usage(registers, spills, blocks * threads / _THREADS)


# ---------------------------------------------------------------- the table


def _target(kind: str, **more: Any) -> Any:
    return make_target({"kind": kind, "host": _HOST, **more})


def report(name: str, arch: str, tools: Any, device: opencl.Device | None, details: bool) -> None:
    """Print the rows of a network."""
    made = NETS[name]()
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(made, Path(folder))
    limits = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}
    cuda = _target("cuda", arch=arch, **limits)
    # the products of attention are kernels of their own here
    plain = lowering.lower(loaded.mod, cuda, KERNELS["DLight"].options)
    operations = sum(
        _count_operations(plain.mod[step.kernel])
        for step in read_program(plain.mod, plain.compute_weights(loaded.params)).steps
        if isinstance(step, KernelCall)
    )
    random = np.random.default_rng(0)
    feed = {
        spec.name: random.standard_normal(spec.shape).astype(spec.dtype) for spec in loaded.inputs
    }
    expected = open_session(made).run(None, feed)
    for title, (rules, options) in KERNELS.items():
        lowered = lowering.lower(loaded.mod, cuda, options)
        weights = lowered.compute_weights(loaded.params)
        scheduled = gpu.schedule_for_gpu(lowered.mod, cuda, rules)
        program = read_program(scheduled.mod, weights)
        calls = [step.kernel for step in program.steps if isinstance(step, KernelCall)]
        counts = {kernel: count(scheduled.mod[kernel], cuda) for kernel in set(calls)}
        moved, least = (sum(counts[kernel][part] for kernel in calls) for part in range(2))
        row = [f"{name:12}{title:9}{len(calls):9}{moved / 1e6:11.1f}{least / 1e6:9.1f}"]
        row.append(f"{moved / max(1, operations):9.3f}")
        if tools:
            usage = {
                kernel: measure_usage(scheduled.mod[kernel], cuda, tools) for kernel in set(calls)
            }
            spills = sum(usage[kernel].spills for kernel in calls)
            weighted = sum(usage[k].occupancy * counts[k].moved for k in calls) / moved
            most = max(used.registers for used in usage.values())
            row.append(f"{most:10}{spills:8}{weighted:11.0%}")
        if device is not None:
            target = make_target(opencl.TARGET)
            own = gpu.schedule_for_gpu(lowered.mod, target, rules)
            model = opencl.Model(device, own.mod, read_program(own.mod, weights), target)
            outputs = [np.empty_like(array) for array in expected]
            arrays = [feed[spec.name] for spec in loaded.inputs]
            times = [model.run(arrays, outputs) for _ in range(2)]
            model.close()
            error = max(
                float(np.abs(a - b).max() / np.abs(b).max())
                for a, b in zip(outputs, expected, strict=True)
            )
            row.append(f"{error:9.1e}{min(sum(run.values()) for run in times) * 1e3:8.0f} ms")
        print("".join(row), flush=True)
        for kernel in sorted(counts) if details else ():
            one = counts[kernel]
            print(
                f"    {kernel:50.50} {scheduled.rules.get(kernel, ''):18}{one.moved / 1e6:9.2f}{one.least / 1e6:9.2f}"
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=NETS, action="append")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--no-pocl", action="store_true", help="do not run by OpenCL")
    arguments = parser.parse_args()
    tools = find_tools()
    device = None if arguments.no_pocl else opencl.find_device()
    if tools is None:
        print("without registers: the wheels with ptxas and NVRTC are not installed")
    if device is None:
        print("without times: no OpenCL")
    columns = f"{'':12}{'rules':9}{'launches':>9}{'loads, MB':>11}{'least':>9}{'B/FLOP':>9}"
    columns += f"{'registers':>10}{'spills':>8}{'occupancy':>11}" if tools else ""
    print(columns + (f"{'error':>9}{'PoCL':>11}" if device else ""))
    for name in arguments.net or NETS:
        report(name, arguments.arch, tools, device, arguments.kernels)


if __name__ == "__main__":
    main()
