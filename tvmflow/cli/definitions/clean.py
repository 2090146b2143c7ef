"""Options and help: `tvmflow clean`."""

from __future__ import annotations

from typing import Final

from tvmflow.cli.arguments import JSON_HELP, StoreOption, store_option
from tvmflow.cli.options import Options, flag


class CleanOptions(Options):
    """Remove stored results, except those that are pinned.

    Removed are also downloads, logs and notes. What lock files and releases need stays (see
    `tvmflow cache pins`), and so do measured trials. To remove only what is not used any more, see
    `tvmflow cache gc`.

    Examples:
        # what would be removed, and how much that is
        tvmflow clean --dry-run
        # remove it, without being asked
        tvmflow clean --yes
    """

    yes: bool = flag("remove without asking")
    dry_run: bool = flag("only show what would be removed")
    ledger: bool = flag("also remove all measured trials")
    store: StoreOption = store_option()
    json: bool = flag(JSON_HELP)
    verbosity: int


COMMANDS: Final = {"clean": CleanOptions}
