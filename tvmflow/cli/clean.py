"""`tvmflow clean`: a store without results, except those that are pinned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvmflow.cli.arguments import StoreOptions, with_disk_errors
from tvmflow.cli.options import flag
from tvmflow.cli.output import print_outcome
from tvmflow.core.errors import EXIT_FAILED, EXIT_OK, UsageError
from tvmflow.core.formatting import count_text, names_text, size_text
from tvmflow.core.project import shortest_path

if TYPE_CHECKING:
    from tvmflow.store.garbage_collection import Cleaning
    from tvmflow.store.local import LocalStore


class CleanOptions(StoreOptions):
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


@with_disk_errors
def clean(options: CleanOptions) -> int:
    from tvmflow.store.garbage_collection import clean_store

    store = options.store.locate()
    if not (options.yes or options.dry_run):
        preview = clean_store(store, ledger=options.ledger, dry_run=True)
        if not _confirm("\n".join(_format_cleaning(preview, store, options, done=False))):
            return EXIT_FAILED
    cleaning = clean_store(store, ledger=options.ledger, dry_run=options.dry_run)
    done = not options.dry_run
    value = {**cleaning._asdict(), "done": done}
    lines = _format_cleaning(cleaning, store, options, done=done)
    return print_outcome(value, lines, EXIT_OK, options)


def _confirm(preview: str) -> bool:
    """Show what would be removed and ask the user."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "clean asks before it removes anything, and there is no terminal here",
            fix="add --yes to remove, or --dry-run to see what would be removed",
        )
    sys.stderr.write(f"{preview}\nRemove? [y/N] ")
    sys.stderr.flush()
    agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not agreed:
        sys.stderr.write("nothing was removed\n")
    return agreed


def _format_cleaning(
    cleaning: Cleaning, store: LocalStore, options: CleanOptions, *, done: bool
) -> Iterator[str]:
    from tvmflow.store.inventory import size_below

    removed = "removed" if done else "would be removed"
    results = count_text(cleaning.results, "result")
    rest = cleaning.bytes - cleaning.trial_bytes
    yield f"{shortest_path(store.root)}: {results} {removed}, with downloads, logs and notes: {size_text(rest)}"
    if cleaning.pins:
        kept = count_text(cleaning.kept_results, "result")
        yield f"  kept: {kept}, pinned by {names_text(cleaning.pins)} ({size_text(cleaning.kept_bytes)})"
    if options.ledger:
        yield f"  measured trials {removed}: {size_text(cleaning.trial_bytes)}"
    else:
        yield f"  measured trials are kept ({size_text(size_below(Path(store.ledger)))})"


COMMANDS: Final = {"clean": clean}
