"""The Hugging Face Hub: the files of a repository at one commit, with their digests, over plain https.

The requests are those of `HfApi.model_info(files_metadata=True)` and `hf_hub_download` of the package
huggingface_hub, and the errors are read as its `hf_raise_for_status` does.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from tvmflow.core.codec import from_json
from tvmflow.core.documents import Unreadable, read_json
from tvmflow.core.formatting import excerpt, quoted
from tvmflow.core.text import did_you_mean
from tvmflow.core.types import Json
from tvmflow.store.addresses import HubFile, check_address, without_secrets
from tvmflow.store.http_client import (
    BROKEN_ANSWER,
    RETRYABLE,
    Answer,
    Credential,
    HttpClient,
    advise,
    call_within,
    find_hub_credential,
    may_send_to,
)

_TIMEOUT_S: Final = 30.0
_ATTEMPTS: Final = 3
_MAX_ANSWER_BYTES: Final = 16 << 20
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_GIT_DIGEST: Final = re.compile(r"[0-9a-f]{40}")
_TRUE: Final = frozenset({"1", "ON", "YES", "TRUE"})


class HubError(Exception):
    """The Hub did not give what was requested.

    Attributes:
        fix: What to do next.
        is_mistake: The recipe is wrong, not the environment.
    """

    def __init__(self, reason: str, fix: str, *, is_mistake: bool = False) -> None:
        super().__init__(reason)
        self.fix = fix
        self.is_mistake = is_mistake


class HubEntry(NamedTuple):
    """A file of a repository: its sha256, empty where the Hub has none, and git's digest of it."""

    sha256: str
    blob: str


class Snapshot(NamedTuple):
    """A repository at one commit.

    The license is as its page states it; empty for none. Whoever downloads files of a gated one must have accepted its terms.
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

    def to_text(self) -> str:
        """Return the snapshot as JSON."""
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> Snapshot:
        """Return the snapshot that `to_text` wrote."""
        return from_json(cls, json.loads(text))


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
    """Check that requests to the Hub are allowed."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        fix = "unset it, or run once on a machine with a network and share the store"
        raise HubError("no request is sent to the Hub: $HF_HUB_OFFLINE is set", fix)


def find_location(file: HubFile) -> tuple[str, Credential | None]:
    """Return the URL of a file, and the credential for it."""
    hub = endpoint()
    path, revision = urllib.parse.quote(file.path), urllib.parse.quote(file.revision, safe="")
    url = f"{hub}/{file.repository}/resolve/{revision}/{path}"
    return url, find_hub_credential(hub)


def read_snapshot(repository: str, revision: str) -> Snapshot:
    """Return a repository at a revision; an empty one is that of its default branch."""
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
    return HubEntry(
        _checked(lfs["sha256"], _SHA256) if lfs else "", _checked(entry["blobId"], _GIT_DIGEST)
    )


def _checked(digest: str, pattern: re.Pattern[str]) -> str:
    """Return a digest that is one: it becomes the name of a file."""
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
    """Return the error that a status of the Hub means."""
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
        text = f"the Hub has no repository {quoted(file.repository)} that is public"
        if credential:
            text = f"the Hub has no repository {quoted(file.repository)} for the token in {credential.origin}"
        return HubError(text, fix=f"check its name{private}", is_mistake=True)
    if answer.status == 404:
        return HubError(
            f"the repository has no file {quoted(file.path)}", f"see {page}", is_mistake=True
        )
    text = f"the Hub answers {answer.status} {excerpt(answer.reason)}"
    return HubError(text, advise(answer.status, "the Hub"))


def gated_error(file: HubFile, credential: Credential | None) -> HubError:
    """Return the error of a gated repository whose files are denied."""
    page = f"{endpoint()}/{file.repository}"
    if credential:
        fix = f"accept its terms at {page} with the account of the token in {credential.origin}"
    else:
        fix = f"accept its terms at {page}, and {_token_fix()} of that account"
    return HubError("the repository is gated", fix)


def _token_fix() -> str:
    if may_send_to(endpoint()):
        return "set $HF_TOKEN to a token"
    return "use https in $HF_ENDPOINT, as tokens are not sent over http, and a token"


def _revision_error(file: HubFile) -> HubError:
    """Return the error of a revision that does not exist, with the newest commit that does."""
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
    except BROKEN_ANSWER as error:
        text = f"no answer from {hub}: {excerpt(str(error)) or type(error).__name__}"
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
