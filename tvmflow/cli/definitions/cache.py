"""Options and help: `tvmflow cache`."""

from __future__ import annotations

from typing import Final

from tvmflow.cli.arguments import (
    JSON_HELP,
    RecipeOptions,
    RemoteCacheOptions,
    StoreOption,
    store_option,
)
from tvmflow.cli.definitions.records import CHECK_HELP
from tvmflow.cli.options import Options, age, argument, flag, option, size


class CacheOptions(Options):
    """The options of all commands that show or mend a store."""

    store: StoreOption = store_option()
    json: bool = flag(JSON_HELP)
    verbosity: int


class StatOptions(CacheOptions):
    """Show what the store holds, for which recipes, and how much `gc` would free.

    Examples:
        tvmflow cache stat
        tvmflow cache stat --store /fast/cache --json
    """


class VerifyOptions(CacheOptions):
    """Read everything and set damaged files aside.

    The exit code is 1 when anything was damaged.

    Examples:
        tvmflow cache verify
    """


class RepairOptions(CacheOptions):
    """Put right what `verify` finds, deleting nothing.

    The exit code is 1 when something is left to do.

    Examples:
        tvmflow cache repair
    """


class GcOptions(Options):
    """Garbage-collect unused results, also while runs are active.

    By default, results are removed that nothing needs and that were unused for 30 days. What recipes,
    lock files and releases need stays: see `tvmflow cache pins`.

    Examples:
        # what would be removed, and why
        tvmflow cache gc --dry-run
        # everything that nothing needs
        tvmflow cache gc --max-age 0
        # down to a size
        tvmflow cache gc --max-size 20GB
    """

    max_age: float | None = option(
        "AGE",
        "remove results that nothing needs and that were unused for this long: 30d, 12h, 2w, 0",
        type=age,
    )
    max_size: int | None = option(
        "SIZE",
        "remove results that nothing needs, the longest unused first, down to this size: 20GB",
        type=size,
    )
    dry_run: bool = flag("only show what would be removed, and why")
    store: StoreOption = store_option()
    json: bool = flag(JSON_HELP)
    verbosity: int


class PinsOptions(CacheOptions):
    """List the pins for which `gc` keeps results: recipes, lock files and releases.

    Examples:
        tvmflow cache pins
    """


class UnpinOptions(Options):
    """Remove pins, so that `gc` may remove their results.

    The next run of a recipe pins it again.

    Examples:
        tvmflow cache unpin recipe:net
    """

    names: tuple[str, ...] = argument("NAME", "a pin, as `cache pins` lists it", "+")
    store: StoreOption = store_option()
    json: bool = flag(JSON_HELP)
    verbosity: int


class OptionalRecipeOptions(RecipeOptions):
    """The recipes, if a command is about some."""

    recipes: tuple[str, ...] = argument("RECIPE", "a recipe, or a pipeline that names recipes", "*")


class PushOptions(Options):
    """Upload results to the remote cache: of recipes, all, or what earlier runs could not upload.

    Examples:
        # what earlier runs could not upload
        tvmflow cache push --remote https://cache.example.com
        # what two recipes need
        tvmflow cache push a.yaml b.yaml --remote s3://bucket/tvmflow
    """

    recipes: OptionalRecipeOptions
    store: StoreOption = store_option()
    remote: RemoteCacheOptions
    json: bool = flag(JSON_HELP)
    all: bool = flag("upload every result in the store")
    ledger: bool = flag("upload all measured trials, too")
    verbosity: int


class PullOptions(Options):
    """Fetch what recipes need from the remote cache, without running anything.

    Examples:
        tvmflow cache pull net.yaml --remote https://cache.example.com
    """

    recipes: RecipeOptions
    store: StoreOption = store_option()
    remote: RemoteCacheOptions
    json: bool = flag(JSON_HELP)
    ledger: bool = flag("fetch the trials of machines like this one, too")
    check: bool = flag(f"with --ledger, {CHECK_HELP}")
    verbosity: int


COMMANDS: Final = {
    "cache": {
        "stat": StatOptions,
        "verify": VerifyOptions,
        "repair": RepairOptions,
        "gc": GcOptions,
        "pins": PinsOptions,
        "unpin": UnpinOptions,
        "push": PushOptions,
        "pull": PullOptions,
    }
}
