"""`tvmflow plan`: what a run would do, and why."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Final

from tvmflow.cli.arguments import JSON_HELP, LockOptions, RecipeOptions, StoreOption, store_option
from tvmflow.cli.download_progress import DownloadLine
from tvmflow.cli.options import flag
from tvmflow.core.errors import EXIT_OK
from tvmflow.core.formatting import count_text, printable
from tvmflow.core.types import Decision
from tvmflow.engine.report import MAX_SHOWN
from tvmflow.engine.up_to_date import save_answer
from tvmflow.planning.decisions import evaluate_plan
from tvmflow.planning.prepare import prepare_run

_KINDS: Final = {"hit": "up to date", "run": "run", "wait": "may run"}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `tvmflow plan`."""

    store: StoreOption = store_option()
    recipes: RecipeOptions
    lock: LockOptions
    json: bool = flag(JSON_HELP)
    argv: tuple[str, ...]


def plan(options: PlanOptions) -> int:
    """Show which stages `run` would run, and why, without running them."""
    store = options.store.open()
    request = options.recipes.request(options.lock.find(options.recipes.recipes))
    prepared = prepare_run(request, store, DownloadLine())
    plan_state = evaluate_plan(prepared.plan, store)
    decisions = [plan_state.decisions[spec.id] for spec in prepared.plan.stages]
    if options.json:
        text = json.dumps({"stages": [decision._asdict() for decision in decisions]}) + "\n"
    else:
        text = "".join(f"{printable(line)}\n" for line in _format_decisions(decisions))
    sys.stdout.write(text)
    if all(decision.kind == "hit" for decision in decisions):
        save_answer(options.argv, text, prepared, plan_state)
    return EXIT_OK


def _format_decisions(decisions: list[Decision]) -> list[str]:
    lines = []
    if len(decisions) > MAX_SHOWN:
        # Nobody reads that many lines about stages that need nothing.
        shown = [decision for decision in decisions if decision.kind != "hit"]
        lines.append(f"up to date: {count_text(len(decisions) - len(shown), 'stage')}")
        decisions = shown
    width = max([len(decision.stage_id) for decision in decisions], default=0)
    return lines + [
        f"{decision.stage_id:<{width}}  {_KINDS[decision.kind]:<10}  {decision.reason}"
        for decision in decisions
    ]


COMMANDS: Final = {"plan": plan}
