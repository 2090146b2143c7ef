"""The names of the forms in which `build` compiles a model, for exporters, which do not import TVM."""

from __future__ import annotations

from typing import Final

C_LIBRARY: Final = "c-library"
C_SOURCE: Final = "c-source"
PARAMS: Final = "params"
SYSTEM_LIBRARY: Final = "system-library"
VM: Final = "vm"
WEBGPU: Final = "webgpu"

WEIGHTS_FILE: Final = "weights.safetensors"
"""The file with the weights in the form `params`."""

BESIDE_WEBASSEMBLY: Final = f"{WEBGPU}/{WEBGPU}"
"""The form `webgpu` among the forms of a target for WebAssembly: `export` reads it as `build/webgpu`."""
WEBGPU_PROGRAM: Final = "program.json"
"""The file with the steps in the form `webgpu`."""
WEBGPU_KERNELS: Final = "kernels.wgsl"
"""The file with its kernels."""
WEBGPU_WEIGHTS: Final = "weights.bin"
"""The file with its weights."""
