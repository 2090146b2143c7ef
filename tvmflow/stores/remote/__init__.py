"""Results of other machines: a second store behind the local one, which every machine can reach."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tvmflow.errors import UsageError
from tvmflow.stores.remote._base import Remote
from tvmflow.stores.remote.folder import FolderRemote
from tvmflow.stores.remote.http import HttpRemote, without_credentials
from tvmflow.stores.remote.objects import ObjectsRemote
from tvmflow.yaml_positions import nearest

Opener = Callable[[str, float], Remote]


def _folder(url: str, timeout_s: float) -> Remote:
    parts = urllib.parse.urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"--remote {without_credentials(url)}: a folder is on this machine",
            fix="give it as file:///FOLDER, with three slashes",
        )
    return FolderRemote(Path(urllib.parse.unquote(parts.path)).absolute())


REMOTES: Final[dict[str, Opener]] = {
    "az": ObjectsRemote,
    "file": _folder,
    "gs": ObjectsRemote,
    "http": HttpRemote,
    "https": HttpRemote,
    "s3": ObjectsRemote,
}


def open_remote(url: str, *, timeout_s: float = 10.0) -> Remote:
    """The remote of an address, or in a folder; it is not yet asked anything. Raises UsageError, EnvironmentProblem."""
    scheme, colon, _ = url.partition("://")
    if not colon:
        if "@" in url.partition("/")[0]:
            # a password may be in it: it is not shown
            raise UsageError(
                "--remote: that is neither a folder nor an address",
                fix="an address starts with " + " or ".join(f"{each}://" for each in REMOTES),
            )
        return FolderRemote(Path(url).expanduser().absolute())
    opener = REMOTES.get(scheme.lower())
    if opener is None:
        raise UsageError(
            f"--remote {without_credentials(url)}: there are no remotes of the kind '{scheme}'"
            + nearest(scheme, REMOTES),
            fix=f"give a folder, or an address that starts with {', '.join(f'{each}://' for each in REMOTES)}",
        )
    return opener(url, timeout_s)
