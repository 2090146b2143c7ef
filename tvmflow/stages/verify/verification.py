"""The verification of a library: its run, the reference's run, comparison, measurement, verdict."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

from tvmflow.compiler import LoweredModel
from tvmflow.core.dimensions import choose_tuning_size, evaluate
from tvmflow.core.errors import StageError, TvmflowError, VerifyFailed
from tvmflow.core.formatting import names_text, quoted
from tvmflow.core.types import Array, Dimension, Feed, Json, State
from tvmflow.graph import ir
from tvmflow.runtime import samples
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.runtime.samples import Samples
from tvmflow.runtime.sessions import Session, holds_states
from tvmflow.stages.base import StageContext
from tvmflow.stages.images import DATA
from tvmflow.stages.lower import LOWERED_ROLE
from tvmflow.stages.verify import (
    MEASUREMENTS,
    VERDICT,
    comparison,
    draws,
    image_inputs,
    inner_tensors,
    inputs,
    latency,
    libraries,
    reference_run,
    verdict_text,
)
from tvmflow.stages.verify.comparison import Tolerance, has_same_bits
from tvmflow.stages.verify.delivery_check import check_deliveries
from tvmflow.stages.verify.inner_check import IndexCheck, add_layers, count_values
from tvmflow.stages.verify.inner_tensors import IndexInputs
from tvmflow.stages.verify.inputs import ChosenSizes, ImportedModel, SizeOutputs
from tvmflow.stages.verify.libraries import Library, LocalLibrary
from tvmflow.stages.verify.reference_run import Case, ReferenceRun
from tvmflow.stages.verify.verdict import (
    FLOAT16,
    FLOAT32,
    INT8_STATES,
    AllowedDifference,
    IsaLevelVerdict,
    OutputComparison,
    PartVerdict,
    SizeVerdict,
    StatesVerdict,
    SweepVerdict,
    Verdict,
    verdict_without_measurements,
)
from tvmflow.stages.verify_settings import (
    CHROMIUM,
    LOCAL,
    UNTIMED_REASONS,
    IsaLevelSettings,
    VerifySettings,
)
from tvmflow.targets.c_runtime.isa_levels import variable

Outputs = dict[str, OutputComparison]


# ---------------------------------------------------------------- the verdict


def verify(settings: VerifySettings, context: StageContext) -> Verdict:
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
    # If the library is rejected, the verdict keeps measurements, because they contain the reason.
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
    """Run all checks, and return the verdict.

    If the reference is not timed, it ends before the library is loaded, so that a large model is in memory only
    once. `stack` ends the process of a timed reference.
    """
    checks = settings.verify
    signature = json.loads(context.inputs["import/signature.json"].read_text())
    dimensions = inputs.read_dimensions(signature, settings)
    mod = ir.load_module(context.inputs["import/model.json"])
    model = inputs.read_imported_model(signature, context.inputs)._replace(
        operands=inputs.find_operands(mod)
    )
    candidates = inputs.load_samples(signature, settings, context.inputs.get(DATA), model.operands)
    verdict: Verdict = {"passed": True, "against": checks.against}
    swept = ChosenSizes()
    if any(spec.image for spec in settings.inputs.values()):
        images, verdict["images"] = image_inputs.load_images(settings, context)
        candidates = image_inputs.with_images(images, candidates, has_data=checks.data)
    if checks.against == "none":
        _, data = next(candidates)
        reference = None
    else:
        arithmetic = comparison.find_arithmetic(mod, settings.precision)
        tolerance = comparison.tolerance_for(arithmetic, rtol=checks.rtol, atol=checks.atol)
        limits = {"for": arithmetic, **tolerance._asdict()}
        verdict["tolerance"] = cast(AllowedDifference, limits)
        indices = inner_tensors.find_index_inputs(mod, model, settings, context.inputs)
        chosen = ChosenSizes()
        if dimensions:
            chosen = inputs.choose_sizes(dimensions, inputs.make_element_count(mod), checks.seed)
            if chosen.left_out:
                verdict["sizes_left_out"] = [*chosen.left_out]
            if _can_sweep(verdict, model, indices, settings):
                swept = inputs.sweep_sizes(dimensions, inputs.make_element_count(mod))
        reference = reference_run.run_reference(
            settings,
            model,
            indices,
            candidates,
            tolerance,
            comparison.widen(tolerance, arithmetic),
            chosen.combinations,
            context,
            stack,
            swept.combinations,
            0 if dimensions else inputs.make_element_count(mod)({}),
        )
        data = reference.results.samples
        _add_inputs(verdict, reference)
    verdict["samples"] = data.total
    if dimensions:
        verdict["at"] = inputs.find_sizes(signature, dimensions, data.batches[0])
    case = Case(settings=settings, context=context, model=model, data=data, reference=reference)
    with libraries.open_library(settings, context) as library:
        _add_results(verdict, library, case)
        latency.add_reference_time(verdict, library, case)
        latency.add_compared(verdict, library, case)
        if settings.deliveries:
            verdict["deliveries"] = check_deliveries(library, case)
        if states := check_states(library, signature, case):
            verdict["states"] = states
        if settings.levels:
            verify_isa_levels(verdict, library, case)
        _add_threads(verdict, library, case)
        if reference is not None and reference.sized:
            if reference.swept:
                verdict["swept"] = sweep(library, reference, swept.coverage, case)
            time_sizes(verdict["sizes"], library, reference, case)
        if gates := latency.check_gates(verdict, library, case):
            verdict["gates"] = gates
    min_speedup = settings.tune.min_speedup if settings.tune else None
    failures = verdict_text.list_failures(verdict, checks)
    if failures and reference is not None:
        failures += inputs.list_operator_mismatches(settings, context, reference.tolerance)
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
    others = libraries.load_with_other_threads(
        case.context.inputs["export/module.tvmflow"], case.settings
    )
    if case.reference is not None and case.reference.sized:
        loaded = [*others]
        verdict["sizes"] = compare_sizes(library, case.reference, [other for _, other in loaded])
        others = iter(loaded)
    if compared := libraries.compare_threads(library, others, case.data.batches[0]):
        verdict["threads"] = compared


def _can_sweep(
    verdict: Verdict, model: ImportedModel, indices: IndexInputs | None, settings: VerifySettings
) -> bool:
    """Return whether a sweep is possible: no ties or coarse roundings could look like errors."""
    # with states of float16 or int8, all arithmetic is still float32
    has_states = model.states and settings.precision == "model"
    arithmetic = (FLOAT16, INT8_STATES) if has_states else (FLOAT32,)
    return (
        settings.run_on == LOCAL
        and verdict["tolerance"]["for"] in arithmetic
        and settings.verify.has_default_tolerance
        and indices is None
        and all(machine.tvm["kind"] == "llvm" for machine in settings.machines.values())
        and all(
            spec.bounded_axis is None and (spec.row_scales or spec.dtype.startswith("float"))
            for spec in model.outputs
        )
    )


def _add_results(verdict: Verdict, library: Library, case: Case) -> None:
    data, reference, run_on = case.data, case.reference, case.settings.run_on
    actual = library.run_all(data.batches)
    if run_on != LOCAL:
        verdict["ran_on"] = library.ran_on
    if reference is not None:
        verdict["reference"] = reference.name
        if reference.note:
            verdict["reference_note"] = reference.note
        _add_comparisons(verdict, library, actual, reference, case)
    if data.labels is not None:
        first = library.outputs[0].name
        verdict["accuracy"] = _find_accuracy(actual, first, data)
    if library.timed is None:
        verdict["latency_not_measured"] = UNTIMED_REASONS[run_on]
    else:
        latency.add_latencies(verdict, library, case)


def _add_inputs(verdict: Verdict, reference: ReferenceRun) -> None:
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
    if unexercised := draws.list_unexercised(more.exercises):
        verdict["unexercised"] = unexercised


def _add_comparisons(
    verdict: Verdict,
    library: Library,
    actual: Sequence[Mapping[str, Array]],
    reference: ReferenceRun,
    case: Case,
) -> None:
    """Compare the library's outputs for each batch, and each part in isolation, with the reference.

    Each part reads the reference's tensors, so that an error is attributed to the part that causes it.
    """
    settings, context, _, data, _ = case
    expected = reference.results.outputs
    tolerance = reference.tolerance
    check = _add_index_inputs(verdict, library, case)

    def compare(library: Library, outputs: Sequence[Mapping[str, Array]]) -> Outputs:
        batches = check.settle(outputs) if check else outputs
        names = [spec.name for spec in library.outputs]
        return comparison.compare_batches(names, batches, expected, data, tolerance)

    verdict["outputs"] = compare(library, actual)
    if reference.more.draws or reference.more.repeats:
        verdict["draws"] = draws.compare_draws(library, reference.more)
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
        # a second library, for TVM's virtual machine, from which some outputs are made
        machine = libraries.load_local(vm_bundle, settings)
        verdict["vm"] = {"outputs": compare(machine, machine.run_all(data.batches))}
        if reference.sized:
            verdict["vm"]["sizes"] = compare_sizes(machine, reference)
    if settings.run_on == CHROMIUM:
        from tvmflow.stages.verify.libraries import BrowserLibrary

        # a package with WebGPU code also has a fallback for browsers without WebGPU
        assert isinstance(library, BrowserLibrary)
        if fallback := library.fallback:
            outputs = compare(fallback, fallback.run_all(data.batches))
            verdict["fallback"] = {"ran_on": fallback.ran_on, "outputs": outputs}
    add_layers(verdict, verdict["tolerance"]["for"], library, case)


def _add_index_inputs(verdict: Verdict, library: Library, case: Case) -> IndexCheck | None:
    """Compare the inputs of argmax-like operators; None if there are none, or if that is impossible."""
    indices = case.reference.indices if case.reference else None
    if indices is None:
        return None
    if indices.loaded is None:
        verdict["index_inputs_not_compared"] = indices.reason
        return None
    lowered = case.context.inputs[LOWERED_ROLE]
    check = IndexCheck(library, case, lambda: LoweredModel.read(lowered))
    verdict["index_inputs"] = check.tensors
    return check


def _find_accuracy(outputs: Sequence[Mapping[str, Array]], name: str, data: Samples) -> float:
    assert data.labels is not None
    joined = samples.join_outputs([{name: batch[name]} for batch in outputs], data)
    return samples.top1_accuracy(joined, name, data.labels)


def list_slowdowns(verdict: Verdict, min_speedup: float | None) -> list[str]:
    """Return a sentence if the end-to-end speedup is below `min_speedup`; otherwise nothing."""
    if min_speedup is None:
        return []
    # without a tuned kernel, the library is the untuned one: the speedup is 1
    speedup = verdict["speedup"]["median"] if "speedup" in verdict else 1.0
    if speedup >= min_speedup:
        return []
    return [
        f"the speedup of the tuned library over the untuned one is {speedup:.3g}, "
        f"below tune.min_speedup {min_speedup:g}"
    ]


# ---------------------------------------------------------------- sizes


_SECONDS_BESIDE_FIXED: Final = 5.0
# The tolerance of a sweep. It is coarse, because at many sizes some outputs are small by chance; errors of a wrong
# tail are larger.
_SWEPT_TOLERANCE: Final = Tolerance(1e-2, 1e-30, of_largest=1e-3)
_MORE_DRAWS: Final = 2


def sweep(
    library: Library, reference: ReferenceRun, coverage: Sequence[str], case: Case
) -> SweepVerdict:
    """Compare a library at many sizes; a size fails if further random inputs give wrong outputs, too."""
    failed = []
    # states of float16 have a larger tolerance
    of_largest = max(_SWEPT_TOLERANCE.of_largest, reference.tolerance.of_largest)
    tolerance = _SWEPT_TOLERANCE._replace(of_largest=of_largest)
    for sized in reference.swept:
        verdict, _ = _compare_at(library, sized, tolerance)
        if not verdict["passed"] and _fails_again(library, sized, reference, tolerance, case):
            failed.append(verdict)
    return {"coverage": [*coverage], "failed": failed}


def _fails_again(
    library: Library,
    sized: SizeOutputs,
    reference: ReferenceRun,
    tolerance: Tolerance,
    case: Case,
) -> bool:
    if reference.timed is None:
        return True
    run, settings = reference.timed.run, case.settings
    for number in range(1, _MORE_DRAWS + 1):
        checks = settings.verify.model_copy(update={"seed": settings.verify.seed + number})
        again = reference_run.run_at(
            lambda feed: run({**feed, **case.model.bound}),
            sized.sizes,
            case.model,
            settings.model_copy(update={"verify": checks}),
            reference.tolerance,
        )
        if _compare_at(library, again, tolerance)[0]["passed"]:
            return False
    return True


def compare_sizes(
    library: Library, reference: ReferenceRun, other_threads: Sequence[Library] = ()
) -> list[SizeVerdict]:
    """Run a library at all sizes in order, then in reverse, and compare it with the reference.

    Results must depend neither on the sizes of earlier calls nor on the number of threads: the second pass
    alternates between libraries with other thread counts.
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
    """Return the verdicts of only those sizes at which a library is wrong."""
    swept = sweep(library, reference, (), case)["failed"]
    verdicts = [*compare_sizes(library, reference), *swept]
    return [verdict for verdict in verdicts if not verdict["passed"]]


