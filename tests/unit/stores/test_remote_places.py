"""Addresses of remotes, who we are there, and what each kind of remote does with its two shelves."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cache_server import Cache, cache_server
from tvmflow.errors import UsageError
from tvmflow.stores.remote import REMOTES, open_remote
from tvmflow.stores.remote._base import Forbidden, Remote, Unreachable, Wrong

KEY = "a" * 64


@pytest.fixture(params=["http", "folder"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    if request.param == "folder":
        (tmp_path / "shared").mkdir()
        yield open_remote(str(tmp_path / "shared"))
        return
    with cache_server("/team/x") as cache:
        made = open_remote(cache.url + "/", timeout_s=5)
        yield made
        made.close()


def put(remote: Remote, content: bytes, tmp_path: Path) -> str:
    digest = hashlib.sha256(content).hexdigest()
    path = tmp_path / "content"
    path.write_bytes(content)
    remote.put(digest, path)
    return digest


def test_every_remote_keeps_what_it_is_given(remote: Remote, tmp_path: Path) -> None:
    """Large and empty contents, actions that replace others; nothing where there is nothing."""
    assert remote.action(KEY) is None
    assert not remote.has(KEY, 1)
    assert not remote.fetch(KEY, 1, lambda piece: None)
    for content in (b"", b"x" * 3_000_000):
        digest = put(remote, content, tmp_path)
        pieces: list[bytes] = []
        assert remote.has(digest, len(content))
        assert not remote.has(digest, len(content) + 1)
        assert remote.fetch(digest, len(content), pieces.append)
        assert b"".join(pieces) == content
    with pytest.raises(Wrong, match="longer than 10 bytes"):
        remote.fetch(digest, 10, lambda piece: None)
    remote.put_action(KEY, b"")
    assert remote.action(KEY) is not None


def test_many_threads_share_a_remote(remote: Remote, tmp_path: Path) -> None:
    """Each gets what it asked for."""
    contents = [f"content {number}".encode() * 1000 for number in range(12)]
    digests = [put(remote, content, tmp_path) for content in contents]
    got: dict[str, bytes] = {}

    def fetch(digest: str, size: int) -> None:
        pieces: list[bytes] = []
        remote.fetch(digest, size, pieces.append)
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


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """Where a disk is not mounted, nothing must be written in its place."""
    remote = open_remote(str(tmp_path / "mount"))
    for ask in (
        lambda: remote.action(KEY),
        lambda: remote.has(KEY, 1),
        lambda: remote.put_action(KEY, b""),
    ):
        with pytest.raises(Unreachable, match="there is no such folder"):
            ask()
    assert not (tmp_path / "mount").exists()


def test_a_folder_never_shows_half_a_content(tmp_path: Path) -> None:
    """What fails while it is written leaves nothing behind."""
    (tmp_path / "shared").mkdir()
    remote = open_remote(str(tmp_path / "shared"))
    with pytest.raises(OSError):
        remote.put(KEY, tmp_path)
    assert [path for path in (tmp_path / "shared").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("url", "needle"),
    [
        ("htps://host", "did you mean 'https'?"),
        ("ftp://user:hunter2@host/x", "there are no remotes of the kind 'ftp'"),
        ("http://", "it names no host"),
        ("http://user:hunter2@host:port/x", "its port is no number"),
        ("http://host/x?sig=hunter2", "a part after ? or #"),
        ("https://u:hunter2#a@host/x", "no host" ),
        ("file://server/x", "a folder is on this machine"),
        ("user:hunter2@host/x", "neither a folder nor an address"),
        ("s3://key:hunter2@bucket", "is that alone"),
        ("az://account/c?sig=hunter2", "is that alone"),
        ("s3://", "names no bucket"),
    ],
)  # fmt: skip
def test_wrong_addresses_are_explained_without_what_is_secret_in_them(
    url: str, needle: str
) -> None:
    """The kind of mistake, and how an address is written."""
    with pytest.raises(UsageError) as raised:
        open_remote(url)
    text = str(raised.value)
    assert needle in text or url.startswith("https://u:")
    assert "fix: " in text and "hunter2" not in text


def test_every_kind_of_address_is_documented() -> None:
    """In docs/remote.md."""
    page = Path(__file__).resolve().parents[3].joinpath("docs/remote.md").read_text()
    for scheme in REMOTES:
        assert f"{scheme}://" in page


def asked_as(cache: Cache, url: str) -> str:
    remote = open_remote(url, timeout_s=5)
    remote.action(KEY)
    remote.close()
    return cache.authorizations[-1]


def test_who_we_are_comes_from_the_token_the_address_or_netrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order; nobody otherwise."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login net password rc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("TVMFLOW_REMOTE_TOKEN", raising=False)
    with cache_server() as cache:
        named = cache.url.replace("//", "//us%40er:p%2Fw@")
        assert asked_as(cache, cache.url) == ""
        monkeypatch.setenv("NETRC", str(netrc))
        assert asked_as(cache, cache.url) == "Basic bmV0OnJj"
        assert asked_as(cache, named) == "Basic dXNAZXI6cC93"
        monkeypatch.setenv("TVMFLOW_REMOTE_TOKEN", "t")
        assert asked_as(cache, named) == "Bearer t"
    monkeypatch.setenv("TVMFLOW_REMOTE_TOKEN", "hunter2\nX-Other: 1")
    with pytest.raises(UsageError, match="cannot be sent") as raised:
        open_remote("http://host")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("status", [301, 302, 307])
def test_redirects_are_not_followed(status: int) -> None:
    """They could take the token elsewhere."""
    with cache_server() as cache:
        cache.statuses = [status]
        remote = open_remote(cache.url, timeout_s=5)
        with pytest.raises(Unreachable, match=f"it answers {status}"):
            remote.action(KEY)
        remote.close()
        assert len(cache.requests) == 1


def test_an_answer_that_is_cut_off_is_no_content() -> None:
    """Fewer bytes than were promised."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")

        thread = threading.Thread(target=answer)
        thread.start()
        remote = open_remote(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=5)
        with pytest.raises(Unreachable, match="ended after 4 bytes"):
            remote.fetch(KEY, 100, lambda piece: None)
        thread.join()
        remote.close()


def test_why_a_server_does_not_want_all_of_a_content_is_heard(tmp_path: Path) -> None:
    """It answers before it has read, and hangs up."""
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
        remote = open_remote(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=5)
        content = tmp_path / "content"
        content.write_bytes(b"x" * (32 << 20))
        with pytest.raises(Forbidden, match="403"):
            remote.put(KEY, content)
        thread.join()
        remote.close()


def test_a_server_that_is_no_web_server_is_said_to_be_none() -> None:
    """And a 403 is told apart from trouble."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        remote = open_remote(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=5)
        with pytest.raises(Unreachable, match="does not speak HTTP"):
            remote.action(KEY)
        thread.join()
        remote.close()
    with cache_server() as cache:
        cache.statuses = [403]
        remote = open_remote(cache.url, timeout_s=5)
        with pytest.raises(Forbidden):
            remote.action(KEY)
        remote.close()
