"""A library with dimensions at many sizes, compared with the reference and timed beside it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, cast

from tvmflow.core.types import Array
from tvmflow.stages.verify.comparison import Tolerance, has_same_bits
from tvmflow.stages.verify.latency import (
    exclusive_devices,
    make_speedup,
    measure_briefly,
    measure_variant,
    schedule_each,
)
from tvmflow.stages.verify.libraries import Library, LocalLibrary, check_call
from tvmflow.stages.verify.reference_run import Case, ReferenceRun, run_at
from tvmflow.stages.verify.sizes import SizeOutputs
from tvmflow.stages.verify.verdict import SizeVerdict, SweepVerdict

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
    verdicts = [
        *compare_sizes(library, reference),
        *sweep(library, reference, (), case)["failed"],
    ]
    return [verdict for verdict in verdicts if not verdict["passed"]]


def time_sizes(
    verdicts: Sequence[SizeVerdict],
    library: Library,
    reference: ReferenceRun,
    case: Case,
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
    if settings.compare is None or not settings.compare.fixed:
        return
    if not isinstance(library, LocalLibrary):
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