def time_sizes(
    verdicts: Sequence[SizeVerdict], library: Library, reference: ReferenceRun, case: Case
) -> None:
    """Time the library and the reference at all sizes, as far as they can be timed.

    With `compare: [fixed]`, an untuned fixed-shape library is built for each size and timed interleaved with the
    dynamic one.
    """
    if library.timed is None:
        return
    called = [
        (verdict, sized)
        for verdict, sized in zip(verdicts, reference.sized, strict=True)
        if "failure" not in verdict
    ]
    with latency.exclusive_devices(case):
        for verdict, sized in called:
            feed = {**sized.feed, **case.model.bound}
            verdict["latency_s"] = latency.measure_briefly(library.timed, sized.feed)
            if reference.timed is not None:
                verdict["reference_latency_s"] = latency.measure_briefly(reference.timed, feed)
    compare = case.settings.compare
    if compare is None or not compare.fixed or not isinstance(library, LocalLibrary):
        return
    models = latency.schedule_each((sized.sizes for _, sized in called), case)
    for (verdict, sized), model in zip(called, models, strict=True):
        fixed = library.load_at(sized.sizes, model)
        with latency.exclusive_devices(case):
            times = latency.measure_variant(library, fixed, sized.feed, _SECONDS_BESIDE_FIXED)
        verdict["fixed_speedup"] = latency.make_speedup(times)


