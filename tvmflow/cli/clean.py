"""`tvmflow clean`: an empty store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tvmflow.cli.arguments import StoreOption, store_option
from tvmflow.cli.options import flag
from tvmflow.cli.output import print_lines
from tvmflow.core.errors import EXIT_OK
from tvmflow.core.formatting import size_text
from tvmflow.store.garbage_collection import clean_store


@dataclass(frozen=True, kw_only=True)
class CleanOptions:
    """The options of `tvmflow clean`."""

    store: StoreOption = store_option()
    ledger: bool = flag("also remove all measured trials")


def clean(options: CleanOptions) -> int:
    """Remove all results from the store, and with --ledger the measured trials, too."""
    store = options.store.locate()
    freed = clean_store(store, ledger=options.ledger)
    kept = "" if options.ledger else "; measured trials are kept"
    print_lines(f"{store.root}: {size_text(freed)} removed{kept}")
    return EXIT_OK


COMMANDS: Final = {"clean": clean}
