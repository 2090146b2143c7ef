"""`tvmflow runs`, `show`, `logs` and `trace`: the work and results of earlier runs."""

from __future__ import annotations

import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tvmflow.cli.arguments import (
    RECIPE_SUFFIXES,
    StoreOption,
    StoreOptions,
    pipeline_option,
    store_option,
)
from tvmflow.cli.options import Options, argument, flag, option, positive_int
from tvmflow.cli.output import (
    check_output_file,
    print_lines,
    print_outcome,
    print_result,
    write_file,
)
from tvmflow.core.errors import EXIT_OK, UsageError
from tvmflow.core.formatting import (
    age_text,
    count_text,
    duration_text,
    excerpt,
    find_width,
    latency_text,
    names_text,
    printable,
    shorten,
    size_text,
)
from tvmflow.core.generated_text import shell_word
from tvmflow.core.project import shortest_path
from tvmflow.core.text import table

if TYPE_CHECKING:
    from tvmflow.core.types import Json
    from tvmflow.engine.kernel_details import BuiltLibrary, ChosenTrials, KernelDetails, KernelRow
    from tvmflow.engine.run_records import RunRecord, StageLog
    from tvmflow.stages.build import KernelCode
    from tvmflow.store.local import LocalStore

_SHOWN_RUNS: Final = 20


class RunsOptions(StoreOptions):
    """List the last runs that did something, the newest first.

    A run that was up to date leaves no record. `show run` shows one run in full.

    Examples:
        tvmflow runs
        # all known facts about the last run, and the one before
        tvmflow show run
        tvmflow show run latest~1
    """

    limit: int = option(
        "N", f"how many to list ({_SHOWN_RUNS})", default=_SHOWN_RUNS, type=positive_int
    )


class LogsOptions(Options):
    """Show the log of a stage.

    Each execution of a stage replaces its log. Without a stage, all logs are listed.

    Examples:
        tvmflow logs
        tvmflow logs tune/host
        # of one recipe, as for `explain`
        tvmflow logs net.yaml tune/host
        # while it runs, in another terminal
        tvmflow logs tune --follow
    """

    recipe: str | None = argument("RECIPE", "only stages of this recipe or pipeline", "?")
    stage: str | None = argument("STAGE[/TARGET]", "the stage, or RECIPE:STAGE/TARGET", "?")
    run_id: str | None = option("RUN", "of this run: its id, or `latest`", name="--run")
    follow: bool = flag("keep printing new output until no run uses the store")
    store: StoreOption = store_option("logs are")
    verbosity: int


class TraceOptions(StoreOptions):
    """Write where the time of a run went, for Perfetto and other viewers.

    The file has stages, trials, measurements, transfers and waits, with a track for each process.
    https://ui.perfetto.dev and chrome://tracing show it; nothing is uploaded.

    Examples:
        tvmflow trace
        # of the previous run, gzipped
        tvmflow trace latest~1 -o trace.json.gz
        # its critical path
        tvmflow explain --critical
    """

    run_id: str | None = argument(
        "RUN", "its id or the beginning of it, `latest` (the default), or `latest~1`", "?"
    )
    output: Path | None = option(
        "FILE",
        "where the trace is written (./trace-RUN.json), gzipped if it ends in .gz",
        name="-o --output",
    )


_MAX_NAMES: Final = 24
# The minimum width in characters for the column with the headline.
_WIDE: Final = 72


def runs(options: RunsOptions) -> int:
    from tvmflow.engine.run_records import list_runs

    history = list_runs(options.store.locate_named(), options.limit)
    value = {
        "runs": [_to_json(run) for run in history.runs],
        "damaged": [{"path": path, "reason": reason} for path, reason in history.damaged],
    }
    return print_result(value, _format_runs(history.runs, history.damaged), options)


def _to_json(run: RunRecord) -> dict[str, Json]:
    """Return a summary of a run without the facts of stages and the text of recipes."""
    from tvmflow.engine.summary import make_headline

    return {
        "id": run.id,
        "argv": run.argv,
        "began_s": run.began_s,
        "seconds": run.seconds,
        "exit_code": run.exit_code,
        "end": run.end,
        "recipes": [recipe.recipe for recipe in run.recipes],
        "outcomes": Counter(stage.outcome for stage in run.stages),
        "headline": make_headline(run.builds),
        "builds": run.builds,
    }


