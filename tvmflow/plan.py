"""Turns recipes into a plan: which stages, with which settings, fed by which. Pure: no disk, no TVM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.errors import RecipeError
from tvmflow.exporters import EXPORTERS
from tvmflow.frontends import FRONTENDS
from tvmflow.recipe import OF_THE_WHOLE, LoadedRecipe, Recipe
from tvmflow.stages import EVERY_STAGE, export, join, pick_best, runner, verify
from tvmflow.stages._kernels import is_mixed
from tvmflow.stages._subjects import QEMU, RPC
from tvmflow.targets import cuda
from tvmflow.targets.abilities import why_not_built, why_not_linked, why_not_mixed
from tvmflow.targets.emulation import MACHINES, machine_of
from tvmflow.targets.resolve import JoinedTarget, ResolvedTarget
from tvmflow.values import Delivery, InputFile, Need, Plan, StageSpec

# Not in a pipeline's list: `verify` needs it where it emulates.
_RUNNER: Final = "runner"
# Nor are these: a model in parts is cut when it is imported, and joined when its parts are exported.
_CUT: Final = "cut"
_JOIN: Final = "join"

Target = ResolvedTarget | JoinedTarget


class PlannedRecipe(NamedTuple):
    """A recipe (or a variant of it) with all that its plan depends on: stages in order, targets resolved, source files named."""

    loaded: LoadedRecipe
    stages: tuple[str, ...]
    targets: tuple[Target, ...]
    model_files: tuple[InputFile, ...]
    variant: str = ""

    @property
    def recipe(self) -> Recipe:
        """As it is for all targets."""
        written = self.loaded.recipe
        return written.variant(self.variant) if self.variant else written

    def of(self, target: Target | None) -> Recipe:
        """As it is for one target, or part of one: the one place where a stage's recipe comes from."""
        return self.recipe.of(target.name) if target else self.recipe

    def where(self, target: Target, *loc: str | int) -> str:
        """`file:line:column` of a target in the recipe, or of a part of one, or of something in it."""
        for index, spec in enumerate(self.loaded.recipe.targets):
            if spec.name == target.name:
                return self.loaded.where("targets", index, *loc)
            for at, name in enumerate(spec.machines()):
                if name == target.name:
                    return self.loaded.where("targets", index, "parts", at, *loc)
        return self.loaded.where("targets", *loc)


def _machines(target: Target) -> tuple[ResolvedTarget, ...]:
    """What code is made for: the target, or those of its parts."""
    return target.machines if isinstance(target, JoinedTarget) else (target,)


def make_plan(recipes: Sequence[PlannedRecipe]) -> Plan:
    """The stages of all recipes, each after those that it needs.

    Raises RecipeError when two recipes have one name, when a target cannot be built, when it would
    have to run on a machine that cannot run it, or when there is no such output for it.
    """
    problems = _name_clashes(recipes)
    for planned in recipes:
        for target in planned.targets:
            unbuildable = [
                each for machine in _machines(target) for each in _unbuildable(planned, machine)
            ]
            problems += unbuildable or _unrunnable(planned, target) + _unexportable(planned, target)
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
    for machine in _machines(target):
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
        asked = {each.name: export.asked(planned.of(each), each) for each in _machines(target)}
    for name, wanted in asked.items():
        why_not = EXPORTERS[output].why_not(wanted)
        if why_not:
            yield name, why_not


def _stages_of(planned: PlannedRecipe) -> list[StageSpec]:
    specs: list[StageSpec] = []
    joined = [each for each in planned.targets if isinstance(each, JoinedTarget)]
    for name in planned.stages:
        if name == "verify":
            emulated = [each for each in planned.targets if _emulates(planned.of(each))]
            machines = [machine for target in emulated for machine in _machines(target)]
            specs += [_spec(planned, _RUNNER, machine) for machine in machines]
        specs += [_spec(planned, name, subject) for subject in _subjects(planned, name)]
        if name == "import":
            specs += [_spec(planned, _CUT, part) for target in joined for part in target.machines]
        if name == "export":
            specs += [_spec(planned, _JOIN, target) for target in joined]
    return specs


def _subjects(planned: PlannedRecipe, stage: str) -> Sequence[Target | None]:
    """What a stage of a pipeline runs for."""
    if stage == "verify":
        return planned.targets
    if EVERY_STAGE[stage].SCOPE == "target":
        return [machine for target in planned.targets for machine in _machines(target)]
    # for a model in parts it also gives the tensors at which that is cut
    joined = [each for each in planned.targets if isinstance(each, JoinedTarget)]
    return [None, *joined] if len(joined) < len(planned.targets) else joined


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
        for machine in _machines(target):
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
    elif other == "import":
        whole = target.whole if target else ""
        is_part = whole and target and name != _CUT
        yield (other, _CUT, target.name) if is_part and target else (other, other, whole)
    elif target:
        yield other, other, target.name


def _frontend_tools(recipe: Recipe, stage: str) -> tuple[str, ...]:
    frontend = FRONTENDS[recipe.model.kind]
    extra: Mapping[str, tuple[str, ...]] = {
        "import": frontend.TOOLS,
        "verify": frontend.REFERENCE_TOOLS if recipe.verify.against != "none" else (),
    }
    return tuple(name for name in extra.get(stage, ()) if name not in EVERY_STAGE[stage].TOOLS)


def _target_tools(target: Target | None, stage: str) -> tuple[str, ...]:
    """What only targets of one kind are compiled with."""
    is_cuda = isinstance(target, ResolvedTarget) and target.tvm["kind"] == cuda.KIND
    return cuda.PACKAGES if is_cuda and stage == "build" else ()


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
        for machine in _machines(target):
            recipe = planned.of(machine)
            deliver(target, "export", machine, export.delivered(recipe, machine))
            if recipe.tune.trials:
                picture = (
                    f"{machine.part}-{pick_best.ROOFLINE}" if machine.part else pick_best.ROOFLINE
                )
                deliver(target, "pick_best", machine, ((pick_best.ROOFLINE, picture),))
        if isinstance(target, JoinedTarget):
            deliver(target, _JOIN, target, join.delivered(planned.of(target), target))
        deliver(target, "verify", target, ((verify.VERDICT, "verify.json"),))
    return found
