"""Turns recipes into a plan: which stages, with which settings, fed by which. Pure: no disk, no TVM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.delivery import VERDICT
from tvmflow.errors import RecipeError
from tvmflow.feasible import problems_of
from tvmflow.frontends import FRONTENDS
from tvmflow.planned import PlannedRecipe, Target, machines_of
from tvmflow.recipe import Recipe
from tvmflow.stages import EVERY_STAGE, export, join, pick_best, runner, verify
from tvmflow.stages._subjects import QEMU
from tvmflow.targets import cuda
from tvmflow.targets.gpu import CUDA
from tvmflow.targets.resolve import JoinedTarget, ResolvedTarget
from tvmflow.values import Delivery, InputFile, Need, Plan, StageSpec

# Not in a pipeline's list: `verify` needs it where it emulates.
_RUNNER: Final = "runner"
# Nor are these: a model in parts is cut when it is imported, and joined when its parts are exported.
_CUT: Final = "cut"
_JOIN: Final = "join"


def make_plan(recipes: Sequence[PlannedRecipe]) -> Plan:
    """The stages of all recipes, each after those that it needs.

    Raises RecipeError when two recipes have one name, when a target cannot be built, when it would
    have to run on a machine that cannot run it, or when there is no such output for it.
    """
    problems = problems_of(recipes)
    if problems:
        raise RecipeError(problems)
    stages: list[StageSpec] = []
    deliveries: list[Delivery] = []
    for planned in recipes:
        specs = _stages_of(planned)
        stages += specs
        deliveries += _deliveries_of(planned, {spec.id for spec in specs})
    return Plan(tuple(stages), tuple(deliveries))


def _stages_of(planned: PlannedRecipe) -> list[StageSpec]:
    specs: list[StageSpec] = []
    for name in planned.stages:
        if name == "verify":
            emulated = [each for each in planned.targets if _emulates(planned.of(each))]
            machines = [machine for target in emulated for machine in machines_of(target)]
            specs += [_spec(planned, _RUNNER, machine) for machine in machines]
        specs += [_spec(planned, name, subject) for subject in _subjects(planned, name)]
        if name == "import":
            specs += [
                _spec(planned, _CUT, part) for whole in planned.joined for part in whole.machines
            ]
        if name == "export":
            specs += [_spec(planned, _JOIN, target) for target in planned.joined]
    return specs


def _subjects(planned: PlannedRecipe, stage: str) -> Sequence[Target | None]:
    """What a stage of a pipeline runs for."""
    if stage == "verify":
        return planned.targets
    if EVERY_STAGE[stage].SCOPE == "target":
        return [machine for target in planned.targets for machine in machines_of(target)]
    # for a model in parts it also gives the tensors at which that is cut
    all_in_parts = len(planned.joined) == len(planned.targets)
    return planned.joined if all_in_parts else (None, *planned.joined)


def _emulates(recipe: Recipe) -> bool:
    return verify.place(recipe) == QEMU


def _stage_id(planned: PlannedRecipe, stage: str, target: str) -> str:
    return f"{planned.recipe.name}:{stage}" + (f"/{target}" if target else "")


def _spec(planned: PlannedRecipe, name: str, target: Target | None) -> StageSpec:
    recipe, stage = planned.of(target), EVERY_STAGE[name]
    return StageSpec(
        id=_stage_id(planned, name, target.name if target else ""),
        stage=name,
        recipe=planned.recipe.name,
        target=target.name if target else "",
        version=stage.VERSION,
        settings=stage.settings(recipe, target),
        files=_files(planned, target, stage.READS),
        needs=tuple(_needs(planned, name, target)),
        tools=(*stage.TOOLS, *_frontend_tools(recipe, name), *_target_tools(target, name)),
        timeout_s=stage.TIMEOUT_S,
    )


def _needs(planned: PlannedRecipe, name: str, target: Target | None) -> Iterator[Need]:
    for other, files in EVERY_STAGE[name].NEEDS.items():
        for role, maker, of in _makers(name, other, target) if other in planned.stages else ():
            yield Need(role, _stage_id(planned, maker, of), files)
    if name == "verify" and target and _emulates(planned.of(target)):
        for machine in machines_of(target):
            role = f"{_RUNNER}/{machine.part}" if machine.part else _RUNNER
            yield Need(role, _stage_id(planned, _RUNNER, machine.name), (runner.RUNNER,))


def _makers(name: str, other: str, target: Target | None) -> Iterator[tuple[str, str, str]]:
    """`(role, stage, its target)` of all that a stage reads as another's files.

    A part of a model is one by itself to most stages: what `import` is to them was cut out.
    """
    if isinstance(target, JoinedTarget):
        if other == "import":
            yield other, other, target.name
        elif name == _JOIN:
            for machine in target.machines:
                yield f"{other}/{machine.part}", other, machine.name
        elif other == "export":
            yield other, _JOIN, target.name
    elif target and other == "import" and target.whole and name != _CUT:
        yield other, _CUT, target.name
    elif target:
        yield other, other, target.whole if other == "import" else target.name


def _frontend_tools(recipe: Recipe, stage: str) -> tuple[str, ...]:
    frontend = FRONTENDS[recipe.model.kind]
    extra: Mapping[str, tuple[str, ...]] = {
        "import": frontend.TOOLS,
        "verify": frontend.REFERENCE_TOOLS if recipe.verify.against != "none" else (),
    }
    return tuple(name for name in extra.get(stage, ()) if name not in EVERY_STAGE[stage].TOOLS)


# What compiles kernels, the last one the untuned library beside the tuned one.
_COMPILING: Final = ("tune", "pick_best", "build", "verify")


def _target_tools(target: Target | None, stage: str) -> tuple[str, ...]:
    """What only targets of one kind are compiled with."""
    is_cuda = isinstance(target, ResolvedTarget) and target.tvm["kind"] == CUDA
    return cuda.PACKAGES if is_cuda and stage in _COMPILING else ()


def _files(
    planned: PlannedRecipe, target: Target | None, reads: tuple[str, ...]
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
    """What each target's folder in `dist` gets: nothing of it before all of it is verified."""
    found: list[Delivery] = []
    name = planned.recipe.name

    def deliver(target: Target, stage: str, of: Target, files: tuple[tuple[str, str], ...]) -> None:
        made_by = _stage_id(planned, stage, of.name)
        verified = _stage_id(planned, "verify", target.name)
        if made_by in ids:
            gate = verified if verified in ids else ""
            found.append(Delivery(name, target.name, made_by, files, gate))

    for target in planned.targets:
        for machine in machines_of(target):
            recipe = planned.of(machine)
            deliver(target, "export", machine, export.delivered(recipe, machine))
            if recipe.tune.trials:
                picture = (
                    f"{machine.part}-{pick_best.ROOFLINE}" if machine.part else pick_best.ROOFLINE
                )
                deliver(target, "pick_best", machine, ((pick_best.ROOFLINE, picture),))
        if isinstance(target, JoinedTarget):
            deliver(target, _JOIN, target, join.delivered(planned.of(target), target))
        deliver(target, "verify", target, ((verify.VERDICT, VERDICT),))
    return found