def _compare_at(
    library: Library, sized: SizeOutputs, tolerance: Tolerance
) -> tuple[SizeVerdict, dict[str, Array] | None]:
    """Return the verdict at some sizes, and the library's outputs; None if it cannot be called."""
    expected = {spec.name: sized.outputs[spec.name] for spec in library.outputs}
    verdict, outputs = libraries.check_call(library, sized.feed, expected, tolerance)
    return cast(SizeVerdict, {"sizes": sized.sizes, **verdict}), outputs


# ---------------------------------------------------------------- ISA levels
# Only the other levels are verified here: `verify` has checked the level that the library selects by default.

_ONLY_INDEX: Final = "it returns only an index, whose scores are not compared: {}"
_SELECTS: Final = (
    "it returns values that an index selects, and another CPU may select others of equal scores"
)


def verify_isa_levels(verdict: Verdict, library: Library, case: Case) -> None:
    """Verify each ISA level, and add the verdicts."""
    program = library.module.program if isinstance(library, LocalLibrary) else None
    chosen = program.level if isinstance(program, NativeProgram) else ""
    runnable = [
        name
        for name, level in case.settings.levels.items()
        if level.run_on == LOCAL and not level.not_verified
    ]
    expected = runnable[-1] if runnable else ""
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


def _verify_isa_level(
    name: str, level: IsaLevelSettings, verdict: Verdict, case: Case
) -> IsaLevelVerdict:
    settings, context, _, data, reference = case
    indices = reference.indices if reference else None
    if indices is not None and indices.selects:
        return {"not_verified": _SELECTS}
    own = settings.model_copy(update={"target": level.machine, "run_on": level.run_on})
    own_case = case._replace(settings=own)
    reason = (
        indices.reason if indices and not indices.loaded else inner_tensors.no_inner_reason(own)
    )
    opened = libraries.open_library(own, context._replace(work=context.work / name))
    with _forced_isa_level(settings.prefix, name), opened as library:
        actual = library.run_all(data.batches)
        found: IsaLevelVerdict = {"ran_on": library.ran_on}
        if reference is not None:
            names = [spec.name for spec in library.outputs]
            if indices and not reason:
                check = IndexCheck(library, own_case, lambda: latency.lower_untuned(own_case))
                found["index_inputs"], actual = check.tensors, check.settle(actual)
            elif indices:
                # another CPU may select others of equal scores
                names = [output for output in names if output not in indices.outputs]
                if not names:
                    return {"not_verified": _ONLY_INDEX.format(reason)}
            found["outputs"] = comparison.compare_batches(
                names, actual, reference.results.outputs, data, reference.tolerance
            )
            if level.run_on == LOCAL and reference.sized and not indices:
                found["sizes"] = list_wrong_sizes(library, reference, case)
            add_layers(found, verdict["tolerance"]["for"], library, own_case)
        if library.timed is not None:
            with latency.exclusive_devices(case):
                repeat = settings.verify.repeat
                found["latency"] = latency.measure(library.timed, case.read_feed(library), repeat)
    return found


