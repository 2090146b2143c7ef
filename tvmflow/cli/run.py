"""`tvmflow run`, and the execution of recipes that `tvmflow lock` shares with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.cli.arguments import (
    ExecutionOptions,
    LockOptions,
    OutputOptions,
    RecipeOptions,
    StoreOption,
    force_option,
    store_option,
)
from tvmflow.cli.options import Options, flag, option
from tvmflow.core import errors
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK, StageError, UsageError

if TYPE_CHECKING:
    from tvmflow.core.fork_server import ForkServer
    from tvmflow.core.types import Plan, StageSpec
    from tvmflow.engine.report import RunReport
    from tvmflow.engine.run_records import Recording
    from tvmflow.planning.decisions import PlanState
    from tvmflow.planning.prepare import PreparedRun
    from tvmflow.planning.request import RunRequest
    from tvmflow.store.local import LocalStore

    RunPlan = Callable[[Plan], RunReport]
    """Runs a plan and shows its progress."""


class RunOptions(Options):
    """Bring recipes up to date and deliver their libraries.

    What is up to date is not run again. Verified files are in dist/RECIPE/TARGET/.

    Examples:
        # everything of one recipe
        tvmflow run recipes/digits.yaml
        # all recipes, two stages at a time; go on after a failure
        tvmflow run recipes/*.yaml --jobs 2 --keep-going
        # one target, without tuning
        tvmflow run net.yaml --target cortex-a72 --pipeline compile
        # exactly what the lock file records, or nothing
        tvmflow run net.yaml --locked
    """

    store: StoreOption = store_option()
    recipes: RecipeOptions
    execution: ExecutionOptions
    lock: LockOptions
    output: OutputOptions
    dump_ir: Path | None = option(
        "DIR",
        "then lower the models once more, also those that are up to date, and write the IR after each pass to DIR",
    )
    check_reproducible: bool = flag(
        "then build everything twice more, each time from an empty store, and report the first difference"
    )
    dry_run: bool = flag(
        "show what would run and what it would cost, as `plan` does, and run nothing"
    )
    best_so_far: bool = flag(
        "search no further: deliver the library of the best trials that earlier runs measured"
    )
    force: tuple[str, ...] = force_option()
    summary: Path | None = option(
        "FILE", "append a summary in Markdown to FILE, such as $GITHUB_STEP_SUMMARY"
    )
    junit: Path | None = option(
        "FILE", "write a test case for each stage and gate to FILE, as JUnit XML"
    )
    argv: tuple[str, ...]


_PRELOAD: Final = ("numpy", "tvm")


class StageDump(NamedTuple):
    """The dump of one stage.

    Attributes:
        stage_id: The stage.
        folder: The folder with the files; None if the model could not be lowered.
        problem: Why the model could not be lowered to the end; empty if it could.
        exit_code: The exit code that this is worth.
    """

    stage_id: str
    folder: Path | None
    problem: str = ""
    exit_code: int = EXIT_OK


def dump_ir(plan: Plan, store: LocalStore, folder: Path) -> Iterator[StageDump]:
    """Lower the models of a plan once more, and write the IR after each pass.

    Args:
        plan: A plan that was run.
        store: The store with its results.
        folder: Where each stage gets a folder `<recipe>/<stage>+<target>`.

    Yields:
        The dump of each stage that lowers a model.

    Raises:
        StageError: No stage of the plan lowers a model.
    """
    from tvmflow.core.fork_server import ForkServer
    from tvmflow.planning.decisions import evaluate_plan
    from tvmflow.stages import STAGES

    specs = [spec for spec in plan.stages if STAGES[spec.stage].TRAITS.dump_ir]
    if not specs:
        names = " and ".join(name for name, stage in STAGES.items() if stage.TRAITS.dump_ir)
        raise StageError(
            "--dump-ir: no stage of this run lowers a model",
            fix=f"run {names}, for example without --until",
        )
    state = evaluate_plan(plan, store)
    with ForkServer.start(_PRELOAD) as fork_server:
        for spec in specs:
            target = folder / spec.recipe / spec.label.replace("/", "+")
            yield _dump_stage(spec, state, fork_server, target)


def _dump_stage(
    spec: StageSpec, state: PlanState, fork_server: ForkServer, folder: Path
) -> StageDump:
    import logging

    from tvmflow.planning.decisions import input_digests
    from tvmflow.stages import STAGES

    missing = [need.maker for need in spec.needs if need.stage_id not in state.artifacts]
    if missing:
        return StageDump(spec.id, None, f"{missing[0]} has no result", EXIT_FAILED)
    # of a locked run, the lock file has the chosen schedules
    inputs = {file.role: file.path for file in spec.files} | {
        role: state.store.blobs.verified_path(digest)
        for role, digest in input_digests(spec, state.artifacts).items()
    }
    outcome = fork_server.call(
        STAGES[spec.stage].TRAITS.dump_ir,
        {"settings": spec.settings, "inputs": inputs, "folder": str(folder)},
        timeout_s=spec.timeout_s,
    )
    logging.getLogger(__name__).debug("%s: dumping its IR ended with %s", spec.id, outcome.kind)
    if outcome.kind == "ok":
        return StageDump(spec.id, folder)
    error = getattr(errors, outcome.error, StageError)
    problem = f"{outcome.message}\n  fix: {outcome.fix}" if outcome.fix else outcome.message
    return StageDump(spec.id, folder, problem, error.exit_code)


class FinishedRun(NamedTuple):
    """A run that has ended, successfully or not."""

    prepared: PreparedRun
    report: RunReport


def run(options: RunOptions) -> int:
    """Bring recipes up to date and deliver their libraries."""
    from tvmflow.cli.output import check_output_file
    from tvmflow.engine.run_records import record_run

    for file in (options.summary, options.junit):
        check_output_file(file, options.recipes.recipes)
    store = options.store.open()
    with record_run(store, options.argv) as recording:
        recording.exit_code = _run(options, store, recording)
        _write_reports(options, recording)
        return recording.exit_code


def _write_reports(options: RunOptions, recording: Recording) -> None:
    """Write what CI services show of a run."""
    from tvmflow.cli.ci_messages import report_failures
    from tvmflow.cli.output import write_file
    from tvmflow.core.disk_errors import disk_errors, make_folder
    from tvmflow.engine.ci_reports import junit_xml, markdown_summary

    report = recording.report
    if report is None:
        return
    report_failures(report)
    if options.summary is not None:
        make_folder(options.summary.parent)
        with (
            disk_errors(options.summary),
            options.summary.open("a", encoding="utf-8") as stream,
        ):
            stream.write(markdown_summary(report))
    if options.junit is not None:
        write_file(options.junit, junit_xml(report, recording.release))


def _run(options: RunOptions, store: LocalStore, recording: Recording) -> int:
    from tvmflow.cli.plan import show_plan
    from tvmflow.cli.plan_execution import show_report
    from tvmflow.cli.release import check_release, check_reproducible, release

    request = options.recipes.request(options.lock.find(options.recipes.recipes))
    if options.dry_run:
        show_plan(
            request,
            store,
            argv=options.argv,
            force=options.force,
            dist=options.execution.dist.locate(),
            as_json=options.output.json,
        )
        return EXIT_OK
    # These do their work again although everything is up to date.
    runs_again = (
        options.check_reproducible
        or options.dump_ir is not None
        or options.force
        or options.best_so_far
    )
    # A cached answer writes no file.
    writes = options.summary is not None or options.junit is not None
    argv = () if runs_again or writes else options.argv
    with contextlib.ExitStack() as leases:
        prepared, report = execute(
            request,
            options.execution,
            options.output,
            store,
            leases,
            argv=argv,
            command=options.argv,
            force=options.force,
            best_so_far=options.best_so_far,
            check=None if options.check_reproducible else check_release,
        )
        recording.report, recording.lock = report, request.lock
        dumped = EXIT_OK
        if options.dump_ir is not None:
            dumped = _dump_ir(prepared.plan, store, options.dump_ir, options.output)
        show_report(report, options.output)
        if exit_code := report.exit_code or dumped:
            return exit_code
        pipeline = prepared.pipeline
        if pipeline and pipeline.release and not options.check_reproducible:
            return release(prepared, pipeline, pipeline.release, store, options.output, recording)
    if options.check_reproducible:
        return check_reproducible(prepared, request, store, options.output)
    return EXIT_OK


def _dump_ir(plan: Plan, store: LocalStore, folder: Path, output: OutputOptions) -> int:
    """Write the IR of every stage that lowers a model, show where, and return the exit code."""
    from tvmflow.cli.output import print_json, print_lines, print_notes

    exit_code = EXIT_OK
    for dump in dump_ir(plan, store, folder):
        if output.json:
            folder_name = str(dump.folder or "")
            print_json({"event": "ir_dumped", **dump._asdict(), "folder": folder_name})
        elif dump.problem:
            print_lines(*f"{dump.stage_id}: the IR is not complete: {dump.problem}".split("\n"))
        else:
            print_notes(output, f"{dump.stage_id}: the IR after each pass is in {dump.folder}")
        exit_code = max(exit_code, dump.exit_code)
    return exit_code


def execute(
    request: RunRequest,
    execution: ExecutionOptions,
    output: OutputOptions,
    store: LocalStore,
    leases: contextlib.ExitStack,
    *,
    argv: Sequence[str] = (),
    command: Sequence[str] = (),
    force: Sequence[str] = (),
    best_so_far: bool = False,
    check: Callable[[PreparedRun, RunRequest], None] | None = None,
    revise: Callable[[PreparedRun, RunPlan], PreparedRun | RunReport] | None = None,
) -> FinishedRun:
    """Run what is requested and show the progress.

    Args:
        request: The recipes to run.
        execution: How stages are run.
        output: How the progress is shown.
        store: The store with the results.
        leases: Holds the store's lease: until it is closed, garbage collection keeps the results of this
            run, so that the caller can pin them.
        argv: The command line, whose answer is saved if everything is up to date; empty if stages
            are to be run and shown in any case.
        command: The command line of `tvmflow run`; empty for another command.
        force: The names of stages that run also if they are up to date.
        best_so_far: Measure no trial, and take the best that the ledger has.
        check: Raises an error if the run must not begin.
        revise: Returns what to run in place of the plan, after it ran what it needs to know that;
            or the report of that, when it did not succeed.
    """
    import logging

    from tvmflow.cli.download_progress import DownloadLine
    from tvmflow.cli.executors import check_executor_options
    from tvmflow.cli.plan_execution import PlanExecution
    from tvmflow.cli.release import retune
    from tvmflow.cli.remote_cache import must_upload
    from tvmflow.core import signing
    from tvmflow.engine.interim import is_search, with_best_so_far
    from tvmflow.engine.up_to_date import confirm_run
    from tvmflow.planning.prepare import PreparedRun, prepare_run
    from tvmflow.planning.stage_names import find_stages
    from tvmflow.provenance.source_state import read_builder_id

    check_executor_options(execution)
    # A signing key that cannot be read is better reported before the work than after it.
    signing.load_signing_key()
    read_builder_id()
    prepared = prepare_run(request, store, DownloadLine())
    if check is not None:
        check(prepared, request)
    forced = {spec.id for name in force for spec in find_stages(prepared.plan, name)}
    if (
        best_so_far
        and prepared.pipeline
        and (prepared.pipeline.release or prepared.pipeline.retune)
    ):
        raise UsageError(
            "--best-so-far is for recipes, and this pipeline releases or retunes several",
            fix="run its recipes with --best-so-far",
        )
    if best_so_far:
        prepared = prepared._replace(plan=with_best_so_far(prepared.plan))
        # no key knows what the ledger has
        forced |= {spec.id for spec in prepared.plan.stages if is_search(spec)}
    pipeline = prepared.pipeline
    is_plain = pipeline is None or not (pipeline.release or pipeline.retune)
    # Who asks for a log gets the decisions of a full evaluation.
    is_logged = logging.getLogger(__name__).isEnabledFor(logging.INFO)
    if argv and is_plain and not is_logged and not must_upload(execution.remote, store):
        report = confirm_run(
            argv, prepared, store, execution.dist.locate(), as_json=output.json, quiet=output.quiet
        )
        if report is not None:
            return FinishedRun(prepared, report)
    leases.enter_context(store.running())
    with PlanExecution(
        *(prepared, execution, output, store, forced),
        delivers_interim=is_plain and not best_so_far,
        best_so_far=_best_so_far_command(command) if is_plain else "",
    ) as plans:
        if pipeline and pipeline.retune and not request.lock:
            plan = retune(
                prepared.plan,
                pipeline.retune,
                lambda plan: None if plans.interrupted else plans.run(plan),
                output,
            )
            prepared = prepared._replace(plan=plan)
        if revise is not None:
            revised = revise(prepared, plans.run)
            if not isinstance(revised, PreparedRun):
                return FinishedRun(prepared, revised)
            prepared = revised
        return FinishedRun(prepared, plans.run(prepared.plan))


def _best_so_far_command(argv: Sequence[str]) -> str:
    """Return the command that delivers what a run had found when it was interrupted."""
    import shlex

    return shlex.join(["tvmflow", *argv, "--best-so-far"]) if argv else ""


COMMANDS: Final = {"run": run}
