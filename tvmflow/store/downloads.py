"""Downloads: a URL and sha256 become a verified file; interrupted downloads resume."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Final, NamedTuple

from tvmflow.core.disk_errors import check_free_space, explain
from tvmflow.core.documents import Unreadable, read_json
from tvmflow.core.errors import DownloadError, Interrupted, StoreError
from tvmflow.core.file_locks import held
from tvmflow.core.files import hash_file
from tvmflow.core.formatting import count_text, excerpt, quoted, size_text
from tvmflow.core.named_files import obstacle
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import Json
from tvmflow.store.addresses import (
    BUCKETS,
    HUB,
    OCI,
    SCHEMES,
    HubFile,
    check_address,
    parse_hub_file,
    parse_oci_reference,
    scheme_of,
    without_secrets,
)
from tvmflow.store.http_client import (
    ACCESS_DENIED,
    CHUNK,
    NO_ANSWER,
    RETRYABLE,
    Answer,
    ByteSource,
    Corrupt,
    Credential,
    HttpClient,
    TransferError,
    Unreachable,
    advise,
    call_within,
    denial_fix,
    find_credential,
    find_hub_credential,
    header_count,
    may_send_to,
    read_pieces,
)
from tvmflow.store.oci import Repository
from tvmflow.store.remote.bucket import INSTALL, NoObject, open_object

# ---------------------------------------------------------------- the Hugging Face Hub
# Requests follow `HfApi.model_info(files_metadata=True)` and `hf_hub_download` of the package huggingface_hub; errors
# are read as in its `hf_raise_for_status`.

_TIMEOUT_S: Final = 30.0
_ATTEMPTS: Final = 3
_MAX_ANSWER_BYTES: Final = 16 << 20
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_GIT_DIGEST: Final = re.compile(r"[0-9a-f]{40}")
_TRUE: Final = frozenset({"1", "ON", "YES", "TRUE"})


class HubError(Exception):
    """The Hub did not provide what was requested; `is_mistake` means that the recipe is wrong."""

    def __init__(self, reason: str, fix: str, *, is_mistake: bool = False) -> None:
        super().__init__(reason)
        self.fix = fix
        self.is_mistake = is_mistake


class HubEntry(NamedTuple):
    """A file of a repository: its sha256 (empty if the Hub has none), and its git digest."""

    sha256: str
    blob: str


class Snapshot(NamedTuple):
    """A repository at one commit: its files, and the license stated on its page (empty for none).

    Files of a gated repository require an account that has accepted its terms.
    """

    commit: str
    license: str
    is_gated: bool
    files: Mapping[str, HubEntry]

    def find(self, file: HubFile) -> HubEntry:
        """Return a file."""
        if file.path in self.files:
            return self.files[file.path]
        hint = did_you_mean(file.path, self.files)
        raise HubError(
            f"the repository has no file {quoted(file.path)} at this commit{hint}",
            fix=f"its files are listed at {endpoint()}/{file.repository}/tree/{self.commit}",
            is_mistake=True,
        )


def endpoint() -> str:
    """Return the URL of the Hub."""
    named = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    if not named:
        return "https://huggingface.co"
    shown = without_secrets(named)
    try:
        urllib.parse.urlsplit(named)
        check_address(shown)
    except ValueError:
        fix = "write it as https://HOST, or unset it"
        raise HubError(f"$HF_ENDPOINT is not a URL: {excerpt(shown)}", fix) from None
    return shown


def check_online() -> None:
    """Raise an error if requests to the Hub are not allowed."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        fix = "unset it, or run once on a machine with a network and share the store"
        raise HubError("no request is sent to the Hub: $HF_HUB_OFFLINE is set", fix)


def find_location(file: HubFile) -> tuple[str, Credential | None]:
    """Return the URL of a file, and the credential to send with the request."""
    hub = endpoint()
    path, revision = urllib.parse.quote(file.path), urllib.parse.quote(file.revision, safe="")
    url = f"{hub}/{file.repository}/resolve/{revision}/{path}"
    return url, find_hub_credential(hub)