@contextlib.contextmanager
def _forced_isa_level(prefix: str, name: str) -> Iterator[None]:
    """Set the ISA level of libraries that the block loads, here or in qemu, by an environment variable."""
    key = variable(prefix)
    before = os.environ.get(key)
    os.environ[key] = name
    try:
        yield
    finally:
        del os.environ[key]
        if before is not None:
            os.environ[key] = before


# ---------------------------------------------------------------- states

_STEPS: Final = 5
_WHAT: Final = "what a call computes with the same states"


def check_states(
    library: Library, signature: Mapping[str, Json], case: Case
) -> StatesVerdict | None:
    """Return the verdict on a session's steps; None without states, or if the library runs elsewhere."""
    if not isinstance(library, LocalLibrary) or not State.list_of(signature):
        return None
    if not holds_states(library.module.program):
        return None
    sequence = _Sequence(library, signature, case)
    try:
        failure = sequence.run()
    except TvmflowError as error:
        failure = error.message
    verdict: StatesVerdict = {
        "passed": not failure,
        "steps": sequence.steps,
        "length": sequence.length,
    }
    return {**verdict, "failure": failure} if failure else verdict


class _Sequence:
    """Steps of a session, compared with calls that take the states as inputs.

    Other checks compare single calls with the reference. Here, each step must have the same bits as a call with the
    states of the previous step, even after a fork, a truncation, and saving and loading.

    Attributes:
        steps: How many steps were compared.
        length: The length of growing states after these steps.
    """

    def __init__(self, library: LocalLibrary, signature: Mapping[str, Json], case: Case) -> None:
        self._library, self._settings, self._model = library, case.settings, case.model
        self._states = State.list_of(signature)
        self._dimensions = Dimension.list_of(signature)
        self._outputs = {spec.name: spec for spec in library.outputs}
        self._session = library.module.session()
        self.steps = self.length = 0

    def run(self) -> str:
        """Return the problem; empty if there is none."""
        session, states = self._session, self._session.states
        before, feed, following = states, None, self._draw(0)
        while self.steps < _STEPS and following is not None:
            before, feed = states, following
            states, failure = self._compare(session, feed, before)
            if failure:
                return f"step {self.steps + 1}: {failure}"
            self.steps += 1
            self.length = session.length
            following = self._draw(self.steps)
        if feed is None:
            return "no step fits the ranges of the dimensions"
        following = following or feed
        return self._check_copies(following, states, feed, before) or self._check_reset()

    def _compare(self, session: Session, feed: Feed, states: Feed) -> tuple[dict[str, Array], str]:
        """Take a step, and compare it with a call; return the next states, and the problem or an empty string."""
        own = {spec.name: feed[spec.name] for spec in session.inputs}
        [expected] = self._library.run_all([{**own, **states}])
        for name, array in session.run(own).items():
            if not has_same_bits({name: array}, {name: expected[name]}):
                return states, f"the output {quoted(name)} is not {_WHAT}"
        following = {state.input: expected[state.output] for state in self._states}
        found = session.states
        for name, array in following.items():
            if not has_same_bits({name: found[name]}, {name: array}):
                return states, f"the state {quoted(name)} is not {_WHAT}"
        return following, ""

    def _check_copies(self, feed: Feed, states: Feed, last: Feed, before: Feed) -> str:
        """Compare steps after a fork, saving and loading, dropping a row, and a truncation."""
        session, loaded = self._session, self._library.module.session()
        loaded.load(session.save())
        # The fork gets different values than the original's next step, so that shared states would differ.
        other = self._draw(self.steps, 1) or feed
        copies = [("a fork", session.fork(), other, states), ("`load`", loaded, feed, states)]
        if self.length and all(state.axis is not None for state in self._states):
            length = next(iter(before.values())).shape[self._states[0].axis or 0]
            dropping = session.fork()
            dropping.drop(1)
            if (short := self._draw(self.steps, session=dropping)) is not None:
                kept = range(1, self.length)
                rest = {s.input: states[s.input].take(kept, s.axis) for s in self._states}
                copies.append(("`drop`", dropping, short, rest))
            session.truncate(length)
            copies.append(("`truncate`", session, last, before))
        copies.append(("steps of these sessions", session, feed, states))
        first: tuple[Session, Feed] | None = None
        for name, copy, given, held in copies:
            if copy.length == self._find_limit():
                continue
            following, failure = self._compare(copy, given, held)
            if failure:
                return f"after {name}, {failure}"
            first = first or (copy, following)
        if first and not has_same_bits(first[0].states, first[1]):
            return "a step of one session changes the states of another"
        return ""

    def _check_reset(self) -> str:
        self._session.reset()
        found = [(state, self._session.states[state.input]) for state in self._states]
        wrong = [
            state.input for state, array in found if array.tobytes() != state.content(array.nbytes)
        ]
        if wrong or self._session.length:
            return f"the states {names_text(wrong)} are not as at the beginning after `reset`"
        return ""

    def _find_limit(self) -> int:
        """Return the largest length of growing states; -1 if none grows."""
        dimension = self._session.length_dimension
        return dimension.max if dimension else -1

    def _draw(self, step: int, index: int = 0, session: Session | None = None) -> Feed | None:
        """Return random inputs for a step, at tuning sizes every third step; None if none fit."""
        session = session or self._session
        sizes = {
            entry.name: choose_tuning_size(entry) if step % 3 == 0 else entry.min
            for entry in self._dimensions
        }
        smallest = {entry.name: entry.min for entry in self._dimensions}
        for chosen in (sizes, smallest):
            if session.length_dimension:
                chosen[session.length_dimension.name] = session.length
            if self._fits(chosen):
                specs, operands = self._session.inputs, self._model.operands
                feeds = inputs.draw_inputs(specs, chosen, self._settings, operands)
                return next(itertools.islice(feeds, index, None))
        return None

    def _fits(self, sizes: Mapping[str, int]) -> bool:
        for state in self._states:
            if state.axis is not None:
                size = self._outputs[state.output].sizes[state.axis]
                return evaluate(size, sizes) <= self._find_limit()
        return True
