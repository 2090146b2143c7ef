"""Models compiled as C libraries and loaded into this process, to be measured."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.compiler.c_program import compile_program
from tvmflow.core.types import Json
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import DescribedModel, symbol_prefix
from tvmflow.targets.tvm_target import cpu_triple

if TYPE_CHECKING:
    from tvmflow.compiler.lowering import ScheduledModel

_NAME: Final = "variant"


def load_c_library(
    model: ScheduledModel, signature: Mapping[str, Json], threads: int
) -> NativeProgram:
    """Compile a model for this machine, and load it.

    Args:
        model: The model.
        signature: Its inputs and outputs.
        threads: The threads of a call.

    Raises:
        UnsupportedProgram: The model needs TVM's runtime.
    """
    triple = cpu_triple(model.target.export())
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as scratch:
        folder, library = Path(scratch), Path(scratch, "library.so")
        prefix = symbol_prefix(_NAME)
        compile_program(model.mod, model.weights, model.target, prefix, folder)
        compiled = {path.name: path for path in folder.iterdir()}
        c_runtime.link(DescribedModel(_NAME, signature, (), triple), compiled, library)
        return NativeProgram(library, _NAME, threads)
