"""`verify`: the library that users will load, on real inputs, against the model's framework."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast, get_args

from tvmflow.core.errors import StageError, VerifyFailed
from tvmflow.core.fork_server import Emit
from tvmflow.core.generated_text import identifier
from tvmflow.core.types import Array, Json, Precision, RunTraits
from tvmflow.exporters import EXPORTERS
from tvmflow.recipe import Recipe
from tvmflow.runtime import samples
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.runtime.samples import Samples
from tvmflow.stages import choose, export, join
from tvmflow.stages.base import (
    Files,
    StageContext,
    StageTraits,
    lowering_options,
    schedules_version,
)
from tvmflow.stages.images import DATA
from tvmflow.stages.lower import LOWERED, LOWERED_ROLE
from tvmflow.stages.runtime_choice import run_location
from tvmflow.stages.verify import comparison, verdict_text
from tvmflow.stages.verify.comparison import Tolerance, has_same_bits
from tvmflow.stages.verify.deliveries import check_deliveries
from tvmflow.stages.verify.draws import compare_draws, list_unexercised
from tvmflow.stages.verify.index_inputs import (
    IndexCheck,
    IndexInputs,
    count_values,
    find_index_inputs,
    no_inner_reason,
)
from tvmflow.stages.verify.inputs import (
    ChosenSizes,
    ImportedModel,
    SizeOutputs,
    choose_sizes,
    find_operands,
    find_sizes,
    list_operator_mismatches,
    load_images,
    load_samples,
    make_element_count,
    read_dimensions,
    read_imported_model,
    sweep_sizes,
    with_images,
)
from tvmflow.stages.verify.latency import (
    add_compared,
    add_latencies,
    add_reference_time,
    check_gates,
    compare_settings,
    exclusive_devices,
    lower_untuned,
    make_speedup,
    measure,
    measure_briefly,
    measure_variant,
    schedule_each,
)
from tvmflow.stages.verify.layer_check import add_layers
from tvmflow.stages.verify.libraries import (
    UNTIMED_REASONS,
    Library,
    LocalLibrary,
    check_call,
    compare_threads,
    load_local,
    load_with_other_threads,
    open_library,
)
from tvmflow.stages.verify.reference_run import Case, ReferenceRun, run_at, run_reference
from tvmflow.stages.verify.sequences import check_states
from tvmflow.stages.verify.verdict import (
    AllowedDifference,
    IsaLevelVerdict,
    OutputComparison,
    PartVerdict,
    SizeVerdict,
    SweepVerdict,
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
    IsaLevelSettings,
    MachineSettings,
    PartSettings,
    SpeedupSettings,
    VerifySettings,
)
from tvmflow.targets.c_runtime.isa_levels import variable
from tvmflow.targets.emulation import UNEMULATED_FEATURES
from tvmflow.targets.resolve import PartitionedTarget, ResolvedTarget

if TYPE_CHECKING:
    import tvm

    Outputs = dict[str, OutputComparison]


NAME: Final = "verify"


def find_faults(payload: dict[str, Json], emit: Emit) -> list[Json]:
    """Return the faults of a rejected library as JSON: see `fault_localization`."""
    from tvmflow.stages.verify import fault_localization

    return fault_localization.find_faults(payload, emit)


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
"""The verified facts: the same bytes whenever the same library passes the same checks."""
DELIVERED_VERDICT: Final = "verify.json"
"""The name of the verdict in `dist`."""
MEASUREMENTS: Final = "measurements.json"
"""All measurements: latencies, accuracy, errors, and the executor of the library."""


# ---------------------------------------------------------------- settings


def settings(recipe: Recipe, target: ResolvedTarget | PartitionedTarget) -> VerifySettings:
    """Return the checks, and where they run."""
    checks = recipe.verify
    min_speedup = recipe.tune.min_speedup
    levels = _isa_level_settings(recipe, target) if isinstance(target, ResolvedTarget) else {}
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
        precision=max((r.kernels.precision for r in recipes), key=get_args(Precision).index),
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


def _isa_level_settings(recipe: Recipe, target: ResolvedTarget) -> dict[str, IsaLevelSettings]:
    """Return where each level runs: this machine if it has the level, else an emulator if allowed."""
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
        settings[level.level] = IsaLevelSettings(
            machine=machine, run_on=run_on, not_verified=reason
        )
    return settings


def _machine_settings(target: ResolvedTarget, run_on: str) -> MachineSettings:
    reached_target = target if run_on == RPC else target._replace(remote=None)
    reached_target = reached_target.measured_isa_level
    return MachineSettings.model_validate(reached_target)


def deliveries(recipe: Recipe, target: ResolvedTarget | PartitionedTarget) -> Files:
    """Return the verdict and the measurements."""
    return ((VERDICT, DELIVERED_VERDICT), (MEASUREMENTS, MEASUREMENTS))


# ---------------------------------------------------------------- the verdict


def run(settings: VerifySettings, context: StageContext) -> Verdict:
    """Write the verdict and the measurements."""
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
    # Why a library is rejected is in its measurements.
    _write_json(
        context.out / VERDICT,
        verdict_without_measurements(verdict) if verdict["passed"] else verdict,
    )
    if not verdict["passed"]:
        raise VerifyFailed("; ".join(verdict["failures"]), fix=verdict_text.describe_fix(verdict))
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
    from tvmflow.graph import ir

    checks = settings.verify
    signature = json.loads(context.inputs["import/signature.json"].read_text())
    dimensions = read_dimensions(signature, settings)
    mod = ir.load_module(context.inputs["import/model.json"])
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
        if states := check_states(library, signature, model, settings):
            verdict["states"] = states
        if settings.levels:
            verify_isa_levels(verdict, library, case)
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
    """Record the inputs, which branches of the model they reach, and which ones are useless."""
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

        # the fallback of browsers without WebGPU, where the package has code for both
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
    """Compare the inputs of argmax-like operators, if the model has some."""
    indices = reference.indices
    if indices is None:
        return None
    if indices.loaded is None:
        verdict["index_inputs_not_compared"] = indices.reason
        return None
    from tvmflow.compiler import LoweredModel

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


# ---------------------------------------------------------------- sizes


_SECONDS_BESIDE_FIXED: Final = 5.0
# Of outputs at many sizes, some are small by chance; results of a wrong tail are further off.
_SWEPT_TOLERANCE: Final = Tolerance(1e-2, 1e-30, of_largest=1e-3)
_MORE_DRAWS: Final = 2


def sweep(
    library: Library, reference: ReferenceRun, coverage: Sequence[str], case: Case
) -> SweepVerdict:
    """Compare a library at many sizes; one fails if it is wrong for other random inputs of it, too."""
    failed = []
    for sized in reference.swept:
        verdict, _ = _compare_at(library, sized, _SWEPT_TOLERANCE)
        if not verdict["passed"] and _fails_again(library, sized, reference, case):
            failed.append(verdict)
    return {"coverage": [*coverage], "failed": failed}


def _fails_again(library: Library, sized: SizeOutputs, reference: ReferenceRun, case: Case) -> bool:
    if reference.timed is None:
        return True
    run, settings = reference.timed.run, case.settings
    for number in range(1, _MORE_DRAWS + 1):
        checks = settings.verify.model_copy(update={"seed": settings.verify.seed + number})
        again = run_at(
            lambda feed: run({**feed, **case.model.bound}),
            sized.sizes,
            case.model,
            settings.model_copy(update={"verify": checks}),
            reference.tolerance,
        )
        if _compare_at(library, again, _SWEPT_TOLERANCE)[0]["passed"]:
            return False
    return True


def compare_sizes(
    library: Library, reference: ReferenceRun, other_threads: Sequence[Library] = ()
) -> list[SizeVerdict]:
    """Run a library at all sizes, and compare it with the reference.

    It runs them forwards, and then backwards: its results must not depend on the sizes of earlier calls, nor
    on the number of threads.

    Libraries with other thread counts are interleaved in reverse order.
    """
    verdicts = []
    first: list[dict[str, Array] | None] = []
    for sized in reference.sized:
        verdict, outputs = _compare_at(library, sized, reference.tolerance)
        verdicts.append(verdict)
        first.append(outputs)
    backwards = reversed([*zip(verdicts, reference.sized, first, strict=True)])
    others = itertools.cycle(other_threads or [library])
    for (verdict, sized, outputs), other in zip(backwards, others, strict=False):
        if outputs is not None and not has_same_bits(other.run_all([sized.feed])[0], outputs):
            verdict["is_repeatable"] = verdict["passed"] = False
    return verdicts


def list_wrong_sizes(library: Library, reference: ReferenceRun, case: Case) -> list[SizeVerdict]:
    """Return the verdicts of the sizes, of all at which the reference ran, that a library fails at."""
    swept = sweep(library, reference, (), case)["failed"]
    verdicts = [*compare_sizes(library, reference), *swept]
    return [verdict for verdict in verdicts if not verdict["passed"]]


def time_sizes(
    verdicts: Sequence[SizeVerdict], library: Library, reference: ReferenceRun, case: Case
) -> None:
    """Time a library and the reference at all sizes, where they can be timed.

    With `compare: [fixed]`, a library of each size alone is built, untuned, and timed interleaved with it.
    """
    settings, context = case.settings, case.context
    if library.timed is None:
        return
    called = [
        (verdict, sized)
        for verdict, sized in zip(verdicts, reference.sized, strict=True)
        if "failure" not in verdict
    ]
    with exclusive_devices(settings, context):
        for verdict, sized in called:
            feed = {**sized.feed, **case.model.bound}
            verdict["latency_s"] = measure_briefly(library.timed, sized.feed)
            if reference.timed is not None:
                verdict["reference_latency_s"] = measure_briefly(reference.timed, feed)
    is_requested = settings.compare is not None and settings.compare.fixed
    if not is_requested or not isinstance(library, LocalLibrary):
        return
    models = schedule_each((sized.sizes for _, sized in called), settings, context)
    for (verdict, sized), model in zip(called, models, strict=True):
        fixed = library.load_at(sized.sizes, model)
        with exclusive_devices(settings, context):
            times = measure_variant(library, fixed, sized.feed, _SECONDS_BESIDE_FIXED)
        verdict["fixed_speedup"] = make_speedup(times)


def _compare_at(
    library: Library, sized: SizeOutputs, tolerance: Tolerance
) -> tuple[SizeVerdict, dict[str, Array] | None]:
    """Return the verdict at some sizes, and the library's outputs; None if it cannot be called."""
    expected = {spec.name: sized.outputs[spec.name] for spec in library.outputs}
    verdict, outputs = check_call(library, sized.feed, expected, tolerance)
    return cast(SizeVerdict, {"sizes": sized.sizes, **verdict}), outputs


