"""What `tvmflow run PIPELINE` says while it spreads a tuning budget."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tvmflow.commands.run import Running
from tvmflow.commands.words import say, say_json
from tvmflow.errors import EXIT_OK
from tvmflow.prepare import Prepared
from tvmflow.recipe import Retune
from tvmflow.report import latency_text
from tvmflow.retune import Standing, spread, up_to, with_standings
from tvmflow.values import Plan, StageSpec


def retune(args: argparse.Namespace, running: Running, prepared: Prepared, budget: Retune) -> Plan:
    """Tune in rounds; the plan with the trials that each recipe's target has had then."""
    specs = [spec for spec in prepared.plan.stages if spec.stage == "tune" and _can_be(spec)]

    def tune(spec: StageSpec) -> Mapping[str, Any] | None:
        if running.interrupted:
            return None
        report = running.run(up_to(prepared.plan, spec))
        if report.exit_code != EXIT_OK:
            return None
        return next(stage.facts for stage in report.stages if stage.stage_id == spec.id)

    def tell(standing: Standing) -> None:
        if args.json:
            told = {"event": "round", "stage_id": standing.spec.id, **standing._asdict()}
            del told["spec"]
            say_json(told)
        else:
            say(_line(standing))

    standings = spread(specs, budget, tune, tell)
    if not args.json:
        kept = "what was found is kept by `tvmflow lock`, or by these numbers as tune.trials"
        lines = [f"{_line(each)}; {each.trials} in all" for each in standings]
        say("spent on", *lines, kept)
    return with_standings(prepared.plan, standings)


def _can_be(spec: StageSpec) -> bool:
    """Whether there is anything to measure on, for a target that the recipe wants tuned."""
    return not spec.settings.get("why_not") and bool(spec.settings["tune"].get("repeat"))


def _line(standing: Standing) -> str:
    if standing.us is None:
        return f"  {standing.spec.id}: {standing.ended or 'had no round'}"
    how = f"{standing.bought:.3g} times as fast as untuned" if standing.bought > 1 else "no faster"
    end = f"; {standing.ended}" if standing.ended else ""
    return (
        f"  {standing.spec.id}: {standing.measured} trials in {standing.rounds} rounds, "
        f"{latency_text(standing.us / 1e6)} in its kernels ({how}, the last round {standing.gain:.1%}){end}"
    )
