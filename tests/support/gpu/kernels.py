"""CUDA kernels as C++ for this machine's CPU: the "machine code" of the stand-in GPU (see driver.cpp)."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_KERNEL = re.compile(
    r'extern "C" __global__ void (__launch_bounds__\((?P<threads>\d+)\) )?(?P<name>\w+)\((?P<parameters>[^)]*)\) {'
)
# Copies are synchronous here: there is nothing to wait for.
_GROUPS = re.compile(r"\btvm_builtin_ptx_cp_async_\w+_group_\w+(?=\(\))")
_WAITS = re.compile(r"__sync|__shfl")
_LLVM_KERNEL = re.compile(
    r"^define dllexport void @(?P<name>\w+)\((?P<parameters>.*?)\) local_unnamed_addr", re.MULTILINE
)
_LLVM_TYPES = {"ptr": "void*", "i32": "int", "i64": "int64_t", "float": "float"}
_LLVM_THREADS = re.compile(r'ptr @(\w+), !"maxntidx", i32 (\d+)')
_LLVM_INTRINSIC = re.compile(r"@llvm\.nvvm\.[\w.]+")
_LLVM_WAITS = re.compile(r"@llvm\.nvvm\.(barrier|bar|shfl)")
# Of the code and its functions: another target is chosen.
_LLVM_TARGETS = re.compile(
    r'^target (datalayout|triple) = .*$|^!\d+ = .*"tvm_target".*$|^!llvm\.module\.flags = .*$'
    r'|"target-(cpu|features)"(="[^"]*")?',
    re.MULTILINE,
)


def take_over(cuda: Any) -> None:
    """Have the CUDA backend compile for the stand-in, with nothing of NVIDIA's installed."""
    driver = Path(os.environ["LD_LIBRARY_PATH"])
    tools = cuda.nvrtc.Toolkit(driver, driver, driver / "libcudart.so.13", ())
    cuda.nvrtc.find_toolkit = lambda: tools
    cuda.nvrtc.is_installed = lambda: True
    cuda.nvrtc.compile_kernels = lambda source, arch, _: _compile_cuda(cuda, source, arch)
    cuda.CudaBackend.TOOLS = ()


def take_over_llvm(device_code: Any) -> None:
    """Have LLVM's code for GPUs that NVRTC does not know compiled for the stand-in."""
    device_code.compile_llvm = _compile_llvm


def _compile_cuda(cuda: Any, source: str, arch: str) -> Any:
    library = compile_source(source)
    return cuda.nvrtc.Compiled(_pack(b"STAND-IN", arch, library), _pack(b"STAND-PT", arch, library))


def compile_source(source: str) -> bytes:
    """Return kernels of CUDA C, as TVM writes them, as a shared library for this machine."""
    # TVM's headers are for CUDA's own compilers
    kernels = source[source.index('extern "C" __global__') :]
    kernels = re.sub(
        r"extern __shared__ (__align__\(\d+\) )?(.*?)\[\]",
        r"alignas(1024) static \2[232448]",
        kernels,
    )
    kernels = re.sub(r"__shared__ (alignas\(\d+\))?", r"\1 static ", kernels)
    groups = "".join(
        f"static void {name}() {{}}\n" for name in sorted(set(_GROUPS.findall(kernels)))
    )
    entries = "".join(
        _entry(head["name"], _types(head["parameters"]), head["threads"], bool(_WAITS.search(body)))
        for head, body in _bodies(kernels)
    )
    return _link({"kernels.cpp": f'#include "kernels.h"\n{groups}{kernels}{entries}'})


def _compile_llvm(llvm_ir: str, kernels: Sequence[str]) -> bytes:
    """Return LLVM's code for this machine: its functions of the hardware are those of llvm.h."""
    heads = {head["name"]: head for head in _LLVM_KERNEL.finditer(llvm_ir)}
    assert sorted(heads) == list(kernels)
    threads = dict(_LLVM_THREADS.findall(llvm_ir))
    entries, declarations = "", ""
    for name, head in heads.items():
        types = [_LLVM_TYPES[text.split()[0]] for text in head["parameters"].split(", ")]
        declarations += f'extern "C" void {name}({", ".join(types)});\n'
        entries += _entry(name, types, threads[name], waits=bool(_LLVM_WAITS.search(llvm_ir)))
    code = _LLVM_INTRINSIC.sub(
        lambda match: "@" + match[0][len("@llvm.") :].replace(".", "_"), llvm_ir
    )
    code = _LLVM_TARGETS.sub("", code.replace("dllexport ", ""))
    files = {"entries.cpp": f'#include "llvm.h"\n{declarations}{entries}', "kernels.ll": code}
    arch = re.findall(r"mcpu\\22:\\22(sm_\d+)", llvm_ir)[0]
    return _pack(b"STAND-PT", arch, _link(files))


def _pack(magic: bytes, arch: str, library: bytes) -> bytes:
    number = int(arch.removeprefix("sm_").rstrip("af"))
    return magic + struct.pack("<QQ", number, len(library)) + library


def _link(files: Mapping[str, str]) -> bytes:
    """Return a shared library for this machine."""
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch, "kernels.so")
        for name, text in files.items():
            Path(scratch, name).write_text(text)
        command = [sys.executable, "-m", "ziglang", "c++", "-std=c++17", "-shared", "-fPIC"]
        command += ["-O1", "-w", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=undefined"]
        command += [
            "-nostdlib++",
            f"-I{Path(__file__).parent}",
            *(str(Path(scratch, name)) for name in files),
        ]
        command += ["-o", str(library), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
        return library.read_bytes()


def _bodies(kernels: str) -> list[tuple[re.Match[str], str]]:
    heads = list(_KERNEL.finditer(kernels))
    ends = [*(head.start() for head in heads[1:]), len(kernels)]
    return [(head, kernels[head.end() : end]) for head, end in zip(heads, ends, strict=True)]


def _types(parameters: str) -> list[str]:
    return [
        parameter.rpartition(" ")[0].replace("__restrict__", "")
        for parameter in parameters.split(",")
    ]


def _entry(name: str, types: Sequence[str], threads: str | None, waits: bool) -> str:
    """Return the code by which the driver finds and calls a kernel: `Function` in driver.cpp."""
    values = ", ".join(f"*({kind}*)all[{place}]" for place, kind in enumerate(types))
    return f"""
static void {name}__thread(void** all) {{ {name}({values}); }}
static void {name}__run(void** all, const unsigned* grid, const unsigned* block) {{
  launch({name}__thread, all, grid, block, {str(waits).lower()});
}}
extern "C" __attribute__((visibility("default"))) struct {{
  void (*run)(void**, const unsigned*, const unsigned*);
  int parameters;
  unsigned threads;
}} {name}__function = {{ {name}__run, {len(types)}, {threads or 1024} }};
"""
