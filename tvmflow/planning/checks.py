"""Checks of planned recipes: what they request and cannot be done, found before anything runs. Pure: no disk, no TVM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from tvmflow.core.types import Artifact, Plan
from tvmflow.exporters import EXPORTERS, PARTITIONED_EXPORTERS
from tvmflow.frontends._peers import PEERS
from tvmflow.planning.planned_recipe import PlannedRecipe, Target, resolved_targets
from tvmflow.recipe import Recipe
from tvmflow.recipe._verify import AUTO as COMPARE_AUTO
from tvmflow.runtime.bundles import C_RUNTIME, VM
from tvmflow.stages import STAGES, export, join
from tvmflow.stages._peer_times import device_of
from tvmflow.stages._runtime_choice import (
    AUTO,
    choose_runtime,
    describe_runtime,
    no_c_runtime_reason,
    no_vm_reason,
    run_location,
    vm_reason,
)
from tvmflow.stages._verify_settings import LOCAL, QEMU, RPC
from tvmflow.targets import c_library
from tvmflow.targets.backends import backend_for
from tvmflow.targets.capabilities import unlinkable_reason
from tvmflow.targets.emulation import EMULATED_ARCHS, find_emulated_arch
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget

_VERIFY_ADVICE: Final = "set verify.run_on: qemu (emulation) or rpc (a device of its kind), or verify.against: none (no check)"
_TUNE_ADVICE: Final = "set tune.trials: 0 (no search)"


def check_plan(recipes: Sequence[PlannedRecipe]) -> list[str]:
    """Return all problems, each `file:line:column: field: problem`.

    They are: two recipes with one name, and targets that cannot be built, that would have to run
    where they cannot, or for which an output does not exist.
    """
    problems = list(_check_names(recipes))
    for planned in recipes:
        for target in planned.targets:
            unbuildable = [
                problem
                for part in resolved_targets(target)
                for problem in _check_build(planned, part)
            ]
            problems += unbuildable or [
                *_check_execution(planned, target),
                *_check_compare(planned, target),
                *_check_outputs(planned, target),
            ]
    # A problem of one variant is a problem of all.
    return list(dict.fromkeys(problems))


def _check_names(recipes: Sequence[PlannedRecipe]) -> Iterator[str]:
    first: dict[str, PlannedRecipe] = {}
    for planned in recipes:
        name = planned.recipe.name
        other = first.setdefault(name, planned)
        if other is not planned:
            loc = ("variants", planned.variant) if planned.variant else ("name",)
            where = planned.loaded.where(*loc)
            yield (
                f"{where}: {'.'.join(loc)}: '{name}' is also the name of {other.loaded.path}; "
                "both would be delivered to one folder: give one of them another name"
            )


def describe_runtimes(
    recipes: Iterable[PlannedRecipe], plan: Plan, artifacts: Mapping[str, Artifact]
) -> Iterator[str]:
    """Yield a line for each library that needs TVM's runtime where its recipe left that open, and why.

    Args:
        recipes: The planned recipes.
        plan: Their plan.
        artifacts: The results that are known: the first stage that lowers a model finds out what it needs.
    """
    needs: dict[str, str] = {}
    for planned in recipes:
        for target in planned.targets if "build" in planned.stages else ():
            for part in resolved_targets(target):
                recipe = planned.recipe_for(part)
                if recipe.runtime == AUTO and (reason := vm_reason(recipe, part)):
                    needs[f"{planned.recipe.name}/{part.name}"] = (
                        f"runs on TVM's virtual machine (runtime: vm): {reason}"
                    )
    for spec in plan.stages:
        facts = artifacts[spec.id].facts if spec.id in artifacts else {}
        for line in describe_runtime(facts):
            needs.setdefault(f"{spec.recipe}/{spec.target}", line)
    yield from (f"{name}: {line}" for name, line in needs.items())


def _check_build(planned: PlannedRecipe, target: ResolvedTarget) -> list[str]:
    """Return the first reason why a target cannot be built, should not be, or cannot be linked."""
    where = f"{planned.where(target)}: targets: '{target.name}'"
    stages = {stage for stage in planned.stages if STAGES[stage].TRAITS.scope != "model"}
    if not stages:
        return []
    backend = backend_for(target.tvm)
    unbuildable = backend.unbuildable_reason(target.tvm)
    if unbuildable:
        return [f"{where} cannot be built: {unbuildable}"]
    useless = _find_useless_precision(planned, target)
    if useless:
        return [f"{where} {useless}; give it `kernels: {{precision: model}}`"]
    recipe = planned.recipe_for(target)
    no_c_runtime = no_c_runtime_reason(recipe, target) if recipe.runtime == C_RUNTIME else ""
    if "build" in stages and no_c_runtime:
        return [f"{where} cannot have the C runtime: {no_c_runtime}; give it `runtime: vm`"]
    unlinkable = unlinkable_reason(target.tvm, target.toolchain)
    if "export" in stages and unlinkable:
        return [f"{where} cannot be linked: {unlinkable}; name one with `toolchain: {{linker: …}}`"]
    no_vm = no_vm_reason(target) if choose_runtime(recipe, target) == VM else ""
    if "export" in stages and no_vm:
        advice = "ask for the output c-library, and leave `runtime: vm` out"
        return [f"{where} cannot have a library for TVM's runtime: {no_vm}; {advice}"]
    return []


def _find_useless_precision(planned: PlannedRecipe, target: ResolvedTarget) -> str:
    """Return what is wrong with the precision for a target, or an empty string."""
    backend, precision = backend_for(target.tvm), planned.recipe_for(target).kernels.precision
    problems = {
        "mixed": ("only loses speed by", backend.slow_float16_reason),
        "bfloat16": ("has no instructions for", backend.no_bfloat16_reason),
    }
    if precision not in problems:
        return ""
    problem, find_reason = problems[precision]
    reason = find_reason(target.tvm, target.features)
    setting = ".".join(planned.setting_loc("kernels", "precision"))
    return f"{problem} {setting}: {precision}: {reason}" if reason else ""


def _check_execution(planned: PlannedRecipe, target: Target) -> Iterator[str]:
    """Check that a target can be tuned and verified, if it has to be."""
    for part in resolved_targets(target):
        recipe, impossible = planned.recipe_for(part), dict[str, str]()
        if "tune" in planned.stages and recipe.tune.trials and part.unmeasurable_reason:
            impossible["tuned"] = _TUNE_ADVICE
        if "verify" in planned.stages:
            if part.unrunnable_reason and _must_run_locally(recipe):
                impossible["verified"] = _VERIFY_ADVICE
            yield from _check_run_location(planned, target, part)
        if impossible:
            yield (
                f"{planned.where(part)}: targets: '{part.name}' cannot be {' or '.join(impossible)} "
                f"on this machine: {part.unrunnable_reason}; {'; '.join(impossible.values())}"
            )


def _check_compare(planned: PlannedRecipe, target: Target) -> Iterator[str]:
    """Check that the runtimes that `verify.compare` names can run the model here, beside the library."""
    recipe = planned.recipe_for(target)
    if "verify" not in planned.stages or run_location(recipe) != LOCAL:
        return
    is_override = recipe.verify.compare != planned.recipe.verify.compare
    for index, name in enumerate(recipe.verify.compare):
        if name == COMPARE_AUTO:
            continue
        loc = planned.setting_loc("verify", "compare")
        if is_override:
            where = planned.where(target, *loc[-2:], index)
        else:
            where = planned.loaded.where(*loc, index)
        peer = PEERS[name]
        problem = peer.unsupported_reason(recipe.model.kind, device_of(target))
        if problem:
            yield f"{where}: verify.compare.{index}: {problem}"
        elif not peer.is_installed():
            traits = peer.traits
            yield f"{where}: verify.compare.{index}: {traits.name} is not installed ({traits.install})"


def _must_run_locally(recipe: Recipe) -> bool:
    """Tell whether verify has to run the library on this host."""
    checks = recipe.verify
    return checks.run_on == "local" or (checks.run_on == "auto" and checks.against != "none")


def _check_run_location(
    planned: PlannedRecipe, target: Target, part: ResolvedTarget
) -> Iterator[str]:
    """Check that a part of a target can run where `verify.run_on` says."""
    location = run_location(planned.recipe_for(target))
    triple = str(part.tvm.get("mtriple", ""))
    if location == QEMU and find_emulated_arch(triple) is None:
        problem = (
            f"qemu runs libraries for Linux on {', '.join(EMULATED_ARCHS)}; "
            f"'{part.name}' is for {triple or part.tvm['kind']}"
        )
    elif location == QEMU and (reason := c_library.unsupported_reason(triple)):
        problem = f"qemu runs plain C libraries: {reason}"
    elif location == QEMU and _has_tvm_runtime(planned.recipe_for(part), part):
        problem = (
            f"qemu runs plain C libraries, and '{part.name}' has a library for TVM's runtime; "
            "leave `runtime: vm` out, ask for the output bundle or c-library, or choose "
            "verify.run_on: rpc"
        )
    elif location == RPC and not part.remote:
        problem = (
            "rpc runs libraries on the devices of a target's remote; "
            f"'{part.name}' needs `remote: {{key: NAME}}`"
        )
    else:
        return
    is_override = location != run_location(planned.recipe)
    loc = planned.setting_loc("verify", "run_on")
    where = planned.where(target, *loc[-2:]) if is_override else planned.loaded.where(*loc)
    yield f"{where}: verify.run_on: {problem}"


def _has_tvm_runtime(recipe: Recipe, target: ResolvedTarget) -> bool:
    """Tell whether a library is for TVM's runtime, by the recipe. A part may have no outputs of its own."""
    has_choice = recipe.outputs or recipe.runtime != AUTO
    return bool(has_choice) and choose_runtime(recipe, target) == VM


def _check_outputs(planned: PlannedRecipe, target: Target) -> Iterator[str]:
    """Check that every output exists for a target."""
    if "export" not in planned.stages:
        return
    outputs = planned.recipe_for(target).outputs
    is_override = outputs != planned.recipe.outputs
    for index, output in enumerate(outputs):
        loc = ("outputs", index)
        where = planned.where(target, *loc) if is_override else planned.loaded.where(*loc)
        for name, reason in _find_unsupported(planned, target, output):
            yield f"{where}: outputs.{index}: there is no {output} for the target '{name}': {reason}"


def _find_unsupported(
    planned: PlannedRecipe, target: Target, output: str
) -> Iterator[tuple[str, str]]:
    """Yield `(target, reason)` for every target or part for which an output does not exist."""
    if isinstance(target, PartitionedTarget) and output in PARTITIONED_EXPORTERS:
        requests = {target.name: join.make_request(planned.recipe_for(target), target)}
    else:
        requests = {
            part.name: export.make_request(planned.recipe_for(part), part)
            for part in resolved_targets(target)
        }
    for name, request in requests.items():
        reason = EXPORTERS[output].unsupported_reason(request)
        if reason:
            yield name, reason
