"""`verify`: the library that users will load, on real inputs, against the model's framework."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from tvmflow.compiler.options import lowering_options, lowest_precision, schedules_version
from tvmflow.core.errors import VerifyFailed
from tvmflow.core.fork_server import Emit
from tvmflow.core.generated_text import identifier
from tvmflow.core.types import Array, Json, RunTraits
from tvmflow.exporters import EXPORTERS
from tvmflow.recipe import Recipe
from tvmflow.runtime import samples
from tvmflow.runtime.samples import Samples
from tvmflow.stages import choose, export, join
from tvmflow.stages.base import Files, StageContext, StageTraits
from tvmflow.stages.images import DATA
from tvmflow.stages.lower import LOWERED, LOWERED_ROLE
from tvmflow.stages.runtime_choice import run_location
from tvmflow.stages.verify import comparison, verdict_text
from tvmflow.stages.verify.comparison import Tolerance
from tvmflow.stages.verify.deliveries import check_deliveries
from tvmflow.stages.verify.draws import compare_draws, list_unexercised
from tvmflow.stages.verify.index_inputs import (
    IndexCheck,
    IndexInputs,
    count_values,
    find_index_inputs,
)
from tvmflow.stages.verify.inputs import (
    ImportedModel,
    find_operands,
    list_operator_mismatches,
    load_images,
    load_samples,
    read_imported_model,
    with_images,
)
from tvmflow.stages.verify.latency import add_latencies, check_gates
from tvmflow.stages.verify.layer_check import add_layers
from tvmflow.stages.verify.libraries import (
    UNTIMED_REASONS,
    Library,
    compare_threads,
    load_local,
    load_with_other_threads,
    open_library,
)
from tvmflow.stages.verify.peer_times import add_compared, add_reference_time, compare_settings
from tvmflow.stages.verify.reference_run import Case, ReferenceRun, run_reference
from tvmflow.stages.verify.sizes import (
    ChosenSizes,
    choose_sizes,
    find_sizes,
    make_element_count,
    read_dimensions,
    sweep_sizes,
)
from tvmflow.stages.verify.variants import compare_sizes, sweep, time_sizes, verify_levels
from tvmflow.stages.verify.verdict import (
    AllowedDifference,
    OutputComparison,
    PartVerdict,
    Verdict,
    verdict_without_measurements,
)
from tvmflow.stages.verify_settings import (
    CHROMIUM,
    LOCAL,
    QEMU,
    RPC,
    CheckSettings,
    InputSettings,
    LevelSettings,
    MachineSettings,
    PartSettings,
    SpeedupSettings,
    VerifySettings,
)
from tvmflow.targets.emulation import UNEMULATED_FEATURES
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget

if TYPE_CHECKING:
    import tvm

    Outputs = dict[str, OutputComparison]

NAME: Final = "verify"


def find_faults(payload: dict[str, Json], emit: Emit) -> list[Json]:
    """Return what is to blame for a library that was rejected, as JSON: see `fault_search`."""
    from tvmflow.stages.verify import fault_search

    return fault_search.find_faults(payload, emit)


TRAITS: Final = StageTraits(
    version=18,
    scope="target",
    needs={
        "import": ("model.json", "params.safetensors", "signature.json"),
        choose.NAME: (choose.CHOICES,),
        "lower": (LOWERED,),
        "extract_tasks": ("workloads.json",),
        "pick_best": ("chosen.json",),
        "build": ("kernels.json",),
        "export": ("module.tvmflow", "vm.tvmflow"),
        "emulation_program": ("program",),
    },
    optional_needs=(choose.NAME, "extract_tasks", "pick_best"),
    needs_of_parts=("emulation_program",),
    needs_all={"export": lambda recipe: run_location(recipe) in (LOCAL, CHROMIUM)},
    reads=("reference", "operators", "data"),
    tools=("apache-tvm", "apache-tvm-ffi", "numpy"),
    timeout_s=4 * 3600.0,
    compiles_kernels=True,
    find_faults=find_faults,
    run=RunTraits(
        measures=True, is_locked=False, is_gate=True, unlocked_settings=("target", "levels")
    ),
)

describe, explain = verdict_text.describe, verdict_text.explain

VERDICT: Final = "verdict.json"
"""What was verified: the same bytes whenever the same library passes the same checks."""
DELIVERED_VERDICT: Final = "verify.json"
"""The name of the verdict in `dist`."""
MEASUREMENTS: Final = "measurements.json"
"""All that was measured: latencies, accuracy, errors, and what ran the library."""


# ---------------------------------------------------------------- settings


def settings(recipe: Recipe, target: ResolvedTarget | PartitionedTarget) -> VerifySettings:
    """Return the checks, and what is run where."""
    checks = recipe.verify
    min_speedup = recipe.tune.min_speedup
    levels = _level_settings(recipe, target) if isinstance(target, ResolvedTarget) else {}
    run_on = run_location(recipe)
    if any(level.run_on == LOCAL and not level.not_verified for level in levels.values()):
        run_on = LOCAL
    is_partitioned = isinstance(target, PartitionedTarget)
    machine: MachineSettings | PartSettings
    if isinstance(target, PartitionedTarget):
        machine = PartSettings(parts={m.part: _machine_settings(m, run_on) for m in target.parts})
        recipes = [recipe.for_target(m.name) for m in target.parts]
    else:
        machine, recipes = _machine_settings(target, run_on), [recipe]
    return VerifySettings(
        verify=CheckSettings(**{**checks.model_dump(), "data": checks.data is not None}),
        inputs={
            name: InputSettings(range=spec.range, image=spec.image is not None)
            for name, spec in recipe.inputs.items()
            if spec.value is None
        },
        model={"kind": recipe.model.kind},
        target=machine,
        precision=lowest_precision(recipes),
        lowering=None
        if is_partitioned
        else replace(lowering_options(recipe), shares_weights=bool(levels)),
        schedules=None if is_partitioned else schedules_version(recipe),
        tune=None if min_speedup is None else SpeedupSettings(min_speedup=min_speedup),
        run_on=run_on,
        compare=compare_settings(recipe, target),
        tune_at={d.name: d.tune_at for d in recipe.list_dimensions() if d.tune_at} or None,
        levels=levels,
        prefix=identifier(recipe.name) if levels else "",
        quantized=recipe.quantize is not None,
        deliveries=_list_deliveries(recipe, target) if run_on == LOCAL else {},
    )


def _list_deliveries(
    recipe: Recipe, target: ResolvedTarget | PartitionedTarget
) -> dict[str, tuple[str, ...]]:
    """Return the files of each output for a target."""
    if isinstance(target, PartitionedTarget):
        request, outputs = join.make_request(recipe, target), join.list_outputs(recipe)
    else:
        request, outputs = export.make_request(recipe, target), sorted(set(recipe.outputs))
    return {output: EXPORTERS[output].files(request) for output in outputs}


def _level_settings(recipe: Recipe, target: ResolvedTarget) -> dict[str, LevelSettings]:
    """Return where each level runs.

    That is this machine if it has the level, else an emulator if the recipe allows it.
    """
    may_emulate = run_location(recipe) == QEMU
    settings = {}
    for level in target.levels:
        reason, run_on = level.unrunnable_reason, LOCAL
        if reason and may_emulate:
            run_on = QEMU
            is_emulated = not UNEMULATED_FEATURES.intersection(level.features)
            reason = "" if is_emulated else f"{reason}, and qemu emulates no AVX-512"
        elif reason:
            reason += " (verify.run_on: qemu emulates other CPUs)"
        machine = MachineSettings.model_validate(level)
        settings[level.level] = LevelSettings(machine=machine, run_on=run_on, not_verified=reason)
    return settings


def _machine_settings(target: ResolvedTarget, run_on: str) -> MachineSettings:
    reached_target = target if run_on == RPC else target._replace(remote=None)
    reached_target = reached_target.measured_level
    return MachineSettings.model_validate(reached_target)


def deliveries(recipe: Recipe, target: ResolvedTarget | PartitionedTarget) -> Files:
    """Return the verdict and the measurements."""
    return ((VERDICT, DELIVERED_VERDICT), (MEASUREMENTS, MEASUREMENTS))


# ---------------------------------------------------------------- the verdict


def run(settings: VerifySettings, context: StageContext) -> Verdict:
    """Write the verdict and the measurements.

    Raises:
        VerifyFailed: when a check fails.
    """
    reasons = "; ".join(
        f"part '{name}': {machine.unrunnable_reason}" if name else machine.unrunnable_reason
        for name, machine in settings.machines.items()
        if machine.unrunnable_reason
    )
    if settings.run_on == LOCAL and settings.verify.against == "none" and reasons:
        return _conclude({"passed": True, "against": "none", "not_run": reasons}, context)
    with contextlib.ExitStack() as stack:
        verdict = _verify(settings, context, stack)
    return _conclude(verdict, context)


def _conclude(verdict: Verdict, context: StageContext) -> Verdict:
    _write_json(context.out / MEASUREMENTS, verdict)
    # Why a library is rejected is in what was measured of it.
    _write_json(
        context.out / VERDICT,
        verdict_without_measurements(verdict) if verdict["passed"] else verdict,
    )
    if not verdict["passed"]:
        raise VerifyFailed(
            "; ".join(verdict["failures"]),
            fix=verdict_text.describe_fix(verdict),
        )
    return verdict


def _write_json(path: Path, verdict: Verdict) -> None:
    path.write_text(json.dumps(verdict, indent=1, sort_keys=True) + "\n")


def _verify(
    settings: VerifySettings, context: StageContext, stack: contextlib.ExitStack
) -> Verdict:
    """Return everything that is verified of the library, and whether it passes.

    A reference that is not timed has ended before the library is loaded: a large model is in memory
    once. The stack ends the process of one that is.
    """
    from tvmflow.compiler import lowering

    checks = settings.verify
    signature = json.loads(context.inputs["import/signature.json"].read_text())
    dimensions = read_dimensions(signature, settings)
    mod = lowering.load_ir(context.inputs["import/model.json"])
    model = read_imported_model(signature, context.inputs)._replace(operands=find_operands(mod))
    candidates = load_samples(signature, settings, context.inputs.get(DATA), model.operands)
    verdict: Verdict = {"passed": True, "against": checks.against}
    swept = ChosenSizes()
    if any(spec.image for spec in settings.inputs.values()):
        images = load_images(settings, context)
        candidates = with_images(images, candidates, has_data=checks.data)
        verdict["images"] = images.comparisons
    if checks.against == "none":
        _, data = next(candidates)
        reference = None
    else:
        tolerance = _add_tolerance(verdict, mod, settings)
        indices = find_index_inputs(mod, model, settings, context.inputs)
        chosen = ChosenSizes()
        if dimensions:
            chosen = choose_sizes(dimensions, make_element_count(mod), checks.seed)
            if chosen.left_out:
                verdict["sizes_left_out"] = [*chosen.left_out]
            if _can_sweep(verdict, model, indices, settings):
                swept = sweep_sizes(dimensions, make_element_count(mod))
        reference = run_reference(
            settings,
            model,
            indices,
            candidates,
            tolerance,
            comparison.widen(tolerance, verdict["tolerance"]["for"]),
            chosen.combinations,
            context,
            stack,
            swept.combinations,
            0 if dimensions else make_element_count(mod)({}),
        )
        data = reference.results.samples
        _add_inputs(verdict, reference)
    verdict["samples"] = data.total
    if dimensions:
        verdict["at"] = find_sizes(signature, dimensions, data.batches[0])
    case = Case(settings=settings, context=context, model=model, data=data, reference=reference)
    with open_library(settings, context) as library:
        _add_results(verdict, library, case)
        add_reference_time(verdict, library, case)
        add_compared(verdict, library, case)
        if settings.deliveries:
            tolerance_of_files = reference.tolerance if reference else None
            verdict["deliveries"] = check_deliveries(
                library, data.batches[0], tolerance_of_files, settings, context
            )
        if settings.levels:
            verify_levels(verdict, library, case)
        _add_threads(verdict, library, case)
        if reference is not None and reference.sized:
            if reference.swept:
                verdict["swept"] = sweep(library, reference, swept.coverage, case)
            time_sizes(verdict["sizes"], library, reference, case)
        tensors = {**data.batches[0], **(reference.results.outputs[0] if reference else {})}
        if gates := check_gates(verdict, library, tensors, settings, context):
            verdict["gates"] = gates
    min_speedup = settings.tune.min_speedup if settings.tune else None
    failures = verdict_text.list_failures(verdict, checks)
    if failures and reference is not None:
        failures += list_operator_mismatches(settings, context, reference.tolerance)
    verdict["failures"] = [
        *failures,
        *list_slowdowns(verdict, min_speedup),
        *verdict_text.list_exceeded(verdict),
    ]
    verdict["passed"] = not verdict["failures"]
    warnings = verdict_text.list_warnings(verdict, checks)
    if warnings:
        verdict["warnings"] = warnings
    return verdict


def _add_threads(verdict: Verdict, library: Library, case: Case) -> None:
    """Compare a library with other numbers of threads, and at the sizes that were chosen."""
    others = load_with_other_threads(case.context.inputs["export/module.tvmflow"], case.settings)
    if case.reference is not None and case.reference.sized:
        loaded = [*others]
        verdict["sizes"] = compare_sizes(library, case.reference, [other for _, other in loaded])
        others = iter(loaded)
    if compared := compare_threads(library, others, case.data.batches[0]):
        verdict["threads"] = compared


def _can_sweep(
    verdict: Verdict, model: ImportedModel, indices: IndexInputs | None, settings: VerifySettings
) -> bool:
    """Return whether many sizes can be compared without a tie or a rounding that looks like an error."""
    return (
        settings.run_on == LOCAL
        and verdict["tolerance"]["for"] == comparison.FLOAT32
        and settings.verify.has_default_tolerance
        and indices is None
        and all(machine.tvm["kind"] == "llvm" for machine in settings.machines.values())
        and all(
            spec.bounded_axis is None and spec.dtype.startswith("float") for spec in model.outputs
        )
    )


def _add_results(verdict: Verdict, library: Library, case: Case) -> None:
    """Run the library, compare it with the reference, and measure it."""
    settings, context, _, data, reference = case
    actual = library.run_all(data.batches)
    if settings.run_on != LOCAL:
        verdict["ran_on"] = library.ran_on
    tensors = dict(data.batches[0])
    if reference is not None:
        tensors.update(reference.results.outputs[0])
        verdict["reference"] = reference.name
        if reference.note:
            verdict["reference_note"] = reference.note
        _add_comparisons(verdict, library, actual, reference, case)
    if data.labels is not None:
        first = library.outputs[0].name
        verdict["accuracy"] = _find_accuracy(actual, first, data)
    if library.timed is None:
        verdict["latency_not_measured"] = UNTIMED_REASONS[settings.run_on]
    else:
        add_latencies(verdict, library, tensors, settings, context)


def _add_inputs(verdict: Verdict, reference: ReferenceRun) -> None:
    """Record what the inputs are, which branches of the model they reach, and which ones tell nothing."""
    more = reference.more
    if reference.results.random_inputs:
        verdict["random_inputs"] = reference.results.random_inputs
    if reference.results.added:
        verdict["added_samples"] = reference.results.added
    if more.left_out:
        verdict["draws_left_out"] = [*more.left_out]
    if more.exercises is None:
        verdict["exercises_not_observed"] = reference.name
        return
    verdict["exercises"] = [*more.exercises]
    if unexercised := list_unexercised(more.exercises):
        verdict["unexercised"] = unexercised


def _add_tolerance(verdict: Verdict, mod: tvm.IRModule, settings: VerifySettings) -> Tolerance:
    """Return how closely outputs must agree, and record it with the arithmetic that it is for."""
    checks = settings.verify
    arithmetic = comparison.find_arithmetic(mod, settings.precision)
    tolerance = comparison.tolerance_for(arithmetic, rtol=checks.rtol, atol=checks.atol)
    verdict["tolerance"] = cast(AllowedDifference, {"for": arithmetic, **tolerance._asdict()})
    return tolerance


def _add_comparisons(
    verdict: Verdict,
    library: Library,
    actual: Sequence[Mapping[str, Array]],
    reference: ReferenceRun,
    case: Case,
) -> None:
    """Compare the library's outputs for each batch, and each part by itself, with the reference.

    A part is run on the tensors of the reference, so that an error is found in the part that makes it.
    """
    settings, context, _, data, _ = case
    expected = reference.results.outputs
    tolerance = reference.tolerance
    check = _add_index_inputs(verdict, library, reference, settings, context)

    def compare(library: Library, outputs: Sequence[Mapping[str, Array]]) -> Outputs:
        batches = check.settle(outputs) if check else outputs
        names = [spec.name for spec in library.outputs]
        return comparison.compare_batches(names, batches, expected, data, tolerance)

    verdict["outputs"] = compare(library, actual)
    if reference.more.draws or reference.more.repeats:
        verdict["draws"] = compare_draws(library, reference.more)
    if reference.floats:
        verdict["float_error"] = comparison.relative_error(actual, reference.floats)
    if reference.indices:
        count_values(verdict["outputs"], reference.indices.outputs, expected)
    if check:
        check.describe(actual, verdict["outputs"])
    for name, what in reference.results.undetected.items():
        index_inputs = verdict.get("index_inputs", {})
        (index_inputs if name in index_inputs else verdict["outputs"])[name]["undetected"] = what
    if data.labels is not None:
        first = library.outputs[0].name
        verdict["reference_accuracy"] = _find_accuracy(reference.floats or expected, first, data)
    parts: dict[str, PartVerdict] = {}
    for name, part in library.parts.items():
        names = [spec.name for spec in part.inputs]
        tensors = [{**f, **outputs} for f, outputs in zip(data.batches, expected, strict=True)]
        feeds = [{name: batch[name] for name in names} for batch in tensors]
        names = [spec.name for spec in part.outputs]
        compared = comparison.compare_batches(names, part.run_all(feeds), expected, data, tolerance)
        parts[name] = {"outputs": compared}
    if parts:
        verdict["parts"] = parts
    vm_bundle = context.inputs.get("export/vm.tvmflow")
    if vm_bundle and settings.run_on == LOCAL:
        # the library for TVM's virtual machine, which outputs are made of beside the other one
        machine = load_local(vm_bundle, settings)
        verdict["vm"] = {"outputs": compare(machine, machine.run_all(data.batches))}
        if reference.sized:
            verdict["vm"]["sizes"] = compare_sizes(machine, reference)
    if settings.run_on == CHROMIUM:
        from tvmflow.stages.verify.remote_backends import BrowserLibrary

        # what browsers without WebGPU run, where the package has code for both
        assert isinstance(library, BrowserLibrary)
        if fallback := library.fallback:
            outputs = compare(fallback, fallback.run_all(data.batches))
            verdict["fallback"] = {"ran_on": fallback.ran_on, "outputs": outputs}
    add_layers(verdict, verdict["tolerance"]["for"], library, case)


def _add_index_inputs(
    verdict: Verdict,
    library: Library,
    reference: ReferenceRun,
    settings: VerifySettings,
    context: StageContext,
) -> IndexCheck | None:
    """Compare what goes into an index, where the model has one."""
    indices = reference.indices
    if indices is None:
        return None
    if indices.loaded is None:
        verdict["index_inputs_not_compared"] = indices.reason
        return None
    from tvmflow.compiler.lowering import LoweredModel

    def delivered() -> LoweredModel:
        return LoweredModel.read(context.inputs[LOWERED_ROLE])

    check = IndexCheck(
        indices,
        library,
        reference.results,
        reference.tolerance,
        settings,
        context.inputs,
        delivered,
    )
    verdict["index_inputs"] = check.tensors
    return check


def _find_accuracy(outputs: Sequence[Mapping[str, Array]], name: str, data: Samples) -> float:
    """Return the accuracy of all batches by an output."""
    assert data.labels is not None
    joined = samples.join_outputs([{name: batch[name]} for batch in outputs], data)
    return samples.top1_accuracy(joined, name, data.labels)


def list_slowdowns(verdict: Verdict, min_speedup: float | None) -> list[str]:
    """Return a sentence if tuning gave less than the least end-to-end speedup."""
    if min_speedup is None:
        return []
    # without a tuned kernel the library is the untuned one
    speedup = verdict["speedup"]["median"] if "speedup" in verdict else 1.0
    if speedup >= min_speedup:
        return []
    return [
        f"the speedup of the tuned library over the untuned one is {speedup:.3g}, "
        f"below tune.min_speedup {min_speedup:g}"
    ]
