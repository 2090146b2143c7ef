"""Plans from recipes: stages, their settings and dependencies. Uses neither the disk nor TVM."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tvmflow.core.errors import RecipeError, UsageError
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.text import did_you_mean, parse_size
from tvmflow.core.types import Delivery, InputFile, Need, Plan, RecipeOrigin, StageSpec
from tvmflow.frontends import FRONTENDS
from tvmflow.frontends.peers import PEERS
from tvmflow.planning.checks import check_plan
from tvmflow.planning.recipes import PlannedRecipe, Target, resolved_targets
from tvmflow.recipe import Recipe
from tvmflow.runtime.image_files import is_pillow_installed
from tvmflow.stages import STAGES
from tvmflow.stages.base import StageSettings, StageTraits
from tvmflow.stages.images import DATA, LABELS, UNKEYED_LABELS, is_table
from tvmflow.stages.quantize import CALIBRATION
from tvmflow.stages.verify import compare_settings
from tvmflow.targets.backends import backend_for
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget

_log: Final = logging.getLogger(__name__)

# Scopes of stages that run for ISA levels of a target, not for the target itself.
_LEVEL_SCOPES: Final = ("level", "measured")
# Stage -> stages that may replace it as the provider of its files.
_SUBSTITUTES: Final = {
    other: tuple(name for name, stage in STAGES.items() if stage.TRAITS.replaces == other)
    for other in {stage.TRAITS.replaces for stage in STAGES.values()}
}


def make_plan(recipes: Sequence[PlannedRecipe]) -> Plan:
    """Return the plan of all recipes in topological order; RecipeError for problems of `check_plan`."""
    if problems := check_plan(recipes):
        raise RecipeError(problems)
    stages: list[StageSpec] = []
    deliveries: list[Delivery] = []
    for planned in recipes:
        specs = list(_plan_stages(planned))
        stages += specs
        deliveries += _plan_deliveries(planned, {spec.id for spec in specs})
    return Plan(tuple(stages), tuple(deliveries), tuple(map(_origin, recipes)))


def _origin(planned: PlannedRecipe) -> RecipeOrigin:
    pipeline = planned.pipeline or str(planned.loaded.pipeline.path)
    path, targets = str(planned.loaded.path), planned.recipe.targets
    names = (name for target in targets for name in (target.name, *target.build_targets()))
    every = tuple(dict.fromkeys(names))
    return RecipeOrigin(planned.recipe.name, path, pipeline, planned.variant, targets=every)


def _plan_stages(planned: PlannedRecipe) -> Iterator[StageSpec]:
    """Yield the stages of a recipe's pipeline, and the stages that they imply, in order."""
    planned_ids: set[str] = set()
    for name in planned.stages:
        for added in _with_added(name):
            for target in _subjects(planned, added):
                # A stage that several stages imply comes with the first of them.
                if _stage_id(planned, added, target.name if target else "") not in planned_ids:
                    spec = _spec(planned, added, target, planned_ids)
                    planned_ids.add(spec.id)
                    yield spec


def _with_added(name: str) -> list[str]:
    """Return a stage of a pipeline and the stages that it implies, in topological order."""
    return [other for other, stage in STAGES.items() if name in (other, *stage.TRAITS.added_with)]


def _subjects(planned: PlannedRecipe, name: str) -> Sequence[Target | None]:
    """Return the targets for which a stage runs; None stands for the whole model."""
    traits = STAGES[name].TRAITS
    if traits.scope == "model":
        all_partitioned = len(planned.partitioned) == len(planned.targets)
        return planned.partitioned if all_partitioned else (None, *planned.partitioned)
    targets = [target for target in planned.targets if traits.is_needed(planned.recipe_for(target))]
    if len(targets) < len(planned.targets):
        _log.debug("%s: %s is planned for %d targets", planned.recipe.name, name, len(targets))
    partitioned = [target for target in targets if isinstance(target, PartitionedTarget)]
    machines = [machine for target in targets for machine in resolved_targets(target)]
    subjects: dict[str, Sequence[Target]] = {
        "target": targets,
        "machine": machines,
        "level": [target for machine in machines for target in machine.compiled_targets],
        "measured": [
            machine.measured_isa_level
            for machine in machines
            # Without a search, rules schedule the measured ISA level, like all others.
            if not machine.levels or planned.recipe_for(machine).tune.trials
        ],
        "part": [machine for target in partitioned for machine in target.parts],
        "partitioned": partitioned,
    }
    return subjects[traits.scope]


def _stage_id(planned: PlannedRecipe, stage: str, target: str) -> str:
    return f"{planned.recipe.name}:{stage}" + (f"/{target}" if target else "")