def read_snapshot(repository: str, revision: str) -> Snapshot:
    """Return a repository at a revision; an empty revision is the default branch."""
    file = HubFile(repository, "", revision)
    at = f"/revision/{urllib.parse.quote(revision, safe='')}" if revision else ""
    answer = _request_json(f"/api/models/{repository}{at}?blobs=true", file)
    try:
        files = {str(entry["rfilename"]): _read_entry(entry) for entry in answer["siblings"]}
        license_ = _license_text(answer.get("cardData") or {})
        commit = _checked(answer["sha"], _GIT_DIGEST)
        if file.is_pinned and commit != revision:
            raise ValueError
        return Snapshot(commit, license_, bool(answer.get("gated")), files)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise _foreign_answer() from None


def _read_entry(entry: Mapping[str, Json]) -> HubEntry:
    lfs = entry.get("lfs")
    sha256 = _checked(lfs["sha256"], _SHA256) if lfs else ""
    return HubEntry(sha256, _checked(entry["blobId"], _GIT_DIGEST))


def _checked(digest: str, pattern: re.Pattern[str]) -> str:
    """Return a digest after checking its form, because it becomes a file name."""
    if not pattern.fullmatch(digest):
        raise ValueError
    return digest


def _license_text(card: Mapping[str, Json]) -> str:
    name = card.get("license")
    if name == "other":
        name = card.get("license_name") or name
    names = name if isinstance(name, list) else [name]
    return ", ".join(entry for entry in names if isinstance(entry, str))


def explain_status(answer: Answer, file: HubFile, credential: Credential | None) -> HubError:
    """Return the error for a status that the Hub answered."""
    code, page = answer.headers.get("X-Error-Code", ""), f"{endpoint()}/{file.repository}"
    if code == "GatedRepo":
        return gated_error(file, credential)
    if answer.status == 401 and credential:
        return HubError(
            f"the Hub does not accept the token in {credential.origin}",
            fix=f"make a new one at {endpoint()}/settings/tokens",
        )
    if answer.status == 403:
        who = f"the token in {credential.origin}" if credential else "the Hub"
        fix = "use a token of an account that may read it" if credential else _token_fix()
        return HubError(f"{who} gives no access to {page}", fix)
    if code == "RevisionNotFound":
        return _revision_error(file)
    if answer.status == 401 or (answer.status == 404 and code in ("", "RepoNotFound")):
        private = "" if credential else f"; if it is private, {_token_fix()}"
        kind = f"for the token in {credential.origin}" if credential else "that is public"
        text = f"the Hub has no repository {quoted(file.repository)} {kind}"
        return HubError(text, fix=f"check its name{private}", is_mistake=True)
    if answer.status == 404:
        return HubError(
            f"the repository has no file {quoted(file.path)}", f"see {page}", is_mistake=True
        )
    text = f"the Hub answers {answer.status} {excerpt(answer.reason)}"
    return HubError(text, advise(answer.status, "the Hub"))


def gated_error(file: HubFile, credential: Credential | None) -> HubError:
    """Return the error for a gated repository that denies access."""
    fix = f", and {_token_fix()} of that account"
    if credential:
        fix = f" with the account of the token in {credential.origin}"
    page = f"{endpoint()}/{file.repository}"
    return HubError("the repository is gated", f"accept its terms at {page}{fix}")


def _token_fix() -> str:
    if may_send_to(endpoint()):
        return "set $HF_TOKEN to a token"
    return "use https in $HF_ENDPOINT, as tokens are not sent over http, and a token"


def _revision_error(file: HubFile) -> HubError:
    """Return the error for a revision that does not exist, with the newest existing commit."""
    text = f"{file.repository} has no revision {quoted(file.revision)}"
    try:
        newest = f"; its newest commit is {read_snapshot(file.repository, '').commit}"
    except HubError:
        newest = ""
    return HubError(text + newest, f"see {endpoint()}/{file.repository}/commits", is_mistake=True)


def _request_json(path: str, file: HubFile) -> Json:
    check_online()
    hub = endpoint()
    credential = find_hub_credential(hub)

    def request() -> tuple[Answer, bytes]:
        with HttpClient(_TIMEOUT_S).get(hub + path, {}, credential) as answer:
            return answer, answer.read_all(_MAX_ANSWER_BYTES) if answer.is_success else b""

    try:
        answer, content = _repeat(request)
        if not answer.is_success:
            raise explain_status(answer, file, credential)
        return read_json(content)
    except NO_ANSWER as error:
        text = f"no answer from {hub}: {error}"
        raise HubError(text, "check the network and $HF_ENDPOINT, and run again") from error
    except Unreadable:
        raise _foreign_answer() from None


