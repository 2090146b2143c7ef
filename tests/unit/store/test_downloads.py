"""Downloads are complete, verified, resumed and shared, or fail with a remedy."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.listening import RequestHandler, listening
from tests.support.web import Web, serving
from tvmflow.core.errors import DownloadError
from tvmflow.store.downloads import DownloadProgress, download
from tvmflow.store.http_client import header_count, redirect_target

BODY = random.Random(0).randbytes(3_000_000)
DIGEST = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(BODY) as server:
        yield server


def get(web: Web, folder: Path, **options: Any) -> Path:
    return download(web.url, DIGEST, folder, **{"backoff_s": 0.01, "timeout_s": 5.0, **options})


def test_a_file_is_downloaded_once_and_named_by_its_digest(web: Web, tmp_path: Path) -> None:
    """The second call finds the file and sends no request."""
    path = get(web, tmp_path / "downloads")
    assert path == tmp_path / "downloads" / DIGEST
    assert path.read_bytes() == BODY
    assert get(web, tmp_path / "downloads") == path
    assert web.requests == [""]


def test_only_the_file_and_its_lock_file_remain(web: Web, tmp_path: Path) -> None:
    """The part and its validator are removed when the file is complete."""
    get(web, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [DIGEST, f"{DIGEST}.lock"]


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_a_url_of_a_local_file_names_a_file(kind: str, tmp_path: Path) -> None:
    """A named pipe is not waited for, and a device is not read to the end of the disk."""
    path = tmp_path / "model.onnx"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(DownloadError, match=r"cannot be downloaded: it is a .*, not a file"):
        download(path.as_uri(), DIGEST, tmp_path / "downloads")


def test_a_damaged_file_is_downloaded_again(web: Web, tmp_path: Path) -> None:
    """A file under the name of a digest is accepted only if it has that digest."""
    (tmp_path / DIGEST).write_bytes(b"rotten")
    assert get(web, tmp_path).read_bytes() == BODY


def test_a_lost_connection_is_resumed(web: Web, tmp_path: Path) -> None:
    """Two broken connections cost two more requests, and no byte is sent twice."""
    web.break_after = [1_000_000, 500_000]
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.requests == ["", "bytes=1000000-", "bytes=1500000-"]
    assert web.served == len(BODY)


def test_a_server_without_ranges_sends_everything_again(web: Web, tmp_path: Path) -> None:
    """A response from the start replaces the part instead of extending it."""
    web.ranges = False
    web.break_after = [1_000_000]
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.served == 1_000_000 + len(BODY)


def test_a_part_of_another_version_is_not_extended(web: Web, tmp_path: Path) -> None:
    """The part has an ETag; when the server has another one, it sends the file from the start."""
    (tmp_path / f"{DIGEST}.part").write_bytes(b"of an older version")
    (tmp_path / f"{DIGEST}.validator").write_text('"zero"')
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.requests == ["bytes=19-"]


def test_a_part_of_another_file_is_discarded(web: Web, tmp_path: Path) -> None:
    """A resumed file with the wrong digest is downloaded once more from the start before an error is raised."""
    (tmp_path / f"{DIGEST}.part").write_bytes(b"of an older version")
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.requests == ["bytes=19-", ""]


def test_a_complete_part_is_not_downloaded_again(web: Web, tmp_path: Path) -> None:
    """After a kill between the last byte and the rename, the server says that nothing is missing, and the digest decides."""
    (tmp_path / f"{DIGEST}.part").write_bytes(BODY)
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.served == 0


def test_a_file_with_a_wrong_digest_is_rejected_and_deleted(web: Web, tmp_path: Path) -> None:
    """The message has both digests, and no part of the file remains."""
    with pytest.raises(DownloadError) as caught:
        download(web.url, "0" * 64, tmp_path, backoff_s=0.01)
    assert caught.value.message == (
        f"{web.url} cannot be downloaded: its sha256 is {DIGEST} (3.0 MB), "
        f"and the recipe says {'0' * 64}"
    )
    assert [path.name for path in tmp_path.iterdir()] == [f"{'0' * 64}.lock"]


def test_a_missing_file_is_not_retried(web: Web, tmp_path: Path) -> None:
    """404 fails at once, and the message says where to save the file by hand."""
    web.statuses = [404]
    with pytest.raises(DownloadError, match="the server answered 404 Not Found") as caught:
        get(web, tmp_path)
    assert str(tmp_path / DIGEST) in caught.value.fix
    assert len(web.requests) == 1


def test_a_file_that_was_saved_by_hand_is_used(web: Web, tmp_path: Path) -> None:
    """The remedy that the message names works."""
    (tmp_path / DIGEST).write_bytes(BODY)
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.requests == []


def test_a_server_error_is_retried(web: Web, tmp_path: Path) -> None:
    """500 and 503 are temporary."""
    web.statuses = [500, 503]
    assert get(web, tmp_path).read_bytes() == BODY


def test_the_number_of_retries_is_limited(web: Web, tmp_path: Path) -> None:
    """The message says how many attempts were made."""
    web.statuses = [500] * 9
    with pytest.raises(DownloadError, match=r"500 Internal Server Error \(3 attempts\)"):
        get(web, tmp_path, retries=2)
    assert len(web.requests) == 3


def test_a_server_that_does_not_answer_times_out(tmp_path: Path) -> None:
    """No answer within `timeout_s` is a failed attempt, not a hang."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/model.onnx"
        with pytest.raises(DownloadError, match="timed out"):
            download(url, DIGEST, tmp_path, retries=1, backoff_s=0.01, timeout_s=0.1)