# ---------------------------------------------------------------- ISA levels
# The level that the library chooses by itself is the one that `verify` has checked already.

_ONLY_INDEX: Final = "it returns an index alone, and what goes into it is not compared: {}"
_SELECTS: Final = "it returns what an index selects, which another CPU may choose among equals"


def verify_isa_levels(verdict: Verdict, library: Library, case: Case) -> None:
    """Verify each level, and add its verdict."""
    chosen = _find_isa_level(library)
    expected = _find_measured(case.settings)
    if chosen and chosen != expected:
        raise StageError(
            f"the library runs the level {chosen} where this machine has {expected}",
            fix="report it as a bug of tvmflow, with the output of `tvmflow doctor`",
        )
    levels = verdict["levels"] = dict[str, IsaLevelVerdict]()
    for name, level in case.settings.levels.items():
        if level.not_verified:
            levels[name] = {"not_verified": level.not_verified}
        elif name == chosen:
            levels[name] = {"ran_on": library.ran_on, "outputs": verdict.get("outputs", {})}
            if "index_inputs" in verdict:
                levels[name]["index_inputs"] = verdict["index_inputs"]
            if "latency" in verdict:
                levels[name]["latency"] = verdict["latency"]["library"]
        else:
            levels[name] = _verify_isa_level(name, level, verdict, case)


