"""The backend of NVIDIA GPUs: NVRTC compiles kernels, and code for a CPU launches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

from tvmflow.core.types import Json
from tvmflow.targets.backends.backend import Backend, find_host_problem
from tvmflow.targets.backends.cuda import gpu, nvrtc
from tvmflow.targets.host import Host
from tvmflow.targets.tvm_target import TvmTarget, gpu_arch

# Jetson boards of 2015 and 2017; their thread blocks have half as many registers.
_SMALL_ARCHS: Final = ("sm_53", "sm_62")
_SMALL_LIMITS: Final[Mapping[str, Json]] = {"registers_per_block": 32768}


class CudaBackend(Backend):
    """NVIDIA GPUs, with TVM's runtime for CUDA 13 or with a library's own runtime."""

    KIND = "cuda"
    DEVICE = "cuda"
    # kDLCUDA in dlpack.h
    DLPACK_DEVICE_TYPE = 2
    EXECUTOR = "cuda.c"
    TOOLS = nvrtc.PACKAGES
    PYTHON_REQUIREMENTS = (gpu.RUNTIME_PACKAGE,)
    ENVIRONMENT_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    # TVM would otherwise use its tensor core rules, which support only float16.
    SEARCH_RULES = "cuda"
    INTRINSICS = ("cuda",)
    NO_BFLOAT16 = "kernels for GPUs compute with float16 (precision: mixed)"
    LIMITS: ClassVar[Mapping[str, Json]] = {
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": 49152,
        "registers_per_block": 65536,
    }

    def target_problem(self, tvm: TvmTarget) -> str:
        """Return a problem if a target lacks the GPU's architecture or a host CPU; else an empty string."""
        if not gpu.is_arch(gpu_arch(tvm)):
            return "needs the GPU's architecture, such as `arch: sm_90`"
        return find_host_problem(tvm)

    def complete_target(self, tvm: TvmTarget) -> dict[str, Json]:
        """Return the target with the limits of its thread blocks."""
        limits = {**self.LIMITS, **(_SMALL_LIMITS if gpu_arch(tvm) in _SMALL_ARCHS else {})}
        return {**limits, **tvm}

    def device(self, tvm: TvmTarget, host: Host, *, runs_here: bool) -> dict[str, str]:
        """Return a GPU; with `runs_here`, this machine's."""
        card = gpu.detect_gpu().gpu if runs_here else None
        return {"kind": self.DEVICE, "class": card.name} if card else {"kind": self.DEVICE}

    def has_device(self) -> bool:
        """Return whether this machine has a GPU that its driver can use."""
        return gpu.detect_gpu().gpu is not None

    def unbuildable_reason(self, tvm: TvmTarget) -> str:
        """Return the problem that NVIDIA's compilers are missing, or do not support the GPU."""
        arch = gpu_arch(tvm)
        if gpu.is_unknown_to_ptx(arch):
            return f"no compiler for {arch} is left; the oldest GPUs are {gpu.OLDEST_ARCH}"
        is_installed = (
            gpu.has_libdevice() if gpu.is_unknown_to_nvrtc(arch) else nvrtc.is_installed()
        )
        return "" if is_installed else f"CUDA's compiler is not installed: {gpu.INSTALL}"

    def unrunnable_reason(self, tvm: TvmTarget, *, in_this_process: bool) -> str:
        """Return why this machine cannot run the code: it has no GPU, or its GPU cannot."""
        detection = gpu.start_gpu() if in_this_process else gpu.detect_gpu()
        return gpu.unrunnable_reason(gpu_arch(tvm), detection)

    def remote_device_mismatch(self, tvm: TvmTarget, device: Any) -> str:
        """Return which GPU the device has, if that GPU cannot run the target's code."""
        if not device.exist:
            return "no NVIDIA GPU that its TVM runtime can use"
        remote_arch = f"sm_{str(device.compute_version).replace('.', '')}"
        return "" if gpu.runs_code_for(gpu_arch(tvm), remote_arch) else remote_arch

    def no_tvm_runtime_reason(self, tvm: TvmTarget) -> str:
        """Return the problem that TVM's runtime needs CUDA 13, which does not support the GPU."""
        arch = gpu_arch(tvm)
        if not gpu.is_unknown_to_nvrtc(arch):
            return ""
        return f"TVM's runtime works with CUDA 13, which does not know {arch}"

    def lowering_target(self, target: Any) -> Any:
        """Return the target; for a GPU that CUDA 13 does not support, LLVM's target for PTX."""
        from tvmflow.targets.backends.cuda import device_code

        return device_code.lowering_target(target)

    def generate_device_code(self, mod: Any, target: Any) -> bytes:
        """Return machine code and PTX; the driver loads what fits its GPU."""
        from tvmflow.targets.backends.cuda import device_code

        return device_code.generate_device_code(mod, target)

    def load_runtime(self) -> None:
        """Load CUDA's runtime library, and TVM's runtime for it."""
        gpu.load_runtime()

    def load_compiler(self, *, runs: bool) -> None:
        """Make TVM call NVRTC; unless `runs`, without loading the driver."""
        if runs:
            gpu.load_runtime()
            nvrtc.register_compiler(nvrtc.find_toolkit(), [])
        else:
            nvrtc.load_without_driver([])

    def call_builder(self, function: Callable[..., Json], *arguments: Json) -> Json:
        """Call the function in a process that can compile for CUDA without a GPU."""
        return nvrtc.call(function, *arguments)

    def place_arguments(self, arguments: Sequence[Any]) -> list[Any]:
        """Return copies in the GPU's memory. GPU errors are raised here, before a kernel runs."""
        import tvm

        copies = [argument.copyto(tvm.cuda()) for argument in arguments]
        tvm.cuda().sync()
        return copies
