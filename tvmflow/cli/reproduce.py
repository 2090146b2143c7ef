"""The reproducibility check, at the end of `tvmflow run --check-reproducible`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tvmflow.cli.arguments import OutputOptions
from tvmflow.cli.output import print_json, print_lines
from tvmflow.core.errors import EXIT_OK, EXIT_VERIFY
from tvmflow.core.formatting import count_text, duration_text
from tvmflow.planning.decisions import evaluate_plan
from tvmflow.planning.prepare import PreparedRun
from tvmflow.planning.request import RunRequest
from tvmflow.release.lock import lock_text, make_lock
from tvmflow.release.reproduce import ENVIRONMENTS, ReproducibilityReport, build_again
from tvmflow.store.local import LocalStore


def check_reproducible(
    prepared: PreparedRun, request: RunRequest, store: LocalStore, output: OutputOptions
) -> int:
    """Build a finished run twice more, show the result, and return the exit code: 3 when a file differs."""

    def show_build(number: int) -> None:
        if not output.json and not output.quiet:
            print_lines(f"building again in an empty store ({number} of {len(ENVIRONMENTS)})")

    folder = Path(tempfile.mkdtemp(prefix="tvmflow-again-"))
    try:
        lock = Path(request.lock) if request.lock else _write_lock(prepared, store, folder)
        arguments = list(_build_arguments(request))
        report = build_again(arguments, lock, prepared.plan, store, folder, show_build)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if output.json:
        difference = report.difference and report.difference._asdict()
        print_json({"event": "reproduced", **report._asdict(), "difference": difference})
    elif report.difference or not output.quiet:
        print_lines(*_format_report(report))
    return EXIT_VERIFY if report.difference else EXIT_OK


def _write_lock(prepared: PreparedRun, store: LocalStore, folder: Path) -> Path:
    path = folder / "again.lock.yaml"
    plan_state = evaluate_plan(prepared.plan, store)
    text = lock_text(make_lock(prepared.recipes, prepared.plan, plan_state, store, folder))
    path.write_text(text, encoding="utf-8")
    return path


def _build_arguments(request: RunRequest) -> Iterator[str]:
    """Yield the arguments of `run` that select what is built; it is not verified again."""
    yield from request.recipes
    for option, values in (("--target", request.targets), ("--variant", request.variants)):
        for value in values:
            yield from (option, value)
    if request.pipeline:
        yield from ("--pipeline", request.pipeline)
    yield from ("--until", request.until if request.until not in (None, "verify") else "export")


def _format_report(report: ReproducibilityReport) -> Iterator[str]:
    difference = report.difference
    if difference is None:
        durations = " and ".join(duration_text(seconds) for seconds in report.seconds)
        files, stages = count_text(report.files, "file"), count_text(report.stages, "stage")
        yield f"reproducible: two more builds gave the same {files} of {stages} ({durations})"
        return
    yield (
        f"NOT REPRODUCIBLE: {difference.build} gave a different {difference.file} "
        f"for {difference.stage_id}"
    )
    yield f"  first difference: {difference.where}"
    yield "  the inputs of this stage were the same; later stages were not compared"
