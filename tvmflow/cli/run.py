"""`tvmflow run`, `lock` and `diff`: running recipes, and their lock files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import (
    JSON_HELP,
    ExecutionOptions,
    LockOptions,
    OutputOptions,
    RecipeOptions,
    StoreOption,
    force_option,
    store_option,
)
from tvmflow.cli.options import Options, argument, flag, option
from tvmflow.cli.output import (
    check_output_file,
    print_json,
    print_notes,
    print_result,
    write_file,
)
from tvmflow.core.disk_errors import disk_errors, make_folder
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK, TvmflowError
from tvmflow.core.formatting import count_text

if TYPE_CHECKING:
    from tvmflow.core.types import Plan
    from tvmflow.engine.driver import Driver, DriverSettings
    from tvmflow.engine.report import RunReport
    from tvmflow.engine.run_records import Recording
    from tvmflow.pages.content import Change
    from tvmflow.planning.prepare import PreparedRun, RunRequest
    from tvmflow.release import LockUpdate
    from tvmflow.store.local import LocalStore


class RunOptions(Options):
    """Bring recipes up to date and deliver their libraries.

    Stages that are up to date do not run again. Verified files are in dist/RECIPE/TARGET/.

    Examples:
        # everything of one recipe
        tvmflow run recipes/digits.yaml
        # all recipes, two stages at a time; go on after a failure
        tvmflow run recipes/*.yaml --jobs 2 --keep-going
        # one target, without tuning
        tvmflow run net.yaml --target cortex-a72 --pipeline compile
        # exactly the results of the lock file, or an error
        tvmflow run net.yaml --locked
    """

    store: StoreOption = store_option()
    recipes: RecipeOptions
    execution: ExecutionOptions
    lock: LockOptions
    output: OutputOptions
    dump_ir: Path | None = option(
        "DIR",
        "after the run, lower all models again, and write the IR after each pass to DIR",
    )
    check_reproducible: bool = flag(
        "after the run, build everything twice more from empty stores, and report the first difference"
    )
    dry_run: bool = flag(
        "show what would run and what it would cost, as `plan` does, and run nothing"
    )
    best_so_far: bool = flag(
        "measure no trial: deliver the library with the best schedules that earlier runs measured"
    )
    force: tuple[str, ...] = force_option()
    summary: Path | None = option(
        "FILE", "append a summary in Markdown to FILE, such as $GITHUB_STEP_SUMMARY"
    )
    junit: Path | None = option(
        "FILE", "write a test case for each stage and gate to FILE, as JUnit XML"
    )
    argv: tuple[str, ...]

    @contextlib.contextmanager
    def start_early(self) -> Iterator[None]:
        """Start loading TVM in a process before planning if the store is new, so that stages will run here."""
        is_new, is_local = False, self.execution.executor.executor == "processes"
        # The command itself reports problems of the store.
        with contextlib.suppress(TvmflowError):
            is_new = is_local and not self.dry_run and not self.store.locate().notes.list("last")
        if not is_new:
            yield
            return
        from tvmflow.executors import local

        local.start_early()
        try:
            yield
        finally:
            local.close_spare()


def run(options: RunOptions) -> int:
    for file in (options.summary, options.junit):
        check_output_file(file, options.recipes.recipes)
    store = options.store.open()
    with contextlib.ExitStack() as stack:
        # For callers other than the command line, which starts it earlier.
        stack.enter_context(options.start_early())
        from tvmflow.engine.run_records import record_run

        recording = stack.enter_context(record_run(store, options.argv))
        recording.exit_code = _run(options, store, recording)
        _write_reports(options, recording)
        return recording.exit_code


def _write_reports(options: RunOptions, recording: Recording) -> None:
    report = recording.report
    if report is None or not (
        options.summary or options.junit or any(stage.message for stage in report.stages)
    ):
        return
    from tvmflow.cli.ci_messages import junit_xml, markdown_summary, report_failures

    report_failures(report)
    if options.summary is not None:
        make_folder(options.summary.parent)
        with disk_errors(options.summary), options.summary.open("a", encoding="utf-8") as stream:
            stream.write(markdown_summary(report))
    if options.junit is not None:
        write_file(options.junit, junit_xml(report, recording.release))


def _run(options: RunOptions, store: LocalStore, recording: Recording) -> int:
    from tvmflow.cli.plan import show_plan
    from tvmflow.engine.driver import prepare
    from tvmflow.engine.progress import DownloadLine

    lock = options.lock.find(options.recipes.recipes)
    request = options.recipes.request(lock, options.force)
    if options.dry_run:
        show_plan(
            request,
            store,
            argv=options.argv,
            dist=options.execution.dist.locate(),
            as_json=options.output.json,
        )
        return EXIT_OK
    settings = options.execution.settings(best_so_far=options.best_so_far)
    prepared = prepare(request, store, settings, DownloadLine())
    if prepared.pipeline and not options.check_reproducible:
        from tvmflow.cli.release import check_release

        check_release(prepared, request)
    with contextlib.ExitStack() as leases:
        confirmed = _confirm(options, prepared, settings, store)
        if confirmed is not None:
            report, text = confirmed
        else:
            # The lease protects results from garbage collection until they are pinned.
            leases.enter_context(store.running())
            with open_driver(
                prepared, settings, options.output, store, recording=recording, command=options.argv
            ) as driver:
                prepared = retune_recipes(prepared, request, driver, options.output)
                report = driver.run(prepared.plan)
                text = render_report(report, options.output)
        recording.report, recording.lock = report, request.lock
        dumped = EXIT_OK
        if options.dump_ir is not None:
            from tvmflow.cli.release import dump_ir

            dumped = dump_ir(prepared.plan, store, options.dump_ir, options.output)
        sys.stdout.write(text)
        if exit_code := report.exit_code or dumped:
            return exit_code
        pipeline = prepared.pipeline
        if pipeline and pipeline.release and not options.check_reproducible:
            from tvmflow.cli.release import release

            return release(prepared, pipeline, pipeline.release, store, options.output, recording)
    if options.check_reproducible:
        from tvmflow.cli.release import check_reproducible

        return check_reproducible(prepared, request, store, options.output)
    return EXIT_OK


def _confirm(
    options: RunOptions, prepared: PreparedRun, settings: DriverSettings, store: LocalStore
) -> tuple[RunReport, str] | None:
    """Return the report and text of a run with nothing to do, or None if there may be work."""
    import logging

    from tvmflow.engine.remote_access import must_upload
    from tvmflow.engine.up_to_date import confirm_run

    # These options need work even if everything is up to date.
    does_more = (
        *(options.check_reproducible, options.force, options.best_so_far),
        *(options.dump_ir, options.summary, options.junit),
    )
    # Logged decisions need a full evaluation.
    is_logged = logging.getLogger(__name__).isEnabledFor(logging.INFO)
    if any(does_more) or not prepared.is_plain or is_logged or must_upload(settings.remote, store):
        return None
    as_json, quiet, dist = options.output.json, options.output.quiet, settings.session.dist
    return confirm_run(options.argv, prepared, store, dist, as_json=as_json, quiet=quiet)


@contextlib.contextmanager
def open_driver(
    prepared: PreparedRun,
    settings: DriverSettings,
    output: OutputOptions,
    store: LocalStore,
    *,
    recording: Recording,
    command: Sequence[str] = (),
) -> Iterator[Driver]:
    """Yield the driver of a command; its runs are shown and recorded while they proceed."""
    import logging
    import shlex

    from tvmflow.engine.driver import Driver, Observer
    from tvmflow.engine.progress import Printer
    from tvmflow.engine.run_records import WorkerLogs

    has_best = bool(command) and prepared.is_plain
    printer = Printer(
        sys.stdout,
        as_json=output.json,
        many=len({spec.recipe for spec in prepared.plan.stages}) > 1,
        stages=len(prepared.plan.stages),
        quiet=output.quiet,
        is_logged=logging.getLogger("tvmflow").isEnabledFor(logging.INFO),
        on_lost_reader=lambda: driver.cancel(),
        best_so_far=shlex.join(["tvmflow", *command, "--best-so-far"]) if has_best else "",
    )
    with contextlib.ExitStack() as stack:
        stack.callback(printer.end)
        observer: Observer = printer
        if output.verbosity > 1:
            observer = logs = WorkerLogs(sys.stderr, printer)
            stack.callback(logs.close)
        progress = recording.note_progress
        driver = stack.enter_context(Driver(prepared, store, settings, observer, progress))
        yield driver


def retune_recipes(
    prepared: PreparedRun, request: RunRequest, driver: Driver, output: OutputOptions
) -> PreparedRun:
    """Spend a pipeline's shared tuning budget; return the run with the trials of each recipe."""
    if prepared.pipeline is None or not prepared.pipeline.retune or request.lock:
        return prepared
    from tvmflow.cli.release import retune

    def run(plan: Plan) -> RunReport | None:
        return None if driver.is_cancelled else driver.run(plan)

    plan = retune(prepared.plan, prepared.pipeline.retune, run, output)
    return prepared._replace(plan=plan)


def render_report(report: RunReport, output: OutputOptions) -> str:
    """Return the summary of a run; with `-v`, it describes the result of each stage."""
    from tvmflow.engine.summary import render

    is_verbose = output.verbosity > 0
    return render(report, as_json=output.json, quiet=output.quiet, verbose=is_verbose)


# ---------------------------------------------------------------- lock and diff


class LockCommandOptions(Options):
    """Run recipes, and record inputs and outputs in a lock file.

    Examples:
        # writes net.lock.yaml
        tvmflow lock net.yaml
        # then, on any machine: the same bytes, or an error
        tvmflow run net.yaml --locked
        # after an upgrade: keep the schedules, and update everything else
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
        "search nothing: keep targets and schedules of the lock file, and lock the current state of everything else"
    )
    argv: tuple[str, ...]


class DiffOptions(Options):
    """Show the changes from one lock file to another.

    The exit code is 1 when anything changed.

    Examples:
        git show HEAD~1:net.lock.yaml > /tmp/before.yaml
        tvmflow diff /tmp/before.yaml net.lock.yaml
    """

    before: Path = argument("A", "a lock file")
    after: Path = argument("B", "a later lock file")
    json: bool = flag(JSON_HELP)


def lock(options: LockCommandOptions) -> int:
    from tvmflow.core.file_kinds import LOCK, check_kind
    from tvmflow.engine.run_records import record_run

    if options.lock is not None:
        # Check the path before the work, because only a lock file may be overwritten.
        check_output_file(options.lock, options.recipes.recipes)
        check_kind(options.lock, LOCK)
    store = options.store.open()
    with record_run(store, options.argv) as recording:
        recording.exit_code = _lock(options, store, recording)
        return recording.exit_code


def _lock(options: LockCommandOptions, store: LocalStore, recording: Recording) -> int:
    from tvmflow.engine.driver import prepare
    from tvmflow.engine.progress import DownloadLine
    from tvmflow.engine.report import RunReport
    from tvmflow.planning.decisions import evaluate_plan
    from tvmflow.recipe.lock_file import lock_path, read_lock
    from tvmflow.release import LockUpdate, lock_text, make_lock, pin_lock, run_update

    path = options.lock or lock_path(options.recipes.recipes)
    request = options.recipes.request(str(path) if options.update else None)
    request = request._replace(updates_lock=options.update)
    result: LockUpdate | RunReport | None = None

    settings = options.execution.settings()
    prepared = prepare(request, store, settings, DownloadLine())
    # The lease protects results from garbage collection until they are pinned.
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
    from tvmflow.release import diff_locks, read_lock_with_measurements

    changes = diff_locks(*map(read_lock_with_measurements, (options.before, options.after)))
    print_result({"changes": changes}, _format_changes(changes), options)
    return EXIT_FAILED if changes else EXIT_OK


def _format_changes(changes: Sequence[Change]) -> Iterator[str]:
    if not changes:
        yield "no difference"
    for place, own in groupby(changes, key=lambda change: change.place):
        yield place
        yield from (f"  {change.what:<11} {change.text}" for change in own)


COMMANDS: Final = {"run": run, "lock": lock, "diff": diff}
