"""Random networks of dynamic shape as Relax models, compiled for both executors."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.s_tir import SBlockRealize

from tests.support.exports import Array, target
from tvmflow.compiler import lowering, schedules
from tvmflow.compiler.c_program import compile_program
from tvmflow.compiler.lowering import ScheduledModel
from tvmflow.compiler.options import LoweringOptions
from tvmflow.core.dimensions import evaluate_shape
from tvmflow.core.types import Dimension, Json, TensorSpec
from tvmflow.graph.dynamic_shapes import size_text, with_dimensions
from tvmflow.targets import c_runtime
from tvmflow.targets.c_runtime import DescribedModel
from tvmflow.targets.tvm_target import make_target

DIMENSIONS = (Dimension("batch", 1, 6), Dimension("seq", 2, 96, 2, (16, 32)))
WIDTH = 24


class DynamicModel(NamedTuple):
    """A model of dynamic shape: its module, its inputs and outputs, and its dimensions."""

    mod: tvm.IRModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dimensions: tuple[Dimension, ...]

    @property
    def signature(self) -> dict[str, Json]:
        """The signature as stages write it."""
        return {
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
            "dimensions": [entry.to_json() for entry in self.dimensions],
        }

    def draw(self, sizes: Mapping[str, int], seed: int = 0) -> list[Array]:
        """Return random inputs of some sizes."""
        rng = np.random.default_rng(seed)
        return [
            rng.standard_normal(evaluate_shape(spec.sizes, sizes), dtype=np.float32)
            for spec in self.inputs
        ]

    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs for some sizes."""
        return [evaluate_shape(spec.sizes or spec.shape, sizes) for spec in self.outputs]


def draw_network(seed: int, steps: int = 7) -> DynamicModel:
    """Return a network over `[batch, seq, 24]`, whose length grows and shrinks with what is joined and cut."""
    chooser = random.Random(seed)
    rng = np.random.default_rng(seed)
    batch, seq = (tirx.Var(entry.name, "int64") for entry in DIMENSIONS)
    params = [
        relax.Var("x", relax.TensorType([batch, seq, WIDTH], "float32")),
        relax.Var("y", relax.TensorType([batch, WIDTH], "float32")),
    ]
    builder = relax.BlockBuilder()

    def weight(*shape: int) -> Any:
        return relax.const((rng.standard_normal(shape) / 5).astype("float32"))

    def length(value: Any) -> Any:
        return value.ty.shape.values[1]

    def attention(value: Any) -> Any:
        scores = builder.emit(relax.op.matmul(value, relax.op.permute_dims(value, [0, 2, 1])))
        return relax.op.matmul(builder.emit(relax.op.nn.softmax(scores)), value)

    def flat_dense(value: Any) -> Any:
        flat = builder.emit(relax.op.reshape(value, [batch * length(value), WIDTH]))
        dense = builder.emit(relax.op.matmul(flat, weight(WIDTH, WIDTH)))
        return relax.op.reshape(dense, [batch, length(value), WIDTH])

    def add_row(value: Any) -> Any:
        return relax.op.add(value, builder.emit(relax.op.expand_dims(params[1], 1)))

    def pool(value: Any) -> Any:
        turned = builder.emit(relax.op.permute_dims(value, [0, 2, 1]))
        pooled = builder.emit(relax.op.nn.max_pool1d(turned, 2, 2, ceil_mode=True))
        return relax.op.permute_dims(pooled, [0, 2, 1])

    choices = [
        attention,
        flat_dense,
        add_row,
        pool,
        relax.op.nn.relu,
        lambda value: relax.op.concat([value, value], 1),
        lambda value: relax.op.concat([value, params[0]], 1),
        lambda value: relax.op.subtract(value, builder.emit(relax.op.mean(value, 1, True))),
    ]
    with builder.function("main", params):
        with builder.dataflow():
            values = [params[0]]
            for _ in range(steps):
                value = builder.emit(chooser.choice(choices)(chooser.choice(values[-2:])))
                values.append(value)
            last = builder.emit(relax.op.mean(values[-1], 1))
            outputs = [builder.emit_output(values[-1]), builder.emit_output(last)]
        builder.emit_func_output(relax.Tuple(outputs))
    mod = builder.get()
    var = mod.get_global_var("main")
    main = mod["main"].with_attr("num_input", len(params))
    mod.update_func(var, with_dimensions(main, DIMENSIONS))
    return describe(mod)


def describe(mod: tvm.IRModule) -> DynamicModel:
    """Return a module with its inputs and outputs."""
    main = mod["main"]
    largest = {entry.name: entry.max for entry in DIMENSIONS}

    def specs(named: Iterator[tuple[str, Any]]) -> tuple[TensorSpec, ...]:
        made = []
        for name, ty in named:
            sizes = tuple(map(size_text, ty.shape.values))
            shape = evaluate_shape(sizes, largest)
            is_dynamic = any(isinstance(size, str) for size in sizes)
            made.append(TensorSpec(name, shape, "float32", sizes=sizes if is_dynamic else ()))
        return tuple(made)

    inputs = specs((str(param.name), param.ty) for param in main.params)
    outputs = specs((f"out{index}", ty) for index, ty in enumerate(main.ret_ty.fields))
    return DynamicModel(mod, inputs, outputs, DIMENSIONS)


