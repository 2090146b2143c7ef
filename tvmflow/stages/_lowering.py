"""The one road from imported Relax to the kernels that are tuned and built.

`extract_tasks` and `build` both call `lower`. A tuned record finds its kernel by the
structure of the lowered function, so a second road would silently give untuned kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import tvm
from tvm import relax

from tvmflow import schedules
from tvmflow.passes._function import Facts, is_straight, outputs_of
from tvmflow.passes.blocked import block_layouts
from tvmflow.passes.groups import widen_groups
from tvmflow.passes.lifted import lift_sequences
from tvmflow.passes.norms import fold_norms
from tvmflow.passes.packed import pack_matmuls
from tvmflow.passes.quantised import keep_whole
from tvmflow.passes.vector_math import vectorise_math
from tvmflow.schedules import Machine

# Weights are transformed on the machine that builds, for a CPU level that every x86-64 machine has and
# without fused multiply-add, so that two builders give the same bytes.
_FOLDING_TARGET: Final = {"kind": "llvm"}


def load_ir(path: Path) -> tvm.IRModule:
    """The module that `import` wrote."""
    return tvm.ir.load_json(path.read_text())


def make_target(mapping: Mapping[str, Any]) -> tvm.target.Target:
    """TVM's target for a resolved mapping (see `targets.resolve`)."""
    return tvm.target.Target(dict(mapping))


def _simplify(
    mod: tvm.IRModule, target: tvm.target.Target, kernels: Mapping[str, Any]
) -> tvm.IRModule:
    """Operators in their form for inference and in the layouts of the machine; what nobody reads is gone."""
    simple = tvm.transform.Sequential(
        [
            relax.transform.DecomposeOpsForInference(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.DeadCodeElimination(),
        ]
    )(fold_norms(mod))
    machine = Machine.of(target.export())
    if machine is None:
        return relax.transform.ToMixedPrecision()(simple) if _is_mixed(kernels) else simple
    simple = keep_whole(simple) if is_straight(simple) else simple
    plain = kernels["plain"]
    kept = "float16" if _is_mixed(kernels) else "float32"
    if kernels["layout"] == "blocked" and is_straight(simple):
        simple = simple if "conv1d" in plain else lift_sequences(simple)
        simple = widen_groups(simple, machine.lanes, plain)
        simple = block_layouts(simple, machine.lanes, plain, kernels["winograd"], kept)
    if kernels["weights"] == "packed" and "matmul" not in plain and is_straight(simple):
        simple = pack_matmuls(simple, machine.lanes, kept)
    return relax.transform.CanonicalizeBindings()(simple)


def _is_mixed(kernels: Mapping[str, Any]) -> bool:
    """Whether weights, and on a GPU the data that they meet, become float16."""
    return bool(kernels["precision"] == "mixed")


def _split(mod: tvm.IRModule) -> tuple[tvm.IRModule, tvm.IRModule | None]:
    """`(inference, weight arithmetic)`: what depends on weights alone moves into a function of its own.

    A batch norm's `sqrt(var + eps)` is computed once when the library is built, not on each call.
    The second part is None when the model has no weights, or gives some of them as they are: TVM's
    pass would lose those.
    """
    main = mod["main"]
    has_weights = len(main.params) > int(main.attrs["num_input"])
    if not has_weights or any(map(Facts(main).is_weight, outputs_of(main))):
        return mod, None
    lifted = relax.transform.LiftTransformParams()(mod)
    return _only(lifted, "main"), _only(lifted, "main_transform_params")


def _only(mod: tvm.IRModule, name: str) -> tvm.IRModule:
    """A module whose `main` is the function `name` of `mod`, with the kernels that it calls and no others."""
    functions = dict(mod.functions_items())
    chosen = next(function for var, function in functions.items() if var.name_hint == name)
    kernels = {
        var: function
        for var, function in functions.items()
        if isinstance(function, tvm.tirx.PrimFunc)
    }
    main = tvm.ir.GlobalVar("main")
    alone = tvm.IRModule({**kernels, main: chosen.with_attr("global_symbol", "main")})
    return relax.transform.DeadCodeElimination(["main"])(alone)


def lower(mod: tvm.IRModule, target: tvm.target.Target, kernels: Mapping[str, Any]) -> tvm.IRModule:
    """Fused, legalized kernels and a `main` that calls them, with weights as arguments.

    `kernels` is what the recipe says under that name.

    The weights that `main` then takes are those that `fold_weights` gives, in its order.
    """
    inference, _ = _split(_simplify(mod, target, kernels))
    with target, tvm.transform.PassContext(opt_level=3):
        lowered = tvm.transform.Sequential(
            [
                relax.backend.DispatchSampling(),
                relax.backend.DispatchSortScan(),
                relax.transform.LegalizeOps(),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FoldConstant(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                relax.transform.DeadCodeElimination(),
            ]
        )(inference)
    is_cpu = Machine.of(target.export()) is not None
    return vectorise_math(lowered) if is_cpu and kernels["math"] == "vector" else lowered


def fold_weights(
    mod: tvm.IRModule,
    params: Mapping[str, np.ndarray[Any, Any]],
    target: tvm.target.Target,
    kernels: Mapping[str, Any],
) -> list[tvm.runtime.Tensor]:
    """The weights that `lower(mod, target, kernels)["main"]` takes after its inputs, computed from the model's own.

    `params` maps the names of the imported `main`'s weight arguments to arrays.
    """
    simple = _simplify(mod, target, kernels)
    main = simple["main"]
    names = [var.name for var in main.params[int(main.attrs["num_input"]) :]]
    arrays = [tvm.runtime.tensor(params[name]) for name in names]
    _, weights = _split(simple)
    if weights is None:
        return arrays
    library = tvm.compile(weights, tvm.target.Target(_FOLDING_TARGET))
    folded = relax.VirtualMachine(library, tvm.cpu())["main"](arrays)
    return list(folded)


def load_weights(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The weights that `import` wrote, by the names of the imported `main`'s arguments."""
    from safetensors.numpy import load_file

    return dict(load_file(path))


def compile_with_weights(
    lowered: tvm.IRModule, weights: list[tvm.runtime.Tensor], target: tvm.target.Target
) -> relax.VMExecutable:
    """A library that carries its weights: `main` takes the model's inputs alone."""
    main = lowered["main"]
    params = list(main.params[int(main.attrs["num_input"]) :])
    if len(params) != len(weights):
        raise AssertionError(f"main takes {len(params)} weights, folding gave {len(weights)}")
    # by variable, not by name: lifting may give two parameters one name
    bound = relax.transform.BindParams("main", dict(zip(params, weights, strict=True)))(lowered)
    with target:
        return tvm.compile(bound, target)


def compile_untuned(
    mod: tvm.IRModule,
    params: Mapping[str, np.ndarray[Any, Any]],
    target: Mapping[str, Any],
    kernels: Mapping[str, Any],
    rules: int,
) -> relax.VMExecutable:
    """An imported model as a library that nothing was searched for; `rules` as in `_kernels.schedules`."""
    made = make_target(target)
    lowered, _ = schedules.by_rule(lower(mod, made, kernels), target, rules)
    return compile_with_weights(lowered, fold_weights(mod, params, made, kernels), made)


def kernel_names(lowered: tvm.IRModule) -> list[str]:
    """The kernels that `main` calls, sorted."""
    return sorted(
        var.name_hint
        for var, function in lowered.functions_items()
        if isinstance(function, tvm.tirx.PrimFunc)
    )
