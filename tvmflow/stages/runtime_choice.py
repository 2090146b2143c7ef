"""The choice of a library's runtime: C code in the library itself, or TVM's virtual machine."""

from __future__ import annotations

from typing import Final

from tvmflow.exporters import EXPORTERS
from tvmflow.recipe import Recipe
from tvmflow.runtime.bundles import C_RUNTIME, VM
from tvmflow.stages.verify_settings import LOCAL, QEMU, RPC
from tvmflow.targets import c_runtime, form_names, linking
from tvmflow.targets.backends import backend_for
from tvmflow.targets.backends.webgpu import WebgpuBackend
from tvmflow.targets.form_names import C_LIBRARY
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.targets.tvm_target import cpu_triple

AUTO: Final = "auto"
"""The C runtime if the model allows it, which `extract_tasks` and `build` find out."""

FORMS: Final = {C_RUNTIME: C_LIBRARY, VM: form_names.VM, WebgpuBackend.KIND: form_names.WEBGPU}
"""Runtime -> the form of compiled code for it."""


def choose_runtime(recipe: Recipe, target: ResolvedTarget) -> str:
    """Return a recipe's runtime for one target: C_RUNTIME, VM, or AUTO if the model decides.

    For WebGPU, it is the backend's kind: code for a browser's GPU is run by the package that contains it.
    """
    backend = backend_for(target.tvm)
    if backend.IS_BESIDE_HOST:
        return backend.KIND
    if recipe.runtime != AUTO:
        return recipe.runtime
    if target.levels or target.isa_level_target:
        return C_RUNTIME
    if backend.no_tvm_runtime_reason(target.tvm):
        return C_RUNTIME
    return VM if vm_reason(recipe, target) else AUTO


def vm_reason(recipe: Recipe, target: ResolvedTarget) -> str:
    """Return why `auto` means TVM's virtual machine independent of the model; empty if it does not."""
    outputs_forms = {EXPORTERS[output].FORM for output in recipe.outputs}
    # a part may have no outputs of its own, because it is delivered in the bundle of all parts
    if outputs_forms and outputs_forms.isdisjoint({"", C_LIBRARY}):
        return "all outputs are made for it"
    return no_c_runtime_reason(recipe, target)


def no_c_runtime_reason(recipe: Recipe, target: ResolvedTarget) -> str:
    """Return why libraries for a target cannot have the C runtime; empty if they can."""
    kind = str(target.tvm["kind"])
    backend = backend_for(target.tvm)
    if not (backend.RUNS_ON_HOST_CPU or backend.EXECUTOR):
        return f"{kind} needs TVM's runtime"
    if target.toolchain:
        return "libraries for it are linked by a toolchain of its own"
    if run_location(recipe) == RPC:
        return "verify.run_on: rpc runs libraries through TVM's RPC server"
    return c_runtime.unsupported_reason(cpu_triple(target.tvm))


def requires_vm(recipe: Recipe) -> bool:
    """Return whether an output is TVM's own library."""
    return any(EXPORTERS[output].FORM == form_names.VM for output in recipe.outputs)


def no_vm_reason(target: ResolvedTarget) -> str:
    """Return why libraries for a target cannot have TVM's runtime; empty if they can."""
    if reason := backend_for(target.tvm).no_tvm_runtime_reason(target.tvm):
        return reason
    return "" if target.toolchain else linking.unlinkable_reason(cpu_triple(target.tvm))


def requires_c_library(recipe: Recipe, target: ResolvedTarget) -> bool:
    """Return whether a C library is required; a model that needs TVM's runtime is an error then."""
    return C_LIBRARY in list_forms(recipe) or choose_runtime(recipe, target) == C_RUNTIME


def list_forms(recipe: Recipe) -> set[str]:
    """Return the forms of compiled code that outputs and verification need."""
    forms = {EXPORTERS[output].FORM for output in recipe.outputs} - {""}
    return forms | {C_LIBRARY} if run_location(recipe) == QEMU else forms


def run_location(recipe: Recipe) -> str:
    """Return where the libraries of a recipe, resolved for one target, are run: LOCAL, QEMU or RPC."""
    return LOCAL if recipe.verify.run_on == "auto" else str(recipe.verify.run_on)


def describe_runtime(reason: str) -> list[str]:
    """Return a line about a library that needs TVM's virtual machine; none if `reason` is empty."""
    return (
        [f"runs on TVM's virtual machine (runtime: vm), which it needs for {reason}"]
        if reason
        else []
    )
