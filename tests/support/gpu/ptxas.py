"""NVIDIA's assembler for PTX, which the package nvidia-cuda-nvcc-cu12 has: it knows GPUs since sm_50."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.targets.backends.cuda import gpu

ASSEMBLER: Final = gpu.find_packaged("bin/ptxas", "cuda_nvcc")

_KERNEL: Final = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


class Usage(NamedTuple):
    """What a kernel takes of a multiprocessor: registers of a thread, bytes that it spills, bytes that a block shares."""

    registers: int
    spilled: int
    shared: int


def assemble(ptx: bytes, arch: str, folder: Path) -> dict[str, Usage]:
    """Assemble PTX for a GPU, and return what each kernel takes."""
    source = folder / "kernels.ptx"
    source.write_bytes(ptx)
    command = [
        str(ASSEMBLER),
        "-v",
        f"-arch={arch}",
        str(source),
        "-o",
        str(folder / "kernels.cubin"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {
        kernel["name"]: Usage(
            registers=int(kernel["registers"]),
            spilled=int(kernel["stores"]) + int(kernel["loads"]),
            shared=int(kernel["shared"] or 0),
        )
        for kernel in _KERNEL.finditer(done.stderr)
    }
