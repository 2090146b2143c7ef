"""Options and help: `tvmflow lock`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.cli.arguments import (
    JSON_HELP,
    ExecutionOptions,
    OutputOptions,
    RecipeOptions,
    StoreOption,
    store_option,
)
from tvmflow.cli.options import Options, argument, flag, option


class LockCommandOptions(Options):
    """Run recipes, and record inputs and outputs in a lock file.

    Examples:
        # writes net.lock.yaml
        tvmflow lock net.yaml
        # then, on any machine: the same bytes, or an error
        tvmflow run net.yaml --locked
        # after an upgrade: the same schedules, all else as it is now
        tvmflow lock net.yaml --update
    """

    store: StoreOption = store_option()
    recipes: RecipeOptions
    execution: ExecutionOptions
    output: OutputOptions
    lock: Path | None = option(
        "FILE", "the lock file to write (beside the recipe: RECIPE.lock.yaml)"
    )
    update: bool = flag(
        "search nothing: keep targets and schedules of the lock file, and lock all else as it is now"
    )
    argv: tuple[str, ...]


class DiffOptions(Options):
    """Show what changed from one lock file to another.

    The exit code is 1 when anything did.

    Examples:
        git show HEAD~1:net.lock.yaml > /tmp/before.yaml
        tvmflow diff /tmp/before.yaml net.lock.yaml
    """

    before: Path = argument("A", "a lock file")
    after: Path = argument("B", "a later lock file")
    json: bool = flag(JSON_HELP)


COMMANDS: Final = {"lock": LockCommandOptions, "diff": DiffOptions}
