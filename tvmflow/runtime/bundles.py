"""Bundles: reading the content of a `.tvmflow` file, whatever machine it is for."""

from __future__ import annotations

import json
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Final, NamedTuple

from tvmflow.core.errors import BundleError
from tvmflow.core.types import Json

LIBRARY_FORMAT: Final = 1
"""The format of a bundle with a library inside."""
PARTITIONED_FORMAT: Final = 2
"""The format of a bundle with the bundles of a model's parts inside."""


class Bundle(NamedTuple):
    """The content of a bundle: a library, or the bundles of the model's parts in order, by name."""

    manifest: dict[str, Json]
    signature: dict[str, Json]
    library: bytes
    parts: dict[str, Bundle]

    @property
    def library_name(self) -> str:
        """The library's file name, by whose suffix a loader goes."""
        return str(self.manifest.get("library", "library.so"))


def read_bundle(path: str | Path) -> Bundle:
    """Return the content of a bundle.

    Raises:
        BundleError: when the file is missing, damaged or of another format.
    """
    try:
        return _read(path, path)
    except FileNotFoundError:
        reason, fix = f"there is no file {path}", "`tvmflow run RECIPE` builds it"
        raise BundleError(reason, fix=fix) from None
    except (zipfile.BadZipFile, LookupError, ValueError, TypeError, OSError) as error:
        raise damaged_file_error(path, "a complete tvmflow bundle", error) from error


def damaged_file_error(path: str | Path, kind: str, reason: object) -> BundleError:
    """Return the error for a file that should be of a kind and is not."""
    return BundleError(f"{path} is not {kind}: {reason}", fix="copy or build it again")


def _read(path: str | Path, source: str | Path | BytesIO) -> Bundle:
    with zipfile.ZipFile(source) as archive:
        if archive.infolist()[0].header_offset:
            # a truncated bundle ends with the index of a part inside it
            raise zipfile.BadZipFile("its end is missing")
        manifest = json.loads(archive.read("manifest.json"))
        signature = json.loads(archive.read("signature.json"))
        if manifest.get("bundle") not in (LIBRARY_FORMAT, PARTITIONED_FORMAT):
            raise BundleError(
                f"{path} has bundle format {manifest.get('bundle')}, "
                f"this tvmflow reads {LIBRARY_FORMAT} and {PARTITIONED_FORMAT}",
                fix="load it with the tvmflow that made it",
            )
        bundle = Bundle(manifest, signature, b"", {})
        if manifest["bundle"] == LIBRARY_FORMAT:
            return bundle._replace(library=archive.read(bundle.library_name))
        parts = {
            part["name"]: _read(path, BytesIO(archive.read(part["file"])))
            for part in manifest["parts"]
        }
        return bundle._replace(parts=parts)
