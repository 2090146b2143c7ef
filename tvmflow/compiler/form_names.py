"""The names of the forms in which `build` compiles a model. An exporter names the form that it needs.

Apart from `compiler.forms`, because exporters must not import TVM.
"""

from __future__ import annotations

from typing import Final

C_LIBRARY: Final = "c-library"
C_SOURCE: Final = "c-source"
PARAMS: Final = "params"
SYSTEM_LIBRARY: Final = "system-library"
VM: Final = "vm"

WEIGHTS_FILE: Final = "weights.safetensors"
"""The file with the weights in the form `params`."""
