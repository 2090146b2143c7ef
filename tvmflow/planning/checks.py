"""Checks of planned recipes: unsupported requests, and lock files, before anything runs."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tvmflow.core.canonical_json import canonical
from tvmflow.core.errors import RecipeError
from tvmflow.core.formatting import names_text
from tvmflow.core.keys import list_changes, stage_key
from tvmflow.core.types import Artifact, Delivery, InputFile, Json, Need, Plan, StageSpec
from tvmflow.exporters import EXPORTERS, PARTITIONED_EXPORTERS, web
from tvmflow.frontends.peers import PEERS
from tvmflow.planning.decisions import PlanState
from tvmflow.planning.recipes import PlannedRecipe, Target, resolved_targets
from tvmflow.recipe import Recipe
from tvmflow.recipe.lock_file import Lock, LockedRecipe, LockedStage
from tvmflow.recipe.sections import AUTO as COMPARE_AUTO
from tvmflow.recipe.sections import FIXED
from tvmflow.runtime.bundles import C_RUNTIME, VM
from tvmflow.stages import (
    STAGES,
    build,
    choose,
    export,
    extract_tasks,
    join,
    pick_best,
    quantize,
    tune,
    verify,
)
from tvmflow.stages.base import find_facts
from tvmflow.stages.build import BuildFacts
from tvmflow.stages.extract_tasks import ExtractTasksFacts
from tvmflow.stages.runtime_choice import (
    AUTO,
    choose_runtime,
    describe_runtime,
    no_c_runtime_reason,
    no_vm_reason,
    requires_vm,
    run_location,
    vm_reason,
)
from tvmflow.stages.verify import device_of
from tvmflow.stages.verify.verdict import LATENCY as MAX_LATENCY
from tvmflow.stages.verify.verdict import MEMORY as MAX_MEMORY
from tvmflow.stages.verify.verdict import VERSUS as MAX_VS
from tvmflow.stages.verify_settings import CHROMIUM, LOCAL, QEMU, RPC, UNTIMED_REASONS
from tvmflow.store.local import LocalStore
from tvmflow.targets import c_runtime
from tvmflow.targets.backends import backend_for
from tvmflow.targets.emulation import EMULATED_ARCHS, UNEMULATED_FEATURES, find_emulated_arch
from tvmflow.targets.form_names import C_LIBRARY
from tvmflow.targets.platforms import parse_triple
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget, unlinkable_reason
from tvmflow.targets.tvm_target import cpu_triple
from tvmflow.tuning.roofline import render_roofline

_VERIFY_ADVICE: Final = "set verify.run_on: qemu (emulation) or rpc (a device of its kind), or verify.against: none (no check)"
_WEB_ADVICE: Final = (
    "set verify.run_on: chromium (a browser without a window), or verify.against: none (no check)"
)
_TUNE_ADVICE: Final = "set tune.trials: 0 (no search), or `remote` of a device of its kind"
_UNEMULATED_ADVICE: Final = (
    "choose verify.run_on: local or rpc; with verify.against: none, nothing is checked"
)
_NOT_HERE: Final = "the library does not run in a program of this machine (verify.run_on)"
_DEVICE_MEMORY: Final = "the memory of a GPU is its driver's"
_COMPARE_FIXED: Final = (
    "a library of one size is compared with one whose sizes each call chooses, and this model has fixed sizes; "
    "leave it out, or name sizes under `dimensions`"
)


def check_plan(recipes: Sequence[PlannedRecipe]) -> list[str]:
    """Return all problems, each `file:line:column: field: problem`."""
    problems = list(_check_names(recipes))
    for planned in recipes:
        for target in planned.targets:
            unbuildable = [
                problem
                for part in resolved_targets(target)
                for problem in _check_build(planned, part)
            ]
            problems += unbuildable or [
                problem for check in _CHECKS for problem in check(planned, target)
            ]
    # A problem of one variant is a problem of all.
    return list(dict.fromkeys(problems))


def _check_quantize(planned: PlannedRecipe, target: Target) -> Iterator[str]:
    """Check that int8 is faster on a target, and that there is calibration data."""
    section = planned.recipe.quantize
    if section is None:
        return
    own = planned.loaded.recipe.variants[planned.variant].quantize if planned.variant else None
    loc = ("quantize",) if own is None else ("variants", planned.variant, "quantize")
    where, name = planned.loaded.where(*loc), ".".join(loc)
    if isinstance(target, PartitionedTarget):
        yield (
            f"{where}: {name}: the target '{target.name}' is in parts, each of which would need data of its own; "
            "leave `quantize` out, or build for a target in one piece"
        )
        return
    if section.activations != "none" and not quantize.find_data_dtype(target):
        reason = quantize.no_integers_reason(target)
        yield (
            f"{where}: {name}: the target '{target.name}' {reason}, so that int8 data would only make it slower; "
            "set `activations: none` (int8 weights only), name a CPU with int8 dot products, or leave "
            "`quantize` out"
        )
    data = section.data or planned.recipe_for(target).verify.data
    if section.needs_data and data is None:
        yield (
            f"{where}: {name}: there are no data to calibrate with; set `data` here, or `verify.data`, "
            "whose first samples are used then"
        )


def _list_target_stages(planned: PlannedRecipe) -> set[str]:
    """Return the stages of a recipe that run for a target, not for the model."""
    return {stage for stage in planned.stages if STAGES[stage].TRAITS.scope != "model"}


def check_quantized_names(planned: PlannedRecipe, names: Iterable[str]) -> Iterator[str]:
    """Check that no input or output has a name that `quantize` needs."""
    for name in names if planned.recipe.quantize is not None else ():
        if problem := quantize.find_name_problem(name):
            yield f"{planned.loaded.where('model')}: model: {problem}"


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
    """Yield a line with the reason for each library that needs TVM's runtime with `runtime: auto`.

    Only the stage that lowers a model finds this out: it is unknown for models without a result.
    """
    needs: dict[str, str] = {}
    for planned in recipes:
        for target in planned.targets if build.NAME in planned.stages else ():
            for part in resolved_targets(target):
                recipe = planned.recipe_for(part)
                if recipe.runtime == AUTO and (reason := vm_reason(recipe, part)):
                    needs[f"{planned.recipe.name}/{part.name}"] = (
                        f"runs on TVM's virtual machine (runtime: vm): {reason}"
                    )
    for spec in plan.stages:
        reason = _find_runtime_reason(spec, artifacts[spec.id]) if spec.id in artifacts else ""
        for line in describe_runtime(reason):
            needs.setdefault(f"{spec.recipe}/{spec.target}", line)
    yield from (f"{name}: {line}" for name, line in needs.items())


def _find_runtime_reason(spec: StageSpec, artifact: Artifact) -> str:
    """Return why a lowered model needs TVM's runtime, from the stage's facts; empty for others."""
    kind = {extract_tasks.NAME: ExtractTasksFacts, build.NAME: BuildFacts}.get(spec.stage)
    facts = find_facts(kind, artifact.facts) if kind else None
    return facts.needs_tvm_for if facts else ""


def _check_build(planned: PlannedRecipe, target: ResolvedTarget) -> list[str]:
    """Return the first reason why a target cannot be built, should not be, or cannot be linked."""
    where = f"{planned.where(target)}: targets: '{target.name}'"
    stages = _list_target_stages(planned)
    if not stages:
        return []
    backend = backend_for(target.tvm)
    if unbuildable := backend.unbuildable_reason(target.tvm):
        return [f"{where} cannot be built: {unbuildable}"]
    if useless := _find_useless_precision(planned, target):
        return [f"{where} {useless}"]
    recipe = planned.recipe_for(target)
    no_c_runtime = no_c_runtime_reason(recipe, target) if recipe.runtime == C_RUNTIME else ""
    if build.NAME in stages and no_c_runtime:
        return [f"{where} cannot have the C runtime: {no_c_runtime}; give it `runtime: vm`"]
    if export.NAME in stages and target.webgpu and web.NAME not in recipe.outputs:
        advice = f"add `{web.NAME}` to `outputs`, or name the preset wasm32-wasi"
        return [f"{where} has code for WebGPU, and no output holds it; {advice}"]
    if target.levels and choose_runtime(recipe, target) == VM:
        advice = "leave `runtime: vm` out"
        return [f"{where} cannot have levels: TVM's runtime has code for one CPU; {advice}"]
    unlinkable = unlinkable_reason(target.tvm, target.toolchain)
    if export.NAME in stages and unlinkable:
        return [f"{where} cannot be linked: {unlinkable}; name one with `toolchain: {{linker: …}}`"]
    is_for_vm = choose_runtime(recipe, target) == VM or requires_vm(recipe)
    no_vm = no_vm_reason(target) if is_for_vm else ""
    if export.NAME in stages and no_vm:
        advice = "ask for the output c-library, and leave `runtime: vm` out"
        return [f"{where} cannot have a library for TVM's runtime: {no_vm}; {advice}"]
    return []


def _find_useless_precision(planned: PlannedRecipe, target: ResolvedTarget) -> str:
    backend, precision = backend_for(target.tvm), planned.recipe_for(target).kernels.precision
    problems = {
        "mixed": ("only loses speed by", backend.slow_float16_reason),
        "float16": ("has no instructions for", backend.no_float16_reason),
        "bfloat16": ("has no instructions for", backend.no_bfloat16_reason),
    }
    if precision not in problems:
        return ""
    problem, find_reason = problems[precision]
    reason = find_reason(target.tvm, target.features)
    if not reason:
        return ""
    setting = ".".join(planned.setting_loc("kernels", "precision"))
    advice = "give it `kernels: {precision: model}`"
    if precision != "mixed" and not backend.slow_float16_reason(target.tvm, target.features):
        advice += " or, for weights of float16, `{precision: mixed}`"
    return f"{problem} {setting}: {precision}: {reason}; {advice}"


def _check_dimensions(planned: PlannedRecipe, target: Target) -> Iterator[str]:
    """If the recipe has dynamic dimensions, check that a library for the target can have them."""
    names = [dimension.name for dimension in planned.recipe_for(target).list_dimensions()]
    if not names or not _list_target_stages(planned):
        return
    parts = resolved_targets(target)
    kinds = [part.tvm["kind"] for part in parts if not backend_for(part.tvm).RUNS_ON_HOST_CPU]
    if isinstance(target, PartitionedTarget):
        reason = "the parts of a model exchange tensors of fixed sizes"
    elif kinds:
        reason = f"kernels for {kinds[0]} are made for fixed sizes"
    else:
        return
    yield (
        f"{planned.where(target)}: targets: '{target.name}' does not support the dynamic dimensions {names_text(names)}: {reason}; "
        "write numbers in their place in a recipe or variant for this target (`variants: {NAME: {inputs: …}}`)"
    )


def _check_states(planned: PlannedRecipe, target: Target) -> Iterator[str]:
    """If the recipe has states, check that the target's library can keep them in its contexts."""
    for part in resolved_targets(target) if _list_target_stages(planned) else ():
        if not planned.recipe_for(part).state:
            continue
        platform = parse_triple(cpu_triple(part.tvm))
        if not backend_for(part.tvm).RUNS_ON_HOST_CPU:
            reason = "a device holds no states yet"
        elif platform.system == "none":
            reason = "without a heap there is no memory for them"
        else:
            continue
        yield (
            f"{planned.where(part)}: targets: '{part.name}' cannot have the recipe's `state`: {reason}; leave it "
            "out in a recipe for this target, and hand the tensors on in the program"
        )


