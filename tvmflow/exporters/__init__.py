"""Every form in which a built library can be delivered: the names under `outputs:` in a recipe."""

from __future__ import annotations

from typing import Final

from tvmflow.exporters import bundle, shared_library
from tvmflow.exporters._base import Exporter

EXPORTERS: Final[dict[str, Exporter]] = {
    "bundle": bundle,
    "shared-library": shared_library,
}
