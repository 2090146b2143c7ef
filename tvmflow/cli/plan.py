"""`tvmflow plan` and `explain`: the stages of a run, why they run, and a result's dependencies."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import (
    RECIPE_SUFFIXES,
    DistOption,
    LockOptions,
    RecipeOptions,
    StoreOptions,
    dist_option,
    force_option,
    pipeline_option,
)
from tvmflow.cli.options import argument, flag, option
from tvmflow.cli.output import check_output_file, print_result, write_file
from tvmflow.core.codec import to_json
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK, UsageError
from tvmflow.core.formatting import count_text, duration_text, find_width, names_text, printable
from tvmflow.core.text import table

if TYPE_CHECKING:
    from tvmflow.core.types import Json, StageSpec
    from tvmflow.engine.run_records import RunRecord
    from tvmflow.engine.timeline import CriticalChain
    from tvmflow.planning.decisions import PlanState
    from tvmflow.planning.prepare import RunRequest
    from tvmflow.store.local import LocalStore

GRAPHS: Final = ("mermaid", "dot", "svg")
"""The formats of a plan's graph."""


class PlanOptions(StoreOptions):
    """Show which stages `run` would run, and why, without running them.

    Examples:
        tvmflow plan recipes/digits.yaml
        # only up to one stage, for one target
        tvmflow plan net.yaml --target host --until build
        # a picture of the stages
        tvmflow plan net.yaml --graph svg --output plan.svg
        # for programs
        tvmflow plan net.yaml --json
    """

    recipes: RecipeOptions
    lock: LockOptions
    check: bool = flag("end with exit code 1 if a stage would run or a file would be delivered")
    force: tuple[str, ...] = force_option()
    dist: DistOption = dist_option()
    graph: str | None = option(
        None, "show a graph of the stages and their states instead of a list", choices=GRAPHS
    )
    output: Path | None = option("FILE", "write the output to FILE")
    argv: tuple[str, ...]


_SHOWN_PATHS: Final = 3


def plan(options: PlanOptions) -> int:
    if options.graph and options.json:
        fix = "use only --json: its stages have the edges of the graph as `needs`"
        raise UsageError("--graph and --json cannot be combined", fix=fix)
    recipes = options.recipes
    check_output_file(options.output, recipes.recipes)
    store = options.store.open_to_read()
    is_up_to_date = show_plan(
        recipes.request(options.lock.find(recipes.recipes), options.force),
        store,
        argv=options.argv,
        dist=options.dist.locate(),
        as_json=options.json,
        graph=options.graph,
        output=options.output,
    )
    return EXIT_OK if is_up_to_date or not options.check else EXIT_FAILED


def show_plan(
    request: RunRequest,
    store: LocalStore,
    *,
    argv: Sequence[str],
    dist: str,
    as_json: bool,
    graph: str | None = None,
    output: Path | None = None,
) -> bool:
    """Show the stages that a run would execute; if there are none, cache the answer and return True."""
    from tvmflow.engine.plan_text import (
        describe_plan,
        estimate_stages,
        find_hits_with_new_weights,
        format_plan,
    )
    from tvmflow.engine.progress import DownloadLine
    from tvmflow.engine.stage_graph import make_graph, to_dot, to_mermaid, to_svg
    from tvmflow.engine.up_to_date import list_delivered, list_files_to_write, save_answer
    from tvmflow.planning.checks import describe_runtimes
    from tvmflow.planning.decisions import evaluate_plan
    from tvmflow.planning.prepare import prepare_run

    prepared = prepare_run(request, store, DownloadLine())
    state = evaluate_plan(prepared.plan, store, prepared.forced)
    unwritten = list_files_to_write(prepared.plan, state, dist)
    is_up_to_date = not unwritten and {one.kind for one in state.decisions.values()} <= {"hit"}
    if graph is not None:
        draw = {"mermaid": to_mermaid, "dot": to_dot, "svg": to_svg}[graph]
        text = draw(make_graph(prepared.plan, state.decisions))
    elif as_json:
        text = json.dumps(to_json({**describe_plan(prepared.plan, state), "deliver": unwritten}))
        text += "\n"
    else:
        decisions = [state.decisions[spec.id] for spec in prepared.plan.stages]
        kept = find_hits_with_new_weights(prepared.plan, state)
        lines = format_plan(decisions, estimate_stages(prepared.plan, state), store.root, kept)
        lines += describe_runtimes(prepared.recipes, prepared.plan, state.artifacts)
        if unwritten:
            count, names = count_text(len(unwritten), "file"), names_text(unwritten, _SHOWN_PATHS)
            lines.append(f"to deliver: {count} missing or changed: {names}")
        text = "".join(f"{printable(line)}\n" for line in lines)
    if output is not None:
        write_file(output, text)
        return is_up_to_date
    sys.stdout.write(text)
    if is_up_to_date:
        save_answer(argv, text, prepared, state, list_delivered(prepared.plan, state, dist))
    return is_up_to_date