def _check_execution(planned: PlannedRecipe, target: Target) -> Iterator[str]:
    """Check that a target can be tuned and verified, if it has to be."""
    for part in resolved_targets(target):
        recipe, impossible = planned.recipe_for(part), dict[str, str]()
        is_tuned = tune.NAME in planned.stages and recipe.tune.trials > 0
        if is_tuned and part.unmeasurable_reason:
            impossible["tuned"] = _TUNE_ADVICE
        if verify.NAME in planned.stages:
            checks = recipe.verify
            is_automatic = checks.run_on == "auto" and checks.against != "none"
            if part.unrunnable_reason and (checks.run_on == "local" or is_automatic):
                is_web = web.NAME in recipe.outputs
                impossible["verified"] = _WEB_ADVICE if is_web else _VERIFY_ADVICE
            yield from _check_run_location(planned, target, part)
        if impossible:
            yield (
                f"{planned.where(part)}: targets: '{part.name}' cannot be {' or '.join(impossible)} "
                f"on this machine: {part.unrunnable_reason}; {'; '.join(impossible.values())}"
            )


def _check_compare(planned: PlannedRecipe, target: Target) -> Iterator[str]:
    """Check that the runtimes that `verify.compare` names can run the model here, beside the library."""
    recipe = planned.recipe_for(target)
    if verify.NAME not in planned.stages or run_location(recipe) != LOCAL:
        return
    for index, name in enumerate(recipe.verify.compare):
        if name == COMPARE_AUTO:
            continue
        where = planned.setting_position(target, "verify", "compare", index)
        if name == FIXED:
            if not recipe.list_dimensions():
                yield f"{where}: verify.compare.{index}: {_COMPARE_FIXED}"
            continue
        if problem := _find_peer_problem(name, recipe, target):
            yield f"{where}: verify.compare.{index}: {problem}"


