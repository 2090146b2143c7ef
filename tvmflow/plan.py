"""Turns recipes into a plan: which stages, with which settings, fed by which. Pure: no disk, no TVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.errors import RecipeError
from tvmflow.exporters import EXPORTERS
from tvmflow.frontends import FRONTENDS
from tvmflow.recipe import LoadedRecipe, Recipe
from tvmflow.stages import EVERY_STAGE, export, pick_best, runner, verify
from tvmflow.targets import cuda
from tvmflow.targets.abilities import why_not_built, why_not_linked
from tvmflow.targets.emulation import MACHINES, machine_of
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.values import Delivery, InputFile, Need, Plan, StageSpec

# Not in a pipeline's list: `verify` needs it where it emulates.
_RUNNER: Final = "runner"


class PlannedRecipe(NamedTuple):
    """A recipe (or a variant of it) with all that its plan depends on: stages in order, targets resolved, source files named."""

    loaded: LoadedRecipe
    stages: tuple[str, ...]
    targets: tuple[ResolvedTarget, ...]
    model_files: tuple[InputFile, ...]
    variant: str = ""

    @property
    def recipe(self) -> Recipe:
        """As it is for all targets."""
        written = self.loaded.recipe
        return written.variant(self.variant) if self.variant else written

    def of(self, target: ResolvedTarget | None) -> Recipe:
        """As it is for one target: the one place where a stage's recipe comes from."""
        return self.recipe.of(target.name) if target else self.recipe

    def where(self, target: ResolvedTarget, *loc: str | int) -> str:
        """`file:line:column` of a target in the recipe, or of something in it."""
        names = [each.name for each in self.loaded.recipe.targets]
        index = [names.index(target.name)] if target.name in names else []
        return self.loaded.where("targets", *index, *loc)


def make_plan(recipes: Sequence[PlannedRecipe]) -> Plan:
    """The stages of all recipes, each after those that it needs.

    Raises RecipeError when two recipes have one name, when a target cannot be built, when it would
    have to run on a machine that cannot run it, or when there is no such output for it.
    """
    problems = _name_clashes(recipes)
    for planned in recipes:
        for target in planned.targets:
            problems += _unbuildable(planned, target) or _unrunnable(
                planned, target
            ) + _unexportable(planned, target)
    # what is wrong for one variant is wrong for all
    problems = list(dict.fromkeys(problems))
    if problems:
        raise RecipeError(problems)
    stages: list[StageSpec] = []
    deliveries: list[Delivery] = []
    for planned in recipes:
        specs = _stages_of(planned)
        stages += specs
        deliveries += _deliveries_of(planned, {spec.id for spec in specs})
    return Plan(tuple(stages), tuple(deliveries))


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
    """A target may be named for which there is no code, or no linker."""
    where = f"{planned.where(target)}: targets: '{target.name}'"
    needed = {stage for stage in planned.stages if EVERY_STAGE[stage].SCOPE == "target"}
    built = why_not_built(target.tvm)
    if needed and built:
        return [f"{where} cannot be built: {built}"]
    linked = why_not_linked(target.tvm, target.toolchain)
    if "export" in needed and linked:
        return [f"{where} cannot be linked: {linked}; name one with `toolchain: {{linker: …}}`"]
    return []


_VERIFY_ELSEWHERE: Final = (
    "verified (verify.against: none turns that off; verify.run_on: qemu has it run under emulation, "
    "and rpc on a device of its kind)"
)


def _unrunnable(planned: PlannedRecipe, target: ResolvedTarget) -> list[str]:
    """A target that cannot run here can be built, but not tuned here, and verified only where it can run."""
    recipe, asked, problems = planned.of(target), [], []
    if "tune" in planned.stages and recipe.tune.trials and target.why_not_tuned:
        asked.append("tuned (tune.trials: 0 turns that off)")
    if "verify" in planned.stages:
        if target.why_not and _must_run_here(recipe):
            asked.append(_VERIFY_ELSEWHERE)
        problems += _no_place(planned, target)
    if asked:
        problems.append(
            f"{planned.where(target)}: targets: '{target.name}' cannot be {' or '.join(asked)} here: {target.why_not}"
        )
    return problems


def _must_run_here(recipe: Recipe) -> bool:
    """Whether verify may not do without running the library on this machine."""
    checks = recipe.verify
    return checks.run_on == "local" or (checks.run_on == "auto" and checks.against != "none")


def _no_place(planned: PlannedRecipe, target: ResolvedTarget) -> list[str]:
    """A target for which there is no place of the kind that `verify.run_on` names."""
    place, triple = verify.place(planned.of(target)), str(target.tvm.get("mtriple", ""))
    if place == verify.QEMU and machine_of(triple) is None:
        what = triple or str(target.tvm["kind"])
        there = f"Linux on {', '.join(MACHINES)}"
        problem = f"qemu runs libraries for {there}; '{target.name}' is for {what}"
    elif place == verify.RPC and not target.remote:
        hint = f"'{target.name}' needs `remote: {{key: NAME}}`"
        problem = f"rpc runs libraries on the devices of a target's remote; {hint}"
    else:
        return []
    is_own = place != verify.place(planned.recipe)
    where = planned.where(target, "verify", "run_on") if is_own else None
    return [f"{where or planned.loaded.where('verify', 'run_on')}: verify.run_on: {problem}"]


