"""What is in a bundle, for whatever machine it is."""

from __future__ import annotations

import json
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple

from tvmflow.errors import BundleError

WHOLE: Final = 1
"""The format with a library inside."""
IN_PARTS: Final = 2
"""The format with the bundles of a model's parts inside."""


class Unpacked(NamedTuple):
    """What is in a bundle: a library, or the bundles of the parts that the model was built in, in order."""

    manifest: dict[str, Any]
    signature: dict[str, Any]
    library: bytes
    parts: dict[str, Unpacked]


def unpack(path: str | Path) -> Unpacked:
    """The content of a bundle, for whatever machine it is. Raises BundleError."""
    try:
        return _unpacked(path, path)
    except FileNotFoundError:
        raise BundleError(f"there is no file {path}", fix="`tvmflow run RECIPE` makes it") from None
    except (zipfile.BadZipFile, LookupError, ValueError, TypeError, OSError) as error:
        raise BundleError(
            f"{path} is not a whole tvmflow bundle: {error}", fix="copy or build it again"
        ) from error


def _unpacked(path: str | Path, source: str | Path | BytesIO) -> Unpacked:
    with zipfile.ZipFile(source) as archive:
        if archive.infolist()[0].header_offset:
            # of a torn bundle, the index that is found last is that of a part inside
            raise zipfile.BadZipFile("its end is missing")
        manifest = json.loads(archive.read("manifest.json"))
        signature = json.loads(archive.read("signature.json"))
        if manifest.get("bundle") not in (WHOLE, IN_PARTS):
            raise BundleError(
                f"{path} has bundle format {manifest.get('bundle')}, this tvmflow reads {WHOLE} and {IN_PARTS}",
                fix="load it with the tvmflow that made it",
            )
        if manifest["bundle"] == WHOLE:
            library = archive.read(manifest.get("library", "library.so"))
            return Unpacked(manifest, signature, library, {})
        parts = {
            each["name"]: _unpacked(path, BytesIO(archive.read(each["file"])))
            for each in manifest["parts"]
        }
        return Unpacked(manifest, signature, b"", parts)
