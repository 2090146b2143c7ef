"""CUDA kernels as C++ for this machine's CPU: the "machine code" of the stand-in GPU (see driver.cpp)."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_KERNEL = re.compile(
    r'extern "C" __global__ void (__launch_bounds__\((?P<threads>\d+)\) )?(?P<name>\w+)\((?P<parameters>[^)]*)\) {'
)
# Copies are synchronous here: there is nothing to wait for.
_GROUPS = re.compile(r"\btvm_builtin_ptx_cp_async_\w+_group_\w+(?=\(\))")
_WAITS = re.compile(r"__sync|__shfl")


def take_over(cuda: Any) -> None:
    """Have the CUDA backend compile for the stand-in, with nothing of NVIDIA's installed."""
    driver = Path(os.environ["LD_LIBRARY_PATH"])
    tools = cuda.nvrtc.Toolkit(driver, driver, driver / "libcudart.so.13", ())
    cuda.nvrtc.find_toolkit = lambda: tools
    cuda.nvrtc.is_installed = lambda: True
    cuda.nvrtc.compile_kernels = _compile
    cuda.TOOLS = ()


def _compile(source: str, arch: str, tools: object) -> bytes:
    del tools
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
    text = '#include "kernels.h"\n' + groups + kernels + "".join(map(_entry, _bodies(kernels)))
    with tempfile.TemporaryDirectory() as scratch:
        code, library = Path(scratch, "kernels.cpp"), Path(scratch, "kernels.so")
        code.write_text(text)
        command = [sys.executable, "-m", "ziglang", "cc", "-xc++", "-std=c++17", "-shared", "-fPIC"]
        command += ["-O1", "-w", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=undefined"]
        command += [f"-I{Path(__file__).parent}", str(code), "-o", str(library), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
        content = library.read_bytes()
    number = int(arch.removeprefix("sm_").rstrip("af"))
    return b"STAND-IN" + struct.pack("<QQ", number, len(content)) + content


def _bodies(kernels: str) -> list[tuple[re.Match[str], str]]:
    heads = list(_KERNEL.finditer(kernels))
    ends = [*(head.start() for head in heads[1:]), len(kernels)]
    return [(head, kernels[head.end() : end]) for head, end in zip(heads, ends, strict=True)]


def _entry(kernel: tuple[re.Match[str], str]) -> str:
    """Return the code by which the driver finds and calls a kernel: `Function` in driver.cpp."""
    head, body = kernel
    name, threads = head["name"], head["threads"] or "1024"
    types = [
        parameter.rpartition(" ")[0].replace("__restrict__", "")
        for parameter in head["parameters"].split(",")
    ]
    values = ", ".join(f"*({kind}*)all[{place}]" for place, kind in enumerate(types))
    waits = "true" if _WAITS.search(body) else "false"
    return f"""
static void {name}__thread(void** all) {{ {name}({values}); }}
static void {name}__run(void** all, const unsigned* grid, const unsigned* block) {{
  launch({name}__thread, all, grid, block, {waits});
}}
extern "C" __attribute__((visibility("default"))) struct {{
  void (*run)(void**, const unsigned*, const unsigned*);
  int parameters;
  unsigned threads;
}} {name}__function = {{ {name}__run, {len(types)}, {threads} }};
"""
