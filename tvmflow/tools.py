"""The identity of the tools that a stage uses, found without importing them.

A version string is not enough: a rebuilt wheel can carry the same one. pip records the
digest of every installed file in the distribution's RECORD, so the digest of that list is
the digest of the binaries, at the cost of reading one small file.
"""

import hashlib
import os
import re
import sys
import sysconfig

_NOT_CODE = re.compile(r"\.dist-info/|__pycache__/|^\.\.|^/")


class NotInstalled(LookupError):
    """The distribution is not installed in this environment."""


def _dist_info_folders() -> dict[str, str]:
    """Normalised distribution name -> its `.dist-info` folder, for this interpreter's site-packages."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            if entry.endswith(".dist-info"):
                name = entry.partition("-")[0].lower().replace("_", "-").replace(".", "-")
                found[name] = f"{folder}/{entry}"
    return found


def record_file(distribution: str) -> tuple[str, str]:
    """`(version, path of RECORD)` of an installed distribution. Raises NotInstalled."""
    folder = _dist_info_folders().get(distribution)
    if folder is None:
        raise NotInstalled(distribution)
    version = folder.rpartition("/")[2].removesuffix(".dist-info").partition("-")[2]
    return version, f"{folder}/RECORD"


def digest_record(path: str) -> str:
    """The first 12 hex digits of the sha256 over a RECORD's lines that name code, in sorted order."""
    with open(path, encoding="utf-8") as stream:
        lines = sorted(line.strip() for line in stream if not _NOT_CODE.search(line))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def identity(distribution: str) -> str:
    """`VERSION+DIGEST` of an installed distribution, or `absent`. An optional tool may be absent."""
    try:
        version, record = record_file(distribution)
    except NotInstalled:
        return "absent"
    return f"{version}+{digest_record(record)}"


def machine() -> str:
    """The architecture that stages run on: a build hosted on another one gives other object code."""
    # Windows has no uname
    name = os.uname().machine if hasattr(os, "uname") else os.environ["PROCESSOR_ARCHITECTURE"]
    return f"{sys.platform}-{name}"
