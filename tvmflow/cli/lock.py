"""`tvmflow lock` and `tvmflow diff`: lock files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import (
    JSON_HELP,
    ExecutionOptions,
    OutputOptions,
    RecipeOptions,
    StoreOption,
    store_option,
)
from tvmflow.cli.options import Options, argument, flag, option
from tvmflow.cli.output import check_output_file, print_json, print_notes, print_result, write_file
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK
from tvmflow.core.formatting import count_text

if TYPE_CHECKING:
    from tvmflow.engine.report import RunReport
    from tvmflow.engine.run_records import Recording
    from tvmflow.release.lock import Change
    from tvmflow.release.lock_update import LockUpdate
    from tvmflow.store.local import LocalStore


class LockCommandOptions(Options):
    """Run recipes, and record inputs and outputs in a lock file.

    Examples:
        # writes net.lock.yaml
        tvmflow lock net.yaml
        # then, on any machine: the same bytes, or an error
        tvmflow run net.yaml --locked
        # after an upgrade: the same schedules, all else as it is now
        tvmflow lock net.yaml --update
    """

    store: StoreOption = store_option()
    recipes: RecipeOptions
    execution: ExecutionOptions
    output: OutputOptions
    lock: Path | None = option(
        "FILE", "the lock file to write (beside the recipe: RECIPE.lock.yaml)"
    )
    update: bool = flag(
        "search nothing: keep targets and schedules of the lock file, and lock all else as it is now"
    )
    argv: tuple[str, ...]


class DiffOptions(Options):
    """Show what changed from one lock file to another.

    The exit code is 1 when anything did.

    Examples:
        git show HEAD~1:net.lock.yaml > /tmp/before.yaml
        tvmflow diff /tmp/before.yaml net.lock.yaml
    """

    before: Path = argument("A", "a lock file")
    after: Path = argument("B", "a later lock file")
    json: bool = flag(JSON_HELP)


def lock(options: LockCommandOptions) -> int:
    from tvmflow.engine.run_records import record_run

    _check_lock_file(options)
    store = options.store.open()
    with record_run(store, options.argv) as recording:
        recording.exit_code = _lock(options, store, recording)
        return recording.exit_code


def _check_lock_file(options: LockCommandOptions) -> None:
    """Check that nothing but a lock file is replaced by one, before the work that it records."""
    from tvmflow.core.file_kinds import LOCK, check_kind

    if options.lock is not None:
        check_output_file(options.lock, options.recipes.recipes)
        check_kind(options.lock, LOCK)


def _lock(options: LockCommandOptions, store: LocalStore, recording: Recording) -> int:
    from tvmflow.cli.run import open_driver, render_report, retune_recipes
    from tvmflow.engine.driver import prepare
    from tvmflow.engine.progress import DownloadLine
    from tvmflow.engine.report import RunReport
    from tvmflow.planning.decisions import evaluate_plan
    from tvmflow.recipe.lock_file import lock_path, read_lock
    from tvmflow.release.lock import lock_text, make_lock, pin_lock
    from tvmflow.release.lock_update import LockUpdate, run_update

    path = options.lock or lock_path(options.recipes.recipes)
    request = options.recipes.request(str(path) if options.update else None)
    request = request._replace(updates_lock=options.update)
    result: LockUpdate | RunReport | None = None

    settings = options.execution.settings()
    prepared = prepare(request, store, settings, DownloadLine())
    # until they are pinned, garbage collection keeps the results
    with store.running():
        with open_driver(prepared, settings, options.output, store, recording=recording) as driver:
            prepared = retune_recipes(prepared, request, driver, options.output)
            if options.update:
                result = run_update(read_lock(path), prepared.plan, store, driver.run)
                if isinstance(result, LockUpdate):
                    _show_uncovered(result, path, options.output)
                    prepared = prepared._replace(plan=result.plan)
            report = result if isinstance(result, RunReport) else driver.run(prepared.plan)
        recording.report = report
        sys.stdout.write(render_report(report, options.output))
        if report.exit_code != EXIT_OK:
            return report.exit_code
        plan_state = evaluate_plan(prepared.plan, store)
        enforced = result.lock if isinstance(result, LockUpdate) else None
        folder = path.parent
        text = lock_text(
            make_lock(prepared.recipes, prepared.plan, plan_state, store, folder, enforced)
        )
        pin_lock(store, path, plan_state)
    previous = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text != previous:
        write_file(path, text)
        recording.lock, recording.did_more = str(path), True
    if not options.output.json:
        change = "unchanged" if text == previous else "changed" if previous else "new"
        print_notes(options.output, f"  {path} ({change})")
    return EXIT_OK


def _show_uncovered(update: LockUpdate, path: Path, output: OutputOptions) -> None:
    """Name the kernels that a lock file does not cover."""
    for entry in update.uncovered:
        if output.json:
            print_json({"event": "not_covered", **entry._asdict()})
            continue
        kernels = count_text(len(entry.kernels), "kernel")
        print_notes(
            output,
            f"{entry.recipe} for {entry.target}: {path} does not cover {kernels}: "
            f"{', '.join(entry.kernels)}; rules schedule them, `tvmflow lock` without --update tunes them",
        )


def diff(options: DiffOptions) -> int:
    from tvmflow.release.gates import read_lock_with_measurements
    from tvmflow.release.lock import diff_locks

    changes = diff_locks(*map(read_lock_with_measurements, (options.before, options.after)))
    print_result({"changes": changes}, _format_changes(changes), options)
    return EXIT_FAILED if changes else EXIT_OK


def _format_changes(changes: Sequence[Change]) -> Iterator[str]:
    if not changes:
        yield "no difference"
    place = None
    for change in changes:
        if change.place != place:
            yield change.place
            place = change.place
        yield f"  {change.what:<11} {change.text}"


COMMANDS: Final = {"lock": lock, "diff": diff}
