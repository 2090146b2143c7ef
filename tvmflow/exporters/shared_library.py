"""`shared-library`: one self-contained file that TVM's runtime loads, weights inside."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tvmflow.exporters._base import Built

SUFFIX: Final = ".so"


def export(built: Built, output: Path) -> None:
    """The linked library as it is."""
    shutil.copyfile(built.library, output)
