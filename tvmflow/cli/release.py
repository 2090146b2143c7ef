"""The release of a pipeline, at the end of `tvmflow run PIPELINE`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tvmflow.cli.arguments import OutputOptions
from tvmflow.cli.output import print_json, print_lines
from tvmflow.core.errors import EXIT_OK, EXIT_VERIFY, UsageError
from tvmflow.core.formatting import count_text, latency_text
from tvmflow.core.types import Json
from tvmflow.engine.run_records import Recording
from tvmflow.planning.decisions import evaluate_plan
from tvmflow.planning.pipelines import Pipeline
from tvmflow.planning.prepare import PreparedRun
from tvmflow.planning.request import RunRequest
from tvmflow.recipe import Release
from tvmflow.recipe.lock_file import read_lock
from tvmflow.release.folder import ReleaseResult, check_before_build, make_release
from tvmflow.release.gates import CONTENT_GATE, Comparison, list_checked_gates
from tvmflow.release.lock import make_lock, pin_lock
from tvmflow.release.measurements import LOCK
from tvmflow.release.previous import find_folder
from tvmflow.store.local import LocalStore
from tvmflow.targets.devices import device_locks_folder


def check_release(prepared: PreparedRun, request: RunRequest) -> None:
    """Check what is known of the release of a pipeline before anything is built; nothing for other runs.

    Raises:
        UsageError: when the run ends before the last stage.
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
    """Make the release of a successful run, show it, and return the exit code: 3 when a gate fails."""
    plan = prepared.plan
    plan_state = evaluate_plan(plan, store)
    path = find_folder(pipeline, settings) / LOCK
    enforced = read_lock(Path(recording.lock)) if recording.lock else None
    folder = pipeline.path.parent
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
        pin_lock(store, path, plan_state)
    gates = list_checked_gates(result.comparisons, settings.gates.model_dump(exclude_none=True))
    recording.release = {**_to_json(result), "gates": [gate._asdict() for gate in gates]}
    recording.did_more = result.is_new
    if output.json:
        print_json({"event": "released", **recording.release})
    elif result.failed_gates or not output.quiet:
        print_lines(*_format_release(result))
    return EXIT_VERIFY if result.failed_gates else EXIT_OK


def _to_json(result: ReleaseResult) -> dict[str, Json]:
    comparisons = [
        {
            **comparison._asdict(),
            "current": comparison.current.model_dump(),
            "previous": comparison.previous.model_dump(),
            "latencies": comparison.latencies and comparison.latencies._asdict(),
        }
        for comparison in result.comparisons
    ]
    return {
        "folder": str(result.folder),
        "is_new": result.is_new,
        "previous": result.previous,
        "added": list(result.content.added),
        "removed": list(result.content.removed),
        "failed_gates": [failed._asdict() for failed in result.failed_gates],
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
    elif result.is_new:
        yield f"released: {result.folder}"
    else:
        yield f"already released with the same files: {result.folder}"


def _format_comparison(comparison: Comparison, previous: str) -> Iterator[str]:
    if comparison.latencies:
        current_s, previous_s = comparison.latencies
        yield (
            f"{comparison.label}: latency {latency_text(current_s)}, {latency_text(previous_s)} in "
            f"{previous} ({current_s / previous_s - 1:+.1%}, measured alternately)"
        )
    elif comparison.is_same_library:
        yield f"{comparison.label}: the same library as in {previous}"
    elif comparison.not_timed_reason:
        reason = comparison.not_timed_reason
        yield f"{comparison.label}: latency not compared with {previous}: {reason}"
