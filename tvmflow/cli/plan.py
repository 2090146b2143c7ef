"""`tvmflow plan`: what a run would do, and why."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import (
    JSON_HELP,
    DistOption,
    LockOptions,
    RecipeOptions,
    StoreOption,
    dist_option,
    force_option,
    store_option,
)
from tvmflow.cli.options import Options, flag, option
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK, UsageError
from tvmflow.core.formatting import count_text, names_text, printable

if TYPE_CHECKING:
    from tvmflow.core.types import Json, Plan
    from tvmflow.planning.decisions import PlanState
    from tvmflow.planning.request import RunRequest
    from tvmflow.store.local import LocalStore


GRAPHS: Final = ("mermaid", "dot", "svg")
"""The formats of a plan's graph."""
"""The formats of a plan's graph."""


class PlanOptions(Options):
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

    store: StoreOption = store_option()
    recipes: RecipeOptions
    lock: LockOptions
    check: bool = flag("end with exit code 1 if a stage would run or a file would be delivered")
    force: tuple[str, ...] = force_option()
    dist: DistOption = dist_option()
    graph: str | None = option(
        None, "show the graph of the stages with their states instead", choices=GRAPHS
    )
    output: Path | None = option("FILE", "write to FILE what would be shown")
    json: bool = flag(JSON_HELP)
    argv: tuple[str, ...]


_SHOWN_PATHS: Final = 3


def plan(options: PlanOptions) -> int:
    from tvmflow.cli.output import check_output_file

    if options.graph and options.json:
        raise UsageError(
            "--graph and --json cannot be combined",
            fix="use --json alone: its stages have the edges of the graph as `needs`",
        )
    check_output_file(options.output, options.recipes.recipes)
    store = options.store.open_to_read()
    lock = options.lock.find(options.recipes.recipes)
    request = options.recipes.request(lock, options.force)
    is_up_to_date = show_plan(
        request,
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
    """Show what a run would do, and return whether that is nothing.

    Args:
        request: What is to be planned.
        store: Where the results are.
        argv: The command line, whose answer is saved if everything is up to date.
        dist: The folder for delivered files.
        as_json: Show it as one line of JSON.
        graph: Show its graph in this format.
        output: Write it to this file.
    """
    import json

    from tvmflow.cli.download_progress import DownloadLine
    from tvmflow.cli.output import write_file
    from tvmflow.engine.estimates import estimate_stages, find_hits_with_new_weights
    from tvmflow.engine.plan_text import format_plan
    from tvmflow.engine.stage_graph import make_graph, to_dot, to_mermaid, to_svg
    from tvmflow.engine.up_to_date import list_delivered, list_files_to_write, save_answer
    from tvmflow.planning.checks import describe_runtimes
    from tvmflow.planning.decisions import evaluate_plan
    from tvmflow.planning.prepare import prepare_run

    prepared = prepare_run(request, store, DownloadLine())
    state = evaluate_plan(prepared.plan, store, prepared.forced)
    unwritten = list_files_to_write(prepared.plan, state, dist)
    is_up_to_date = not unwritten and all(
        decision.kind == "hit" for decision in state.decisions.values()
    )
    if graph is not None:
        draw = {"mermaid": to_mermaid, "dot": to_dot, "svg": to_svg}[graph]
        text = draw(make_graph(prepared.plan, state.decisions))
    elif as_json:
        text = json.dumps({**_to_json(prepared.plan, state), "deliver": unwritten}) + "\n"
    else:
        decisions = [state.decisions[spec.id] for spec in prepared.plan.stages]
        kept = find_hits_with_new_weights(prepared.plan, state)
        lines = format_plan(decisions, estimate_stages(prepared.plan, state), store.root, kept)
        lines += describe_runtimes(prepared.recipes, prepared.plan, state.artifacts)
        lines += _describe_delivery(unwritten)
        text = "".join(f"{printable(line)}\n" for line in lines)
    if output is not None:
        write_file(output, text)
        return is_up_to_date
    sys.stdout.write(text)
    if is_up_to_date:
        save_answer(argv, text, prepared, state, list_delivered(prepared.plan, state, dist))
    return is_up_to_date


def _describe_delivery(paths: Sequence[str]) -> list[str]:
    """Return the line about files that are missing or not as the results that are there."""
    if not paths:
        return []
    names = names_text(paths, _SHOWN_PATHS)
    return [f"to deliver: {count_text(len(paths), 'file')} missing or changed: {names}"]


def _to_json(plan: Plan, state: PlanState) -> Json:
    from tvmflow.core.codec import to_json
    from tvmflow.engine.estimates import add_up, estimate_stages, find_hits_with_new_weights

    estimates, kept = estimate_stages(plan, state), find_hits_with_new_weights(plan, state)
    stages = [
        {
            **state.decisions[spec.id]._asdict(),
            "needs": [need.stage_id for need in spec.needs],
            "estimate": estimates[spec.id].to_json() if spec.id in estimates else None,
            "kept_with_new_weights": spec.id in kept,
        }
        for spec in plan.stages
    ]
    fewer = [estimate for stage_id, estimate in estimates.items() if stage_id not in kept]
    return {
        "stages": stages,
        "total": to_json(add_up(estimates.values())),
        "total_with_new_weights": to_json(add_up(fewer)) if kept else None,
    }


COMMANDS: Final = {"plan": plan}