def test_a_refused_connection_and_an_unknown_host_are_named(tmp_path: Path) -> None:
    """The message names the host, not the exception."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(DownloadError, match=r"no answer from 127\.0\.0\.1: .*refused"):
        download(f"http://127.0.0.1:{port}/m", DIGEST, tmp_path, retries=0, backoff_s=0.01)
    with pytest.raises(DownloadError, match=r"(the host|no answer from) nowhere\.invalid"):
        download("http://nowhere.invalid/m", DIGEST, tmp_path, retries=0, backoff_s=0.01)


def test_a_file_above_the_limit_is_rejected_before_the_download(web: Web, tmp_path: Path) -> None:
    """The size that the server declares is enough."""
    with pytest.raises(DownloadError, match=r"it has 3\.0 MB, and the limit is 1\.0 kB"):
        get(web, tmp_path, max_bytes=1000)


def test_a_file_larger_than_the_disk_is_rejected_before_the_download(
    web: Web, tmp_path: Path
) -> None:
    """The message has both sizes, and the remedy is to free space."""
    web.declared = 1 << 60
    with pytest.raises(
        DownloadError,
        match=r"no space left .* 115292150\d\.\d GB are needed, 115292\d+\.\d GB more",
    ) as caught:
        get(web, tmp_path, max_bytes=1 << 62)
    assert caught.value.fix.startswith("free some space")


def test_a_folder_that_cannot_be_written_is_named(web: Web, tmp_path: Path) -> None:
    """The error is about the folder, not about the network."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="file"):
        get(web, tmp_path / "file" / "downloads")
    assert web.requests == []


def test_only_http_https_and_file_urls_are_supported(tmp_path: Path) -> None:
    """ftp is rejected; the file of a file: URL is copied and verified."""
    with pytest.raises(DownloadError, match="'ftp' are not supported"):
        download("ftp://example.org/m", DIGEST, tmp_path)
    (tmp_path / "model.onnx").write_bytes(BODY)
    path = download((tmp_path / "model.onnx").as_uri(), DIGEST, tmp_path / "downloads")
    assert path.read_bytes() == BODY
    with pytest.raises(DownloadError, match="No such file"):
        download((tmp_path / "gone.onnx").as_uri(), DIGEST, tmp_path / "other")


def test_a_redirect_to_a_local_file_is_rejected(web: Web, tmp_path: Path) -> None:
    """A server may redirect to another server, but not to files of this machine."""
    web.statuses, web.location = [302], "file:///etc/hostname"
    with pytest.raises(DownloadError, match="is not allowed"):
        get(web, tmp_path)


def test_a_redirect_from_https_to_http_is_rejected() -> None:
    """https may not lead to http."""
    with pytest.raises(DownloadError, match="is not allowed"):
        redirect_target("https://example.org/m", "http://example.org/m")
    assert redirect_target("https://example.org/m", "/n") == "https://example.org/n"


