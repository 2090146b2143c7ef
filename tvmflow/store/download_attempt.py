"""One attempt of a download: request the bytes that are missing, and append them to the part that has arrived."""

from __future__ import annotations

import hashlib
import logging
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NamedTuple

from tvmflow.core.bounded_calls import call_within
from tvmflow.core.disk_errors import check_free_space
from tvmflow.core.errors import DownloadError, Interrupted, StoreError
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import excerpt, size_text
from tvmflow.store.addresses import BUCKETS, HUB, parse_hub_file, scheme_of, without_secrets
from tvmflow.store.credentials import Credential, find_credential
from tvmflow.store.hub import HubError, check_online, explain_status, find_location
from tvmflow.store.remote.base import RemoteCacheError, Unreachable
from tvmflow.store.remote.bucket import INSTALL, NoObject, library_errors, open_bucket
from tvmflow.store.web_requests import (
    ACCESS_DENIED,
    BROKEN_ANSWER,
    RETRYABLE,
    denial_fix,
    header_count,
    open_url,
)

_log = logging.getLogger(__name__)

_CHUNK: Final = 1 << 18
_SPACE_INTERVAL: Final = 1 << 20
_PROGRESS_INTERVAL_S: Final = 0.25
_RANGE_NOT_SATISFIABLE: Final = 416
_PARTIAL_CONTENT: Final = 206


class DownloadProgress(NamedTuple):
    """The progress of a download.

    Attributes:
        url: What is downloaded, without what may be secret.
        done: How many bytes have arrived.
        total: How many bytes there are; 0 while that is unknown.
    """

    url: str
    done: int
    total: int


OnProgress = Callable[[DownloadProgress], None]


