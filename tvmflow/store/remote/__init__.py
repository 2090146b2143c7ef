"""Remote caches: stores that several machines reach, and the client of one.

May import `core` and the rest of `store`.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tvmflow.core.errors import UsageError
from tvmflow.core.text import did_you_mean
from tvmflow.store.remote.base import RemoteCache
from tvmflow.store.remote.bucket import BucketCache
from tvmflow.store.remote.folder import FolderCache
from tvmflow.store.remote.http import HttpCache, RegistryCache, without_credentials

# Takes the URL and the time limit for each answer in seconds.
Opener = Callable[[str, float], RemoteCache]


def _open_file_url(url: str, timeout_s: float) -> RemoteCache:
    parts = urllib.parse.urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        text = f"--remote {without_credentials(url)}: a file: URL names a folder of this machine"
        raise UsageError(text, fix="write it as file:///FOLDER, with three slashes")
    return FolderCache(Path(urllib.parse.unquote(parts.path)).absolute())


REMOTE_CACHES: Final[dict[str, Opener]] = {
    "az": BucketCache,
    "file": _open_file_url,
    "gs": BucketCache,
    "http": HttpCache,
    "https": HttpCache,
    "oci": RegistryCache,
    "s3": BucketCache,
}


def open_remote_cache(url: str, *, timeout_s: float = 10.0) -> RemoteCache:
    """Return the remote cache with a URL, or in a folder. No request is sent yet.

    The URL is one of `REMOTE_CACHES`, or the path of a folder.
    """
    schemes = [f"{scheme}://" for scheme in REMOTE_CACHES]
    scheme, separator, _ = url.partition("://")
    if not separator:
        if "@" in url.partition("/")[0]:
            # it may contain a password, so it is not shown
            fix = f"a URL starts with {' or '.join(schemes)}"
            raise UsageError("--remote: the value is neither a folder nor a URL", fix=fix)
        return FolderCache(Path(url).expanduser().absolute())
    opener = REMOTE_CACHES.get(scheme.lower())
    if opener is None:
        raise UsageError(
            f"--remote {without_credentials(url)}: there is no remote cache of the kind '{scheme}'"
            + did_you_mean(scheme, REMOTE_CACHES),
            fix=f"give a folder, or a URL that starts with {', '.join(schemes)}",
        )
    try:
        urllib.parse.urlsplit(url)
    except ValueError as error:
        raise UsageError(
            f"--remote {without_credentials(url)}: this is not a valid URL ({error})",
            fix=f"give a folder, or a URL that starts with {', '.join(schemes)}",
        ) from None
    return opener(url, timeout_s)