def _spec(
    planned: PlannedRecipe, name: str, target: Target | None, planned_ids: set[str]
) -> StageSpec:
    recipe, stage = planned.recipe_for(target), STAGES[name]
    settings: StageSettings = stage.settings(recipe, target)
    return StageSpec(
        id=_stage_id(planned, name, target.name if target else ""),
        stage=name,
        recipe=planned.recipe.name,
        target=target.name if target else "",
        version=stage.TRAITS.version,
        settings=settings.to_json(),
        files=tuple(_input_files(planned, target, stage.TRAITS)),
        needs=tuple(need for need in _needs(planned, name, target) if need.stage_id in planned_ids),
        tools=tuple(dict.fromkeys(_tools(planned, target, stage.TRAITS))),
        timeout_s=stage.TRAITS.timeout_s,
        traits=stage.TRAITS.run,
        devices=settings.measured_devices,
        memory_bytes=parse_size(recipe.stage_memory) if recipe.stage_memory else None,
        deliver_every_s=_deliver_every_s(recipe, stage.TRAITS),
    )


def _deliver_every_s(recipe: Recipe, traits: StageTraits) -> float | None:
    """Return the seconds of search between interim deliveries; None for no such delivery."""
    tune = recipe.tune
    # Interim results could fail these gates.
    has_gates = tune.min_speedup is not None or tune.min_coverage is not None
    if not traits.forecast or not tune.trials or tune.deliver_every is None or has_gates:
        return None
    return tune.deliver_every * 60


def _needs(planned: PlannedRecipe, name: str, target: Target | None) -> Iterator[Need]:
    """Yield the files that a stage reads from other stages, including stages that are not planned."""
    traits = STAGES[name].TRAITS
    for other, files in traits.needs.items():
        if target is None:
            continue
        if other in traits.needs_all and traits.needs_all[other](planned.recipe_for(target)):
            files = ()
        if isinstance(target, PartitionedTarget) and other in traits.needs_of_parts:
            for part in target.parts:
                yield Need(f"{other}/{part.part}", _stage_id(planned, other, part.name), files)
        elif (
            isinstance(target, ResolvedTarget)
            and target.levels
            and other in traits.needs_of_isa_levels
        ):
            for level in target.levels:
                yield Need(f"{other}/{level.level}", _stage_id(planned, other, level.name), files)
        else:
            maker = _maker(name, other, target, planned.recipe_for(target))
            yield Need(other, _stage_id(planned, maker, _target_of(maker, target)), files)
            webgpu = target.webgpu if isinstance(target, ResolvedTarget) else None
            if webgpu and other in traits.needs_of_isa_levels:
                stage_id = _stage_id(planned, other, webgpu.name)
                yield Need(f"{other}/{webgpu.tvm['kind']}", stage_id, files)


def _maker(name: str, other: str, target: Target, recipe: Recipe) -> str:
    """Return the stage that provides the files of `other` to the stage `name`.

    For a partitioned model, other stages replace `import` (which provides the whole model) and `export` (which provides
    a part). For a quantized model, `quantize` replaces `import`.
    """
    if other not in _SUBSTITUTES:
        return other
    if isinstance(target, PartitionedTarget):
        scopes = ["partitioned"]
    else:
        scopes = ["part", "machine"] if target.partitioned_target else ["machine"]
    makers = [
        candidate
        for candidate in _SUBSTITUTES[other]
        if STAGES[candidate].TRAITS.scope in scopes and STAGES[candidate].TRAITS.is_needed(recipe)
    ]
    if name in makers:
        makers = makers[: makers.index(name)]
    return makers[-1] if makers else other


def _target_of(maker: str, target: Target) -> str:
    """Return the target in the id of the stage `maker` that provides files for `target`."""
    scope = STAGES[maker].TRAITS.scope
    if isinstance(target, PartitionedTarget):
        return target.name
    if scope == "model":
        return target.partitioned_target
    if scope == "machine":
        return target.isa_level_target or target.name
    return target.measured_isa_level.name if scope in _LEVEL_SCOPES else target.name


def list_known_tools(planned: PlannedRecipe) -> list[str]:
    """Return the distributions that the stages of a recipe use whatever the target is."""
    names = dict.fromkeys(added for name in planned.stages for added in _with_added(name))
    tools = (tool for name in names for tool in _tools(planned, None, STAGES[name].TRAITS))
    return list(dict.fromkeys(tools))