@pytest.mark.parametrize(
    "location",
    [
        "http://[bad/",
        "http://" + "a" * 70 + "/",
        "http://a..b/",
        "http://127.0.0.1:" + "9" * 5000 + "/",
        "gopher://127.0.0.1/\x01\x1b[2J",
        "ftp://127.0.0.1/",
        "javascript:alert(1)",
        "http://user:secret@127.0.0.1/",
        "",
    ],
)
def test_a_redirect_to_no_address_is_rejected(location: str, web: Web, tmp_path: Path) -> None:
    """Whatever stands there: a message that names the server, without what may be secret."""
    web.statuses, web.location = [302] * 20, location
    with pytest.raises(DownloadError) as caught:
        get(web, tmp_path)
    assert "secret" not in str(caught.value)
    assert web.url in str(caught.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_body_of_a_redirect_is_not_read(status: int, tmp_path: Path) -> None:
    """It may have no end, and would fill the memory."""
    sent: list[int] = []

    class Handler(RequestHandler):
        def do_GET(self) -> None:
            if self.path == "/m":
                self.head(200, len(BODY))
                self.wfile.write(BODY)
                return
            self.head(status, 1 << 40, {"Location": "/m"})
            with contextlib.suppress(ConnectionError):
                while len(sent) < 1000:
                    self.wfile.write(bytes(1 << 20))
                    sent.append(1)

    with listening(Handler) as address:
        path = download(f"{address}/first", DIGEST, tmp_path, retries=0)
    assert path.read_bytes() == BODY
    assert len(sent) < 100


def test_a_number_of_5000_digits_in_a_header_is_none(web: Web, tmp_path: Path) -> None:
    """Python refuses to read it; the file is what its digest says."""
    assert header_count("9" * 5000) is None
    assert header_count("\xb2") is None
    assert header_count("12") == 12

    class Handler(RequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            for name in ("Content-Length", "Content-Range", "Retry-After"):
                self.send_header(name, "bytes 0-1/" + "9" * 5000)
            self.send_header("Content-Length", "9" * 5000)
            self.end_headers()
            self.wfile.write(BODY)
            self.close_connection = True

    with listening(Handler) as address:
        assert download(f"{address}/m", DIGEST, tmp_path).read_bytes() == BODY


def test_passwords_are_not_in_messages(tmp_path: Path) -> None:
    """The part of a URL before the @ is omitted."""
    with pytest.raises(DownloadError) as caught:
        download("ftp://user:secret@example.org/m", DIGEST, tmp_path)
    assert "secret" not in str(caught.value)


def test_progress_is_reported_at_intervals(web: Web, tmp_path: Path) -> None:
    """The last report is complete, and a slow download does not report too often."""
    web.slow_s = 0.04
    events: list[DownloadProgress] = []
    started = time.monotonic()
    get(web, tmp_path, on_progress=events.append)
    took_s = time.monotonic() - started
    assert events[-1] == DownloadProgress(web.url, len(BODY), len(BODY))
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert 3 <= len(events) <= 4 * took_s + 2


def test_two_processes_at_once_download_once(web: Web, tmp_path: Path) -> None:
    """The second waits for the first and uses its file."""
    web.slow_s = 0.005
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(get(web, tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / DIGEST] * 2
    assert web.served == len(BODY)


def test_a_killed_download_is_resumed(web: Web, tmp_path: Path) -> None:
    """After a SIGKILL, the next process resumes, and the server sends few bytes twice."""
    web.slow_s = 0.05
    script = (
        "import sys; from pathlib import Path; from tvmflow.store.downloads import download;"
        "download(sys.argv[1], sys.argv[2], Path(sys.argv[3]))"
    )
    process = subprocess.Popen([sys.executable, "-c", script, web.url, DIGEST, str(tmp_path)])
    part = tmp_path / f"{DIGEST}.part"
    while not part.exists() or part.stat().st_size < 1_000_000:
        time.sleep(0.01)
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = part.stat().st_size
    web.slow_s = 0.0
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.requests[-1] == f"bytes={kept}-"
    # the answer to the one that was killed may still be on its way
    assert web.sent[-1] == len(BODY) - kept


class _Proxy(BaseHTTPRequestHandler):
    """A proxy that answers for every server, and opens no tunnels."""

    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(f"{self.path} {self.headers.get('Proxy-Authorization')}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"model")

    def do_CONNECT(self) -> None:
        self.requests.append(f"CONNECT {self.path}")
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        return


def test_downloads_go_through_the_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encrypted one through a tunnel, with the credentials of the proxy, and not to hosts without a proxy."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    monkeypatch.setenv("http_proxy", f"http://me:pw@{address}")
    monkeypatch.setenv("https_proxy", address)
    monkeypatch.setenv("no_proxy", "elsewhere.example")
    digest = hashlib.sha256(b"model").hexdigest()
    with server:
        download("http://models.example/net.onnx?x=1", digest, tmp_path)
        with pytest.raises(DownloadError, match="Tunnel connection failed: 403"):
            download("https://models.example/net.onnx", "0" * 64, tmp_path, retries=0)
        with pytest.raises(DownloadError, match=r"elsewhere\.example is not known|no answer from"):
            download("http://elsewhere.example/net.onnx", "0" * 64, tmp_path, retries=0)
        server.shutdown()
    with pytest.raises(DownloadError, match="the proxy: connection refused"):
        download("http://models.example/net", "0" * 64, tmp_path, retries=0)
    assert _Proxy.requests == [
        "http://models.example/net.onnx?x=1 Basic bWU6cHc=",
        "CONNECT models.example:443",
    ]