def _foreign_answer() -> HubError:
    return HubError(f"{endpoint()} does not answer as the Hub does", fix="check $HF_ENDPOINT")


def _repeat(request: Callable[[], tuple[Answer, bytes]]) -> tuple[Answer, bytes]:
    for attempt in range(1, _ATTEMPTS):
        answer, content = call_within(_TIMEOUT_S, request)
        if answer.status not in RETRYABLE:
            return answer, content
        time.sleep(attempt)
    return call_within(_TIMEOUT_S, request)


# ---------------------------------------------------------------- downloads

_log = logging.getLogger(__name__)

_MAX_WAIT_S: Final = 30.0
_SPACE_INTERVAL: Final = 1 << 20
_PROGRESS_INTERVAL_S: Final = 0.25
_RANGE_NOT_SATISFIABLE: Final = 416


class DownloadProgress(NamedTuple):
    """The progress of a download in bytes: `total` is 0 while unknown; the URL has no secrets."""

    url: str
    done: int
    total: int


OnProgress = Callable[[DownloadProgress], None]


class _TemporaryProblem(Exception):
    """A failure after which a retry may succeed, perhaps after a wait that the server requests."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _Job(NamedTuple):
    """One file to download, and its folder; without a sha256, any content of the URL is accepted."""

    url: str
    sha256: str
    folder: Path
    on_progress: OnProgress | None
    max_bytes: int
    timeout_s: float
    abandoned: threading.Event

    @property
    def name(self) -> str:
        return _download_name(self.url, self.sha256)

    @property
    def target(self) -> Path:
        return self.folder / self.name

    @property
    def part(self) -> Path:
        return self.folder / f"{self.name}.part"

    @property
    def validator(self) -> Path:
        """The file with the ETag or date of the partial file: only the same version is appended."""
        return self.folder / f"{self.name}.validator"

    def is_complete(self) -> bool:
        """Return whether the file is complete; a damaged file is removed."""
        if not self.sha256 or not self.target.exists():
            return False
        if hash_file(self.target) == self.sha256:
            return True
        _log.debug("%s is damaged and downloaded again", self.target)
        self.target.unlink()
        return False

    def part_size(self) -> int:
        """Return how many bytes were received so far."""
        with contextlib.suppress(FileNotFoundError):
            return self.part.stat().st_size
        return 0

    def discard_part(self) -> None:
        self.part.unlink(missing_ok=True)
        self.validator.unlink(missing_ok=True)

    def check_abandoned(self) -> None:
        """Raise Interrupted once no caller waits for the file, because another process may own the part then."""
        if self.abandoned.is_set():
            raise Interrupted("the download was stopped; the part that arrived is kept")

    def error(self, reason: str, *, fix: str = "") -> DownloadError:
        text = f"{without_secrets(self.url)} cannot be downloaded: {reason}"
        if not self.sha256 or scheme_of(self.url) == OCI:
            return DownloadError(text, fix=fix)
        by_hand = f"save the file as {self.target}, or set the recipe's model to a local copy of it"
        return DownloadError(text, fix=f"{fix}; or {by_hand}" if fix else by_hand)


def _download_name(url: str, sha256: str) -> str:
    """Return the base name of a download's files: the digest of the file, or of its URL."""
    return sha256 or hashlib.sha256(url.encode()).hexdigest()