def _check_gates(planned: PlannedRecipe, target: Target) -> Iterator[str]:
    """Check that the gates of `verify` can be measured where the library runs."""
    recipe = planned.recipe_for(target)
    checks, location = recipe.verify, run_location(recipe)
    if verify.NAME not in planned.stages:
        return
    unrunnable = [part.unrunnable_reason for part in resolved_targets(target)]
    untimed = UNTIMED_REASONS[location] if location in (QEMU, CHROMIUM) else ""
    if location == RPC and len(unrunnable) > 1:
        untimed = UNTIMED_REASONS[RPC]
    elsewhere = next(filter(None, unrunnable), "") if location == LOCAL else _NOT_HERE
    memory = elsewhere or (_DEVICE_MEMORY if device_of(target) != "cpu" else "")
    untimed = untimed or (elsewhere if location == LOCAL else "")
    reasons = {MAX_LATENCY: untimed, MAX_MEMORY: memory, MAX_VS: elsewhere}
    for gate, reason in reasons.items():
        if not getattr(checks, gate):
            continue
        where = planned.setting_position(target, "verify", gate)
        if reason:
            yield (
                f"{where}: verify.{gate}: it cannot be measured for the target '{target.name}': {reason}; "
                f"write `verify: {{{gate}: {'{}' if gate == MAX_VS else '~'}}}` into this target"
            )
            continue
        for name in checks.max_vs if gate == MAX_VS else ():
            if problem := _find_peer_problem(name, recipe, target):
                yield f"{where}: verify.{gate}.{name}: {problem}"


