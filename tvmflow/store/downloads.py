"""Downloads: a URL and its sha256 become a verified file in a folder, resumed after any interruption."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Final

from tvmflow.core.bounded_calls import call_within
from tvmflow.core.disk_errors import explain
from tvmflow.core.errors import Interrupted, StoreError
from tvmflow.core.file_locks import held
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text, excerpt, size_text
from tvmflow.core.named_files import obstacle
from tvmflow.store.addresses import SCHEMES, scheme_of, without_secrets
from tvmflow.store.download_attempt import (
    DownloadJob,
    OnProgress,
    TemporaryProblem,
    download_missing,
    download_name,
)

_log = logging.getLogger(__name__)

_MAX_WAIT_S: Final = 30.0


def list_files(folder: Path, url: str, sha256: str) -> list[Path]:
    """Return the paths that a download uses: the file itself, and what belongs to its part."""
    name = download_name(url, sha256.lower())
    return [folder / name, *(folder / f"{name}.{part}" for part in ("lock", "part", "validator"))]


def download(
    url: str,
    sha256: str,
    folder: Path,
    *,
    on_progress: OnProgress | None = None,
    max_bytes: int = 64 << 30,
    timeout_s: float = 60.0,
    limit_s: float = math.inf,
    retries: int = 5,
    backoff_s: float = 0.5,
) -> Path:
    """Return the file with this digest, downloaded unless the folder has it.

    Without a digest, the file at the URL is downloaded, whatever it is, and kept by its digest.

    An interrupted download is resumed. Of several processes that need a file, one downloads it.

    Args:
        url: A URL with one of `addresses.SCHEMES`.
        sha256: The digest (hex) of the file, which becomes its name; empty for an unknown one.
        folder: Where it is kept.
        on_progress: Called a few times a second.
        max_bytes: The largest file that is accepted.
        timeout_s: The limit of each wait for the server.
        limit_s: The limit of the download as a whole.
        retries: How many attempts in a row may fail without any progress.
        backoff_s: The pause after the first of them; each further pause is twice as long.

    Raises:
        DownloadError: when the file cannot be downloaded, or has another digest.
        TimeoutError: when it takes longer than `limit_s`; what has arrived is kept.
        Interrupted: when a signal ends this process; what has arrived is kept.
    """
    job = DownloadJob(
        url, sha256.lower(), folder, on_progress, max_bytes, timeout_s, threading.Event()
    )
    scheme = scheme_of(url)
    if scheme not in SCHEMES:
        reason = f"URLs with the scheme '{excerpt(scheme)}' are not supported"
        raise job.error(reason, fix=f"use {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}")
    if scheme == "file" and (other := obstacle(_local_path(url))):
        raise job.error(f"it {other}", fix="check the URL")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        subject = f"the download of {without_secrets(url)}"
        with held(folder / f"{job.name}.lock", subject=subject):
            if not job.is_complete():
                digest = _download_within(limit_s, job, retries, backoff_s)
                job = job._replace(sha256=digest)
            # garbage collection holds this lock too, and removes no download that was used since it
            # looked; in a shared store the file may be another user's
            with contextlib.suppress(PermissionError):
                os.utime(job.target)
        return job.target
    except TimeoutError:
        raise
    except OSError as error:
        problem = explain(error, folder) or StoreError(str(error), fix=f"check {folder}")
        raise job.error(problem.message, fix=problem.fix) from error


def _local_path(url: str) -> Path:
    return Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))


def _download_within(limit_s: float, job: DownloadJob, retries: int, backoff_s: float) -> str:
    """Download a file in a thread that can be abandoned: name resolution and slow servers know no limit.

    Returns:
        The digest of the file.
    """
    try:
        return call_within(limit_s, lambda: _download_part(job, retries, backoff_s))
    except (TimeoutError, Interrupted):
        # the thread writes nothing more
        job.abandoned.set()
        raise


def _download_part(job: DownloadJob, retries: int, backoff_s: float) -> str:
    """Download a file in as many attempts as are allowed, verify it, and return its digest."""
    failures = 0
    while True:
        job.check_abandoned()
        size_before = job.part_size()
        try:
            download_missing(job)
            digest = hash_file(job.part)
            if digest == job.sha256 or not job.sha256:
                break
            size = job.part_size()
            job.discard_part()
            if not size_before:
                raise job.error(
                    f"its sha256 is {digest} ({size_text(size)}), and the recipe says {job.sha256}",
                    fix="ask its publisher which one is right, and correct sha256 in the recipe",
                )
            # otherwise the part may have been the beginning of another version
        except TemporaryProblem as problem:
            failures = 1 if job.part_size() > size_before else failures + 1
            _log.debug("%s: attempt failed: %s", without_secrets(job.url), problem)
            if failures > retries:
                reason = f"{problem} ({count_text(failures, 'attempt')})"
                raise job.error(reason, fix="check the network and run again") from problem
            time.sleep(min(max(backoff_s * 2 ** (failures - 1), problem.wait_s), _MAX_WAIT_S))
    job.part.replace(job.folder / digest)
    job.validator.unlink(missing_ok=True)
    return digest
