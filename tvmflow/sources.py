"""Downloads: a URL and its sha256 become a checked file in a folder, whatever the network does in between."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http.client
import os
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from tvmflow import __version__
from tvmflow.errors import DownloadError

Emit = Callable[[dict[str, Any]], None]

_SCHEMES: Final = ("http", "https", "file")
_CHUNK: Final = 1 << 18
_PROGRESS_EVERY_S: Final = 0.25
_LONGEST_WAIT_S: Final = 30.0
_TRY_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_RANGE_NOT_SATISFIABLE: Final = 416
_PARTIAL_CONTENT: Final = 206


def fetch(
    url: str,
    sha256: str,
    folder: Path,
    *,
    emit: Emit | None = None,
    max_bytes: int = 64 << 30,
    timeout_s: float = 60.0,
    retries: int = 5,
    backoff_s: float = 0.5,
) -> Path:
    """The file with this digest, downloaded into `folder` unless it is there; its name is the digest.

    A download that was cut off, in this process or an earlier one, goes on where it stopped. Of
    several processes that want the same file, one downloads it and the others wait. `retries` counts
    attempts that brought nothing; they are `backoff_s`, twice that, … seconds apart. `timeout_s` limits
    each wait for the server. `emit` gets `{"event": "download", "url", "done", "total"}` (bytes; total
    is 0 while unknown) a few times a second. Raises DownloadError.
    """
    job = _Job(url, sha256.lower(), folder, emit, max_bytes, timeout_s)
    scheme = urllib.parse.urlsplit(url).scheme
    if scheme not in _SCHEMES:
        raise job.error(
            f"addresses that start with '{scheme}:' cannot be fetched",
            fix="use https, http or file",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with job.locked():
            if not job.is_there():
                _download(job, retries, backoff_s)
            # whoever clears downloads holds this lock too, and takes none that was used since;
            # in a shared store the file may be another user's
            with contextlib.suppress(PermissionError):
                os.utime(job.target)
        return job.target
    except OSError as error:
        raise job.error(
            f"{error.filename or folder}: {error.strerror or error}",
            fix="free some space" if error.errno in _NO_SPACE else f"make {folder} writable",
        ) from error


_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


class _TryAgain(Exception):
    """What may be better next time. `wait_s` is what the server asked for."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class _Job(NamedTuple):
    """One file to fetch, and where it is kept while it comes."""

    url: str
    sha256: str
    folder: Path
    emit: Emit | None
    max_bytes: int
    timeout_s: float

    @property
    def target(self) -> Path:
        return self.folder / self.sha256

    @property
    def part(self) -> Path:
        return self.folder / f"{self.sha256}.part"

    @property
    def validator(self) -> Path:
        """The ETag or date that the part was served with: more of another version must not be appended."""
        return self.folder / f"{self.sha256}.validator"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with this file, also among processes; the lock dies with its process."""
        with (self.folder / f"{self.sha256}.lock").open("wb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def is_there(self) -> bool:
        """Whether the file is complete; one that is damaged is removed."""
        if not self.target.exists():
            return False
        if _digest_of(self.target).hexdigest() == self.sha256:
            return True
        self.target.unlink()
        return False

    def forget_part(self) -> None:
        self.part.unlink(missing_ok=True)
        self.validator.unlink(missing_ok=True)

    def error(self, why: str, *, fix: str = "") -> DownloadError:
        by_hand = f"save the file as {self.target}, or point model.onnx at a copy of it"
        return DownloadError(
            f"{_without_password(self.url)} cannot be downloaded: {why}",
            fix=f"{fix}; or {by_hand}" if fix else by_hand,
        )


def _digest_of(path: Path) -> Any:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest


def _without_password(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _download(job: _Job, retries: int, backoff_s: float) -> None:
    failures = 0
    while True:
        before = _size(job.part)
        try:
            _attempt(job)
            digest = _digest_of(job.part).hexdigest()
            if digest == job.sha256:
                break
            size = _size(job.part)
            job.forget_part()
            if not before:
                raise job.error(
                    f"its sha256 is {digest} ({size} bytes), and the recipe says {job.sha256}",
                    fix="check with its publisher which one is right, and correct sha256 in the recipe",
                )
            # what was there before may have been the beginning of another version
        except _TryAgain as problem:
            failures = 1 if _size(job.part) > before else failures + 1
            if failures > retries:
                raise job.error(
                    f"{problem} ({failures} attempts)", fix="check the network and run again"
                ) from problem
            time.sleep(min(max(backoff_s * 2 ** (failures - 1), problem.wait_s), _LONGEST_WAIT_S))
    job.part.replace(job.target)
    job.validator.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _attempt(job: _Job) -> None:
    """Get what is missing of the part. Raises _TryAgain, DownloadError, or OSError from the disk."""
    offset = _size(job.part)
    try:
        response = _OPENER.open(_request(job, offset), timeout=job.timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            _explain_status(job, error, offset)
        return
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise _why_no_answer(job, error) from error
    with response:
        _receive(job, response, offset)


def _request(job: _Job, offset: int) -> urllib.request.Request:
    request = urllib.request.Request(job.url)
    request.add_header("User-Agent", f"tvmflow/{__version__}")
    request.add_header("Accept-Encoding", "identity")
    if offset:
        request.add_header("Range", f"bytes={offset}-")
        if job.validator.exists():
            request.add_header("If-Range", job.validator.read_text())
    return request


def _explain_status(job: _Job, error: urllib.error.HTTPError, offset: int) -> None:
    """Return when the part is as long as it can be; its digest then decides."""
    if error.code == _RANGE_NOT_SATISFIABLE and offset:
        if _total(error.headers, 0) == offset:
            return
        job.forget_part()
        raise _TryAgain("the server has less than was downloaded before")
    said = f"the server answered {error.code} {error.reason}"
    if error.code in _TRY_AGAIN:
        wait = error.headers.get("Retry-After", "")
        raise _TryAgain(said, float(wait) if wait.isdecimal() else 0.0)
    raise job.error(said, fix="check the address")


def _why_no_answer(job: _Job, error: Exception) -> Exception:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    parts = urllib.parse.urlsplit(job.url)
    if parts.scheme == "file":
        return job.error(str(reason), fix="check the address")
    if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
        return job.error(
            f"no host {parts.hostname} is known", fix="check the address and the network"
        )
    if isinstance(reason, ssl.SSLCertVerificationError):
        return job.error(
            str(reason), fix="check the address, and this machine's clock and certificates"
        )
    return _TryAgain(f"no answer from {parts.hostname}: {reason or type(reason).__name__}")


def _receive(job: _Job, response: Any, offset: int) -> None:
    headers: Message = response.headers
    resumed = response.status == _PARTIAL_CONTENT and _starts_at(headers) == offset
    if not resumed:
        if response.status == _PARTIAL_CONTENT:
            job.forget_part()
            raise _TryAgain("the server sent another part than the one that was asked for")
        job.forget_part()
        offset = 0
    total = _total(headers, offset)
    _check_room(job, total, offset)
    if validator := _validator(headers):
        job.validator.write_text(validator)
    with job.part.open("ab") as stream:
        done = _copy(job, response, stream, offset, total)
    if total and done != total:
        raise _TryAgain(f"the connection ended after {done} of {total} bytes")


def _starts_at(headers: Message) -> int:
    """The first position in `Content-Range: bytes 100-199/200`."""
    first = headers.get("Content-Range", "").removeprefix("bytes").strip().partition("-")[0]
    return int(first) if first.isdecimal() else -1


def _total(headers: Message, offset: int) -> int:
    """The size of the whole file, 0 when the server does not say."""
    whole = headers.get("Content-Range", "").rpartition("/")[2]
    if whole.isdecimal():
        return int(whole)
    length = headers.get("Content-Length", "")
    return offset + int(length) if length.isdecimal() else 0


def _validator(headers: Message) -> str:
    """What `If-Range` may carry: a strong ETag, or else a date."""
    tag = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def _check_room(job: _Job, total: int, offset: int) -> None:
    if total > job.max_bytes:
        raise job.error(f"it has {total} bytes, more than the {job.max_bytes} that are allowed")
    free = shutil.disk_usage(job.folder).free
    if total - offset > free:
        raise job.error(
            f"it needs {total - offset} more bytes, and {job.folder} has {free} free",
            fix="free some space, or choose another folder with --store",
        )


def _copy(job: _Job, response: Any, stream: IO[bytes], done: int, total: int) -> int:
    """Append the body to the part, chunk by chunk; returns the size then."""
    last_event = 0.0
    while True:
        try:
            chunk = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _TryAgain(f"the connection broke after {done} bytes: {error}") from error
        if chunk:
            stream.write(chunk)
            done += len(chunk)
        if done > job.max_bytes:
            job.forget_part()
            raise job.error(f"it has more than the {job.max_bytes} bytes that are allowed")
        now = time.monotonic()
        if job.emit and (not chunk or now - last_event >= _PROGRESS_EVERY_S):
            last_event = now
            job.emit(
                {
                    "event": "download",
                    "url": _without_password(job.url),
                    "done": done,
                    "total": total,
                }
            )
        if not chunk:
            return done


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and refuses those that would give up encryption or leave the web."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        before, after = (urllib.parse.urlsplit(url).scheme for url in (req.full_url, newurl))
        if after not in ("http", "https") or (before == "https" and after == "http"):
            raise DownloadError(
                f"{_without_password(req.full_url)} sends us on to {_without_password(newurl)}, which is not allowed",
                fix="use an address that is served from the web, and stays on https",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER: Final = urllib.request.build_opener(_Redirects)
