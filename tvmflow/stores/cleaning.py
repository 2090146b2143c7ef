"""Empties a store: results always, measured trials only when asked, because those cost hours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tvmflow.stores.contents import existing
from tvmflow.stores.local import LocalStore

_RESULTS: Final = "actions cas last work logs stats facts plans delivered downloads spool tmp damaged runs".split()


def clean_store(store: LocalStore, *, ledger: bool) -> int:
    """Remove all results; the bytes freed. Raises StoreError while a run uses the store."""
    existing(store)
    freed = 0
    with store.alone():
        for name in [*_RESULTS, *(["ledger"] if ledger else [])]:
            folder = Path(store.root, name)
            freed += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder, ignore_errors=True)
    return freed
