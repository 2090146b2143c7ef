"""Downloads are complete, checked, resumed and shared, or refused with a remedy."""

from __future__ import annotations

import hashlib
import io
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.web import Web, serving
from tvmflow.errors import DownloadError
from tvmflow.sources import fetch

BODY = random.Random(0).randbytes(3_000_000)
DIGEST = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(BODY) as server:
        yield server


def get(web: Web, folder: Path, **options: Any) -> Path:
    return fetch(web.url, DIGEST, folder, **{"backoff_s": 0.01, "timeout_s": 5.0, **options})


def test_a_file_is_downloaded_once_and_named_by_its_digest(web: Web, tmp_path: Path) -> None:
    """The second call finds the file and asks nobody."""
    path = get(web, tmp_path / "downloads")
    assert path == tmp_path / "downloads" / DIGEST
    assert path.read_bytes() == BODY
    assert get(web, tmp_path / "downloads") == path
    assert web.requests == [""]


def test_nothing_but_the_file_and_its_lock_is_left(web: Web, tmp_path: Path) -> None:
    """The part and its validator are gone when the file is complete."""
    get(web, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [DIGEST, f"{DIGEST}.lock"]


def test_a_damaged_file_is_fetched_again(web: Web, tmp_path: Path) -> None:
    """What lies under the digest's name is believed only when it has that digest."""
    (tmp_path / DIGEST).write_bytes(b"rotten")
    assert get(web, tmp_path).read_bytes() == BODY


def test_a_lost_connection_is_resumed_where_it_broke(web: Web, tmp_path: Path) -> None:
    """Two breaks cost two more requests and not one byte twice."""
    web.break_after = [1_000_000, 500_000]
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.requests == ["", "bytes=1000000-", "bytes=1500000-"]
    assert web.served == len(BODY)


def test_a_server_without_ranges_sends_everything_again(web: Web, tmp_path: Path) -> None:
    """An answer from the start replaces the part instead of following it."""
    web.ranges = False
    web.break_after = [1_000_000]
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.served == 1_000_000 + len(BODY)


def test_a_file_that_changed_on_the_server_is_not_pasted_together(web: Web, tmp_path: Path) -> None:
    """The part carries its ETag; with another one the server starts over."""
    (tmp_path / f"{DIGEST}.part").write_bytes(b"of an older version")
    (tmp_path / f"{DIGEST}.validator").write_text('"zero"')
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.requests == ["bytes=19-"]


def test_a_part_of_something_else_is_thrown_away(web: Web, tmp_path: Path) -> None:
    """A resumed file with the wrong digest is fetched once more from its start before anyone complains."""
    (tmp_path / f"{DIGEST}.part").write_bytes(b"of an older version")
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.requests == ["bytes=19-", ""]


def test_a_complete_part_is_not_fetched_again(web: Web, tmp_path: Path) -> None:
    """Killed between the last byte and the rename: the server says so, and the digest decides."""
    (tmp_path / f"{DIGEST}.part").write_bytes(BODY)
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.served == 0


def test_a_wrong_digest_is_refused_and_deleted(web: Web, tmp_path: Path) -> None:
    """The message has both digests, and nothing of the file stays."""
    with pytest.raises(DownloadError) as caught:
        fetch(web.url, "0" * 64, tmp_path, backoff_s=0.01)
    assert caught.value.message == (
        f"{web.url} cannot be downloaded: its sha256 is {DIGEST} (3000000 bytes), "
        f"and the recipe says {'0' * 64}"
    )
    assert [path.name for path in tmp_path.iterdir()] == [f"{'0' * 64}.lock"]


def test_a_missing_file_is_not_tried_again(web: Web, tmp_path: Path) -> None:
    """404 fails at once and says how to bring the file by hand."""
    web.statuses = [404]
    with pytest.raises(DownloadError, match="the server answered 404 Not Found") as caught:
        get(web, tmp_path)
    assert str(tmp_path / DIGEST) in caught.value.fix
    assert len(web.requests) == 1


def test_a_file_brought_by_hand_is_taken(web: Web, tmp_path: Path) -> None:
    """The remedy that the message names works."""
    (tmp_path / DIGEST).write_bytes(BODY)
    assert get(web, tmp_path).read_bytes() == BODY
    assert web.requests == []


def test_a_server_error_is_tried_again(web: Web, tmp_path: Path) -> None:
    """500 and 503 pass."""
    web.statuses = [500, 503]
    assert get(web, tmp_path).read_bytes() == BODY


def test_a_server_that_stays_broken_is_given_up(web: Web, tmp_path: Path) -> None:
    """The attempts are counted, and said."""
    web.statuses = [500] * 9
    with pytest.raises(DownloadError, match=r"500 Internal Server Error \(3 attempts\)"):
        get(web, tmp_path, retries=2)
    assert len(web.requests) == 3


def test_a_silent_server_runs_into_the_time_limit(tmp_path: Path) -> None:
    """No answer within `timeout_s` is a failed attempt, not a hang."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/model.onnx"
        with pytest.raises(DownloadError, match="timed out"):
            fetch(url, DIGEST, tmp_path, retries=1, backoff_s=0.01, timeout_s=0.1)


def test_a_refused_connection_and_an_unknown_host_are_named(tmp_path: Path) -> None:
    """The message says which host, not which exception."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(DownloadError, match=r"no answer from 127\.0\.0\.1: .*refused"):
        fetch(f"http://127.0.0.1:{port}/m", DIGEST, tmp_path, retries=0, backoff_s=0.01)
    with pytest.raises(DownloadError, match=r"(no host|no answer from) nowhere\.invalid"):
        fetch("http://nowhere.invalid/m", DIGEST, tmp_path, retries=0, backoff_s=0.01)


def test_a_file_above_the_limit_is_refused_before_it_comes(web: Web, tmp_path: Path) -> None:
    """A declared size is enough to refuse."""
    with pytest.raises(DownloadError, match="3000000 bytes, more than the 1000 that are allowed"):
        get(web, tmp_path, max_bytes=1000)


def test_a_file_larger_than_the_disk_is_refused_before_it_comes(web: Web, tmp_path: Path) -> None:
    """The message has both sizes, and the remedy is space."""
    web.declared = 1 << 60
    with pytest.raises(DownloadError, match=r"needs 1152921504606846976 more bytes") as caught:
        get(web, tmp_path, max_bytes=1 << 62)
    assert caught.value.fix.startswith("free some space")


def test_a_folder_that_cannot_be_written_is_named(web: Web, tmp_path: Path) -> None:
    """The error is about the folder, not about the network."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="file"):
        get(web, tmp_path / "file" / "downloads")
    assert web.requests == []


def test_only_web_and_file_addresses_are_fetched(tmp_path: Path) -> None:
    """ftp and the like are refused; a file: address is copied and checked."""
    with pytest.raises(DownloadError, match="'ftp:' cannot be fetched"):
        fetch("ftp://example.org/m", DIGEST, tmp_path)
    (tmp_path / "model.onnx").write_bytes(BODY)
    path = fetch((tmp_path / "model.onnx").as_uri(), DIGEST, tmp_path / "downloads")
    assert path.read_bytes() == BODY
    with pytest.raises(DownloadError, match="No such file"):
        fetch((tmp_path / "gone.onnx").as_uri(), DIGEST, tmp_path / "other")


def test_a_redirect_off_the_web_is_refused(web: Web, tmp_path: Path) -> None:
    """A server may send us elsewhere, but not to our own files."""
    web.statuses, web.location = [302], "file:///etc/hostname"
    with pytest.raises(DownloadError, match="is not allowed"):
        get(web, tmp_path)


def test_a_redirect_that_gives_up_encryption_is_refused() -> None:
    """https may not lead to http."""
    from urllib.request import Request

    from tvmflow.sources import _Redirects

    handler = _Redirects()
    secure = Request("https://example.org/m")
    with pytest.raises(DownloadError, match="is not allowed"):
        handler.redirect_request(secure, io.BytesIO(), 302, "", {}, "http://example.org/m")
    followed = handler.redirect_request(secure, io.BytesIO(), 302, "", {}, "https://example.com/m")
    assert followed is not None and followed.full_url == "https://example.com/m"


def test_passwords_do_not_reach_messages(tmp_path: Path) -> None:
    """The part of an address before the @ is left out."""
    with pytest.raises(DownloadError) as caught:
        fetch("ftp://user:secret@example.org/m", DIGEST, tmp_path)
    assert "secret" not in str(caught.value)


def test_progress_tells_how_much_is_there(web: Web, tmp_path: Path) -> None:
    """The last event is complete, and a slow download does not flood the watcher."""
    web.slow_s = 0.02
    events: list[dict[str, Any]] = []
    get(web, tmp_path, emit=events.append)
    assert events[-1] == {
        "event": "download",
        "url": web.url,
        "done": len(BODY),
        "total": len(BODY),
    }
    assert [event["done"] for event in events] == sorted(event["done"] for event in events)
    assert 3 <= len(events) <= 12


def test_two_at_once_download_once(web: Web, tmp_path: Path) -> None:
    """The second waits for the first and takes what it brought."""
    web.slow_s = 0.005
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(get(web, tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / DIGEST] * 2
    assert web.served == len(BODY)


def test_a_killed_download_is_resumed(web: Web, tmp_path: Path) -> None:
    """SIGKILL in the middle: the next process goes on, and the server sends little twice."""
    web.slow_s = 0.02
    script = (
        "import sys; from pathlib import Path; from tvmflow.sources import fetch;"
        "fetch(sys.argv[1], sys.argv[2], Path(sys.argv[3]))"
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