def _format_runs(runs: Sequence[RunRecord], damaged: Sequence[tuple[str, str]]) -> Iterator[str]:
    for path, reason in damaged:
        yield f"damaged record: {path}: {reason}"
    if not runs:
        yield "no run has done anything in this store yet"
        return
    width = find_width()
    rows = [_cells(run) for run in runs]
    is_wide = width and width >= _WIDE
    expendable = ("stages", "command") if is_wide else ("headline", "stages", "command", "took")
    # the headline gets the remaining width
    for line in table(rows, right=("took",), expendable=expendable, width=width):
        yield line if width is None else excerpt(line, width - 1)


def _cells(run: RunRecord) -> dict[str, str]:
    from tvmflow.engine.summary import count_stages, make_headline

    recipes = list(dict.fromkeys(recipe.recipe for recipe in run.recipes))
    names = names_text(recipes, 2)
    if len(names) > _MAX_NAMES and recipes:
        more = f" and {len(recipes) - 1} more" if len(recipes) > 1 else ""
        names = shorten(recipes[0], _MAX_NAMES - len(more)) + more
    return {
        "run": run.id,
        "when": f"{age_text(time.time() - run.began_s)} ago",
        "command": run.argv[0] if run.argv else "",
        "recipes": names,
        "end": run.end,
        "took": duration_text(run.seconds),
        "stages": count_stages(run.stages),
        "headline": excerpt(run.message) or make_headline(run.builds),
    }


def logs(options: LogsOptions) -> int:
    from tvmflow.engine.run_records import find_logs, follow, read_run
    from tvmflow.store.disk import active_runs

    store = options.store.locate()

    def has_active_runs() -> bool:
        return bool(active_runs(store.root))

    run = read_run(store, options.run_id) if options.run_id else None
    path, stage = options.recipe, options.stage
    if path and stage is None and Path(path).suffix not in RECIPE_SUFFIXES:
        # A single word that is not a recipe names a stage.
        path, stage = None, path
    recipes = _list_recipe_names(path) if path else frozenset[str]()
    selected = find_logs(store, stage or "", run, recipes)
    if stage is None:
        print_lines(*_format_logs(selected))
        return EXIT_OK
    for log in selected:
        if len(selected) > 1:
            print_lines(f"==> {log.stage_id} ({log.path})")
        is_followed = options.follow and log is selected[-1]
        for text in follow(log.path, has_active_runs if is_followed else lambda: False):
            # Lines are kept, and terminal control sequences are escaped.
            sys.stdout.write("".join(map(_printable_line, text.splitlines(keepends=True))))
            sys.stdout.flush()
    if options.follow and options.verbosity >= 0:
        place = shortest_path(store.root)
        sys.stderr.write(f"nothing runs in {place}: this log is complete\n")
    return EXIT_OK


def _list_recipe_names(path: str) -> frozenset[str]:
    from tvmflow.planning.prepare import RunRequest, load_request

    recipes, _ = load_request(RunRequest((path,)))
    return frozenset(
        f"{entry.recipe.name}-{variant}" if variant else entry.recipe.name
        for entry in recipes
        for variant in ("", *entry.recipe.variants)
    )


def _printable_line(line: str) -> str:
    content = line.rstrip("\r\n")
    return printable(content.expandtabs()) + ("\n" if line.endswith(("\n", "\r")) else "")


def _format_logs(logs: Sequence[StageLog]) -> Iterator[str]:
    rows = [
        {
            "stage": log.stage_id,
            "written": f"{age_text(time.time() - log.written_s)} ago",
            "size": size_text(log.bytes),
            "file": log.path,
        }
        for log in logs
    ]
    yield from table(rows, right=("size",), expendable=("file",), width=find_width())
    yield f"{count_text(len(logs), 'log')}; `tvmflow logs STAGE` shows one"


