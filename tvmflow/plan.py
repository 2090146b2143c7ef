"""Turns recipes into a plan: which stages, with which settings, fed by which. Pure: no disk, no TVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.errors import RecipeError
from tvmflow.frontends import FRONTENDS
from tvmflow.recipe import LoadedRecipe, Recipe
from tvmflow.stages import EVERY_STAGE, export, pick_best, runner, verify
from tvmflow.targets.emulation import MACHINES, machine_of
from tvmflow.targets.resolve import ResolvedTarget
from tvmflow.values import Delivery, InputFile, Need, Plan, StageSpec

# Not in a pipeline's list: `verify` needs it where it emulates.
_RUNNER: Final = "runner"


class PlannedRecipe(NamedTuple):
    """A recipe with all that its plan depends on: stages in order, targets resolved, source files named."""

    loaded: LoadedRecipe
    stages: tuple[str, ...]
    targets: tuple[ResolvedTarget, ...]
    model_files: tuple[InputFile, ...]

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe


def make_plan(recipes: Sequence[PlannedRecipe]) -> Plan:
    """The stages of all recipes, each after those that it needs.

    Raises RecipeError when two recipes have one name, or when a target would have to run
    on a machine that cannot run it.
    """
    problems = _name_clashes(recipes)
    for planned in recipes:
        problems += _unrunnable(planned)
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
    seen: dict[str, LoadedRecipe] = {}
    problems = []
    for planned in recipes:
        first = seen.setdefault(planned.recipe.name, planned.loaded)
        if first is not planned.loaded:
            where = planned.loaded.where("name")
            problems.append(
                f"{where}: name: '{planned.recipe.name}' is also the name of {first.path}"
            )
    return problems


def _unrunnable(planned: PlannedRecipe) -> list[str]:
    """A target that cannot run here can be built, but not tuned here, and verified only where it can run."""
    recipe, problems = planned.recipe, []
    for target in planned.targets:
        asked = []
        if "tune" in planned.stages and recipe.tune.trials and target.why_not_tuned:
            asked.append("tuned (tune.trials: 0 turns that off)")
        if "verify" in planned.stages:
            if target.why_not and _must_run_here(recipe, target):
                asked.append(_VERIFY_ELSEWHERE)
            problems += _no_place(planned, target)
        if asked:
            where = planned.loaded.where("targets", _index(recipe, target))
            problems.append(
                f"{where}: targets: '{target.name}' cannot be {' or '.join(asked)} here: {target.why_not}"
            )
    return problems


_VERIFY_ELSEWHERE: Final = (
    "verified (verify.against: none turns that off; verify.run_on: qemu has it run under emulation, "
    "and rpc on a device of its kind)"
)


def _must_run_here(recipe: Recipe, target: ResolvedTarget) -> bool:
    """Whether verify may not do without running this target's library on this machine."""
    chosen = recipe.run_on(target.name)
    return chosen == "local" or (chosen == "auto" and recipe.verify.against != "none")


def _no_place(planned: PlannedRecipe, target: ResolvedTarget) -> list[str]:
    """A target for which there is no place of the kind that `run_on` names."""
    place, triple = verify.place(planned.recipe, target), str(target.tvm.get("mtriple", ""))
    if place == verify.QEMU and machine_of(triple) is None:
        what = triple or str(target.tvm["kind"])
        there = f"Linux on {', '.join(MACHINES)}"
        problem = f"qemu runs libraries for {there}; '{target.name}' is for {what}"
    elif place == verify.RPC and not target.remote:
        hint = f"'{target.name}' needs `remote: {{key: NAME}}`"
        problem = f"rpc runs libraries on the devices of a target's remote; {hint}"
    else:
        return []
    index = _index(planned.recipe, target)
    own = planned.recipe.targets[index].run_on is not None
    path = ("targets", index, "run_on") if own else ("verify", "run_on")
    return [f"{planned.loaded.where(*path)}: {'.'.join(map(str, path))}: {problem}"]


