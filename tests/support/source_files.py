"""The files of models in a store that is empty, for tests of frontends."""

from __future__ import annotations

from tvmflow.store.local import LocalStore
from tvmflow.store.source_files import SourceFiles


def empty_source_files() -> SourceFiles:
    """Return what resolves the files of models, where nothing was downloaded before."""
    # Files with a path need nothing of a store, so that this one is never created.
    return SourceFiles(LocalStore("no-store"))