def _find_peer_problem(name: str, recipe: Recipe, target: Target) -> str:
    peer = PEERS[name]
    problem = peer.unsupported_reason(recipe.model.kind, device_of(target))
    if not problem and not peer.is_installed():
        problem = f"{peer.traits.name} is not installed ({peer.traits.install})"
    return problem


def _check_run_location(
    planned: PlannedRecipe, target: Target, part: ResolvedTarget
) -> Iterator[str]:
    """Check that a part of a target can run where `verify.run_on` says."""
    location, recipe = run_location(planned.recipe_for(target)), planned.recipe_for(part)
    triple = str(part.tvm.get("mtriple", ""))
    # a part may have no outputs of its own
    has_choice = recipe.outputs or recipe.runtime != AUTO
    if location == QEMU and find_emulated_arch(triple) is None:
        problem = (
            f"qemu runs libraries for Linux and Android on {', '.join(EMULATED_ARCHS)}; "
            f"'{part.name}' is for {triple or part.tvm['kind']}"
        )
    elif location == QEMU and (reason := c_runtime.unsupported_reason(triple)):
        problem = f"qemu runs plain C libraries: {reason}"
    elif location == QEMU and UNEMULATED_FEATURES.intersection(part.features):
        problem = (
            f"qemu emulates no AVX-512, for which '{part.name}' has code; {_UNEMULATED_ADVICE}"
        )
    elif location == QEMU and has_choice and choose_runtime(recipe, part) == VM:
        problem = (
            f"qemu runs plain C libraries, and '{part.name}' has a library for TVM's runtime; "
            "leave `runtime: vm` out, ask for the output bundle or c-library, or choose "
            "verify.run_on: rpc"
        )
    elif location == CHROMIUM and isinstance(target, PartitionedTarget):
        problem = "chromium runs models in one piece"
    elif location == CHROMIUM and web.NAME not in recipe.outputs:
        problem = "chromium runs packages for browsers; add `web` to `outputs`"
    elif location == RPC and not part.remote:
        problem = (
            "rpc runs libraries on the devices of a target's remote; "
            f"'{part.name}' needs `remote: {{key: NAME}}`"
        )
    else:
        return
    where = planned.setting_position(target, "verify", "run_on")
    yield f"{where}: verify.run_on: {problem}"