def _tools(planned: PlannedRecipe, target: Target | None, traits: StageTraits) -> Iterator[str]:
    """Yield the distributions whose code can change a stage's result."""
    recipe = planned.recipe_for(target)
    frontend = FRONTENDS[recipe.model.kind]
    yield from traits.tools
    if "model" in traits.reads:
        yield from frontend.TOOLS
    if "reference" in traits.reads and recipe.verify.against != "none":
        yield from frontend.REFERENCE.tools
    if "reference" in traits.reads and target is not None:
        compare = compare_settings(recipe, target)
        for name in compare.runtimes if compare else ():
            yield from PEERS[name].traits.tools
    if DATA in traits.reads and any(spec.image for spec in recipe.inputs.values()):
        # Pillow decodes images, and is the reference of the preprocessing.
        yield from ["pillow"] if is_pillow_installed() else []
    if traits.compiles_kernels and isinstance(target, ResolvedTarget):
        yield from backend_for(target.tvm).TOOLS


def _input_files(
    planned: PlannedRecipe, target: Target | None, traits: StageTraits
) -> Iterator[InputFile]:
    if "model" in traits.reads:
        yield from planned.model_files
    if "reference" in traits.reads:
        # The imported model is in the key already: equivalent files give the same reference.
        yield from (file._replace(keyed=False) for file in planned.model_files)
    if "operators" in traits.reads:
        yield from planned.operator_files
    recipe = planned.recipe_for(target)
    if recipe.labels is not None and not {LABELS, UNKEYED_LABELS}.isdisjoint(traits.reads):
        path, where = planned.loaded.path.parent / recipe.labels, planned.loaded.where("labels")
        yield InputFile(LABELS, str(path.absolute()), where, keyed=LABELS in traits.reads)
    if DATA in traits.reads and recipe.verify.data is not None:
        where = planned.setting_position(target, "verify", "data")
        yield from _data_files(planned, DATA, recipe.verify.data, where)
    if CALIBRATION in traits.reads and recipe.quantize and recipe.quantize.data is not None:
        where = planned.loaded.where(*planned.setting_loc("quantize", "data"))
        yield from _data_files(planned, CALIBRATION, recipe.quantize.data, where)


def _data_files(planned: PlannedRecipe, role: str, data: str, where: str) -> Iterator[InputFile]:
    """Yield the file of `verify.data` or `quantize.data`, or its images."""
    path = planned.loaded.path.parent.absolute() / data
    images = planned.images.get(data)
    if images is None or is_table(data):
        yield InputFile(role, str(path), where)
    folder = path.parent if is_table(data) else path
    # A table may list an image twice.
    for file in dict.fromkeys(images or ()):
        yield InputFile(f"{role}/{file}", str(folder / file), where, folder=str(folder))


def _plan_deliveries(planned: PlannedRecipe, planned_ids: Iterable[str]) -> Iterator[Delivery]:
    """Yield the files of each target's folder in `dist`; a file is delivered after the target's last gate."""
    name = planned.recipe.name
    gates = [stage for stage in planned.stages if STAGES[stage].TRAITS.run.is_gate]
    for target in planned.targets:
        gate = _stage_id(planned, gates[-1], target.name) if gates else ""
        for stage, maker in _makers_for(target):
            stage_id = _stage_id(planned, stage, maker.name)
            if stage_id not in planned_ids:
                continue
            if files := STAGES[stage].deliveries(planned.recipe_for(maker), maker):
                yield Delivery(name, target.name, stage_id, files, verified_by=gate)


def _makers_for(target: Target) -> Iterator[tuple[str, Target]]:
    """Yield each stage that may deliver files of a target, with the target that it runs for."""
    for machine in resolved_targets(target):
        for name, stage in STAGES.items():
            if stage.TRAITS.scope == "machine":
                yield name, machine
            elif stage.TRAITS.scope in _LEVEL_SCOPES:
                yield name, machine.measured_isa_level
    if isinstance(target, PartitionedTarget):
        yield from ((name, target) for name, s in STAGES.items() if s.TRAITS.scope == "partitioned")
    yield from ((name, target) for name, s in STAGES.items() if s.TRAITS.scope == "target")


def find_stages(plan: Plan, name: str) -> tuple[StageSpec, ...]:
    """Return the stages that a command-line name `[RECIPE:]STAGE[/TARGET]` selects; UsageError for none."""
    if specs := tuple(spec for spec in plan.stages if name in _list_names(spec)):
        return specs
    several = len({spec.recipe for spec in plan.stages}) > 1
    names = dict.fromkeys(name for spec in plan.stages for name in _list_names(spec))
    known = [spec.id if several else spec.label for spec in plan.stages]
    raise UsageError(
        f"there is no stage {quoted(name)}{did_you_mean(name, names)}",
        fix=f"the stages are: {names_text(known)}",
    )


def _list_names(spec: StageSpec) -> tuple[str, ...]:
    return (spec.stage, spec.label, f"{spec.recipe}:{spec.stage}", spec.id)
