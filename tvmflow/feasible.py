"""What recipes ask for that cannot be done: told before anything runs. Pure: no disk, no TVM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tvmflow.exporters import EXPORTERS
from tvmflow.planned import PlannedRecipe, Target, machines_of
from tvmflow.recipe import OF_THE_WHOLE, Recipe
from tvmflow.stages import EVERY_STAGE, export, join, verify
from tvmflow.stages._kernels import is_mixed
from tvmflow.stages._subjects import QEMU, RPC
from tvmflow.targets.abilities import why_not_built, why_not_linked, why_not_mixed
from tvmflow.targets.emulation import MACHINES, machine_of
from tvmflow.targets.resolve import JoinedTarget, ResolvedTarget


def problems_of(recipes: Sequence[PlannedRecipe]) -> list[str]:
    """`file:line:column: field: what`, for all of them.

    Two recipes with one name, a target that cannot be built, or that would have to run where it
    cannot, or for which there is no such output.
    """
    problems = _name_clashes(recipes)
    for planned in recipes:
        for target in planned.targets:
            unbuildable = [
                each for machine in machines_of(target) for each in _unbuildable(planned, machine)
            ]
            problems += unbuildable or _unrunnable(planned, target) + _unexportable(planned, target)
    # what is wrong for one variant is wrong for all
    return list(dict.fromkeys(problems))


def _name_clashes(recipes: Sequence[PlannedRecipe]) -> list[str]:
    seen: dict[str, PlannedRecipe] = {}
    problems = []
    for planned in recipes:
        name = planned.recipe.name
        first = seen.setdefault(name, planned)
        if first is not planned:
            loc = ("variants", planned.variant) if planned.variant else ("name",)
            problems.append(
                f"{planned.loaded.where(*loc)}: {'.'.join(loc)}: '{name}' is also the name of {first.loaded.path}"
            )
    return problems


def _unbuildable(planned: PlannedRecipe, target: ResolvedTarget) -> list[str]:
    """A target may be named for which there is no code, no float16, or no linker."""
    where = f"{planned.where(target)}: targets: '{target.name}'"
    needed = {stage for stage in planned.stages if EVERY_STAGE[stage].SCOPE == "target"}
    built = why_not_built(target.tvm)
    if needed and built:
        return [f"{where} cannot be built: {built}"]
    mixed = why_not_mixed(target) if is_mixed(planned.of(target)) else ""
    if needed and mixed:
        return [
            f"{where} only loses speed by kernels.precision: mixed: {mixed}; give it `kernels: {{precision: model}}`"
        ]
    linked = why_not_linked(target.tvm, target.toolchain)
    if "export" in needed and linked:
        return [f"{where} cannot be linked: {linked}; name one with `toolchain: {{linker: …}}`"]
    return []


_VERIFY_ELSEWHERE: Final = (
    "verified (verify.against: none turns that off; verify.run_on: qemu has it run under emulation, "
    "and rpc on a device of its kind)"
)


def _unrunnable(planned: PlannedRecipe, target: Target) -> list[str]:
    """A target that cannot run here can be built, but not tuned here, and verified only where it can run."""
    problems = []
    for machine in machines_of(target):
        recipe, asked = planned.of(machine), []
        if "tune" in planned.stages and recipe.tune.trials and machine.why_not_tuned:
            asked.append("tuned (tune.trials: 0 turns that off)")
        if "verify" in planned.stages:
            if machine.why_not and _must_run_here(recipe):
                asked.append(_VERIFY_ELSEWHERE)
            problems += _no_place(planned, target, machine)
        if asked:
            problems.append(
                f"{planned.where(machine)}: targets: '{machine.name}' cannot be {' or '.join(asked)} here: {machine.why_not}"
            )
    return problems


def _must_run_here(recipe: Recipe) -> bool:
    """Whether verify may not do without running the library on this machine."""
    checks = recipe.verify
    return checks.run_on == "local" or (checks.run_on == "auto" and checks.against != "none")


def _no_place(planned: PlannedRecipe, target: Target, machine: ResolvedTarget) -> list[str]:
    """A target for one of whose machines there is no place of the kind that `verify.run_on` names."""
    place, triple = verify.place(planned.of(target)), str(machine.tvm.get("mtriple", ""))
    if place == QEMU and machine_of(triple) is None:
        what = triple or str(machine.tvm["kind"])
        there = f"Linux on {', '.join(MACHINES)}"
        problem = f"qemu runs libraries for {there}; '{machine.name}' is for {what}"
    elif place == RPC and not machine.remote:
        hint = f"'{machine.name}' needs `remote: {{key: NAME}}`"
        problem = f"rpc runs libraries on the devices of a target's remote; {hint}"
    else:
        return []
    is_own = place != verify.place(planned.recipe)
    where = planned.where(target, "verify", "run_on") if is_own else None
    return [f"{where or planned.loaded.where('verify', 'run_on')}: verify.run_on: {problem}"]


def _unexportable(planned: PlannedRecipe, target: Target) -> list[str]:
    """Outputs that there are not for a target."""
    recipe, problems = planned.of(target), []
    for index, output in enumerate(recipe.outputs if "export" in planned.stages else ()):
        for name, why_not in _refusals(planned, target, output):
            is_own = recipe.outputs != planned.recipe.outputs
            where = (
                planned.where(target, "outputs", index)
                if is_own
                else planned.loaded.where("outputs", index)
            )
            problems.append(
                f"{where}: outputs.{index}: there is no {output} for the target '{name}': {why_not}"
            )
    return problems


def _refusals(planned: PlannedRecipe, target: Target, output: str) -> Iterator[tuple[str, str]]:
    """`(target, reason)` wherever there is no such output."""
    if isinstance(target, JoinedTarget) and output in OF_THE_WHOLE:
        asked = {target.name: join.asked(planned.of(target), target)}
    else:
        asked = {each.name: export.asked(planned.of(each), each) for each in machines_of(target)}
    for name, wanted in asked.items():
        why_not = EXPORTERS[output].why_not(wanted)
        if why_not:
            yield name, why_not
