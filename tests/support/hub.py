"""A server with the interface of the Hugging Face Hub, as its documentation describes it.

Files in Git LFS are answered with a redirect to another server, as the Hub does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.listening import RequestHandler, listening

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_hunter2"


@dataclass
class Hub:
    """One repository of the Hub, and the requests that it got."""

    repository: str = "org/net"
    files: dict[str, bytes] = field(default_factory=dict)
    small: set[str] = field(default_factory=set)
    """The files that are not in Git LFS."""
    card: dict[str, Any] = field(default_factory=lambda: {"license": "apache-2.0"})
    private: bool = False
    gated: bool = False
    accepted: bool = True
    """Whether the account of the token has accepted the terms."""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers."""
    url: str = ""
    storage: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Path and `Authorization` of each request, of the server with the content too."""

    def address(self, path: str, revision: str = COMMIT) -> str:
        return f"hf://{self.repository}/{path}" + (f"@{revision}" if revision else "")

    def info(self) -> dict[str, Any]:
        siblings = []
        for path, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry: dict[str, Any] = {"rfilename": path, "blobId": blob, "size": len(content)}
            if path not in self.small:
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        return {
            "id": self.repository,
            "sha": COMMIT,
            "private": self.private,
            "gated": "auto" if self.gated else False,
            "cardData": self.card,
            "siblings": siblings,
        }


@contextlib.contextmanager
def serving_hub() -> Iterator[Hub]:
    """Give a server of one repository on a free port, without files."""
    hub = Hub()

    class Content(RequestHandler):
        """The server to which the Hub redirects for large files."""

        def do_GET(self) -> None:
            hub.requests.append((self.path, self.headers.get("Authorization", "")))
            send(self, hub.files[urllib.parse.unquote(self.path[1:])])

    class Handler(RequestHandler):
        def do_GET(self) -> None:
            token = self.headers.get("Authorization", "")
            hub.requests.append((self.path, token))
            url = urllib.parse.urlsplit(self.path)
            parts = urllib.parse.unquote(url.path).strip("/").split("/")
            if hub.statuses:
                self.refuse(hub.statuses.pop(0), "")
            elif token and token != f"Bearer {TOKEN}":
                message = "Invalid credentials in Authorization header"
                self.refuse(401, "", message)
            elif parts[:2] == ["api", "models"]:
                self.answer_info("/".join(parts[2:4]), "/".join(parts[5:]), url.query)
            else:
                self.answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

        def is_found(self, repository: str, revision: str) -> bool:
            token = self.headers.get("Authorization", "")
            if repository != hub.repository or (hub.private and not token):
                # The Hub does not say whether there is a private repository.
                self.refuse(404 if token else 401, "RepoNotFound")
                return False
            if revision not in ("", "main", COMMIT):
                self.refuse(404, "RevisionNotFound")
                return False
            return True

        def answer_info(self, repository: str, revision: str, query: str) -> None:
            assert query == "blobs=true"
            if self.is_found(repository, revision):
                send(self, json.dumps(hub.info()).encode())

        def answer_file(self, repository: str, revision: str, path: str) -> None:
            if not self.is_found(repository, revision):
                return
            token = self.headers.get("Authorization", "")
            if hub.gated and not (token and hub.accepted):
                self.refuse(403 if token else 401, "GatedRepo")
            elif path not in hub.files:
                self.refuse(404, "EntryNotFound")
            elif path in hub.small:
                send(self, hub.files[path])
            else:
                location = f"{hub.storage}/{urllib.parse.quote(path)}"
                self.head(302, headers={"Location": location})

        def refuse(self, status: int, code: str, message: str = "") -> None:
            headers = {"X-Error-Code": code} if code else {}
            self.head(status, headers={**headers, "X-Error-Message": message})

    with listening(Handler) as hub.url, listening(Content) as hub.storage:
        yield hub


def send(handler: RequestHandler, body: bytes) -> None:
    handler.head(200, len(body))
    handler.wfile.write(body)