def trace(options: TraceOptions) -> int:
    from tvmflow.engine.run_records import LATEST, read_run
    from tvmflow.engine.timeline import make_trace, read_timeline

    check_output_file(options.output, ())
    run = read_run(options.store.locate(), options.run_id or LATEST)
    timeline = read_timeline(run.timeline, run.id)
    about = {
        "run": run.id,
        "command": " ".join(map(shell_word, ["tvmflow", *run.argv])),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.began_s)),
        "machine": run.machine.name,
        "tvmflow": run.tvmflow,
        "spans left out": timeline.left_out,
    }
    path = options.output or Path(f"trace-{run.id}.json")
    content = make_trace(timeline, run.stages, run.began_s, about).to_bytes(path)
    write_file(path, content)
    lines = [f"{path}: open it at https://ui.perfetto.dev, or in another viewer of Chrome's traces"]
    if timeline.left_out:
        left_out = count_text(timeline.left_out, "span")
        lines.append(f"the last {left_out} of this long run are missing")
    return print_outcome({"path": str(path), "bytes": len(content)}, lines, EXIT_OK, options)


_SUBJECT: Final = "RECIPE|RUN"
_SUBJECT_HELP: Final = "a recipe that was run, or a run (see `tvmflow runs`)"


class ShowRunOptions(Options):
    """Show the request of a run, and the outcome and messages of each stage.

    Examples:
        tvmflow show run
        # the run before the last one
        tvmflow show run latest~1
        # with the recipes as they were, and the facts of each stage
        tvmflow show run --json
    """

    run_id: str | None = argument(
        "RUN", "its id or the beginning of it, `latest` (the default), or `latest~1`", "?"
    )
    json: bool = flag("print the record as one line of JSON")
    store: StoreOption = store_option()


class ShowKernelsOptions(StoreOptions):
    """Show the kernels of libraries: share of the time, schedule, workload, and nodes of the model.

    The slowest kernel comes first. `show kernel` shows the details and the code of one kernel.

    Examples:
        tvmflow show kernels net.yaml
        tvmflow show kernels net.yaml host --json
    """

    what: str = argument(_SUBJECT, _SUBJECT_HELP)
    target: str | None = argument("TARGET", "only this target", "?")
    pipeline: str | None = pipeline_option()


class ShowKernelOptions(StoreOptions):
    """Show the details of one kernel: nodes of the model, schedule, time, roofline and code.

    Its code is made again from the stored results, as `build` made it.

    Examples:
        tvmflow show kernel net.yaml fused_conv2d
        # the steps of the schedule, and the assembly
        tvmflow show kernel net.yaml fused_conv2d --schedule --asm
        # in the last run but one
        tvmflow show kernel latest~1 fused_conv2d host --record
    """

    what: str = argument(_SUBJECT, _SUBJECT_HELP)
    kernel: str = argument("KERNEL", "its name, or the beginning of it")
    target: str | None = argument("TARGET", "only this target", "?")
    tir: bool = flag("show the scheduled kernel as TVMScript")
    schedule: bool = flag("show the instructions of its schedule as Python")
    candidates: bool = flag("show the register tiles that its rule ranks first")
    record: bool = flag("show the trial behind its schedule, or else the best one")
    asm: bool = flag("show its assembly; for a GPU, its CUDA C")
    pipeline: str | None = pipeline_option()


_SHOWN_KEY: Final = 12
_MAX_KERNEL: Final = 40
_NUMBERS: Final = ("time", "per inference", "alone", "calls")


def show_kernels(options: ShowKernelsOptions) -> int:
    from tvmflow.engine.kernel_details import list_rows

    store = options.store.open_to_read()
    libraries = _find_libraries(options, store)
    tables = {library.name: list_rows(library, store) for library in libraries}
    return print_result(tables, _format_kernels(tables), options)


def show_kernel(options: ShowKernelOptions) -> int:
    from tvmflow.engine.kernel_details import find_kernel

    store = options.store.open_to_read()
    libraries = _find_libraries(options, store)
    names = find_kernel(libraries, options.kernel)
    shown = [
        _read_kernel(library, names[library.name], options, store)
        for library in libraries
        if library.name in names
    ]
    value = {kernel.library.name: kernel for kernel in shown}
    lines = (line for kernel in shown for line in _format_kernel(kernel, options))
    return print_result(value, lines, options)