def _check_outputs(planned: PlannedRecipe, target: Target) -> Iterator[str]:
    if export.NAME not in planned.stages:
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
    requests = {
        part.name: export.make_request(planned.recipe_for(part), part)
        for part in resolved_targets(target)
    }
    if isinstance(target, PartitionedTarget) and output in PARTITIONED_EXPORTERS:
        requests = {target.name: join.make_request(planned.recipe_for(target), target)}
    has_isa_levels = isinstance(target, ResolvedTarget) and target.levels
    for name, request in requests.items():
        reason = EXPORTERS[output].unsupported_reason(request)
        if has_isa_levels and EXPORTERS[output].FORM not in ("", C_LIBRARY):
            reason = "code for several levels of CPUs is in plain C libraries: bundle, c-library, cpp and wheel have them"
        if reason:
            yield name, reason


_CHECKS: Final = (
    *(_check_dimensions, _check_states, _check_execution, _check_compare, _check_gates),
    *(_check_outputs, _check_quantize),
)

SEARCHES: Final = tuple(name for name, stage in STAGES.items() if stage.TRAITS.run.searches)
"""The stages that search."""

LOCKED: Final = "locked"
"""The folder of a store with the schedules that lock files choose, each file named by its digest."""

_log = logging.getLogger(__name__)

_FIX = "write the lock file again with `tvmflow lock`, or restore what it records"


def locked_settings(spec: StageSpec) -> dict[str, Json]:
    """Return the settings of a stage that a lock file records, as plain values in a stable order."""
    locked = {
        name: value
        for name, value in spec.settings.items()
        if name not in spec.traits.unlocked_settings
    }
    plain: dict[str, Json] = json.loads(canonical(locked))
    return plain


def enforce_lock(lock: Lock, plan: Plan, state: PlanState, store: LocalStore) -> Plan:
    """Return the plan without its search, each stage pinned to the outputs in the lock file.

    Writes the locked schedules into the store, where `build` reads them. Raises RecipeError with every difference in
    settings, sources, packages and platform.
    """
    specs = [spec for spec in plan.stages if not spec.traits.searches]
    if problems := _find_problems(lock, specs, state):
        raise RecipeError(problems, fix=_FIX)
    stages = tuple(_pin(lock, spec, store) for spec in specs)
    _log.debug("%s: %d of %d stages are pinned", lock.path, len(stages), len(plan.stages))
    ids = {spec.id for spec in stages}
    kept = (d if d.stage_id in ids else _pin_delivery(lock, d, store) for d in plan.deliveries)
    deliveries = tuple(delivery for delivery in kept if delivery is not None)
    origins = tuple(origin._replace(locked=True) for origin in plan.origins)
    return Plan(stages, deliveries, origins)


def _find_problems(lock: Lock, specs: list[StageSpec], state: PlanState) -> list[str]:
    missing: list[str] = []
    # Another version of a package changes every stage and is reported once.
    differences: dict[str, str] = {}
    for spec in specs:
        recipe = lock.recipes.get(spec.recipe)
        locked = recipe.stages.get(spec.label) if recipe else None
        if locked is None:
            missing.append(f"{lock.path}: {spec.id} is not in this lock file")
            continue
        where = lock.where("recipes", spec.recipe, "stages", spec.label)
        for cause in _list_differences(lock, locked, spec, state):
            differences.setdefault(cause, f"{where}: {spec.id} is not what was locked: {cause}")
    return [*missing, *differences.values()]


def _list_differences(
    lock: Lock, locked: LockedStage, spec: StageSpec, state: PlanState
) -> list[str]:
    """Return how a stage differs from the locked one, and where the lock file contradicts itself."""
    before: dict[str, Json] = {
        "stage": spec.stage,
        "version": locked.version,
        "settings": locked.settings,
        "inputs": locked.inputs,
        "tools": {name: lock.file.tools.get(name, "(not in the lock file)") for name in spec.tools},
        "machine": lock.file.machine,
    }
    plain = spec._replace(settings=locked_settings(spec))
    inputs = {**state.digest_files(spec), **_locked_inputs(lock.recipes[spec.recipe], spec)}
    after = stage_key(plain, inputs, state.tool_identities(spec), state.machine).preimage
    return list_changes(before, after)


