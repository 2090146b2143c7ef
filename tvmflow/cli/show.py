"""`tvmflow show`: all that is known of one thing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from tvmflow.cli.definitions.show import ShowRunOptions
from tvmflow.cli.output import print_result
from tvmflow.cli.show_kernels import show_kernel, show_kernels
from tvmflow.core.errors import EXIT_OK
from tvmflow.core.formatting import duration_text
from tvmflow.core.generated_text import shell_word
from tvmflow.core.project import shortest_path
from tvmflow.core.terminal import find_width
from tvmflow.engine.report import STOPPED
from tvmflow.engine.run_records import LATEST, RunRecord, read_run
from tvmflow.engine.summary import summary

_SHOWN_COMMIT: Final = 12


def show_run(options: ShowRunOptions) -> int:
    """Show what a run was asked for, and what each of its stages did and said."""
    run = read_run(options.store.locate(), options.run_id or LATEST)
    print_result(run.to_json(), _format_run(run), as_json=options.json)
    return EXIT_OK


def _format_run(run: RunRecord) -> Iterator[str]:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began_s))
    machine = (
        f"{run.machine.name}: {run.machine.cpu}, {run.machine.cpus} CPUs, {run.machine.platform}"
    )
    yield f"run {run.id}"
    fields = {
        "command": " ".join(map(shell_word, ["tvmflow", *run.argv])),
        "folder": run.folder,
        "began": f"{began}, took {duration_text(run.seconds)}",
        "ended": run.message if run.end == "stopped" else _end_text(run),
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


def _end_text(run: RunRecord) -> str:
    return f"exit code {run.exit_code}" + (f": {run.message}" if run.message else "")


COMMANDS: Final = {"show": {"run": show_run, "kernels": show_kernels, "kernel": show_kernel}}
