"""Options and help: `tvmflow run`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tvmflow.cli.arguments import (
    ExecutionOptions,
    LockOptions,
    OutputOptions,
    RecipeOptions,
    StoreOption,
    force_option,
    store_option,
)
from tvmflow.cli.options import Options, flag, option


class RunOptions(Options):
    """Bring recipes up to date and deliver their libraries.

    What is up to date is not run again. Verified files are in dist/RECIPE/TARGET/.

    Examples:
        # everything of one recipe
        tvmflow run recipes/digits.yaml
        # all recipes, two stages at a time; go on after a failure
        tvmflow run recipes/*.yaml --jobs 2 --keep-going
        # one target, without tuning
        tvmflow run net.yaml --target cortex-a72 --pipeline compile
        # exactly what the lock file records, or nothing
        tvmflow run net.yaml --locked
    """

    store: StoreOption = store_option()
    recipes: RecipeOptions
    execution: ExecutionOptions
    lock: LockOptions
    output: OutputOptions
    dump_ir: Path | None = option(
        "DIR",
        "then lower the models once more, also those that are up to date, and write the IR after each pass to DIR",
    )
    check_reproducible: bool = flag(
        "then build everything twice more, each time from an empty store, and report the first difference"
    )
    dry_run: bool = flag(
        "show what would run and what it would cost, as `plan` does, and run nothing"
    )
    best_so_far: bool = flag(
        "search no further: deliver the library of the best trials that earlier runs measured"
    )
    force: tuple[str, ...] = force_option()
    summary: Path | None = option(
        "FILE", "append a summary in Markdown to FILE, such as $GITHUB_STEP_SUMMARY"
    )
    junit: Path | None = option(
        "FILE", "write a test case for each stage and gate to FILE, as JUnit XML"
    )
    argv: tuple[str, ...]


COMMANDS: Final = {"run": RunOptions}
