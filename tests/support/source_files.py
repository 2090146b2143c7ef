"""The files of models in a store that is empty, for tests of frontends."""

from __future__ import annotations

import tempfile

from tvmflow.store.local import LocalStore
from tvmflow.store.source_files import SourceFiles


def empty_source_files() -> SourceFiles:
    """Return what resolves the files of models, where nothing was downloaded before."""
    return SourceFiles(LocalStore(f"{tempfile.mkdtemp()}/store"))
