"""The runtime of a library: C code in the library itself, or TVM's virtual machine."""

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
"""The C runtime if the model allows it: `extract_tasks` and `build` find out."""

FORMS: Final = {C_RUNTIME: C_LIBRARY, VM: form_names.VM, WebgpuBackend.KIND: form_names.WEBGPU}
"""The runtime -> the form of compiled code for it."""


def choose_runtime(recipe: Recipe, target: ResolvedTarget) -> str:
    """Return the runtime of a recipe for one target: C_RUNTIME, VM, or AUTO where the model decides.

    Code for the GPU of a browser is run by the package that it is delivered in.
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
    """Return why `auto` means TVM's virtual machine for any model, or an empty string."""
    outputs_forms = {EXPORTERS[output].FORM for output in recipe.outputs}
    # a part of a model may have no outputs of its own: it is in a bundle of the whole
    if outputs_forms and outputs_forms.isdisjoint({"", C_LIBRARY}):
        return "all outputs are made for it"
    return no_c_runtime_reason(recipe, target)


def no_c_runtime_reason(recipe: Recipe, target: ResolvedTarget) -> str:
    """Return why no library for a target can have the C runtime, or an empty string."""
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
    """Return why no library for a target can have TVM's runtime, or an empty string."""
    if reason := backend_for(target.tvm).no_tvm_runtime_reason(target.tvm):
        return reason
    return "" if target.toolchain else linking.unlinkable_reason(cpu_triple(target.tvm))


def requires_c_library(recipe: Recipe, target: ResolvedTarget) -> bool:
    """Return whether there must be a C library, so that a model that needs TVM's runtime is an error."""
    return C_LIBRARY in list_forms(recipe) or choose_runtime(recipe, target) == C_RUNTIME


def list_forms(recipe: Recipe) -> set[str]:
    """Return the forms of compiled code that outputs and verification need."""
    forms = {EXPORTERS[output].FORM for output in recipe.outputs} - {""}
    return forms | {C_LIBRARY} if run_location(recipe) == QEMU else forms


def run_location(recipe: Recipe) -> str:
    """Return where the libraries of a recipe, resolved for one target, are run: LOCAL, QEMU or RPC."""
    return LOCAL if recipe.verify.run_on == "auto" else str(recipe.verify.run_on)


def describe_runtime(reason: str) -> list[str]:
    """Return a report's line about a library that needs TVM's virtual machine; nothing without a reason."""
    return (
        [f"runs on TVM's virtual machine (runtime: vm), which it needs for {reason}"]
        if reason
        else []
    )