def _index(recipe: Recipe, target: ResolvedTarget) -> int:
    """Where a target stands in its recipe; a command line may have asked for some of them only."""
    return [each.name for each in recipe.targets].index(target.name)


def _stages_of(planned: PlannedRecipe) -> list[StageSpec]:
    specs: list[StageSpec] = []
    for name in planned.stages:
        targets = planned.targets if EVERY_STAGE[name].SCOPE == "target" else (None,)
        if name == "verify":
            emulated = [each for each in planned.targets if _emulates(planned.recipe, each)]
            specs += [_spec(planned, _RUNNER, target) for target in emulated]
        specs += [_spec(planned, name, target) for target in targets]
    return specs


def _emulates(recipe: Recipe, target: ResolvedTarget | None) -> bool:
    return target is not None and verify.place(recipe, target) == verify.QEMU


def _stage_id(recipe: Recipe, stage: str, target: ResolvedTarget | None) -> str:
    scoped = target is not None and EVERY_STAGE[stage].SCOPE == "target"
    return f"{recipe.name}:{stage}/{target.name}" if scoped and target else f"{recipe.name}:{stage}"


def _spec(planned: PlannedRecipe, name: str, target: ResolvedTarget | None) -> StageSpec:
    recipe, stage = planned.recipe, EVERY_STAGE[name]
    needs = tuple(
        Need(other, _stage_id(recipe, other, target), files)
        for other, files in stage.NEEDS.items()
        if other in planned.stages
    )
    if name == "verify" and _emulates(recipe, target):
        needs += (Need(_RUNNER, _stage_id(recipe, _RUNNER, target), (runner.RUNNER,)),)
    return StageSpec(
        id=_stage_id(recipe, name, target),
        stage=name,
        recipe=recipe.name,
        target=target.name if target else "",
        version=stage.VERSION,
        settings=stage.settings(recipe, target),
        files=_files(planned, stage.READS),
        needs=needs,
        tools=(*stage.TOOLS, *_frontend_tools(recipe, name)),
        timeout_s=stage.TIMEOUT_S,
    )


def _frontend_tools(recipe: Recipe, stage: str) -> tuple[str, ...]:
    frontend = FRONTENDS[recipe.model.kind]
    extra: Mapping[str, tuple[str, ...]] = {
        "import": frontend.TOOLS,
        "verify": frontend.REFERENCE_TOOLS if recipe.verify.against != "none" else (),
    }
    return tuple(name for name in extra.get(stage, ()) if name not in EVERY_STAGE[stage].TOOLS)


def _files(planned: PlannedRecipe, reads: tuple[str, ...]) -> tuple[InputFile, ...]:
    files: list[InputFile] = []
    if "model" in reads:
        files += planned.model_files
    if "reference" in reads:
        # import has already said what the model means; a file that means the same verifies the same
        files += [file._replace(keyed=False) for file in planned.model_files]
    data = planned.recipe.verify.data
    if "data" in reads and data is not None:
        path = Path(planned.loaded.path).parent / data
        where = planned.loaded.where("verify", "data")
        files.append(InputFile("data", str(path.absolute()), where))
    return tuple(files)


def _deliveries_of(planned: PlannedRecipe, ids: set[str]) -> list[Delivery]:
    recipe, found = planned.recipe, []
    for target in planned.targets:
        exported = _stage_id(recipe, "export", target)
        picked = _stage_id(recipe, "pick_best", target)
        verified = _stage_id(recipe, "verify", target)
        gate = verified if verified in ids else ""
        if exported in ids:
            files = export.delivered(recipe)
            found.append(Delivery(recipe.name, target.name, exported, files, gate))
        if picked in ids and recipe.tune.trials:
            picture = ((pick_best.ROOFLINE, pick_best.ROOFLINE),)
            found.append(Delivery(recipe.name, target.name, picked, picture, gate))
        if gate:
            report = ((verify.VERDICT, "verify.json"),)
            found.append(Delivery(recipe.name, target.name, verified, report, gate))
    return found