class TemporaryProblem(Exception):
    """A failure after which another attempt may succeed, perhaps after the wait that the server requests."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class DownloadJob(NamedTuple):
    """One file to download, and where it is kept meanwhile; without a sha256, whatever is at the URL."""

    url: str
    sha256: str
    folder: Path
    on_progress: OnProgress | None
    max_bytes: int
    timeout_s: float
    abandoned: threading.Event

    @property
    def name(self) -> str:
        """The name of the files of the download."""
        return download_name(self.url, self.sha256)

    @property
    def target(self) -> Path:
        """The complete file."""
        return self.folder / self.name

    @property
    def part(self) -> Path:
        """The file with the bytes that have arrived so far."""
        return self.folder / f"{self.name}.part"

    @property
    def validator(self) -> Path:
        """The ETag or date that the part was served with: another version must not be appended to it."""
        return self.folder / f"{self.name}.validator"

    def is_complete(self) -> bool:
        """Return whether the file is complete; a damaged one is removed."""
        if not self.sha256 or not self.target.exists():
            return False
        if hash_file(self.target) == self.sha256:
            return True
        _log.debug("%s is damaged and downloaded again", self.target)
        self.target.unlink()
        return False

    def part_size(self) -> int:
        """Return how many bytes have arrived so far."""
        try:
            return self.part.stat().st_size
        except FileNotFoundError:
            return 0

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
        text = f"{without_secrets(self.url)} cannot be downloaded: {reason}"
        if not self.sha256:
            return DownloadError(text, fix=fix)
        by_hand = f"save the file as {self.target}, or set the recipe's model to a local copy of it"
        return DownloadError(text, fix=f"{fix}; or {by_hand}" if fix else by_hand)


def download_name(url: str, sha256: str) -> str:
    """Return the name of the files of a download: the digest of the file, or else of the URL."""
    return sha256 or hashlib.sha256(url.encode()).hexdigest()


def download_missing(job: DownloadJob) -> None:
    """Download what the part lacks.

    Raises:
        TemporaryProblem: when another attempt may succeed.
        DownloadError: when it will not.
        OSError: when the part cannot be written.
    """
    offset = job.part_size()
    response = _open(job, offset)
    if response is None:
        return
    with response:
        job.check_abandoned()
        _receive(job, response, offset)


def _open(job: DownloadJob, offset: int) -> Any:
    """Return the response with what is missing; None when the part is already as long as the file."""
    validator = job.validator.read_text() if offset and job.validator.exists() else ""
    if scheme_of(job.url) in BUCKETS:
        return _open_object(job, offset, validator)
    url, credential = _locate(job)
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    if validator:
        headers["If-Range"] = validator
    try:
        return call_within(
            # a server may send its header byte by byte
            job.timeout_s,
            lambda: open_url(url, headers, credential, job.timeout_s),
            job.abandoned.is_set,
        )
    except urllib.error.HTTPError as error:
        with error:
            _handle_status(job, error, offset)
            if error.code != _RANGE_NOT_SATISFIABLE:
                raise _status_error(job, error, url, credential) from None
        return None
    except BROKEN_ANSWER as error:
        raise _connection_error(job, url, error) from error


def _locate(job: DownloadJob) -> tuple[str, Credential | None]:
    """Return the URL to request, and the credential for it."""
    if scheme_of(job.url) != HUB:
        return job.url, find_credential(job.url)
    try:
        check_online()
        return find_location(parse_hub_file(job.url))
    except HubError as problem:
        raise job.error(str(problem), fix=problem.fix) from None


def _open_object(job: DownloadJob, offset: int, validator: str) -> Any:
    """Return the rest of an object in a bucket as a response."""
    try:
        return call_within(
            job.timeout_s,
            lambda: open_object(job.url, offset, validator, job.timeout_s),
            job.abandoned.is_set,
        )
    except ImportError as missing:
        reason = f"it needs the package obstore ({missing})"
        raise job.error(reason, fix=INSTALL) from missing
    except NoObject:
        raise job.error("there is no such bucket or object", fix="check the URL") from None
    except ValueError as error:
        fix = "correct the URL, or the environment variables of the service"
        raise job.error(str(error), fix=fix) from None
    except (TimeoutError, Unreachable) as error:
        raise TemporaryProblem(str(error)) from None
    except RemoteCacheError as error:
        raise job.error(str(error)) from None


def _handle_status(job: DownloadJob, error: urllib.error.HTTPError, offset: int) -> None:
    """Raise the error of a status that is temporary; check that nothing is missing where it says so."""
    if error.code == _RANGE_NOT_SATISFIABLE and offset:
        if _total_size(error.headers, 0) == offset:
            return
        job.discard_part()
        raise TemporaryProblem("the file on the server is shorter than what was downloaded before")
    if error.code in RETRYABLE:
        wait_s = header_count(error.headers.get("Retry-After", "")) or 0
        reason = f"the server answered {error.code} {excerpt(str(error.reason))}"
        raise TemporaryProblem(reason, float(wait_s))


def _status_error(
    job: DownloadJob, error: urllib.error.HTTPError, url: str, credential: Credential | None
) -> DownloadError:
    """Return the error of a status that will not change by itself."""
    if scheme_of(job.url) == HUB:
        problem = explain_status(error, parse_hub_file(job.url), credential)
        return job.error(str(problem), fix=problem.fix)
    reason = f"the server answered {error.code} {excerpt(str(error.reason))}"
    is_denied = error.code in ACCESS_DENIED
    return job.error(reason, fix=denial_fix(url, credential) if is_denied else "check the URL")


def _connection_error(job: DownloadJob, url: str, error: Exception) -> Exception:
    """Return what to raise when there is no answer."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return job.error(str(reason), fix="check the URL")
    if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
        text = f"the host {parts.hostname} is not known"
        return job.error(text, fix="check the URL and the network")
    if isinstance(reason, ssl.SSLCertVerificationError):
        fix = "check the URL, and this machine's clock and certificates"
        return job.error(str(reason), fix=fix)
    return TemporaryProblem(
        f"no answer from {parts.hostname}: {excerpt(str(reason)) or type(reason).__name__}"
    )


def _receive(job: DownloadJob, response: Any, offset: int) -> None:
    """Append a response to the part, or start the part again."""
    headers: Message = response.headers
    if response.status == _PARTIAL_CONTENT:
        if _range_start(headers) != offset:
            job.discard_part()
            raise TemporaryProblem("the server sent another range than the requested one")
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
        raise TemporaryProblem(f"the connection ended after {done} of {total} bytes")


def _range_start(headers: Message) -> int:
    """Return the first position in `Content-Range: bytes 100-199/200`; -1 without one."""
    first = headers.get("Content-Range", "").removeprefix("bytes").strip().partition("-")[0]
    start = header_count(first)
    return -1 if start is None else start


