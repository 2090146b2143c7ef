"""Lowering of imported models to kernels, and their compilation to libraries."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvmflow.compiler import ir, pipeline, schedules, vector_width
from tvmflow.compiler.c_sources import compile_c_sources
from tvmflow.compiler.code_generation import compile_model
from tvmflow.compiler.context import LoweringContext
from tvmflow.compiler.cpu_model import CpuModel
from tvmflow.compiler.ir_dump import IRDump
from tvmflow.compiler.node_tracking import KernelNodes, NodeTracker
from tvmflow.compiler.options import LoweringOptions
from tvmflow.compiler.passes.constant_evaluation import evaluate_function
from tvmflow.compiler.passes.lift_weights import split_weights
from tvmflow.compiler.vector_width import VectorWidth
from tvmflow.core.types import Json
from tvmflow.runtime.weights import read_safetensors

_log = logging.getLogger(__name__)

Weights = Mapping[str, np.ndarray[Any, Any]]

# In other names than these, TVM's code generators do not replace what is no identifier.
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][\w.:-]*", re.ASCII)

# Weights are computed for a CPU level that every x86-64 machine has, and without fused
# multiply-add, so that any two machines that build give the same bytes.
_WEIGHTS_TARGET: Final = {"kind": "llvm"}


@dataclass(frozen=True)
class LoweredModel:
    """A lowered model.

    Attributes:
        mod: The kernels, and `main`, which calls them and takes the computed weights after its inputs.
        weight_names: The names of the imported model's weights, in the order of its `main`.
        weight_mod: A module whose `main` computes the weights; None if they are used as they are.
        width: The vectors of the code; None where no CPU model chose them.
        kernel_nodes: The bindings of the imported `main` that each call of a kernel came from.
    """

    mod: tvm.IRModule
    weight_names: tuple[str, ...]
    weight_mod: tvm.IRModule | None
    width: VectorWidth | None = None
    kernel_nodes: KernelNodes = field(default_factory=dict)

    def compute_weights(self, params: Weights) -> list[np.ndarray[Any, Any]]:
        """Compute the weights that `main` takes, in its order.

        Args:
            params: The imported model's weights by name.
        """
        arrays = [params[name] for name in self.weight_names]
        if self.weight_mod is None:
            return arrays
        weights = evaluate_function(self.weight_mod["main"], arrays)
        if weights is not None:
            return weights
        _log.debug("the weights need an operator without a numpy rule: compiling their function")
        target = tvm.target.Target(_WEIGHTS_TARGET)
        library = tvm.compile(compile_c_sources(self.weight_mod, target), target)
        tensors = list(map(tvm.runtime.tensor, arrays))
        computed = relax.VirtualMachine(library, tvm.cpu())["main"](tensors)
        return [weight.numpy() for weight in computed]


def load_ir(path: Path) -> tvm.IRModule:
    """Load the module that `import` wrote."""
    return tvm.ir.load_json(path.read_text())


def load_weights(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights that `import` wrote, by the names of the imported `main`'s parameters, mapped from the file."""
    return read_safetensors(path)


def make_target(mapping: Mapping[str, Json]) -> tvm.target.Target:
    """Return TVM's target for a resolved mapping (see `targets.resolve`)."""
    return tvm.target.Target(dict(mapping))


def lower(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    options: LoweringOptions,
    dump: IRDump | None = None,
) -> LoweredModel:
    """Lower an imported model to fused kernels.

    Args:
        mod: The imported model.
        target: The target to lower for.
        options: The options of the recipe.
        dump: Where to write the module after each pass; None to write nothing.
    """
    names = tuple(str(var.name) for var in ir.list_weights(mod["main"]))
    mod = ir.rename_parameters(mod, _name_in_code)
    cpu = CpuModel.from_target(target.export())
    width = vector_width.choose_width(mod, cpu, options.vector_bits) if cpu else None
    narrowed = cpu._replace(lanes=width.lanes) if cpu and width else None
    context = LoweringContext(target, narrowed, options)
    tracker = NodeTracker(mod)
    graph = pipeline.run_phases(pipeline.GRAPH_PHASES, mod, context, tracker, dump)
    with target, tvm.transform.PassContext(opt_level=3):
        kernels = pipeline.run_phases(pipeline.KERNEL_PHASES, graph, context, tracker, dump)
    return LoweredModel(kernels, names, split_weights(graph), width, tracker.list_kernels())


def _name_in_code(name: str) -> str:
    """Return a name as TVM's code generators take it: for C and CUDA they write others as they are (apache-tvm 0.27)."""
    if _PLAIN_NAME.fullmatch(name):
        return name
    return "v_" + re.sub(r"\W", "_", name, flags=re.ASCII)


def compile_with_weights(
    mod: tvm.IRModule, weights: Sequence[np.ndarray[Any, Any]], target: tvm.target.Target
) -> relax.VMExecutable:
    """Compile a lowered module to a library that contains its weights: `main` takes the model's inputs alone."""
    params = ir.list_weights(mod["main"])
    if len(params) != len(weights):
        raise AssertionError(f"main takes {len(params)} weights, but {len(weights)} were computed")
    # By variable, not by name: lifting may give two parameters the same name.
    tensors = map(tvm.runtime.tensor, weights)
    bound = relax.transform.BindParams("main", dict(zip(params, tensors, strict=True)))(mod)
    return compile_model(bound, target)


class ScheduledModel(NamedTuple):
    """A model with scheduled kernels, ready for code generation.

    Attributes:
        mod: The lowered module.
        weights: The weights that `main` takes after its inputs.
        target: The target.
    """

    mod: tvm.IRModule
    weights: Sequence[np.ndarray[Any, Any]]
    target: tvm.target.Target


def compile_untuned(
    mod: tvm.IRModule,
    params: Weights,
    target: Mapping[str, Json],
    options: LoweringOptions,
    rules_version: int,
) -> relax.VMExecutable:
    """Compile an imported model without tuned schedules; arguments as of `schedule_untuned`."""
    return compile_with_weights(*schedule_untuned(mod, params, target, options, rules_version))


def schedule_untuned(
    mod: tvm.IRModule,
    params: Weights,
    target: Mapping[str, Json],
    options: LoweringOptions,
    rules_version: int,
) -> ScheduledModel:
    """Lower an imported model, and schedule its kernels by the rules alone.

    Args:
        mod: The imported model.
        params: Its weights by name.
        target: TVM's mapping of the target.
        options: The options of the recipe.
        rules_version: As for `schedules.schedule_untuned`.
    """
    tvm_target = make_target(target)
    lowered = lower(mod, tvm_target, options)
    scheduled = schedules.schedule_untuned(lowered.mod, target, rules_version)
    return ScheduledModel(scheduled.mod, lowered.compute_weights(params), tvm_target)


def list_kernels(mod: tvm.IRModule) -> list[str]:
    """Return the names of the kernels in a lowered module, sorted."""
    return sorted(
        str(var.name_hint)
        for var, function in mod.functions_items()
        if isinstance(function, tvm.tirx.PrimFunc)
    )