def list_files(folder: Path, url: str, sha256: str) -> list[Path]:
    """Return the paths that a download uses: file, lock, partial file and validator."""
    name = _download_name(url, sha256.lower())
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
    """Return the file with this digest; it is downloaded unless the folder has it.

    Without a digest, any content at the URL is accepted, and named by its digest. Interrupted downloads resume, and of
    several processes only one downloads. Up to `retries` consecutive attempts may fail without progress; the pause
    between them starts at `backoff_s` and doubles. `timeout_s` limits each wait for the server, `limit_s` the whole
    download.

    Raises:
        DownloadError: when the file cannot be downloaded, or its digest is wrong.
        TimeoutError: when it takes longer than `limit_s`; what was received is kept.
        Interrupted: when a signal ends this process; what was received is kept.
    """
    job = _Job(
        url=url,
        sha256=sha256.lower(),
        folder=folder,
        on_progress=on_progress,
        max_bytes=max_bytes,
        timeout_s=timeout_s,
        abandoned=threading.Event(),
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
                download_part = partial(_download_part, job, retries, backoff_s)
                try:
                    job = job._replace(sha256=call_within(limit_s, download_part))
                except (TimeoutError, Interrupted):
                    # The abandoned thread writes nothing more after this.
                    job.abandoned.set()
                    raise
            # Garbage collection holds this lock too, and keeps a download whose time has changed since it looked. In a
            # shared store, the file may be another user's.
            with contextlib.suppress(OSError):
                os.utime(job.target)
        return job.target
    except TimeoutError:
        raise
    except OSError as error:
        problem = explain(error, folder) or StoreError(str(error), fix=f"check {folder}")
        raise job.error(problem.message, fix=problem.fix) from error


def _download_part(job: _Job, retries: int, backoff_s: float) -> str:
    """Download and verify a file within the allowed attempts; return its digest."""
    failures = 0
    while True:
        job.check_abandoned()
        size_before = job.part_size()
        try:
            _download_missing(job)
            digest = hash_file(job.part)
            if digest == job.sha256 or not job.sha256:
                break
            size = job.part_size()
            job.discard_part()
            if not size_before:
                source = "recipe"
                fix = "ask its publisher which one is right, and correct sha256 in the recipe"
                if scheme_of(job.url) == OCI:
                    source, fix = "manifest", "run again; if it stays so, the registry is damaged"
                text = f"its sha256 is {digest} ({size_text(size)}), and the {source} says"
                raise job.error(f"{text} {job.sha256}", fix=fix)
            # A mismatch may come from a part of another version, so a new attempt is worthwhile.
        except _TemporaryProblem as problem:
            failures = 1 if job.part_size() > size_before else failures + 1
            _log.debug("%s: attempt failed: %s", without_secrets(job.url), problem)
            if failures > retries:
                reason = f"{problem} ({count_text(failures, 'attempt')})"
                raise job.error(reason, fix="check the network and run again") from problem
            time.sleep(min(max(backoff_s * 2 ** (failures - 1), problem.wait_s), _MAX_WAIT_S))
    job.part.replace(job.folder / digest)
    job.validator.unlink(missing_ok=True)
    return digest


def _download_missing(job: _Job) -> None:
    offset = job.part_size()
    source = _open(job, offset)
    if source is None:
        return
    with contextlib.closing(source):
        job.check_abandoned()
        if source.start != offset or not offset:
            job.discard_part()
            if source.start:
                raise _TemporaryProblem("the server sent a range that was not requested")
        if source.total > job.max_bytes:
            limit = size_text(job.max_bytes)
            raise job.error(f"it has {size_text(source.total)}, and the limit is {limit}")
        _check_space(job, source.total - source.start)
        if source.validator:
            job.validator.write_text(source.validator)
        with job.part.open("ab") as stream:
            _copy(job, source, stream)


def _open(job: _Job, offset: int) -> ByteSource | None:
    """Return a source of the missing bytes; None when the partial download is already complete."""
    validator = job.validator.read_text() if offset and job.validator.exists() else ""
    scheme = scheme_of(job.url)
    if scheme == "file":
        return _open_file(job)
    if scheme in BUCKETS:
        return _open_object(job, offset, validator)
    url, credential = job.url, None
    if scheme == HUB:
        try:
            check_online()
            url, credential = find_location(parse_hub_file(job.url))
        except HubError as problem:
            raise job.error(str(problem), fix=problem.fix) from None
    elif scheme != OCI:
        credential = find_credential(job.url)
    headers, visited = {"Range": f"bytes={offset}-"} if offset else {}, [url]
    if validator:
        headers["If-Range"] = validator

    def request() -> Answer:
        if scheme == OCI:
            repository = Repository(parse_oci_reference(job.url), job.timeout_s)
            blob = f"{repository.url}/blobs/sha256:{job.sha256}"
            return repository.request("GET", blob, headers)
        return HttpClient(job.timeout_s).get(url, headers, credential, visited=visited)

    try:
        # A server may send its headers byte by byte, so the whole request has a time limit.
        answer = call_within(job.timeout_s, request, job.abandoned.is_set)
    except NO_ANSWER as error:
        text = f"no answer from {urllib.parse.urlsplit(visited[-1]).hostname}: {error}"
        if isinstance(error, Unreachable) and error.fix:
            raise job.error(text, fix=error.fix) from error
        raise _TemporaryProblem(text) from error
    if answer.is_success:
        return answer
    with contextlib.closing(answer):
        _handle_status(job, answer, offset)
        if answer.status != _RANGE_NOT_SATISFIABLE:
            raise _status_error(job, answer, url, credential)
    return None


class _LocalFile:
    start = 0
    validator = ""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("rb")
        self.total = os.fstat(self._stream.fileno()).st_size

    def read(self) -> bytes:
        return self._stream.read(CHUNK)

    def close(self) -> None:
        self._stream.close()


def _open_file(job: _Job) -> _LocalFile:
    host = urllib.parse.urlsplit(job.url).netloc
    try:
        if host not in ("", "localhost"):
            raise OSError(f"{excerpt(host)} is another host")
        return _LocalFile(_local_path(job.url))
    except OSError as error:
        raise job.error(str(error), fix="check the URL") from None


def _local_path(url: str) -> Path:
    return Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))


