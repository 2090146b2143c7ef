"""Remote caches: their URLs, credentials, and what each kind does with actions and blobs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cache_server import Cache, cache_server
from tests.support.registry import (
    HTPASSWD,
    LOGIN,
    Fixed,
    docker_registry,
    front,
    needs_registry,
)
from tvmflow.core.errors import UsageError
from tvmflow.store import oci
from tvmflow.store.http_client import Corrupt, TransferError, Unreachable
from tvmflow.store.remote import REMOTE_CACHES, open_remote_cache
from tvmflow.store.remote.connection import Forbidden, RemoteCache

ACTION = f"ac/{'a' * 64}"
BLOB = f"cas/{'a' * 64}"


def ignore(piece: bytes) -> None:
    """Take a piece of a file that no test looks at."""


@pytest.fixture(params=["http", "folder", pytest.param("oci", marks=needs_registry)])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteCache]:
    if request.param == "oci":
        with docker_registry(tmp_path / "registry") as host:
            made = open_remote_cache(f"oci://{host}/team/x", timeout_s=5)
            yield made
            made.close()
        return
    if request.param == "folder":
        (tmp_path / "shared").mkdir()
        yield open_remote_cache(str(tmp_path / "shared"))
        return
    with cache_server("/team/x") as cache:
        made = open_remote_cache(cache.url + "/", timeout_s=5)
        yield made
        made.close()


def put(remote: RemoteCache, content: bytes, tmp_path: Path) -> str:
    digest = hashlib.sha256(content).hexdigest()
    path = tmp_path / "content"
    path.write_bytes(content)
    remote.put(f"cas/{digest}", path)
    return digest


def test_every_remote_cache_keeps_what_it_gets(remote: RemoteCache, tmp_path: Path) -> None:
    """Large and empty blobs, actions that replace others; nothing where nothing was stored."""
    assert not remote.get(ACTION, 1000, ignore)
    assert not remote.has(BLOB, 1)
    assert not remote.get(BLOB, 1, ignore)
    for content in (b"", b"x" * 3_000_000):
        digest = put(remote, content, tmp_path)
        pieces: list[bytes] = []
        assert remote.has(f"cas/{digest}", len(content))
        assert not remote.has(f"cas/{digest}", len(content) + 1)
        assert remote.get(f"cas/{digest}", len(content), pieces.append)
        assert b"".join(pieces) == content
    with pytest.raises(Corrupt, match="longer than 10 bytes"):
        remote.get(f"cas/{digest}", 10, ignore)
    remote.put(ACTION, b"")
    assert remote.get(ACTION, 1000, ignore)


def test_many_threads_share_a_remote_cache(remote: RemoteCache, tmp_path: Path) -> None:
    """Each gets the blob that it requests."""
    contents = [f"content {number}".encode() * 1000 for number in range(12)]
    digests = [put(remote, content, tmp_path) for content in contents]
    got: dict[str, bytes] = {}

    def fetch(digest: str, size: int) -> None:
        pieces: list[bytes] = []
        remote.get(f"cas/{digest}", size, pieces.append)
        got[digest] = b"".join(pieces)

    threads = [
        threading.Thread(target=fetch, args=(digest, len(content)))
        for digest, content in zip(digests, contents, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == dict(zip(digests, contents, strict=True))


def test_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    """Where a disk is not mounted, nothing must be written in its place."""
    remote = open_remote_cache(str(tmp_path / "mount"))
    for request in (
        lambda: remote.get(ACTION, 1000, ignore),
        lambda: remote.has(BLOB, 1),
        lambda: remote.put(ACTION, b""),
    ):
        with pytest.raises(Unreachable, match="the folder does not exist"):
            request()
    assert not (tmp_path / "mount").exists()


def test_a_failed_upload_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    """What fails while it is written leaves no file behind."""
    (tmp_path / "shared").mkdir()
    remote = open_remote_cache(str(tmp_path / "shared"))
    with pytest.raises(OSError):
        remote.put(BLOB, tmp_path)
    assert [path for path in (tmp_path / "shared").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("url", "needle"),
    [
        ("htps://host", "did you mean 'https'?"),
        ("ftp://user:hunter2@host/x", "there is no remote cache of the kind 'ftp'"),
        ("http://", "the URL has no host"),
        ("http://user:hunter2@host:port/x", "the port is not a number"),
        ("http://host/x?sig=hunter2", "a query or a fragment"),
        ("https://u:hunter2#a@host/x", "no host" ),
        ("file://server/x", "names a folder of this machine"),
        ("user:hunter2@host/x", "neither a folder nor a URL"),
        ("s3://key:hunter2@bucket", "has no user, query or fragment"),
        ("az://account/c?sig=hunter2", "has no user, query or fragment"),
        ("s3://", "has no bucket"),
        ("https://key:hunter2@[", "this is not a valid URL"),
        ("http://[", "this is not a valid URL"),
        ("s3://[", "this is not a valid URL"),
        ("file://[", "this is not a valid URL"),
    ],
)  # fmt: skip
def test_invalid_urls_are_explained_without_their_secrets(url: str, needle: str) -> None:
    """The message names the mistake and how a URL is written."""
    with pytest.raises(UsageError) as raised:
        open_remote_cache(url)
    text = str(raised.value)
    assert needle in text or url.startswith("https://u:")
    assert "fix: " in text and "hunter2" not in text


def test_every_kind_of_url_is_documented() -> None:
    """In docs/remote.md."""
    page = Path(__file__).resolve().parents[3].joinpath("docs/remote.md").read_text()
    for scheme in REMOTE_CACHES:
        assert f"{scheme}://" in page


def sent_authorization(cache: Cache, url: str) -> str:
    remote = open_remote_cache(url, timeout_s=5)
    remote.get(ACTION, 1000, ignore)
    remote.close()
    return cache.authorizations[-1]


def test_credentials_come_from_the_token_the_url_or_netrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order; otherwise there are none."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login net password rc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("TVMFLOW_REMOTE_TOKEN", raising=False)
    with cache_server() as cache:
        url = cache.url.replace("//", "//us%40er:p%2Fw@")
        assert sent_authorization(cache, cache.url) == ""
        monkeypatch.setenv("NETRC", str(netrc))
        assert sent_authorization(cache, cache.url) == "Basic bmV0OnJj"
        assert sent_authorization(cache, url) == "Basic dXNAZXI6cC93"
        monkeypatch.setenv("TVMFLOW_REMOTE_TOKEN", "t")
        assert sent_authorization(cache, url) == "Bearer t"
    monkeypatch.setenv("TVMFLOW_REMOTE_TOKEN", "hunter2\nX-Other: 1")
    with pytest.raises(UsageError, match="cannot be sent") as raised:
        open_remote_cache("http://host")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("status", [301, 302, 307])
def test_redirects_are_not_followed(status: int) -> None:
    """They could send the token to another server."""
    with cache_server() as cache:
        cache.statuses = [status]
        remote = open_remote_cache(cache.url, timeout_s=5)
        with pytest.raises(Unreachable, match=f"it answers {status}"):
            remote.get(ACTION, 1000, ignore)
        remote.close()
        assert len(cache.requests) == 1


def test_a_truncated_response_is_an_error() -> None:
    """Fewer bytes arrive than were declared."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")

        thread = threading.Thread(target=answer)
        thread.start()
        remote = open_remote_cache(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=5)
        with pytest.raises(Unreachable, match="ended after 4 bytes"):
            remote.get(BLOB, 100, ignore)
        thread.join()
        remote.close()


