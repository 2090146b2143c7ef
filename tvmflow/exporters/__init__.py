"""Exporters: every form in which a built library can be delivered, the names under `outputs:` in a recipe.

Imports frontends and what is below it. To add an exporter, write one module with the shape of
`_base.Exporter` and its line here.
"""

from __future__ import annotations

from typing import Final

from tvmflow.exporters import (
    archive,
    bundle,
    c_library,
    c_library_weights,
    c_source,
    cpp,
    objects,
    params,
    shared_library,
    static_library,
    system_library,
    wheel,
)
from tvmflow.exporters.base import Exporter, PartitionedExporter

EXPORTERS: Final[dict[str, Exporter]] = {
    "bundle": bundle,
    "c-library": c_library,
    "c-library-weights": c_library_weights,
    "c-source": c_source,
    "cpp": cpp,
    "objects": objects,
    "params": params,
    "shared-library": shared_library,
    "static-library": static_library,
    "system-library": system_library,
    "wheel": wheel,
    # holds the files of all others, so it comes last
    "archive": archive,
}

PARTITIONED_EXPORTERS: Final[dict[str, PartitionedExporter]] = {
    "bundle": bundle,
    "cpp": cpp,
    "wheel": wheel,
    "archive": archive,
}
"""The exporters that hold a partitioned model as one; the others write files for each part."""
