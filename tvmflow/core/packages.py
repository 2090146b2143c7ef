"""The identity of installed packages, found without importing them.

A version is not enough: a rebuilt wheel can have the same one. pip records the digest of
every installed file in the distribution's RECORD, so the digest of that list stands for the
installed files, at the cost of reading one small file.
"""

import hashlib
import os
import re
import sys
import sysconfig

_NOT_CODE = re.compile(r"\.dist-info/|__pycache__/|^\.\.|^/")


class NotInstalled(LookupError):
    """A distribution is not installed in this environment."""


def identity(distribution: str) -> str:
    """Return `VERSION+DIGEST` of an installed distribution, or `absent`: an optional tool may be."""
    try:
        version, record = record_file(distribution)
    except NotInstalled:
        return "absent"
    return f"{version}+{digest_record(record)}"


def record_file(distribution: str) -> tuple[str, str]:
    """Return the version of an installed distribution and the path of its RECORD.

    Raises:
        NotInstalled: when it is not installed.
    """
    folder = _find_dist_info_folders().get(distribution)
    if folder is None:
        raise NotInstalled(distribution)
    version = folder.rpartition("/")[2].removesuffix(".dist-info").partition("-")[2]
    return version, f"{folder}/RECORD"


def digest_record(path: str) -> str:
    """Return the first 12 hex digits of the sha256 over a RECORD's lines about code, in sorted order."""
    with open(path, encoding="utf-8") as stream:
        lines = sorted(line.strip() for line in stream if not _NOT_CODE.search(line))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def host_platform() -> str:
    """Return the system and architecture of this host: stages give other object code on another one."""
    # Windows has no uname.
    name = os.uname().machine if hasattr(os, "uname") else os.environ["PROCESSOR_ARCHITECTURE"]
    return f"{sys.platform}-{name}"


def _find_dist_info_folders() -> dict[str, str]:
    """Return the `.dist-info` folders of this interpreter's site-packages by normalized name."""
    folders: dict[str, str] = {}
    for site in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        for entry in os.listdir(site) if os.path.isdir(site) else ():
            if entry.endswith(".dist-info"):
                name = entry.partition("-")[0].lower().replace("_", "-").replace(".", "-")
                folders[name] = f"{site}/{entry}"
    return folders
