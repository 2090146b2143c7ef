"""What the installed packages say of themselves: their licenses, and their wheels.

These are the wheels that they were installed from.
"""

from __future__ import annotations

import json
from email.parser import HeaderParser
from pathlib import Path
from typing import Final

from tvmflow.core import packages
from tvmflow.core.bill_of_materials import license_expression, stated_license_fields
from tvmflow.core.documents import get_field
from tvmflow.core.errors import EnvironmentProblem
from tvmflow.core.types import Json
from tvmflow.provenance.lineage import Tool

# What packages wrote before metadata had expressions, where it means one license.
_SPDX: Final = {
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license v2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd 2-clause license": "BSD-2-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
_CLASSIFIER: Final = "License ::"


def find_license(tool: Tool) -> dict[str, Json]:
    """Return a package's license as an SPDX expression, or by the name that its metadata has.

    Nothing where the metadata names none, or another build of the package is installed now.
    """
    folder = _metadata_folder(tool)
    if folder is None:
        return {}
    try:
        text = (folder / "METADATA").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    metadata = HeaderParser().parsestr(text)
    classifiers = [
        classifier.rpartition(" :: ")[2]
        for classifier in metadata.get_all("Classifier", [])
        if classifier.startswith(_CLASSIFIER)
    ]
    # Some packages put the whole text of the license into the field.
    text = str(metadata.get("License", "")).strip()
    names = [str(metadata.get("License-Expression", "")), *([] if "\n" in text else [text])]
    stated = [_SPDX.get(name.lower(), name) for name in (*names, *classifiers) if name]
    # A name that is no expression may mean several licenses.
    return stated_license_fields(next(filter(license_expression, stated), next(iter(stated), "")))


def wheel_digest(tool: Tool) -> str:
    """Return the sha256 (hex) of the archive that a package was installed from.

    It is empty where that is not known.

    pip notes it for an archive that was named by its file or URL, and not for one from an index.
    """
    folder = _metadata_folder(tool)
    if folder is None:
        return ""
    try:
        note = json.loads((folder / "direct_url.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return get_field(note, "archive_info", "hashes", "sha256", of=str)


def _metadata_folder(tool: Tool) -> Path | None:
    """Return the `.dist-info` folder of a package, if the installed build is the one that was used."""
    try:
        if packages.identity(tool.name) != f"{tool.version}+{tool.record}":
            return None
        record = packages.find_package(tool.name).record
    except EnvironmentProblem:
        return None
    return Path(record).parent if record else None