def _unexportable(planned: PlannedRecipe, target: ResolvedTarget) -> list[str]:
    """Outputs that there are not for a target."""
    recipe, problems = planned.of(target), []
    for index, output in enumerate(recipe.outputs if "export" in planned.stages else ()):
        why_not = EXPORTERS[output].why_not(export.asked(recipe, target))
        if why_not:
            is_own = recipe.outputs != planned.recipe.outputs
            where = (
                planned.where(target, "outputs", index)
                if is_own
                else planned.loaded.where("outputs", index)
            )
            problems.append(
                f"{where}: outputs.{index}: there is no {output} for the target '{target.name}': {why_not}"
            )
    return problems


def _stages_of(planned: PlannedRecipe) -> list[StageSpec]:
    specs: list[StageSpec] = []
    for name in planned.stages:
        targets = planned.targets if EVERY_STAGE[name].SCOPE == "target" else (None,)
        if name == "verify":
            emulated = [each for each in planned.targets if _emulates(planned.of(each))]
            specs += [_spec(planned, _RUNNER, target) for target in emulated]
        specs += [_spec(planned, name, target) for target in targets]
    return specs


def _emulates(recipe: Recipe) -> bool:
    return verify.place(recipe) == verify.QEMU


def _stage_id(recipe: Recipe, stage: str, target: ResolvedTarget | None) -> str:
    scoped = target is not None and EVERY_STAGE[stage].SCOPE == "target"
    return f"{recipe.name}:{stage}/{target.name}" if scoped and target else f"{recipe.name}:{stage}"


def _spec(planned: PlannedRecipe, name: str, target: ResolvedTarget | None) -> StageSpec:
    recipe, stage = planned.of(target), EVERY_STAGE[name]
    needs = tuple(
        Need(other, _stage_id(recipe, other, target), files)
        for other, files in stage.NEEDS.items()
        if other in planned.stages
    )
    if name == "verify" and _emulates(recipe):
        needs += (Need(_RUNNER, _stage_id(recipe, _RUNNER, target), (runner.RUNNER,)),)
    return StageSpec(
        id=_stage_id(recipe, name, target),
        stage=name,
        recipe=recipe.name,
        target=target.name if target else "",
        version=stage.VERSION,
        settings=stage.settings(recipe, target),
        files=_files(planned, target, stage.READS),
        needs=needs,
        tools=(*stage.TOOLS, *_frontend_tools(recipe, name), *_target_tools(target, name)),
        timeout_s=stage.TIMEOUT_S,
    )


def _frontend_tools(recipe: Recipe, stage: str) -> tuple[str, ...]:
    frontend = FRONTENDS[recipe.model.kind]
    extra: Mapping[str, tuple[str, ...]] = {
        "import": frontend.TOOLS,
        "verify": frontend.REFERENCE_TOOLS if recipe.verify.against != "none" else (),
    }
    return tuple(name for name in extra.get(stage, ()) if name not in EVERY_STAGE[stage].TOOLS)


def _target_tools(target: ResolvedTarget | None, stage: str) -> tuple[str, ...]:
    """What only targets of one kind are compiled with."""
    is_cuda = target is not None and target.tvm["kind"] == cuda.KIND
    return cuda.PACKAGES if is_cuda and stage == "build" else ()


def _files(
    planned: PlannedRecipe, target: ResolvedTarget | None, reads: tuple[str, ...]
) -> tuple[InputFile, ...]:
    files: list[InputFile] = []
    if "model" in reads:
        files += planned.model_files
    if "reference" in reads:
        # import has already said what the model means; a file that means the same verifies the same
        files += [file._replace(keyed=False) for file in planned.model_files]
    data = planned.of(target).verify.data
    if "data" in reads and data is not None:
        path = Path(planned.loaded.path).parent / data
        where = planned.loaded.where("verify", "data")
        if target and data != planned.recipe.verify.data:
            where = planned.where(target, "verify", "data")
        files.append(InputFile("data", str(path.absolute()), where))
    return tuple(files)


def _deliveries_of(planned: PlannedRecipe, ids: set[str]) -> list[Delivery]:
    found = []
    for target in planned.targets:
        recipe = planned.of(target)
        exported = _stage_id(recipe, "export", target)
        picked = _stage_id(recipe, "pick_best", target)
        verified = _stage_id(recipe, "verify", target)
        gate = verified if verified in ids else ""
        if exported in ids:
            files = export.delivered(recipe, target)
            found.append(Delivery(recipe.name, target.name, exported, files, gate))
        if picked in ids and recipe.tune.trials:
            picture = ((pick_best.ROOFLINE, pick_best.ROOFLINE),)
            found.append(Delivery(recipe.name, target.name, picked, picture, gate))
        if gate:
            report = ((verify.VERDICT, "verify.json"),)
            found.append(Delivery(recipe.name, target.name, verified, report, gate))
    return found
