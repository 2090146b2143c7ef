"""Debian's docker-registry on a free port, and a server before it that can want tokens, cut transfers and lie."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.listening import RequestHandler, listening

PROGRAM = shutil.which("docker-registry")
HTPASSWD = shutil.which("htpasswd")
SKOPEO = shutil.which("skopeo")
needs_registry = pytest.mark.skipif(PROGRAM is None, reason="needs docker-registry")

USER, PASSWORD = "ann", "hunter2:with colon"
LOGIN = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


@contextlib.contextmanager
def docker_registry(folder: Path, *, with_login: bool = False) -> Iterator[str]:
    """Give host and port of a registry whose content is in a folder."""
    assert PROGRAM
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "content")}},
        "http": {"addr": host},
    }
    if with_login:
        assert HTPASSWD
        users = subprocess.run(
            [HTPASSWD, "-Bbn", "-C4", USER, PASSWORD], check=True, capture_output=True
        )
        (folder / "users").write_bytes(users.stdout)
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "users")}}
    (folder / "config.yml").write_text(json.dumps(config))
    process = subprocess.Popen(
        [PROGRAM, "serve", str(folder / "config.yml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        name, port = host.split(":")
        for _ in range(500):
            with contextlib.suppress(OSError), socket.create_connection((name, int(port))):
                break
            time.sleep(0.02)
        yield host
    finally:
        process.terminate()
        process.wait()


@dataclass(frozen=True)
class Request:
    """A request that a `Front` got."""

    method: str
    path: str
    authorization: str
    range: str
    size: int


@dataclass
class Fixed:
    """An answer that does not come from the registry; an endless one sends its body again and again."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    endless: bool = False


@dataclass
class Front:
    """How the server before a registry behaves, and what it got."""

    upstream: str
    host: str = ""
    requests: list[Request] = field(default_factory=list)
    answers: dict[str, Fixed] = field(default_factory=dict)
    """Answers to GET and HEAD requests by the ends of their paths."""
    uploads: list[Fixed] = field(default_factory=list)
    """Answers to the next requests for an upload."""
    refused_manifests: list[Fixed] = field(default_factory=list)
    """Answers to the next manifests that are sent."""
    cut_uploads: list[int] = field(default_factory=list)
    """After how many bytes the next uploads of more than 1000 bytes end with the connection."""
    cut_downloads: list[int] = field(default_factory=list)
    """The same for blobs."""
    token: str = ""
    """What the registry wants, and gives to whoever logs in; empty for a registry that is open."""
    realm: str = ""
    """Where the token is to be had; empty for this server."""
    has_referrers: bool = False
    """Whether it lists referrers, as registries of OCI 1.1 do."""
    referrers: dict[str, list[dict[str, object]]] = field(default_factory=dict)

    def sent(self, method: str, part: str = "") -> list[Request]:
        """Return the requests of a method whose paths have a part."""
        return [one for one in self.requests if one.method == method and part in one.path]


@contextlib.contextmanager
def front(upstream: str) -> Iterator[Front]:
    """Give a server before a registry."""
    state = Front(upstream)

    class Handler(RequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            secret = self.headers.get("Authorization", "")
            asked = self.headers.get("Range", "")
            state.requests.append(Request(self.command, self.path, secret, asked, size))
            path = urllib.parse.urlsplit(self.path).path
            if path in state.answers:
                self.answer(state.answers[path])
            elif path == "/token":
                is_known = secret in ("", f"Basic {LOGIN}")
                self.answer(
                    Fixed(200 if is_known else 401, json.dumps({"token": state.token}).encode())
                )
            elif state.token and secret != f"Bearer {state.token}":
                self.rfile.read(size)
                realm = state.realm or f"http://{state.host}/token"
                wanted = f'Bearer realm="{realm}",service="test",scope="repository:a:pull,push"'
                self.answer(Fixed(401, b"{}", {"WWW-Authenticate": wanted}))
            elif self.command == "POST" and state.uploads:
                self.answer(state.uploads.pop(0))
            elif self.command == "PUT" and "/manifests/" in path and state.refused_manifests:
                self.rfile.read(size)
                self.answer(state.refused_manifests.pop(0))
            elif size > 1000 and state.cut_uploads:
                self.rfile.read(state.cut_uploads.pop(0))
                self.close_connection = True
            elif fixed := next(
                (fixed for end, fixed in state.answers.items() if path.endswith(end)), None
            ):
                self.answer(fixed)
            elif state.has_referrers and "/referrers/" in path:
                listed = state.referrers.get(path.rpartition("/")[2], [])
                self.answer(Fixed(200, json.dumps({"manifests": listed}).encode()))
            else:
                self.forward(path, self.rfile.read(size))

        do_HEAD = do_POST = do_PUT = do_GET

        def answer(self, fixed: Fixed) -> None:
            self.head(fixed.status, 1 << 40 if fixed.endless else len(fixed.body), fixed.headers)
            with contextlib.suppress(OSError):
                if self.command != "HEAD":
                    self.wfile.write(fixed.body)
                while fixed.endless:
                    self.wfile.write(fixed.body)

        def forward(self, path: str, body: bytes) -> None:
            connection = http.client.HTTPConnection(state.upstream)
            kept = {name: text for name, text in self.headers.items() if name != "Authorization"}
            secret = {} if state.token else {"Authorization": self.headers.get("Authorization")}
            headers = {**kept, **{name: text for name, text in secret.items() if text}}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            sent = {
                name: text
                for name, text in answer.headers.items()
                if name not in ("Content-Length", "Transfer-Encoding", "Connection")
            }
            length = int(answer.headers.get("Content-Length") or len(content))
            if state.has_referrers and self.command == "PUT" and "/manifests/sha256:" in path:
                value = json.loads(body)
                if subject := value.get("subject"):
                    sent["OCI-Subject"] = subject["digest"]
                    listed = {
                        "mediaType": value["mediaType"],
                        "artifactType": value["artifactType"],
                        "digest": path.rpartition("/")[2],
                        "size": len(body),
                        "annotations": value.get("annotations", {}),
                    }
                    state.referrers.setdefault(subject["digest"], []).insert(0, listed)
            self.head(answer.status, length, sent)
            if "/blobs/" in path and len(content) > 1000 and state.cut_downloads:
                content = content[: state.cut_downloads.pop(0)]
                self.close_connection = True
            self.wfile.write(content)
            connection.close()

    with listening(Handler) as url:
        state.host = url.removeprefix("http://")
        yield state
