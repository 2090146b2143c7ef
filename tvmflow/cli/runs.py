"""`tvmflow runs`, `logs` and `trace`: what earlier runs did, what their stages wrote, and when."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import RECIPE_SUFFIXES, StoreOption, StoreOptions, store_option
from tvmflow.cli.options import Options, argument, flag, option, positive_int
from tvmflow.cli.output import (
    check_output_file,
    print_lines,
    print_outcome,
    print_result,
    write_file,
)
from tvmflow.core.errors import EXIT_OK
from tvmflow.core.formatting import (
    age_text,
    count_text,
    duration_text,
    excerpt,
    names_text,
    printable,
    shorten,
    size_text,
)
from tvmflow.core.generated_text import shell_word
from tvmflow.core.project import shortest_path
from tvmflow.core.terminal import find_width
from tvmflow.core.text import table

if TYPE_CHECKING:
    from tvmflow.core.types import Json
    from tvmflow.engine.run_records import RunRecord
    from tvmflow.engine.stage_logs import StageLog


_SHOWN_RUNS: Final = 20


class RunsOptions(StoreOptions):
    """List the last runs that did something, the last one first.

    A run that was up to date leaves no record. `show run` shows all of one run.

    Examples:
        tvmflow runs
        # all that is known of the last run, and of the one before
        tvmflow show run
        tvmflow show run latest~1
    """

    limit: int = option(
        "N", f"how many to list ({_SHOWN_RUNS})", default=_SHOWN_RUNS, type=positive_int
    )


class LogsOptions(Options):
    """Show the log of a stage.

    It is that of its last execution. Without a stage, the logs that there are are listed.

    Of each stage there is one log: a later execution replaces it.

    Examples:
        tvmflow logs
        tvmflow logs tune/host
        # of one recipe, as for `explain`
        tvmflow logs net.yaml tune/host
        # while it runs, in another terminal
        tvmflow logs tune --follow
    """

    recipe: str | None = argument("RECIPE", "only stages of this recipe or pipeline", "?")
    stage: str | None = argument("STAGE[/TARGET]", "the stage, also as RECIPE:STAGE/TARGET", "?")
    run_id: str | None = option("RUN", "of this run: its id, or `latest`", name="--run")
    follow: bool = flag("go on with what is written, until no run uses the store any more")
    store: StoreOption = store_option("logs are")
    verbosity: int


class TraceOptions(StoreOptions):
    """Write where the time of a run went, for Perfetto and other viewers.

    The file has stages, trials, measurements, transfers and waits, on the tracks of the processes that did
    them. https://ui.perfetto.dev and chrome://tracing show it; nothing is uploaded.

    Examples:
        tvmflow trace
        # of the run before, packed
        tvmflow trace latest~1 -o trace.json.gz
        # the stages that decided how long it took
        tvmflow explain --critical
    """

    run_id: str | None = argument(
        "RUN", "its id or the beginning of it, `latest` (the default), or `latest~1`", "?"
    )
    output: Path | None = option(
        "FILE",
        "where the trace is written (./trace-RUN.json), packed if it ends in .gz",
        name="-o --output",
    )


_MAX_NAMES: Final = 24
# From here on a row has room for the beginning of a headline.
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
    """Return a row; the facts of stages and the text of recipes are in the record itself."""
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
    expendable = (
        ("stages", "command")
        if width and width >= _WIDE
        else ("headline", "stages", "command", "took")
    )
    # the headline gets what the other columns leave
    for line in table(rows, right=("took",), expendable=expendable, width=width):
        yield line if width is None else excerpt(line, width - 1)


def _cells(run: RunRecord) -> dict[str, str]:
    from tvmflow.engine.summary import count_stages, make_headline

    recipes = list(dict.fromkeys(recipe.recipe for recipe in run.recipes))
    return {
        "run": run.id,
        "when": f"{age_text(time.time() - run.began_s)} ago",
        "command": run.argv[0] if run.argv else "",
        "recipes": _name_recipes(recipes),
        "end": run.end,
        "took": duration_text(run.seconds),
        "stages": count_stages(run.stages),
        "headline": excerpt(run.message) or make_headline(run.builds),
    }


def _name_recipes(recipes: Sequence[str]) -> str:
    """Return the names of one or two recipes, and how many more there are."""
    text = names_text(recipes, 2)
    if len(text) <= _MAX_NAMES or not recipes:
        return text
    more = f" and {len(recipes) - 1} more" if len(recipes) > 1 else ""
    return shorten(recipes[0], _MAX_NAMES - len(more)) + more


# ---------------------------------------------------------------- logs


def logs(options: LogsOptions) -> int:
    from tvmflow.engine.run_records import read_run
    from tvmflow.engine.stage_logs import find_logs, follow, read_text
    from tvmflow.store.leases import active_runs

    store = options.store.locate()
    run = read_run(store, options.run_id) if options.run_id else None
    path, stage = options.recipe, options.stage
    if path and stage is None and Path(path).suffix not in RECIPE_SUFFIXES:
        # one word is the stage
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
        texts = (
            follow(log, lambda: bool(active_runs(store.root))) if is_followed else [read_text(log)]
        )
        for text in texts:
            # a log keeps its lines; nothing in it commands the terminal
            sys.stdout.write("".join(map(_printable_line, text.splitlines(keepends=True))))
            sys.stdout.flush()
    if options.follow and options.verbosity >= 0:
        place = shortest_path(store.root)
        sys.stderr.write(f"nothing runs in {place}: no more will be written to this log\n")
    return EXIT_OK


def _list_recipe_names(path: str) -> frozenset[str]:
    """Return the names under which a recipe, or those of a pipeline, are planned."""
    from tvmflow.planning.prepare import RunRequest, load_request

    recipes, _ = load_request(RunRequest((path,)))
    return frozenset(
        f"{entry.recipe.name}-{variant}" if variant else entry.recipe.name
        for entry in recipes
        for variant in ("", *entry.recipe.variants)
    )


def _printable_line(line: str) -> str:
    content = line.rstrip("\r\n")
    return printable(content.expandtabs()) + ("\n" if line.endswith("\n") else "")


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


# ---------------------------------------------------------------- traces


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
        lines.append(
            f"the last {count_text(timeline.left_out, 'span')} of this long run are missing"
        )
    print_outcome({"path": str(path), "bytes": len(content)}, lines, EXIT_OK, options)
    return EXIT_OK


COMMANDS: Final = {"runs": runs, "logs": logs, "trace": trace}
