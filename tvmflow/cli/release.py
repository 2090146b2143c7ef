"""Further actions of `tvmflow run`: releases, retuning, reproducibility checks, and IR dumps."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tvmflow.cli.arguments import OutputOptions
from tvmflow.cli.output import print_json, print_lines, print_notes
from tvmflow.core import errors
from tvmflow.core.codec import from_json, to_json
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK, EXIT_VERIFY, StageError, UsageError
from tvmflow.core.fork_server import WITH_TVM, ForkServer
from tvmflow.core.formatting import count_text, duration_text, latency_text
from tvmflow.core.types import Json, Plan, StageSpec
from tvmflow.engine.report import RunReport
from tvmflow.engine.run_records import Recording
from tvmflow.planning.decisions import PlanState, evaluate_plan, input_digests
from tvmflow.planning.prepare import PreparedRun, RunRequest
from tvmflow.planning.recipes import Pipeline
from tvmflow.recipe import Release, Retune
from tvmflow.recipe.lock_file import read_lock
from tvmflow.release import (
    CONTENT_GATE,
    ENVIRONMENTS,
    LOCK,
    ReleaseResult,
    ReproducibilityReport,
    TargetComparison,
    TuningProgress,
    build_again,
    check_before_build,
    find_folder,
    list_checked_gates,
    lock_text,
    make_lock,
    make_release,
    pin_lock,
    select_stage,
    spend_budget,
    with_spent_trials,
)
from tvmflow.stages import STAGES, export, verify
from tvmflow.store.local import LocalStore
from tvmflow.targets.devices import device_locks_folder
from tvmflow.tuning.tuning_job import TuneFacts


def check_release(prepared: PreparedRun, request: RunRequest) -> None:
    """Check the release of a pipeline before anything is built; ignore runs without a release.

    Raises:
        UsageError: if the run ends before the last stage.
        TvmflowError: as `check_before_build` does.
    """
    pipeline = prepared.pipeline
    if pipeline is None or pipeline.release is None:
        return
    last = pipeline.stages[-1]
    if request.until not in (None, last):
        raise UsageError(
            f"--until {request.until}: {pipeline.path} makes a release, which needs all stages up to {last}",
            fix=f"run it without --until, or a recipe with --pipeline {pipeline.path}",
        )
    recipes = {planned.loaded.path: planned.loaded.recipe for planned in prepared.recipes}
    requested = {
        name
        for recipe in recipes.values()
        for variant in recipe.variants or ("",)
        for base in (recipe.for_variant(variant).name if variant else recipe.name,)
        for name in (base, *(f"{base}/{target.name}" for target in recipe.targets))
    }
    check_before_build(pipeline, pipeline.release, prepared.plan, requested)


def release(
    prepared: PreparedRun,
    pipeline: Pipeline,
    settings: Release,
    store: LocalStore,
    output: OutputOptions,
    recording: Recording,
) -> int:
    """Make and show the release of a successful run; return the exit code, which is 3 if a gate fails."""
    plan, folder = prepared.plan, pipeline.path.parent
    plan_state = evaluate_plan(plan, store)
    enforced = read_lock(Path(recording.lock)) if recording.lock else None
    made_lock = make_lock(prepared.recipes, plan, plan_state, store, folder, enforced)
    result = make_release(
        pipeline,
        settings,
        made_lock,
        plan,
        plan_state.artifacts,
        store,
        Path(device_locks_folder()),
        recording.report.stages if recording.report else (),
    )
    if not result.failed_gates:
        pin_lock(store, find_folder(pipeline, settings) / LOCK, plan_state)
    gates = list_checked_gates(result.comparisons, settings.gates.model_dump(exclude_none=True))
    recording.release = to_json({**_describe(result), "gates": gates})
    recording.did_more = result.is_new
    if output.json:
        print_json({"event": "released", **recording.release})
    else:
        lines = [*_format_release(result)]
        print_lines(*(lines[-1:] if output.quiet and not result.failed_gates else lines))
    return EXIT_VERIFY if result.failed_gates else EXIT_OK


def _describe(result: ReleaseResult) -> dict[str, Json]:
    comparisons = [
        {
            **own._asdict(),
            "current": own.current.model_dump(),
            "previous": own.previous.model_dump(),
        }
        for own in result.comparisons
    ]
    return {
        "folder": str(result.folder),
        "is_new": result.is_new,
        "previous": result.previous,
        "added": result.content.added,
        "removed": result.content.removed,
        "failed_gates": result.failed_gates,
        "comparisons": comparisons,
    }


def _format_release(result: ReleaseResult) -> Iterator[str]:
    for comparison in result.comparisons:
        yield from _format_comparison(comparison, result.previous)
    yield from (f"{name}: new in this release" for name in result.content.added)
    lost = {failed.label for failed in result.failed_gates if failed.gate == CONTENT_GATE}
    for name in result.content.removed:
        if name not in lost:
            yield f"{name}: no longer in this release, as release.drop says"
    for failed in result.failed_gates:
        yield f"{failed.label}: {failed.gate}: {failed.message}"
    if result.failed_gates:
        number = count_text(len(result.failed_gates), "gate")
        yield f"NOT RELEASED: {number} failed; {result.folder} was not created"
    else:
        state = "released" if result.is_new else "already released with the same files"
        yield f"{state}: {result.folder}"


def _format_comparison(comparison: TargetComparison, previous: str) -> Iterator[str]:
    if comparison.latencies:
        current_s, previous_s = comparison.latencies
        yield (
            f"{comparison.label}: latency {latency_text(current_s)}, {latency_text(previous_s)} in "
            f"{previous} ({current_s / previous_s - 1:+.1%}, measured interleaved)"
        )
    elif comparison.is_same_library:
        yield f"{comparison.label}: the same library as in {previous}"
    elif comparison.not_timed_reason:
        reason = comparison.not_timed_reason
        yield f"{comparison.label}: latency not compared with {previous}: {reason}"


def retune(
    plan: Plan, budget: Retune, run_plan: Callable[[Plan], RunReport | None], output: OutputOptions
) -> Plan:
    """Tune in rounds and return the plan with all trials; `run_plan` returns None if interrupted."""

    def tune(spec: StageSpec) -> TuneFacts | None:
        report = run_plan(select_stage(plan, spec))
        if report is None or report.exit_code != EXIT_OK:
            return None
        facts = next(stage.facts for stage in report.stages if stage.stage_id == spec.id)
        return from_json(TuneFacts, facts)

    def show_round(progress: TuningProgress) -> None:
        if output.json:
            event = {"event": "round", "stage_id": progress.spec.id, **progress._asdict()}
            del event["spec"]
            print_json(event)
        elif not output.quiet:
            print_lines(_format_progress(progress))

    specs = [
        spec
        for spec in plan.stages
        if spec.traits.uses_ledger
        and not spec.settings.get("unmeasurable_reason")
        and spec.settings.get("tune", {}).get("repeat")
    ]
    rows = spend_budget(specs, budget, tune, show_round)
    if not output.json:
        print_notes(
            output,
            "trials spent:",
            *(f"{_format_progress(row)}; {row.trials} in total" for row in rows),
            "to keep this result, run `tvmflow lock`, or write these totals into the recipes as tune.trials",
        )
    return with_spent_trials(plan, rows)


def _format_progress(progress: TuningProgress) -> str:
    if progress.estimated_us is None:
        return f"  {progress.spec.id}: {progress.stop_reason or 'no round'}"
    speedup = progress.speedup
    total = f"estimated speedup over untuned {speedup:.3g}" if speedup > 1 else "no speedup"
    end = f"; {progress.stop_reason}" if progress.stop_reason else ""
    return (
        f"  {progress.spec.id}: {count_text(progress.measured, 'trial')} in "
        f"{count_text(progress.rounds, 'round')}, {latency_text(progress.estimated_us / 1e6)} in "
        f"kernels ({total}, last round {progress.gain or 0.0:.1%}){end}"
    )


def check_reproducible(
    prepared: PreparedRun, request: RunRequest, store: LocalStore, output: OutputOptions
) -> int:
    """Build a finished run twice more, and return the exit code; 3 if a file differs."""

    def show_build(number: int) -> None:
        if not output.json and not output.quiet:
            print_lines(f"building again in an empty store ({number} of {len(ENVIRONMENTS)})")

    plan, state = prepared.plan, evaluate_plan(prepared.plan, store)
    folder = Path(tempfile.mkdtemp(prefix="tvmflow-again-"))
    try:
        lock = Path(request.lock or folder / "again.lock.yaml")
        if not request.lock:
            made_lock = make_lock(prepared.recipes, plan, state, store, folder)
            lock.write_text(lock_text(made_lock), encoding="utf-8")
        report = build_again(_build_arguments(request), lock, plan, store, folder, show_build)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if output.json:
        print_json({"event": "reproduced", **report._asdict()})
    elif report.difference or not output.quiet:
        print_lines(*_format_report(report))
    return EXIT_VERIFY if report.difference else EXIT_OK


def _build_arguments(request: RunRequest) -> list[str]:
    """Return the arguments of `run` that select a build without verification."""
    until = request.until if request.until not in (None, verify.NAME) else export.NAME
    pipeline = ["--pipeline", request.pipeline] if request.pipeline else []
    targets = [word for target in request.targets for word in ("--target", target)]
    variants = [word for variant in request.variants for word in ("--variant", variant)]
    return [*request.recipes, *targets, *variants, *pipeline, "--until", str(until)]


def _format_report(report: ReproducibilityReport) -> Iterator[str]:
    difference = report.difference
    if difference is None:
        durations = " and ".join(duration_text(seconds) for seconds in report.seconds)
        files, stages = count_text(report.files, "file"), count_text(report.stages, "stage")
        yield f"reproducible: two more builds gave the same {files} of {stages} ({durations})"
        return
    what = f"a different {difference.file} for {difference.stage_id}"
    yield f"NOT REPRODUCIBLE: {difference.build} gave {what}"
    yield f"  first difference: {difference.where}"
    yield "  the inputs of this stage were the same; later stages were not compared"


def dump_ir(plan: Plan, store: LocalStore, folder: Path, output: OutputOptions) -> int:
    """Lower the models of a plan again, write the IR after each pass, and return the exit code.

    Each stage gets a folder `<recipe>/<stage>+<target>`. Raises StageError if no stage of the plan lowers a model.
    """
    specs = [spec for spec in plan.stages if STAGES[spec.stage].TRAITS.dump_ir]
    if not specs:
        names = " and ".join(name for name, stage in STAGES.items() if stage.TRAITS.dump_ir)
        fix = f"run {names}, for example without --until"
        raise StageError("--dump-ir: no stage of this run lowers a model", fix=fix)
    state, exit_code = evaluate_plan(plan, store), EXIT_OK
    with ForkServer.start(WITH_TVM) as fork_server:
        for spec in specs:
            target = folder / spec.recipe / spec.label.replace("/", "+")
            missing = [need.maker for need in spec.needs if need.stage_id not in state.artifacts]
            problem, code = f"{missing[0]} has no result" if missing else "", EXIT_FAILED
            if not missing:
                problem, code = _dump_stage(spec, state, fork_server, target)
            if output.json:
                written = "" if missing else str(target)
                event = {"event": "ir_dumped", "stage_id": spec.id, "folder": written}
                print_json({**event, "problem": problem, "exit_code": code})
            elif problem:
                print_lines(*f"{spec.id}: the IR is not complete: {problem}".split("\n"))
            else:
                print_notes(output, f"{spec.id}: the IR after each pass is in {target}")
            exit_code = max(exit_code, code)
    return exit_code


def _dump_stage(
    spec: StageSpec, state: PlanState, fork_server: ForkServer, folder: Path
) -> tuple[str, int]:
    """Dump the IR of a stage; return the problem, or an empty string, and the exit code."""
    lower = STAGES[spec.stage].TRAITS.dump_ir
    assert lower is not None
    # In a locked run, the schedules are an input file.
    inputs = {file.role: file.path for file in spec.files} | {
        role: state.store.blobs.verified_path(digest)
        for role, digest in input_digests(spec, state.artifacts).items()
    }
    payload = {"settings": spec.settings, "inputs": inputs, "folder": str(folder)}
    outcome = fork_server.call(lower, payload, timeout_s=spec.timeout_s)
    logging.getLogger(__name__).debug("%s: dumping its IR ended with %s", spec.id, outcome.kind)
    if outcome.kind == "ok":
        return "", EXIT_OK
    problem = f"{outcome.message}\n  fix: {outcome.fix}" if outcome.fix else outcome.message
    return problem, getattr(errors, outcome.error, StageError).exit_code