def _find_libraries(
    options: ShowKernelsOptions | ShowKernelOptions, store: LocalStore
) -> list[BuiltLibrary]:
    from tvmflow.engine.kernel_details import list_libraries
    from tvmflow.engine.progress import DownloadLine
    from tvmflow.engine.report import StageReport
    from tvmflow.engine.run_records import read_run
    from tvmflow.planning.decisions import evaluate_plan
    from tvmflow.planning.prepare import RunRequest, prepare_run

    what = options.what
    if Path(what).suffix in RECIPE_SUFFIXES or Path(what).is_file():
        command = f"tvmflow run {shell_word(what)}"
        plan = prepare_run(RunRequest((what,), options.pipeline), store, DownloadLine()).plan
        artifacts = evaluate_plan(plan, store).artifacts.items()
        stages = (StageReport(name, facts=made.facts, key=made.key) for name, made in artifacts)
        libraries = list_libraries(stages, command)
        problem = f"{what} has no kernels yet: it has not been built in its present form"
    else:
        run = read_run(store, what)
        paths = dict.fromkeys(shortest_path(recipe.path) for recipe in run.recipes)
        command = " ".join(map(shell_word, ["tvmflow", "run", *paths]))
        libraries = list_libraries(run.stages, command)
        problem = f"run {run.id} has built no library"
    targets = [library.name.rpartition("/")[2] for library in libraries]
    if options.target and libraries:
        if options.target not in targets:
            fix = f"its targets are: {names_text(targets)}"
            raise UsageError(f"{what} has no library for {options.target}", fix=fix)
        libraries = [lib for lib in libraries if lib.name.endswith(f"/{options.target}")]
    if not libraries:
        raise UsageError(problem, fix=command)
    return libraries


def _format_kernels(tables: Mapping[str, Sequence[KernelRow]]) -> Iterator[str]:
    width = find_width()
    for name, rows in tables.items():
        yield f"{name}: {count_text(len(rows), 'kernel')}"
        cells = list(map(_format_row, rows))
        if any(row.share is not None for row in rows):
            # Times of kernels inside the library and alone are not comparable.
            cells = [{**cell, "alone": ""} for cell in cells]
            cells.append(_format_rest(rows, tuple(cells[0])))
        expendable = ("workload", "per inference", "alone", "calls", "schedule")
        # the nodes get the remaining width
        for line in table(cells, right=_NUMBERS, expendable=expendable, width=width):
            yield line if width is None else excerpt(line, width - 1)


def _format_row(row: KernelRow) -> dict[str, str]:
    return {
        "time": "" if row.share is None else f"{row.share:.1%}",
        "per inference": "" if row.seconds is None else latency_text(row.seconds),
        "alone": "" if row.alone_s is None else latency_text(row.alone_s),
        "calls": "" if row.calls is None else str(row.calls),
        "kernel": excerpt(row.name, _MAX_KERNEL),
        "schedule": row.schedule,
        "workload": row.workload[:_SHOWN_KEY],
        "nodes": row.nodes,
    }


def _format_rest(rows: Sequence[KernelRow], headings: Sequence[str]) -> dict[str, str]:
    """Return the row of the time between kernels, so that all rows add up to one call."""
    share = sum(row.share or 0.0 for row in rows)
    seconds = sum(row.seconds or 0.0 for row in rows)
    rest = {"time": f"{max(1 - share, 0.0):.1%}", "kernel": "(between kernels)"}
    if seconds:
        rest["per inference"] = latency_text(max(1 - share, 0.0) * seconds / share)
    return {heading: rest.get(heading, "") for heading in headings}


# ---------------------------------------------------------------- one kernel


class _ShownKernel(NamedTuple):
    """A kernel of a library; `trials` and `code` are None if they were not requested."""

    library: BuiltLibrary
    details: KernelDetails
    trials: ChosenTrials | None
    code: KernelCode | None

    def to_json(self) -> dict[str, Json]:
        from tvmflow.cli import records

        value = self.details.to_json()
        if self.trials is not None:
            workloads = map(records.workload_to_json, self.trials.select())
            value["record"] = {"chosen": self.trials.chosen, "workloads": list(workloads)}
        if self.code is not None:
            value["code"] = self.code
        return value


def _read_kernel(
    library: BuiltLibrary, kernel: str, options: ShowKernelOptions, store: LocalStore
) -> _ShownKernel:
    from tvmflow.engine.kernel_details import find_trials, make_kernel_code, read_details

    details = read_details(library, kernel, store)
    needs_trials = options.record or options.candidates
    trials = find_trials(library, details.row, store) if needs_trials else None
    code, asm, candidates = None, options.asm, options.candidates
    if options.tir or options.schedule or asm or candidates:
        code = make_kernel_code(
            library, kernel, store, with_assembly=asm, with_candidates=candidates
        )
    return _ShownKernel(library, details, trials, code)