def _locked_inputs(recipe: LockedRecipe, spec: StageSpec) -> dict[str, str]:
    """Return the digests of a stage's inputs from other stages, as recorded in the lock file."""
    inputs: dict[str, str] = {}
    for need in spec.needs:
        traits = STAGES[need.maker].TRAITS.run
        if traits.searches:
            # A lock file holds the schedules that the search chose, and no outputs of the search.
            name = f"{need.stage}/{chosen_file(need)}"
            inputs[name] = recipe.stages[spec.label].inputs.get(name, "")
        elif traits.is_locked:
            locked = recipe.stages.get(need.stage_id.partition(":")[2])
            outputs: Mapping[str, str] = locked.outputs if locked else {}
            names = need.files or tuple(outputs)
            # of the files that the stage needs, the locked stage made only some
            inputs.update(
                {f"{need.stage}/{name}": outputs[name] for name in names if name in outputs}
            )
    return inputs


def _pin(lock: Lock, spec: StageSpec, store: LocalStore) -> StageSpec:
    """Return a stage with its locked outputs, and with the locked schedules in place of a search."""
    locked = lock.recipes[spec.recipe].stages[spec.label]
    reused = reuse_searched(lock, spec, SEARCHES, store, locked.inputs)
    return reused._replace(pinned=tuple(locked.outputs.items()))


def _pin_delivery(lock: Lock, delivery: Delivery, store: LocalStore) -> Delivery | None:
    """Return the delivery of a search's chart, made of the lock file's figures; None without figures."""
    target_name = delivery.stage_id.partition("/")[2]
    target = lock.recipes[delivery.recipe].targets.get(target_name)
    kernels = target.measured_kernels if target else []
    if target is None or not any(kernel.flops for kernel in kernels):
        return None
    path = store.blobs.temporary_path()
    Path(path).write_text(render_roofline(kernels, target.peak_gflops), encoding="utf-8")
    digest = store.blobs.add(path)
    # Whatever is tuned has had its workloads extracted.
    return delivery._replace(
        stage_id=f"{delivery.recipe}:{extract_tasks.NAME}/{target_name}",
        known_digests=((pick_best.ROOFLINE, digest),),
    )


def chosen_file(need: Need) -> str:
    """Return the file of a search's choices."""
    return choose.CHOICES if need.stage == choose.NAME else pick_best.CHOSEN


def reuse_searched(
    lock: Lock,
    spec: StageSpec,
    searches: Collection[str],
    store: LocalStore,
    digests: Mapping[str, str] | None = None,
) -> StageSpec:
    """Return a stage that reads a lock file's choices in place of some searches' choices.

    Raises RecipeError if the sha256 of such a file differs from the one of its role in `digests`.
    """
    searched = [need for need in spec.needs if need.maker in searches]
    files = []
    for need in searched:
        role, target_name = f"{need.stage}/{chosen_file(need)}", need.stage_id.partition("/")[2]
        recipe = lock.recipes.get(spec.recipe)
        target = recipe.targets.get(target_name) if recipe else None
        if need.stage == choose.NAME:
            text = choose.choices_text(target.choices if target else {})
        else:
            text = pick_best.choice_text(target.choice if target else {})
        digest = hashlib.sha256(text.encode()).hexdigest()
        where = lock.where("recipes", spec.recipe, "targets", target_name, "kernels")
        if digests is not None and digest != digests[role]:
            raise RecipeError(
                f"{where}: the schedules of {spec.recipe} for {target_name} are not those that "
                f"{spec.id} was built with",
                fix="take one side of the merge completely, or write the lock file again with `tvmflow lock`",
            )
        store.notes.write(text, LOCKED, digest)
        files.append(InputFile(role, str(Path(store.root, LOCKED, digest)), where))
    needs = tuple(need for need in spec.needs if need not in searched)
    return spec._replace(files=(*spec.files, *files), needs=needs)
