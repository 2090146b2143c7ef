"""`tvmflow lock` and `tvmflow diff`: lock files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tvmflow.cli.arguments import (
    JSON_HELP,
    ExecutionOptions,
    OutputOptions,
    RecipeOptions,
    StoreOption,
    store_option,
)
from tvmflow.cli.options import argument, flag, option
from tvmflow.cli.output import print_json, print_lines, print_result
from tvmflow.cli.run import RunPlan, execute
from tvmflow.core.disk_errors import disk_errors
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK
from tvmflow.core.files import write_atomically
from tvmflow.core.formatting import count_text
from tvmflow.engine.report import RunReport, render
from tvmflow.planning.decisions import evaluate_plan
from tvmflow.planning.prepare import PreparedRun
from tvmflow.recipe.lock_file import lock_path, read_lock
from tvmflow.release.lock import lock_text, make_lock, pin_lock
from tvmflow.release.lock_diff import Change, diff_locks
from tvmflow.release.lock_update import LockUpdate, run_update
from tvmflow.release.measurements import read_lock_with_measurements


@dataclass(frozen=True, kw_only=True)
class LockCommandOptions:
    """The options of `tvmflow lock`."""

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


def lock(options: LockCommandOptions) -> int:
    """Bring recipes up to date and record inputs and outputs in a lock file."""
    path = options.lock or lock_path(options.recipes.recipes)
    request = options.recipes.request(str(path) if options.update else None)
    request = request._replace(updates_lock=options.update)
    store = options.store.open()
    update: LockUpdate | None = None

    def keep_schedules(prepared: PreparedRun, run: RunPlan) -> PreparedRun | RunReport:
        nonlocal update
        result = run_update(read_lock(path), prepared.plan, store, run)
        if isinstance(result, RunReport):
            return result
        update = result
        _show_uncovered(update, path, options.output)
        return prepared._replace(plan=update.plan)

    with contextlib.ExitStack() as leases:
        prepared, report = execute(
            request,
            options.execution,
            options.output,
            store,
            leases,
            revise=keep_schedules if options.update else None,
        )
        sys.stdout.write(render(report, as_json=options.output.json, quiet=options.output.quiet))
        if report.exit_code != EXIT_OK:
            return report.exit_code
        plan_state = evaluate_plan(prepared.plan, store)
        enforced = update.lock if update else None
        folder = path.parent
        text = lock_text(
            make_lock(prepared.recipes, prepared.plan, plan_state, store, folder, enforced)
        )
        pin_lock(store, path, plan_state)
    previous = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text != previous:
        with disk_errors(str(path)):
            write_atomically(path, text)
    if not options.output.json:
        change = "unchanged" if text == previous else "changed" if previous else "new"
        print_lines(f"  {path} ({change})")
    return EXIT_OK


def _show_uncovered(update: LockUpdate, path: Path, output: OutputOptions) -> None:
    """Name the kernels that a lock file does not cover."""
    for entry in update.uncovered:
        if output.json:
            print_json({"event": "not_covered", **entry._asdict(), "kernels": list(entry.kernels)})
            continue
        kernels = count_text(len(entry.kernels), "kernel")
        print_lines(
            f"{entry.recipe} for {entry.target}: {path} does not cover {kernels}: "
            f"{', '.join(entry.kernels)}; rules schedule them, `tvmflow lock` without --update tunes them"
        )


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """The options of `tvmflow diff`."""

    before: Path = argument("A", "a lock file")
    after: Path = argument("B", "a later lock file")
    json: bool = flag(JSON_HELP)


def diff(options: DiffOptions) -> int:
    """Show what changed from one lock file to another; exit code 1 when anything did."""
    changes = diff_locks(*map(read_lock_with_measurements, (options.before, options.after)))
    value = {"changes": [change._asdict() for change in changes]}
    print_result(value, _format_changes(changes), as_json=options.json)
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
