"""WebGPU: code for the GPU of a browser, beside the WebAssembly that browsers without it run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tvmflow.core.errors import StageError
from tvmflow.core.types import Json
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.tvm_target import TvmTarget, cpu_triple, target_kind

KIND: Final = "webgpu"
"""TVM's target kind, and the name of the code for the GPU after that of the target."""

# What every implementation has: https://www.w3.org/TR/webgpu/#limits
_LIMITS: Final[Mapping[str, Json]] = {
    "max_num_threads": 256,
    "max_shared_memory_per_block": 16384,
}


def is_webgpu(tvm: TvmTarget) -> bool:
    """Return whether a target is for WebGPU, with WebAssembly as its host."""
    return target_kind(tvm) == KIND


def find_problem(tvm: TvmTarget) -> str:
    """Return what a target for WebGPU lacks, or an empty string."""
    host = tvm.get("host")
    triple = cpu_triple(host) if isinstance(host, dict) else ""
    if not triple or parse_triple(triple).system != "wasi":
        return "needs the code of browsers without WebGPU, such as `host: {kind: llvm, mtriple: wasm32-wasi}`"
    return ""


def complete_target(tvm: TvmTarget) -> dict[str, Json]:
    """Return a target with the limits of WebGPU where it names none."""
    return {**_LIMITS, **tvm}


def refuse(reason: str) -> StageError:
    """Return the error of a model that needs something that WebGPU does not have."""
    return StageError(
        f"this model cannot run by WebGPU: {reason}",
        fix="name the preset wasm32-wasi in place of browser: the package then has WebAssembly alone",
    )