def _open_object(job: _Job, offset: int, validator: str) -> ByteSource:
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
        raise _TemporaryProblem(str(error)) from None
    except TransferError as error:
        raise job.error(str(error)) from None


def _handle_status(job: _Job, answer: Answer, offset: int) -> None:
    """Raise the error for a temporary status; for status 416, check that the part is complete."""
    if answer.status == _RANGE_NOT_SATISFIABLE and offset:
        if answer.total == offset:
            return
        job.discard_part()
        raise _TemporaryProblem(
            "the file on the server is shorter than the part that was downloaded before"
        )
    if answer.status in RETRYABLE:
        wait_s = header_count(answer.headers.get("Retry-After", "")) or 0
        raise _TemporaryProblem(_status_text(answer), float(wait_s))


def _status_text(answer: Answer) -> str:
    return f"the server answered {answer.status} {excerpt(answer.reason)}"


def _status_error(
    job: _Job, answer: Answer, url: str, credential: Credential | None
) -> DownloadError:
    if scheme_of(job.url) == HUB:
        problem = explain_status(answer, parse_hub_file(job.url), credential)
        return job.error(str(problem), fix=problem.fix)
    if scheme_of(job.url) == OCI:
        return Repository(parse_oci_reference(job.url)).explain(answer)
    is_denied = answer.status in ACCESS_DENIED
    fix = denial_fix(url, credential) if is_denied else "check the URL"
    return job.error(_status_text(answer), fix=fix)


def _check_space(job: _Job, needed: int) -> None:
    try:
        check_free_space(job.folder, needed)
    except StoreError as problem:
        raise job.error(problem.message, fix=problem.fix) from None


def _copy(job: _Job, source: ByteSource, stream: IO[bytes]) -> None:
    done, checked, last_progress = source.start, -_SPACE_INTERVAL, 0.0

    def report() -> None:
        if job.on_progress:
            job.on_progress(DownloadProgress(without_secrets(job.url), done, source.total))

    try:
        for piece in read_pieces(source, job.max_bytes - source.start):
            job.check_abandoned()
            # Other programs may fill the disk while the file arrives.
            if done - checked >= _SPACE_INTERVAL:
                checked = done
                stream.flush()
                _check_space(job, _SPACE_INTERVAL)
            stream.write(piece)
            done += len(piece)
            if (now := time.monotonic()) - last_progress >= _PROGRESS_INTERVAL_S:
                last_progress = now
                report()
    except DownloadError:
        if not source.total:
            # The file has no known size, and perhaps no end: another attempt would not help.
            job.discard_part()
        raise
    except Corrupt:
        job.discard_part()
        raise job.error(f"it is larger than the limit of {size_text(job.max_bytes)}") from None
    except (TransferError, NoObject) as error:
        job.check_abandoned()
        raise _TemporaryProblem(str(error) or "it was removed") from error
    job.check_abandoned()
    report()
