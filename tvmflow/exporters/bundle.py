"""`bundle`: one file with library, signature and a manifest that is checked before anything is loaded."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, Final

from tvmflow.exporters._base import Built

SUFFIX: Final = ".tvmflow"

# The earliest time that a zip can hold; any fixed one makes equal content equal bytes.
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


def export(built: Built, output: Path) -> None:
    """A zip without compression: `manifest.json`, `signature.json`, `library.so`, in this order."""
    with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "manifest.json", _json(built.manifest))
        _add(archive, "signature.json", _json(built.signature))
        _add(archive, "library.so", built.library.read_bytes())


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.create_system = 3
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content)
