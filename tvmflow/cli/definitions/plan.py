"""Options and help: `tvmflow plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

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

GRAPHS: Final = ("mermaid", "dot", "svg")
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


COMMANDS: Final = {"plan": PlanOptions}
