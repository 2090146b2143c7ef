"""Exporters: every form in which a built library can be delivered, by its name in a recipe.

Imports frontends and the layers below. To add an exporter, write one module with the shape of
`exporter.Exporter`, or a `Form` in the table of a module, and its line here.
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
    # it contains the files of all others, so it comes last
    "archive": archives,
}

PARTITIONED_EXPORTERS: Final[dict[str, PartitionedExporter]] = {
    "bundle": bundle,
    "cpp": cpp,
    "wheel": wheel,
    "archive": archives,
}
"""The exporters with one file for a partitioned model; the others write files for each part."""
