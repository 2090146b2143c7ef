"""Every form in which a built library can be delivered: the names under `outputs:` in a recipe."""

from __future__ import annotations

from typing import Final

from tvmflow.exporters import (
    archive,
    bundle,
    c_source,
    cpp,
    objects,
    params,
    shared_library,
    static_library,
    system_library,
    wheel,
)
from tvmflow.exporters._base import Exporter, JoinedExporter

EXPORTERS: Final[dict[str, Exporter]] = {
    "bundle": bundle,
    "c-source": c_source,
    "cpp": cpp,
    "objects": objects,
    "params": params,
    "shared-library": shared_library,
    "static-library": static_library,
    "system-library": system_library,
    "wheel": wheel,
    # holds what the others have written, so it comes last
    "archive": archive,
}

OF_THE_WHOLE: Final[dict[str, JoinedExporter]] = {
    "bundle": bundle,
    "cpp": cpp,
    "wheel": wheel,
    "archive": archive,
}
"""Those that hold a model in parts together; of the others there is one for each part."""
