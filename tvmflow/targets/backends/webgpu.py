"""The WebGPU backend: WGSL for a browser's GPU, beside WebAssembly for browsers without WebGPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from tvmflow.core.errors import StageError
from tvmflow.core.types import Json
from tvmflow.targets.backends.backend import Backend
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple

_ONLY_BROWSERS: Final = "only browsers run code for WebGPU"


class WebgpuBackend(Backend):
    """WebGPU; its kind is also the last part of the name of a target's GPU code."""

    KIND = "webgpu"
    DEVICE = "webgpu"
    # kDLWebGPU in dlpack.h
    DLPACK_DEVICE_TYPE = 15
    IS_BESIDE_HOST = True
    HAS_INT64 = False
    NO_FLOAT16 = "float16 is optional in WebGPU"
    NO_BFLOAT16 = "WGSL has no bfloat16"
    NO_RPC = _ONLY_BROWSERS
    # Limits that every implementation supports: https://www.w3.org/TR/webgpu/#limits
    LIMITS: ClassVar[Mapping[str, Json]] = {
        "max_num_threads": 256,
        "max_shared_memory_per_block": 16384,
    }

    def target_problem(self, tvm: TvmTarget) -> str:
        """Return the problem that there is no code for browsers without WebGPU, if it is missing."""
        host = tvm.get("host")
        triple = cpu_triple(host) if isinstance(host, dict) else ""
        if not triple or parse_triple(triple).system != "wasi":
            return "needs the code of browsers without WebGPU, such as `host: {kind: llvm, mtriple: wasm32-wasi}`"
        return ""

    def has_device(self) -> bool:
        """Return False, because only browsers have such a device."""
        return False

    def unrunnable_reason(self, tvm: TvmTarget, *, in_this_process: bool) -> str:
        """Return that only browsers run the code."""
        return _ONLY_BROWSERS


def refuse(reason: str) -> StageError:
    """Return the error for a model that needs something that WebGPU lacks."""
    return StageError(
        f"this model cannot run by WebGPU: {reason}",
        fix="name the preset wasm32-wasi in place of browser: the package then has only WebAssembly",
    )