# ---------------------------------------------------------------- tvmflow explain


class ExplainOptions(StoreOptions):
    """Show why a stage must run or not, and the dependencies of its result.

    Examples:
        # the stage for one target
        tvmflow explain net.yaml tune/host
        # for all targets; for `build`, also the schedule of each kernel
        tvmflow explain net.yaml build
        # all stages
        tvmflow explain net.yaml
        # the critical path of the last run, and of the last run of a recipe
        tvmflow explain --critical
        tvmflow explain net.yaml --critical
    """

    recipe: str | None = argument(
        "RECIPE",
        "the recipe; with --critical a run (see `tvmflow runs`) or the last run of a recipe",
        "?",
    )
    stage: str | None = argument("STAGE[/TARGET]", "the stage, or RECIPE:STAGE/TARGET", "?")
    pipeline: str | None = pipeline_option()
    critical: bool = flag(
        "show the critical path of a run, and how much faster it would be if a stage took no time"
    )


def explain(options: ExplainOptions) -> int:
    from tvmflow.engine.progress import DownloadLine
    from tvmflow.planning.decisions import evaluate_plan
    from tvmflow.planning.plan import find_stages
    from tvmflow.planning.prepare import RunRequest, prepare_run

    if options.critical:
        return _explain_length(options)
    if options.recipe is None:
        fix = "name the recipe of the stage; `tvmflow explain --critical` is about the last run"
        raise UsageError("explain: no recipe is named", fix=fix)
    store = options.store.open_to_read()
    request = RunRequest((options.recipe,), options.pipeline)
    plan = prepare_run(request, store, DownloadLine()).plan
    plan_state = evaluate_plan(plan, store)
    several = len({spec.recipe for spec in plan.stages}) > 1
    specs = find_stages(plan, options.stage) if options.stage else plan.stages
    explained = [_explain_stage(spec, plan_state, store, with_recipe=several) for spec in specs]
    lines = "\n".join(text for _, text in explained).split("\n")
    return print_result({"stages": [value for value, _ in explained]}, lines, options)


def _explain_stage(
    spec: StageSpec, state: PlanState, store: LocalStore, *, with_recipe: bool
) -> tuple[dict[str, Json], str]:
    from tvmflow.engine.plan_text import explain_stage
    from tvmflow.store.local import find_failure

    key, decision = state.keys.get(spec.id), state.decisions[spec.id]
    artifact = store.find(key.digest) if key else None
    record = store.record(key.digest) if key else None
    origin = record.origin.text if record and record.origin else ""
    facts, failure = artifact and artifact.facts, find_failure(store, spec.id)
    value = {
        **decision._asdict(),
        "key": key and key.digest,
        "depends_on": key and key.preimage,
        "facts": facts,
        "origin": origin or None,
        "failure": failure,
    }
    return value, explain_stage(
        decision, key, facts, with_recipe=with_recipe, origin=origin, failure=failure
    )


def _explain_length(options: ExplainOptions) -> int:
    from tvmflow.cli.report import find_run_of
    from tvmflow.engine.run_records import LATEST, read_run
    from tvmflow.engine.timeline import find_critical_chain, read_timeline

    if options.stage is not None:
        raise UsageError(
            "--critical is about all stages of a run", fix=f"leave {options.stage!r} out"
        )
    store, name = options.store.locate(), options.recipe or LATEST
    is_recipe = Path(name).suffix in RECIPE_SUFFIXES
    run = find_run_of(Path(name), store) if is_recipe else read_run(store, name)
    chain = find_critical_chain(read_timeline(run.timeline, run.id), run.seconds)
    value = {"run": run.id, "seconds": run.seconds, **chain._asdict()}
    return print_result(value, _format_chain(chain, run), options)


def _format_chain(chain: CriticalChain, run: RunRecord) -> Iterator[str]:
    times = (run.seconds, chain.before_s, chain.stages_s, chain.after_s, chain.at_best_s)
    took, before, stages, after, at_best = map(duration_text, times)
    workers = count_text(chain.jobs, "worker")
    if not chain.links:
        yield f"run {run.id} took {took}; no stage was executed"
        return
    yield f"run {run.id} took {took}: {before} before its stages, {stages} for them with {workers}, {after} after them"
    rows = [
        {
            "stage": link.stage_id,
            "took": duration_text(link.seconds),
            "saves": duration_text(link.saves_s),
            "saves at best": duration_text(link.saves_at_best_s),
            "began": f"when {link.cause} {'freed a worker' if link.waited_for_worker else 'had ended'}"
            if link.cause
            else "at once",
        }
        for link in chain.links
    ]
    right = ("took", "saves", "saves at best")
    yield from table(rows, right=right, expendable=("began",), width=find_width())
    yield (
        "saves: how much shorter the stages would be if this one cost nothing, with "
        f"{workers}; at best: with a worker for each"
    )
    yield f"with a worker for each, the stages would take {at_best}; `--jobs N` runs N at a time"


COMMANDS: Final = {"plan": plan, "explain": explain}
