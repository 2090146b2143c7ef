"""A library at further sizes and ISA levels: each is compared with the reference, and timed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Final, cast

from tvmflow.core.errors import StageError
from tvmflow.core.types import Array
from tvmflow.runtime.c_loader import NativeProgram
from tvmflow.stages.verify import comparison
from tvmflow.stages.verify.comparison import Tolerance, has_same_bits
from tvmflow.stages.verify.index_inputs import IndexCheck, no_inner_reason
from tvmflow.stages.verify.latency import (
    exclusive_devices,
    lower_untuned,
    make_speedup,
    measure,
    measure_briefly,
    measure_variant,
    schedule_each,
)
from tvmflow.stages.verify.layer_check import add_layers
from tvmflow.stages.verify.libraries import Library, LocalLibrary, check_call, open_library
from tvmflow.stages.verify.reference_run import Case, ReferenceRun, run_at
from tvmflow.stages.verify.sizes import SizeOutputs
from tvmflow.stages.verify.verdict import LevelVerdict, SizeVerdict, SweepVerdict, Verdict
from tvmflow.stages.verify_settings import LOCAL, LevelSettings, VerifySettings
from tvmflow.targets.c_runtime.levels import variable

_SECONDS_BESIDE_FIXED: Final = 5.0
# Of outputs at many sizes, some are small by chance; what a wrong tail computes is further off.
_SWEPT_TOLERANCE: Final = Tolerance(1e-2, 1e-30, of_largest=1e-3)
_MORE_DRAWS: Final = 2


def sweep(
    library: Library, reference: ReferenceRun, coverage: Sequence[str], case: Case
) -> SweepVerdict:
    """Run a library at many sizes, and compare its outputs with the reference's.

    A size fails if the library is wrong for other random inputs of it, too.
    """
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

    It runs them forwards, and then backwards: what it computes must not depend on the sizes of earlier calls, nor
    on the number of threads.

    Libraries with other numbers of threads take turns backwards.
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

    With `compare: [fixed]`, a library of each size alone is built, untuned, and timed in turns with it.
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
    """Return the verdict at some sizes, and what the library computes; None where it cannot be called."""
    expected = {spec.name: sized.outputs[spec.name] for spec in library.outputs}
    verdict, outputs = check_call(library, sized.feed, expected, tolerance)
    return cast(SizeVerdict, {"sizes": sized.sizes, **verdict}), outputs


# ---------------------------------------------------------------- ISA levels
# The level that the library chooses by itself is the one that `verify` has checked already.

_ONLY_INDEX: Final = "it returns an index alone, and what goes into it is not compared: {}"
_SELECTS: Final = "it returns what an index selects, which another CPU may choose among equals"


def verify_levels(verdict: Verdict, library: Library, case: Case) -> None:
    """Verify each level, and add its verdict.

    Raises:
        StageError: when a library runs another level than it should.
    """
    chosen = _find_level(library)
    expected = _find_measured(case.settings)
    if chosen and chosen != expected:
        raise StageError(
            f"the library runs the level {chosen} where this machine has {expected}",
            fix="report it as a bug of tvmflow, with the output of `tvmflow doctor`",
        )
    levels = verdict["levels"] = dict[str, LevelVerdict]()
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
            levels[name] = _verify(name, level, verdict, case)


def _find_measured(settings: VerifySettings) -> str:
    """Return the last level that this machine has; where none is verified here, empty."""
    runnable = [
        name
        for name, level in settings.levels.items()
        if level.run_on == LOCAL and not level.not_verified
    ]
    return runnable[-1] if runnable else ""


def _find_level(library: Library) -> str:
    """Return the level that a library runs in this process; empty where it runs elsewhere."""
    if not isinstance(library, LocalLibrary):
        return ""
    program = library.module.program
    return program.level if isinstance(program, NativeProgram) else ""


def _verify(name: str, level: LevelSettings, verdict: Verdict, case: Case) -> LevelVerdict:
    """Return the verdict on one level that a library does not choose by itself."""
    settings, context, _, data, reference = case
    indices = reference.indices if reference else None
    if indices is not None and indices.selects:
        return {"not_verified": _SELECTS}
    own = settings.model_copy(update={"target": level.machine, "run_on": level.run_on})
    reason = indices.reason if indices and not indices.loaded else no_inner_reason(own)
    opened = open_library(own, context._replace(work=context.work / name))
    with _forced_level(settings.prefix, name), opened as library:
        actual = library.run_all(data.batches)
        found: LevelVerdict = {"ran_on": library.ran_on}
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
def _forced_level(prefix: str, name: str) -> Iterator[None]:
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