def _find_measured(settings: VerifySettings) -> str:
    """Return the last level that this machine has; where none is verified here, empty."""
    runnable = [
        name
        for name, level in settings.levels.items()
        if level.run_on == LOCAL and not level.not_verified
    ]
    return runnable[-1] if runnable else ""


def _find_isa_level(library: Library) -> str:
    """Return the level that a library runs in this process; empty if it runs elsewhere."""
    if not isinstance(library, LocalLibrary):
        return ""
    program = library.module.program
    return program.level if isinstance(program, NativeProgram) else ""


def _verify_isa_level(
    name: str, level: IsaLevelSettings, verdict: Verdict, case: Case
) -> IsaLevelVerdict:
    """Return the verdict on one level that a library does not choose by itself."""
    settings, context, _, data, reference = case
    indices = reference.indices if reference else None
    if indices is not None and indices.selects:
        return {"not_verified": _SELECTS}
    own = settings.model_copy(update={"target": level.machine, "run_on": level.run_on})
    reason = indices.reason if indices and not indices.loaded else no_inner_reason(own)
    opened = open_library(own, context._replace(work=context.work / name))
    with _forced_isa_level(settings.prefix, name), opened as library:
        actual = library.run_all(data.batches)
        found: IsaLevelVerdict = {"ran_on": library.ran_on}
        if reference is not None:
            names = [spec.name for spec in library.outputs]
            if indices and not reason:
                delivered = functools.partial(lower_untuned, own, context.inputs)
                check = IndexCheck(
                    indices,
                    library,
                    reference.results,
                    reference.tolerance,
                    own,
                    context.inputs,
                    delivered,
                )
                found["index_inputs"], actual = check.tensors, check.settle(actual)
            elif indices:
                # another CPU may choose among equals
                names = [output for output in names if output not in indices.outputs]
                if not names:
                    return {"not_verified": _ONLY_INDEX.format(reason)}
            found["outputs"] = comparison.compare_batches(
                names, actual, reference.results.outputs, data, reference.tolerance
            )
            if level.run_on == LOCAL and reference.sized and not indices:
                found["sizes"] = list_wrong_sizes(library, reference, case)
            add_layers(found, verdict["tolerance"]["for"], library, case._replace(settings=own))
        if library.timed is not None:
            feed = {spec.name: data.batches[0][spec.name] for spec in library.inputs}
            with exclusive_devices(settings, context):
                found["latency"] = measure(library.timed, feed, settings.verify.repeat)
    return found


@contextlib.contextmanager
def _forced_isa_level(prefix: str, name: str) -> Iterator[None]:
    """Let libraries that are loaded meanwhile run a level; qemu passes its environment on."""
    key = variable(prefix)
    before = os.environ.get(key)
    os.environ[key] = name
    try:
        yield
    finally:
        del os.environ[key]
        if before is not None:
            os.environ[key] = before