def _format_kernel(kernel: _ShownKernel, options: ShowKernelOptions) -> Iterator[str]:
    details = kernel.details
    yield f"{kernel.library.name}: {details.row.name}"
    fields = {name: text for name, text in _list_fields(kernel) if text}
    indent = " " * (max(map(len, fields)) + 4)
    width = find_width() or len(indent) + max(map(len, fields.values()))
    for name, text in fields.items():
        yield from textwrap.wrap(
            text,
            max(width, 2 * len(indent)),
            initial_indent=f"  {name:<{len(indent) - 2}}",
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
    if options.record and kernel.trials is not None:
        yield from ("", *_format_trials(kernel, kernel.trials))
    if (code := kernel.code) is None:
        return
    if options.schedule:
        missing = f"# there are no instructions: its schedule is '{details.row.schedule}'"
        yield from ("", *(code.schedule or missing).rstrip().split("\n"))
    if options.candidates:
        yield from ("", *_format_candidates(kernel, code))
    for text in ([code.tir] if options.tir else []) + ([code.assembly] if options.asm else []):
        yield from ("", *text.rstrip().split("\n"))


def _format_candidates(kernel: _ShownKernel, code: KernelCode) -> list[str]:
    from tvmflow.stages.build import RankedTile

    if not code.candidates:
        return ["no candidates: only contractions on CPUs have register tiles"]
    workloads = kernel.trials.workloads if kernel.trials is not None else ()
    times = {
        trial.id: latency_text(trial.seconds)
        for workload in workloads
        for trial in workload.trials
        if trial.run_secs
    }
    ranked = [RankedTile(*fields) for fields in code.candidates]
    if (untuned_s := kernel.details.untuned_s) is not None:
        times.setdefault(ranked[0].trial, latency_text(untuned_s))
    rows = [
        {
            "rows×vectors": candidate.tile,
            "estimated": f"{candidate.speed:.0%} of peak",
            "measured": times.get(candidate.trial, "not measured"),
        }
        for candidate in ranked
    ]
    return list(table(rows, right=("estimated", "measured")))


def _list_fields(kernel: _ShownKernel) -> Iterator[tuple[str, str]]:
    details, row = kernel.details, kernel.details.row
    calls = [names_text(nodes) for nodes in details.nodes if nodes]
    if len(calls) > 1:
        calls = [f"{number}: {text}" for number, text in enumerate(calls, 1)]
    yield "nodes", "; ".join(calls)
    yield "schedule", _schedule_text(details)
    yield "time", _time_text(kernel)
    if details.tuned_s is not None and details.untuned_s is not None:
        ratio = details.untuned_s / details.tuned_s
        yield "tuning", f"{ratio:.2f} times as fast as untuned, kernel by kernel (interleaved)"
    if speedups := details.size_speedups:
        yield "sizes", ", ".join(f"{speedup:.3g} times ({at})" for at, speedup in speedups.items())
    yield "roofline", _roofline_text(kernel)
    yield "workload", row.workload[:_SHOWN_KEY]


def _schedule_text(details: KernelDetails) -> str:
    from tvmflow.stages.build import OWN_SCHEDULE, TUNED, UNSCHEDULED

    trials = count_text(details.trials or 0, "trial")
    if details.row.schedule == TUNED:
        best = "" if details.trials is None else f": the best of {trials}"
        return f"found by a search{best}"
    if details.row.schedule == OWN_SCHEDULE:
        return "none: the kernel is hand-written"
    if details.row.schedule == UNSCHEDULED:
        return "none: its loops run sequentially"
    slower = f"; none of {trials} was faster" if details.trials else ""
    return f"by the rule {details.row.schedule}{slower}"


def _time_text(kernel: _ShownKernel) -> str:
    from tvmflow.stages.verify.verdict import Verdict

    row = kernel.details.row
    calls = "" if row.calls is None else f" in {count_text(row.calls, 'call')}"
    texts = [] if row.seconds is None else [f"{latency_text(row.seconds)} per inference{calls}"]
    texts += [] if row.share is None else [f"{row.share:.1%} of the time of a call of the library"]
    if not texts and row.alone_s is not None:
        texts = [f"{latency_text(row.alone_s)} per inference{calls}, measured in isolation"]
    if texts:
        return ", ".join(texts)
    if kernel.library.facts.get(Verdict) is not None:
        listed = calls and f", {calls.strip()}"
        return f"not measured{listed}: the library was not run on its target"
    return f"not measured: `{kernel.library.command}` verifies and measures"


def _roofline_text(kernel: _ShownKernel) -> str:
    from tvmflow.tuning.tuning_job import TuneFacts

    details = kernel.details
    texts = []
    if details.gflops is not None:
        peak = details.peak_gflops
        part = f", {details.gflops / peak:.0%} of the machine's peak" if peak else ""
        texts.append(f"{details.gflops:.3g} GFLOPS{part}")
    if details.roofline_share is not None and details.least_s is not None:
        bound = latency_text(details.least_s)
        texts.append(f"{details.roofline_share:.0%} of its roofline bound, {bound} per call")
    if texts or kernel.library.facts.get(TuneFacts) is not None:
        return "; ".join(texts)
    return "not known: only a search measures it (`tune: {trials: 64}` in the recipe)"


def _format_trials(kernel: _ShownKernel, trials: ChosenTrials) -> Iterator[str]:
    """Yield the lines of the trial that a schedule comes from, or of the best trial."""
    from tvmflow.cli import records

    row, selected = kernel.details.row, trials.select()
    if not row.workload and not trials.chosen:
        yield "no trial: this library was built without a search (`tune: {trials: 64}` in the recipe)"
        return
    if not selected:
        hint = "`tvmflow records import` takes those of another machine"
        yield f"no trial of {row.name} is in the ledger; {hint}"
        return
    if trials.chosen:
        yield "the trial behind its schedule"
    else:
        yield f"its schedule is by the rule {row.schedule}; the best trial was not faster"
    for workload in selected:
        yield from records.format_trials(workload, trace=False)
    yield f"`tvmflow records show {row.workload[:_SHOWN_KEY]} --trace` shows all of its trials"


_SHOWN_COMMIT: Final = 12


def show_run(options: ShowRunOptions) -> int:
    from tvmflow.engine.run_records import LATEST, read_run

    run = read_run(options.store.locate(), options.run_id or LATEST)
    return print_result(run, _format_run(run), options)


def _format_run(run: RunRecord) -> Iterator[str]:
    from tvmflow.engine.report import STOPPED
    from tvmflow.engine.summary import summary

    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began_s))
    machine = (
        f"{run.machine.name}: {run.machine.cpu}, {run.machine.cpus} CPUs, {run.machine.platform}"
    )
    end = f"exit code {run.exit_code}" + (f": {run.message}" if run.message else "")
    yield f"run {run.id}"
    fields = {
        "command": " ".join(map(shell_word, ["tvmflow", *run.argv])),
        "folder": run.folder,
        "began": f"{began}, took {duration_text(run.seconds)}",
        "ended": run.message if run.end == "stopped" else end,
        "machine": machine,
        "tvmflow": run.tvmflow,
    }
    for recipe in run.recipes:
        state = {"yes": "", "no": " with changes"}.get(recipe.clean, f" ({recipe.clean})")
        commit = f", commit {recipe.commit[:_SHOWN_COMMIT]}{state}" if recipe.commit else ""
        fields[f"recipe {recipe.recipe}"] = f"{shortest_path(recipe.path)}{commit}"
    if run.release:
        fields["release"] = str(run.release.get("folder", ""))
    width = max(map(len, fields))
    yield from (f"  {name:<{width}}  {value}" for name, value in fields.items())
    yield ""
    width = max((len(stage.stage_id) for stage in run.stages), default=0)
    for stage in run.stages:
        reason = f"  {stage.reason}" if stage.outcome != "hit" else ""
        outcome = "stopped" if stage.outcome == STOPPED else stage.outcome
        yield f"{stage.stage_id:<{width}} {outcome:<9} {duration_text(stage.seconds):>12}{reason}"
    yield ""
    yield from summary(run.report, verbose=True, width=find_width()).split("\n")


COMMANDS: Final = {
    "runs": runs,
    "logs": logs,
    "trace": trace,
    "show": {"run": show_run, "kernels": show_kernels, "kernel": show_kernel},
}
