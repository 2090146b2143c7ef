"""Downloads: a URL and its sha256 become a verified file in a folder, resumed after any interruption."""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import os
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import IO, Any, Final, NamedTuple
from urllib.request import HTTPRedirectHandler, Request, build_opener

from tvmflow.core.bounded_calls import call_within
from tvmflow.core.disk_errors import check_free_space, explain
from tvmflow.core.errors import DownloadError, Interrupted, StoreError
from tvmflow.core.file_locks import held
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text, excerpt, size_text
from tvmflow.core.named_files import obstacle
from tvmflow.core.version import VERSION

_log = logging.getLogger(__name__)

_SCHEMES: Final = ("http", "https", "file")
_CHUNK: Final = 1 << 18
_SPACE_INTERVAL: Final = 1 << 20
_PROGRESS_INTERVAL_S: Final = 0.25
_MAX_WAIT_S: Final = 30.0
_RETRYABLE: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_RANGE_NOT_SATISFIABLE: Final = 416
_PARTIAL_CONTENT: Final = 206


def list_files(folder: Path, sha256: str) -> list[Path]:
    """Return the paths that a download with this digest uses: the file itself, and what belongs to its part."""
    name = sha256.lower()
    return [folder / name, *(folder / f"{name}.{part}" for part in ("lock", "part", "validator"))]


class DownloadProgress(NamedTuple):
    """The progress of a download.

    Attributes:
        url: What is downloaded, without a password.
        done: How many bytes have arrived.
        total: How many bytes there are; 0 while that is unknown.
    """

    url: str
    done: int
    total: int


OnProgress = Callable[[DownloadProgress], None]


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

    An interrupted download is resumed. Of several processes that need a file, one downloads it.

    Args:
        url: A URL with the scheme http, https or file.
        sha256: The digest (hex) of the file, which becomes its name.
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
    job = _Download(
        url, sha256.lower(), folder, on_progress, max_bytes, timeout_s, threading.Event()
    )
    scheme = urllib.parse.urlsplit(url).scheme
    if scheme not in _SCHEMES:
        reason = f"URLs with the scheme '{excerpt(scheme)}' are not supported"
        raise job.error(reason, fix="use https, http or file")
    if scheme == "file" and (other := obstacle(_local_path(url))):
        raise job.error(f"it {other}", fix="check the URL")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        subject = f"the download of {_without_password(url)}"
        with held(folder / f"{job.sha256}.lock", subject=subject):
            if not job.is_complete():
                _download_within(limit_s, job, retries, backoff_s)
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


class _Retryable(Exception):
    """A failure after which another attempt may succeed, perhaps after the wait that the server requests."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _Download(NamedTuple):
    """One file to download, and where it is kept meanwhile."""

    url: str
    sha256: str
    folder: Path
    on_progress: OnProgress | None
    max_bytes: int
    timeout_s: float
    abandoned: threading.Event

    @property
    def target(self) -> Path:
        """The complete file."""
        return self.folder / self.sha256

    @property
    def part(self) -> Path:
        """The file with the bytes that have arrived so far."""
        return self.folder / f"{self.sha256}.part"

    @property
    def validator(self) -> Path:
        """The ETag or date that the part was served with: another version must not be appended to it."""
        return self.folder / f"{self.sha256}.validator"

    def is_complete(self) -> bool:
        """Return whether the file is complete; a damaged one is removed."""
        if not self.target.exists():
            return False
        if hash_file(self.target) == self.sha256:
            return True
        _log.debug("%s is damaged and downloaded again", self.target)
        self.target.unlink()
        return False

    def discard_part(self) -> None:
        """Remove what has arrived so far."""
        self.part.unlink(missing_ok=True)
        self.validator.unlink(missing_ok=True)

    def check_abandoned(self) -> None:
        """Raise Interrupted once nobody waits for the file: the part may be another process's by then."""
        if self.abandoned.is_set():
            raise Interrupted("the download was stopped; the part that arrived is kept")

    def error(self, reason: str, *, fix: str = "") -> DownloadError:
        """Return the error of this download."""
        by_hand = f"save the file as {self.target}, or set the recipe's model to a local copy of it"
        text = f"{_without_password(self.url)} cannot be downloaded: {reason}"
        return DownloadError(text, fix=f"{fix}; or {by_hand}" if fix else by_hand)


