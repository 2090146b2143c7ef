"""Attention with a KV cache (`caches`) as the sources of a C library, which tests change and compile themselves."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support import caches
from tests.support.exports import target
from tvmflow.compiler import lowering, schedules
from tvmflow.compiler.c_program import compile_program
from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.dimensions import evaluate_shape
from tvmflow.core.types import Dimension, Json, TensorSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.states import list_growing, pair_states, store_states
from tvmflow.graph.dynamic_shapes import with_dimensions
from tvmflow.graph.states import with_states
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.runtime.module import Module
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import DescribedModel
from tvmflow.targets.tvm_target import make_target

DIMENSIONS: Final = (Dimension("past", 0, 40), Dimension("seq", 1, 12))
_CACHE: Final = (1, caches.HEADS, "past", caches.DEPTH)
_INPUTS: Final[Mapping[str, tuple[int | str, ...]]] = {
    "x": (1, "seq", caches.WIDTH),
    "mask": (1, "past + seq"),
    "past_key": _CACHE,
    "past_value": _CACHE,
}
_LARGEST: Final = {entry.name: entry.max for entry in DIMENSIONS}


class StateLibrary(NamedTuple):
    """The sources of a library with the prefix `cached`, and its signature."""

    folder: Path
    signature: Mapping[str, Json]

    def load(self, library: Path) -> Module:
        """Return what a shared library of these sources computes."""
        program = NativeProgram(library, "cached", 1, self.signature)
        return Module(program, self.signature, {"name": "cached"})

    def compile(self, compiler: Sequence[str], made: Path, **edited: str) -> None:
        """Compile the sources, some of them with another text, by a command with its flags."""
        for name, text in edited.items():
            (self.folder / f"{name}.c").write_text(text)
        objects = map(str, self.folder.glob("*.o"))
        libraries = ["-lm", "-lpthread", "-o", str(made)]
        command = [*compiler, f"-I{self.folder}", c_runtime.SOURCE, *objects, *libraries]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)


def write_library(folder: Path, dtype: str = "") -> StateLibrary:
    """Compile the kernels for this machine, with states of a dtype, by default the model's; write the rest in C."""
    path = folder / "cached.onnx"
    caches.write_cached_attention(path)
    specs = tuple(
        TensorSpec(name, evaluate_shape(sizes, _LARGEST), "float32", sizes=sizes)
        for name, sizes in _INPUTS.items()
    )
    loaded = FRONTENDS["onnx"].load({"model": path}, specs, dimensions=DIMENSIONS)
    states = pair_states(
        {"past_*": "present_*"}, loaded.inputs, loaded.outputs, DIMENSIONS, {"past_*": dtype}
    )
    loaded = store_states(loaded, states)
    growing = list_growing(states, loaded.inputs, loaded.outputs)
    main = with_dimensions(with_states(loaded.mod["main"], growing), DIMENSIONS)
    loaded.mod.update_func(loaded.mod.get_global_var("main"), main)
    signature: dict[str, Any] = {
        "inputs": [spec.to_json() for spec in loaded.inputs],
        "outputs": [spec.to_json() for spec in loaded.outputs],
        "dimensions": [entry.to_json() for entry in DIMENSIONS],
        "states": [state._asdict() for state in states],
        "model": "0" * 64,
    }
    tvm_dict = target().tvm
    tvm_target = make_target(tvm_dict)
    lowered = lowering.lower(loaded.mod, tvm_target, LoweringOptions())
    mod = schedules.schedule_untuned(lowered.mod, tvm_dict, 1).mod
    weights = lowered.compute_weights(loaded.params)
    compile_program(ScheduledModel(mod, weights, tvm_target), "cached_", folder)
    compiled = {c_runtime.PROGRAM: folder / "compiled.c"}
    (folder / c_runtime.PROGRAM).rename(compiled[c_runtime.PROGRAM])
    model = DescribedModel("cached", signature, (), str(tvm_dict["mtriple"]))
    c_runtime.write_sources(model, compiled, folder)
    header = c_runtime.write_header(model, compiled[c_runtime.PROGRAM].read_text())
    (folder / "cached.h").write_text(header)
    return StateLibrary(folder, signature)