def test_the_reason_of_a_rejected_upload_is_reported(tmp_path: Path) -> None:
    """The server answers before it has read the body, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                connection.shutdown(socket.SHUT_RD)
                time.sleep(0.2)

        thread = threading.Thread(target=answer)
        thread.start()
        remote = open_remote_cache(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=5)
        content = tmp_path / "content"
        content.write_bytes(b"x" * (32 << 20))
        with pytest.raises(Forbidden, match="403"):
            remote.put(BLOB, content)
        thread.join()
        remote.close()


def test_a_server_that_does_not_speak_http_is_reported() -> None:
    """A 403 is another error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        remote = open_remote_cache(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=5)
        with pytest.raises(Unreachable, match="is not an HTTP server"):
            remote.get(ACTION, 1000, ignore)
        thread.join()
        remote.close()
    with cache_server() as cache:
        cache.statuses = [403]
        remote = open_remote_cache(cache.url, timeout_s=5)
        with pytest.raises(Forbidden):
            remote.get(ACTION, 1000, ignore)
        remote.close()


@pytest.mark.skipif(HTPASSWD is None, reason="needs htpasswd")
@needs_registry
def test_a_registry_that_wants_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials it refuses access, with those of docker it takes results."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with docker_registry(tmp_path / "registry", with_login=True) as host:
        made = open_remote_cache(f"oci://{host}/team/x", timeout_s=5)
        with pytest.raises(Forbidden, match=f"^{host} denies access: 401"):
            made.get(ACTION, 1000, ignore)
        (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": LOGIN}}}))
        made.put(ACTION, b"")
        assert made.get(ACTION, 1000, ignore)
        made.close()


LOOP = {"Location": "?again"}
LYING_ANSWERS = [
    Fixed(200, b"x" * 65_536, endless=True),
    Fixed(200, b"{}", {"Content-Range": "bytes 9-1/0"}),
    Fixed(206, b"x"),
    Fixed(307, b"", LOOP),
    Fixed(307, b"", {"Location": "file:///etc/passwd"}),
    Fixed(307, b"", {"Location": "http://ann:hunter2@127.0.0.1:1/"}),
    Fixed(307, b"", {"Location": "http://127.0.0.1:1/gone"}),
    Fixed(401, b"", {"WWW-Authenticate": 'Bearer realm="https://auth.docker.io/token"'}),
    Fixed(401, b"", {"WWW-Authenticate": 'Bearer realm="' + "a" * 60_000}),
    Fixed(403, b'{"errors": [{"message": "\\u001b[2J"}]}'),
    Fixed(200, b"[" * 100_000),
    Fixed(200, b'{"layers": 1, "annotations": {"a": 1}}'),
    Fixed(204),
    Fixed(999),
]


@pytest.mark.parametrize("kind", ["GET", "HEAD", "POST", "PUT"])
@pytest.mark.parametrize("answer", LYING_ANSWERS)
def test_a_lying_registry_costs_nothing_but_its_results(
    answer: Fixed, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it answers is an error of a remote cache, or nothing: no other error, no credential elsewhere."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(oci, "_PAUSE_S", 0.0)
    with front("127.0.0.1:1") as server:
        config = {"auths": {server.host: {"auth": LOGIN}}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        cache = open_remote_cache(f"oci://{server.host}/team/x", timeout_s=5)
        if kind in ("POST", "PUT"):
            server.uploads = [answer] * 9
            server.answers = {"a" * 64: Fixed(404), "/upload": answer}
            if kind == "PUT":
                server.uploads = [Fixed(202, b"", {"Location": "/upload"})] * 9
        else:
            server.answers = {"a" * 64: answer}
        got: list[bytes] = []
        with contextlib.suppress(TransferError):
            if kind == "GET":
                cache.get(ACTION, 1000, got.append)
            elif kind == "HEAD":
                assert cache.has(BLOB, 1) in (True, False)
            else:
                cache.put(BLOB, b"content")
        cache.close()
        assert sum(map(len, got)) <= 1000
        assert not any(one.authorization for one in server.requests)
    oci._LOGINS.clear()
