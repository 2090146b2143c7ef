"""Exporters: the delivered forms of a built library, by their names in a recipe.

Imports only frontends and lower layers. To add an exporter, write a module with the shape of `exporter.Exporter`, or a
`Form` in a module's table, and add its line here.
"""

from __future__ import annotations

from typing import Final

from tvmflow.exporters import android, archives, bundle, c_library, cpp, tvm_libraries, web, wheel
from tvmflow.exporters.exporter import Exporter, PartitionedExporter

EXPORTERS: Final[dict[str, Exporter]] = {
    "android": android,
    "bundle": bundle,
    "c-library": c_library,
    "c-library-weights": c_library.WITH_WEIGHTS,
    "cpp": cpp,
    **tvm_libraries.EXPORTERS,
    web.NAME: web,
    "wheel": wheel,
    "xcframework": c_library.XCFRAMEWORK,
    # Last, because it contains the files of all others.
    "archive": archives,
}

PARTITIONED_EXPORTERS: Final[dict[str, PartitionedExporter]] = {
    "bundle": bundle,
    "cpp": cpp,
    "wheel": wheel,
    "archive": archives,
}
"""The exporters that write one delivery for a partitioned model; the others write files for each part."""
