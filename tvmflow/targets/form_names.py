"""The names of the forms in which `build` compiles a model; exporters read them without TVM."""

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
"""The form `webgpu` of a WebAssembly target, which `export` reads as `build/webgpu`."""
WEBGPU_PROGRAM: Final = "program.json"
"""The file with the execution steps in the form `webgpu`."""
WEBGPU_KERNELS: Final = "kernels.wgsl"
"""The file with the kernels in the form `webgpu`."""
WEBGPU_WEIGHTS: Final = "weights.bin"
"""The file with the weights in the form `webgpu`."""
