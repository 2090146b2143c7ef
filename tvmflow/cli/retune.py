"""The retuning of a pipeline with `retune`: a budget of trials for all of its recipes and targets."""

from __future__ import annotations

from collections.abc import Callable

from tvmflow.cli.arguments import OutputOptions
from tvmflow.cli.output import print_json, print_lines, print_notes
from tvmflow.core.errors import EXIT_OK
from tvmflow.core.formatting import count_text, latency_text
from tvmflow.core.types import Plan, StageSpec
from tvmflow.engine.report import RunReport
from tvmflow.recipe import Retune
from tvmflow.release.retune import (
    TuneFacts,
    TuningProgress,
    select_stage,
    spend_budget,
    with_spent_trials,
)


def retune(
    plan: Plan,
    budget: Retune,
    run_plan: Callable[[Plan], RunReport | None],
    output: OutputOptions,
) -> Plan:
    """Tune in rounds and return the plan with the trials that each recipe and target was given.

    Args:
        plan: A plan with `tune` stages.
        budget: How many trials or minutes are spent, and in which rounds.
        run_plan: Runs a plan; None when the user has interrupted.
        output: How the rounds are shown.
    """

    def tune(spec: StageSpec) -> TuneFacts | None:
        report = run_plan(select_stage(plan, spec))
        if report is None or report.exit_code != EXIT_OK:
            return None
        facts = next(stage.facts for stage in report.stages if stage.stage_id == spec.id)
        return TuneFacts.from_json(facts)

    def show_round(progress: TuningProgress) -> None:
        if output.json:
            event = {"event": "round", "stage_id": progress.spec.id, **progress._asdict()}
            del event["spec"]
            print_json(event)
        elif not output.quiet:
            print_lines(_format_progress(progress))

    specs = [spec for spec in plan.stages if spec.traits.uses_ledger and _is_tunable(spec)]
    rows = spend_budget(specs, budget, tune, show_round)
    if not output.json:
        print_notes(
            output,
            "trials spent:",
            *(f"{_format_progress(row)}; {row.trials} in total" for row in rows),
            "to keep this result, run `tvmflow lock`, or write these totals into the recipes as tune.trials",
        )
    return with_spent_trials(plan, rows)


def _is_tunable(spec: StageSpec) -> bool:
    """Return whether the recipe wants this target tuned and there is a device to measure on."""
    return not spec.settings.get("unmeasurable_reason") and bool(
        spec.settings["tune"].get("repeat")
    )


def _format_progress(progress: TuningProgress) -> str:
    if progress.estimated_us is None:
        return f"  {progress.spec.id}: {progress.stop_reason or 'no round'}"
    speedup = progress.speedup
    total = f"estimated speedup over untuned {speedup:.3g}" if speedup > 1 else "no speedup"
    end = f"; {progress.stop_reason}" if progress.stop_reason else ""
    return (
        f"  {progress.spec.id}: {count_text(progress.measured, 'trial')} in "
        f"{count_text(progress.rounds, 'round')}, {latency_text(progress.estimated_us / 1e6)} in "
        f"kernels ({total}, last round {progress.gain or 0.0:.1%}){end}"
    )