def _local_path(url: str) -> Path:
    return Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))


def _without_password(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _download_within(limit_s: float, job: _Download, retries: int, backoff_s: float) -> None:
    """Download a file in a thread that can be abandoned: name resolution and slow servers know no limit."""
    try:
        call_within(limit_s, lambda: _download_part(job, retries, backoff_s))
    except (TimeoutError, Interrupted):
        # the thread writes nothing more
        job.abandoned.set()
        raise


def _download_part(job: _Download, retries: int, backoff_s: float) -> None:
    """Download a file in as many attempts as are allowed, and verify it."""
    failures = 0
    while True:
        job.check_abandoned()
        size_before = _size(job.part)
        try:
            _attempt(job)
            digest = hash_file(job.part)
            if digest == job.sha256:
                break
            size = _size(job.part)
            job.discard_part()
            if not size_before:
                raise job.error(
                    f"its sha256 is {digest} ({size_text(size)}), and the recipe says {job.sha256}",
                    fix="ask its publisher which one is right, and correct sha256 in the recipe",
                )
            # otherwise the part may have been the beginning of another version
        except _Retryable as problem:
            failures = 1 if _size(job.part) > size_before else failures + 1
            _log.debug("%s: attempt failed: %s", _without_password(job.url), problem)
            if failures > retries:
                reason = f"{problem} ({count_text(failures, 'attempt')})"
                raise job.error(reason, fix="check the network and run again") from problem
            time.sleep(min(max(backoff_s * 2 ** (failures - 1), problem.wait_s), _MAX_WAIT_S))
    job.part.replace(job.target)
    job.validator.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


# ---------------------------------------------------------------- one attempt


def _attempt(job: _Download) -> None:
    """Download what the part lacks.

    Raises:
        _Retryable: when another attempt may succeed.
        DownloadError: when it will not.
        OSError: when the part cannot be written.
    """
    offset = _size(job.part)
    try:
        request = _make_request(job, offset)
        response = call_within(
            # a server may send its header byte by byte
            job.timeout_s,
            lambda: _OPENER.open(request, timeout=job.timeout_s),
            job.abandoned.is_set,
        )
    except urllib.error.HTTPError as error:
        with error:
            _handle_status(job, error, offset)
        return
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise _connection_error(job, error) from error
    with response:
        job.check_abandoned()
        _receive(job, response, offset)


def _make_request(job: _Download, offset: int) -> Request:
    request = Request(job.url)
    request.add_header("User-Agent", f"tvmflow/{VERSION}")
    request.add_header("Accept-Encoding", "identity")
    if offset:
        request.add_header("Range", f"bytes={offset}-")
        if job.validator.exists():
            request.add_header("If-Range", job.validator.read_text())
    return request


def _handle_status(job: _Download, error: urllib.error.HTTPError, offset: int) -> None:
    """Raise the error of a status; return when the part is already as long as the file."""
    if error.code == _RANGE_NOT_SATISFIABLE and offset:
        if _total_size(error.headers, 0) == offset:
            return
        job.discard_part()
        raise _Retryable("the file on the server is shorter than what was downloaded before")
    reason = f"the server answered {error.code} {excerpt(str(error.reason))}"
    if error.code in _RETRYABLE:
        wait = error.headers.get("Retry-After", "")
        raise _Retryable(reason, float(wait) if wait.isdecimal() else 0.0)
    raise job.error(reason, fix="check the URL")


def _connection_error(job: _Download, error: Exception) -> Exception:
    """Return what to raise when there is no answer."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    parts = urllib.parse.urlsplit(job.url)
    if parts.scheme == "file":
        return job.error(str(reason), fix="check the URL")
    if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
        text = f"the host {parts.hostname} is not known"
        return job.error(text, fix="check the URL and the network")
    if isinstance(reason, ssl.SSLCertVerificationError):
        fix = "check the URL, and this machine's clock and certificates"
        return job.error(str(reason), fix=fix)
    return _Retryable(f"no answer from {parts.hostname}: {reason or type(reason).__name__}")


def _receive(job: _Download, response: Any, offset: int) -> None:
    """Append a response to the part, or start the part again."""
    headers: Message = response.headers
    if response.status == _PARTIAL_CONTENT:
        if _range_start(headers) != offset:
            job.discard_part()
            raise _Retryable("the server sent another range than the requested one")
    else:
        job.discard_part()
        offset = 0
    total = _total_size(headers, offset)
    _check_size(job, total, offset)
    if validator := _find_validator(headers):
        job.validator.write_text(validator)
    with job.part.open("ab") as stream:
        done = _copy(job, response, stream, offset, total)
    if total and done != total:
        raise _Retryable(f"the connection ended after {done} of {total} bytes")


def _range_start(headers: Message) -> int:
    """Return the first position in `Content-Range: bytes 100-199/200`; -1 without one."""
    first = headers.get("Content-Range", "").removeprefix("bytes").strip().partition("-")[0]
    return int(first) if first.isdecimal() else -1


def _total_size(headers: Message, offset: int) -> int:
    """Return the size of the complete file; 0 when the server does not say."""
    total = headers.get("Content-Range", "").rpartition("/")[2]
    if total.isdecimal():
        return int(total)
    length = headers.get("Content-Length", "")
    return offset + int(length) if length.isdecimal() else 0


def _find_validator(headers: Message) -> str:
    """Return what `If-Range` may contain: a strong ETag, or else a date."""
    tag = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def _check_size(job: _Download, total: int, offset: int) -> None:
    if total > job.max_bytes:
        raise job.error(f"it has {size_text(total)}, and the limit is {size_text(job.max_bytes)}")
    try:
        check_free_space(job.folder, total - offset)
    except StoreError as problem:
        raise job.error(problem.message, fix=problem.fix) from None


class _Space:
    """The space for a download while it arrives: other processes write to the disk, too, and it may never end."""

    def __init__(self, job: _Download, *, is_known: bool) -> None:
        self._job = job
        self._is_known = is_known
        self._unchecked = 0

    def check(self, stream: IO[bytes], size: int) -> None:
        """Check that the next bytes can be written and a reserve is left."""
        self._unchecked -= size
        if self._unchecked > 0:
            return
        self._unchecked = _SPACE_INTERVAL
        stream.flush()
        try:
            check_free_space(self._job.folder, _SPACE_INTERVAL)
        except StoreError as problem:
            if not self._is_known:
                # of an unknown size, perhaps without end: the next attempt would not be better
                self._job.discard_part()
            raise self._job.error(problem.message, fix=problem.fix) from None


def _copy(job: _Download, response: Any, stream: IO[bytes], done: int, total: int) -> int:
    """Append the body of a response to the part and return the size of the part."""
    last_progress = 0.0
    space = _Space(job, is_known=bool(total))
    while True:
        try:
            # what has arrived: a slow server must not keep the part and the progress waiting
            chunk = response.read1(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _Retryable(f"the connection broke after {done} bytes: {error}") from error
        job.check_abandoned()
        if chunk:
            space.check(stream, len(chunk))
            stream.write(chunk)
            done += len(chunk)
        if done > job.max_bytes:
            job.discard_part()
            raise job.error(f"it is larger than the limit of {size_text(job.max_bytes)}")
        now = time.monotonic()
        if job.on_progress and (not chunk or now - last_progress >= _PROGRESS_INTERVAL_S):
            last_progress = now
            job.on_progress(DownloadProgress(_without_password(job.url), done, total))
        if not chunk:
            return done


class _Redirects(HTTPRedirectHandler):
    """Follows redirects, except from https to http and to other schemes."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> Request | None:
        """Return the request of a redirect, as `urllib` expects it.

        Raises:
            DownloadError: when the redirect is not allowed.
        """
        before, after = (urllib.parse.urlsplit(url).scheme for url in (req.full_url, newurl))
        if after not in ("http", "https") or (before == "https" and after == "http"):
            raise DownloadError(
                f"{_without_password(req.full_url)} redirects to {_without_password(newurl)}, which is not allowed",
                fix="use a URL that is served over http or https, and is not redirected from https to http",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER: Final = build_opener(_Redirects)
