"""What kernels for a GPU depend on: its limits."""

from __future__ import annotations

from typing import Final, NamedTuple

import tvm

# Compute units of NVIDIA's GPUs: those of the smallest board of an architecture, from NVIDIA's data sheets.
_CUDA_UNITS: Final = {
    "sm_50": 5,
    "sm_52": 13,
    "sm_53": 1,
    "sm_60": 56,
    "sm_61": 10,
    "sm_62": 2,
    "sm_70": 80,
    "sm_72": 6,
    "sm_75": 40,
    "sm_80": 108,
    "sm_86": 28,
    "sm_87": 8,
    "sm_89": 58,
    "sm_90": 114,
}
# The oldest architecture with tensor cores that CUDA C is compiled for: LLVM has no code of TVM's for them.
_TENSOR_CORES: Final = 75
# Of GPUs of which nothing is known: what integrated ones have.
_UNITS: Final = 16
# The least that OpenCL, WebGPU and Metal promise.
_THREADS: Final = 256
_SHARED_BYTES: Final = 16384
_LANES: Final = 32
# Of 32 bits: with more, a compute unit holds too few threads.
_REGISTERS: Final = {"cuda": 128, "nvptx": 128, "rocm": 128, "metal": 96}
_FEW_REGISTERS: Final = 68
# With so many results at once, and so many threads, a compute unit is busy while others wait.
_BUSY_RESULTS: Final = 2048
_BUSY_THREADS: Final = 128


class Device(NamedTuple):
    """The limits of a GPU.

    Attributes:
        threads: The most threads of a block.
        shared_bytes: The most shared memory of a block.
        lanes: The threads that compute in step (warp, subgroup).
        units: The compute units that blocks are divided between.
        registers: The most registers of a thread that leave enough threads for a compute unit.
        has_tensor_cores: Whether kernels may multiply squares of float16 by units for it.
    """

    threads: int
    shared_bytes: int
    lanes: int
    units: int
    registers: int
    has_tensor_cores: bool = False

    @classmethod
    def from_target(cls, target: tvm.target.Target) -> Device:
        """Return the limits that a target states, and the least that such GPUs have where it states none."""

        def limit(name: str, least: int) -> int:
            value = target.attrs.get(name)
            return int(value) if value is not None and int(value) > 1 else least

        arch = str(target.attrs.get("arch", "")).rstrip("af")
        return cls(
            threads=limit("max_threads_per_block", _THREADS),
            shared_bytes=limit("max_shared_memory_per_block", _SHARED_BYTES),
            lanes=limit("thread_warp_size", _LANES),
            units=_CUDA_UNITS.get(arch, _UNITS),
            registers=_REGISTERS.get(str(target.kind.name), _FEW_REGISTERS),
            has_tensor_cores=arch.removeprefix("sm_").isdigit() and int(arch[3:]) >= _TENSOR_CORES,
        )

    def estimate_time(self, blocks: int, threads: int, work: float, results: int) -> float:
        """Return the time of blocks whose threads have so much work for some results, in no unit.

        A compute unit with few threads is idle while these wait, unless each has several results to
        work on (Volkov, Better performance at lower occupancy, 2010).
        """
        on_each = -(-blocks // self.units) * threads
        return work * max(on_each, _BUSY_RESULTS // results, _BUSY_THREADS)