def _total_size(headers: Message, offset: int) -> int:
    """Return the size of the complete file; 0 when the server does not say."""
    total = header_count(headers.get("Content-Range", "").rpartition("/")[2])
    if total is not None:
        return total
    length = header_count(headers.get("Content-Length", ""))
    return 0 if length is None else offset + length


def _find_validator(headers: Message) -> str:
    """Return what `If-Range` may contain: a strong ETag, or else a date."""
    tag = headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified", "")


def _check_size(job: DownloadJob, total: int, offset: int) -> None:
    if total > job.max_bytes:
        raise job.error(f"it has {size_text(total)}, and the limit is {size_text(job.max_bytes)}")
    try:
        check_free_space(job.folder, total - offset)
    except StoreError as problem:
        raise job.error(problem.message, fix=problem.fix) from None


class _Space:
    """The space for a download while it arrives: other processes write to the disk, too, and it may never end."""

    def __init__(self, job: DownloadJob, *, is_known: bool) -> None:
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


def _copy(job: DownloadJob, response: Any, stream: IO[bytes], done: int, total: int) -> int:
    """Append the body of a response to the part and return the size of the part."""
    last_progress = 0.0
    space = _Space(job, is_known=bool(total))
    while True:
        try:
            # what has arrived: a slow server must not keep the part and the progress waiting
            chunk = response.read1(_CHUNK)
        except BROKEN_ANSWER as error:
            raise TemporaryProblem(
                f"the connection broke after {done} bytes: {excerpt(str(error))}"
            ) from error
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
            job.on_progress(DownloadProgress(without_secrets(job.url), done, total))
        if not chunk:
            return done


# ---------------------------------------------------------------- bucket object
# An object in a bucket as a response, so that it is downloaded like a file of a web server.
#
# Credentials are found as for remote caches in buckets (see `store.remote.bucket`).


# A slower download is continued by a further request.
_TRANSFER_TIMEOUT_S: Final = 3600.0


class ObjectResponse:
    """The bytes of an object from a position on, with the interface of `http.client.HTTPResponse`."""

    def __init__(self, status: int, headers: Message, chunks: Iterator[Any]) -> None:
        self.status = status
        self.headers = headers
        self._chunks = chunks

    def read1(self, size: int) -> bytes:
        """Return the next bytes; none at the end. Their number is the library's choice.

        Raises:
            OSError: when the connection breaks.
        """
        try:
            with library_errors(_TRANSFER_TIMEOUT_S):
                return bytes(next(self._chunks, b""))
        except (RemoteCacheError, NoObject) as error:
            raise OSError(str(error)) from None

    def __enter__(self) -> ObjectResponse:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return


def open_object(url: str, offset: int, validator: str, timeout_s: float) -> ObjectResponse:
    """Return an object from a position on; from its beginning when it is another one than before.

    Args:
        url: Its URL.
        offset: How many bytes have arrived.
        validator: The ETag of the object that they are from.
        timeout_s: How long to wait for an answer.

    Raises:
        ImportError: when obstore is not installed.
        ValueError: when the URL or the environment variables of the service are wrong.
        NoObject: when there is no such object.
        RemoteCacheError: when the bucket does not answer, or denies access.
    """
    import obstore

    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    store = open_bucket(f"{scheme}://{bucket}", timeout_s, _TRANSFER_TIMEOUT_S)
    with library_errors(timeout_s):
        meta = obstore.head(store, path)
        size, tag = int(meta["size"]), meta["e_tag"] or ""
        headers = Message()
        if tag:
            headers["ETag"] = tag
        if offset > size or validator != tag:
            offset = 0
        if offset:
            headers["Content-Range"] = f"bytes {offset}-{size - 1}/{size}"
        else:
            headers["Content-Length"] = str(size)
        if offset == size:
            return ObjectResponse(206 if offset else 200, headers, iter(()))
        options: Any = {"range": {"offset": offset}, **({"if_match": tag} if tag else {})}
        answer = obstore.get(store, path, options=options)
        chunks = iter(answer.stream(min_chunk_size=_CHUNK))
    return ObjectResponse(206 if offset else 200, headers, chunks)