class Built(NamedTuple):
    """A model compiled for both executors.

    Attributes:
        model: The model.
        folder: The folder of what its library was linked from.
        executable: What TVM's virtual machine runs.
    """

    model: DynamicModel
    folder: Path
    executable: relax.VMExecutable

    @property
    def library(self) -> Path:
        """The shared library with the prefix `net`."""
        return self.folder / "libnet.so"

    @property
    def described(self) -> DescribedModel:
        """The model as its library describes it."""
        return DescribedModel("net", self.model.signature, (), str(target().tvm["mtriple"]))

    def run_machine(self, inputs: list[Array]) -> list[Array]:
        """Return the outputs of the virtual machine."""
        machine = relax.VirtualMachine(self.executable, tvm.cpu())
        result = machine["main"](*map(tvm.runtime.tensor, inputs))
        return [tensor.numpy() for tensor in result]


def build(model: DynamicModel, folder: Path) -> Built:
    """Compile a model, all of whose loops are divided into tasks, however short they are."""
    compiled, executable = compile_objects(model, folder, target().tvm)
    program = compiled[c_runtime.PROGRAM]
    program.write_text(divide_loops(program.read_text()))
    built = Built(model, folder, executable())
    c_runtime.link(built.described, compiled, built.library, folder / "libnet.a", folder / "net.h")
    return built


def compile_objects(
    model: DynamicModel, folder: Path, tvm_dict: Mapping[str, Any]
) -> tuple[dict[str, Path], Callable[[], relax.VMExecutable]]:
    """Compile what a library is linked from; also return how the same is compiled for the virtual machine."""
    tvm_target = make_target(tvm_dict)
    lowered = lowering.lower(model.mod, tvm_target, LoweringOptions())
    mod = _divide(schedules.schedule_untuned(lowered.mod, tvm_dict, 1).mod)
    weights = lowered.compute_weights({})
    objects = folder / "objects"
    objects.mkdir()
    compile_program(ScheduledModel(mod, weights, tvm_target), "net_", objects)
    compiled = {path.name: path for path in objects.iterdir()}
    return compiled, lambda: lowering.ScheduledModel(mod, weights, tvm_target).compile()


def divide_loops(program: str) -> str:
    """Return the C code of a model with all parallel loops divided into 64 tasks."""
    every = "(void)work;\n  for (size_t i = 0; i < TF_CALLS; ++i) tasks[i] = 64;"
    program, choices = re.subn(r"tf_choose_tasks\(tasks, TF_CALLS, work\);", every, program)
    program, limits = re.subn(r"(#define TF_MOST_TASKS) \d+u", r"\1 64u", program)
    assert choices == limits == 1
    return program


def _divide(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose kernels have their outermost loops in parallel, where these are."""
    for var, function in list(mod.functions_items()):
        # kernels that are written out have no block
        if isinstance(function, tirx.PrimFunc) and isinstance(function.body, SBlockRealize):
            schedule = tvm.s_tir.Schedule(function)
            for block in schedule.get_child_blocks(schedule.get_sblock("root")):
                loops = schedule.get_loops(block)
                if loops and schedule.get(loops[0]).kind == tirx.ForKind.SERIAL:
                    with contextlib.suppress(tvm.s_tir.ScheduleError):
                        schedule.parallel(loops[0])
            mod.update_func(var, schedule.mod["main"].with_attrs(dict(function.attrs)))
    return mod


class DynamicBundles(NamedTuple):
    """A folder with bundles of random networks, each beside what its library was linked from."""

    folder: Path

    @property
    def c(self) -> Path:
        """A network as a C library."""
        return self.folder / "c.tvmflow"

    @property
    def vm(self) -> Path:
        """The same for TVM's virtual machine."""
        return self.folder / "vm.tvmflow"

    @property
    def doubling(self) -> Path:
        """A network that doubles the length, as a C library."""
        return self.folder / "doubling.tvmflow"

    def objects(self, bundle: Path) -> Path:
        """The folder of the objects that the C library of a bundle was linked from."""
        return self.folder / bundle.stem / "objects"


def make_bundles(folder: Path) -> DynamicBundles:
    """Write all bundles, compiled in one process of their own."""
    command = [sys.executable, "-m", "tests.support.dynamic_programs", str(folder)]
    subprocess.run(command, check=True)
    return DynamicBundles(folder)


def _make_bundles(bundles: DynamicBundles) -> None:
    from tvmflow.exporters import bundle
    from tvmflow.exporters.exporter import BuiltModel, ExportRequest
    from tvmflow.targets.linking import export_library

    tvm_target = target().tvm
    manifest = {
        "name": "net",
        "target": {"name": "host", "tvm": tvm_target, "features": []},
        "verified_against": "none",
        "tvm": tvm.__version__,
        "tvm_ffi": metadata.version("apache-tvm-ffi"),
    }
    request = ExportRequest("net", "0", "host", "llvm", str(tvm_target["mtriple"]))

    def write(path: Path, built: Built, library: Path, **fields: str) -> None:
        model = BuiltModel(request, library, {}, built.model.signature, manifest, path, {})
        bundle.write(model.with_library(library, (), **fields), path)

    def build_beside(path: Path, seed: int) -> Built:
        folder = bundles.objects(path).parent
        folder.mkdir()
        return build(draw_network(seed), folder)

    built = build_beside(bundles.c, 4)
    write(bundles.c, built, built.library, runtime="c", prefix="net")
    library = bundles.folder / "library.so"
    export_library(built.executable, library, tvm_target)
    write(bundles.vm, built, library, runtime="vm")
    built = build_beside(bundles.doubling, 13)
    write(bundles.doubling, built, built.library, runtime="c", prefix="net")


if __name__ == "__main__":
    _make_bundles(DynamicBundles(Path(sys.argv[1])))
