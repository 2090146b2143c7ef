"""The backend of WebGPU: WGSL for the GPU of a browser.

It is delivered beside the WebAssembly that browsers without WebGPU run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tvmflow.core.errors import StageError
from tvmflow.core.types import Json
from tvmflow.targets.backends import base
from tvmflow.targets.host import Host
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple

KIND: Final = "webgpu"
"""TVM's target kind, and the name of the code for the GPU after that of the target."""
DEVICE: Final = "webgpu"
# kDLWebGPU in dlpack.h
DLPACK_DEVICE_TYPE: Final = 15
RUNS_ON_HOST_CPU: Final = False
IS_BESIDE_HOST: Final = True
HAS_INT64: Final = False
EXECUTOR: Final = ""
TOOLS: Final[tuple[str, ...]] = ()
PYTHON_REQUIREMENTS: Final[tuple[str, ...]] = ()
ENVIRONMENT_VARIABLES: Final[tuple[str, ...]] = ()
SEARCH_RULES: Final = ""

# What every implementation has: https://www.w3.org/TR/webgpu/#limits
_LIMITS: Final[Mapping[str, Json]] = {
    "max_num_threads": 256,
    "max_shared_memory_per_block": 16384,
}

unbuildable_reason = base.no_unbuildable_reason
slow_float16_reason = base.no_slow_float16_reason
lowering_target = base.same_target
load_runtime = base.load_nothing
load_compiler = base.load_no_compiler
call_builder = base.call_in_process
place_arguments = base.same_arguments


def target_problem(tvm: TvmTarget) -> str:
    """Return whether the code of browsers without WebGPU is missing."""
    host = tvm.get("host")
    triple = cpu_triple(host) if isinstance(host, dict) else ""
    if not triple or parse_triple(triple).system != "wasi":
        return "needs the code of browsers without WebGPU, such as `host: {kind: llvm, mtriple: wasm32-wasi}`"
    return ""


def complete_target(tvm: TvmTarget) -> dict[str, Json]:
    """Return a target with the limits of WebGPU where it names none."""
    return {**_LIMITS, **tvm}


def device(tvm: TvmTarget, host: Host, *, runs_here: bool) -> dict[str, str]:
    """Return the device without a class: the browser that opens a package chooses it."""
    return {"kind": DEVICE}


def has_device() -> bool:
    """Return False: browsers have it, not this process."""
    return False


def unrunnable_reason(tvm: TvmTarget, *, in_this_process: bool) -> str:
    """Return that only browsers run the code."""
    return "browsers alone run code for WebGPU"


def no_float16_reason(tvm: TvmTarget, features: Iterable[str]) -> str:
    """Return that a browser need not have float16."""
    return "float16 is optional in WebGPU"


def no_bfloat16_reason(tvm: TvmTarget, features: Iterable[str]) -> str:
    """Return that WGSL has no such numbers."""
    return "WGSL has no bfloat16"


def remote_device_mismatch(tvm: TvmTarget, device: Any) -> str:
    """Return that nothing behind RPC runs the code."""
    return "browsers alone run code for WebGPU"


def tensor_intrinsics(tvm: TvmTarget) -> tuple[str, ...]:
    """Return nothing: schedules for WebGPU name no intrinsics."""
    return ()


def no_tvm_runtime_reason(tvm: TvmTarget) -> str:
    """Return that TVM's wheel was built without WebGPU."""
    return f"TVM's wheel has no runtime for {KIND}"


def generate_device_code(mod: Any, target: Any) -> bytes:
    """Return WGSL, as TVM writes it."""
    import tvm

    build = tvm.get_global_func(f"target.build.{KIND}")
    return str(build(mod, target).inspect_source()).encode()


def refuse(reason: str) -> StageError:
    """Return the error of a model that needs something that WebGPU does not have."""
    return StageError(
        f"this model cannot run by WebGPU: {reason}",
        fix="name the preset wasm32-wasi in place of browser: the package then has WebAssembly alone",
    )
