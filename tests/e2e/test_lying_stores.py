"""Stores of others that lie: whatever they answer, nothing wrong is kept or delivered, and a run ends well."""

from __future__ import annotations

import hashlib
import random
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import Count
from tests.support.listening import RequestHandler, listening
from tests.support.small_runs import WRITES, RunHost, plan_of

pytestmark = pytest.mark.faults

PLAN: Final = plan_of(width=2)
_ERROR: Final = b"<?xml version='1.0'?><Error><Code>SlowDown</Code></Error>"

# Takes the right content and all others: what is sent, and the length that is promised.
Lie = Callable[[random.Random, bytes, list[bytes]], tuple[bytes, int]]


def _whole(content: bytes) -> tuple[bytes, int]:
    return content, len(content)


READ_LIES: Final[dict[str, Lie]] = {
    "other bytes": lambda draw, content, others: _whole(draw.randbytes(len(content))),
    "one flipped bit": lambda draw, content, others: _whole(
        bytes([content[0] ^ 1, *content[1:]]) if content else b"x"
    ),
    "shorter": lambda draw, content, others: _whole(content[: len(content) // 2]),
    "longer": lambda draw, content, others: _whole(content + b"\0" * 100),
    "cut off": lambda draw, content, others: (content[: len(content) // 2], len(content)),
    "another object": lambda draw, content, others: _whole(draw.choice(others)),
    "an error with status 200": lambda draw, content, others: _whole(_ERROR),
    "nothing": lambda draw, content, others: _whole(b""),
    "a length of its own": lambda draw, content, others: (content, len(content) + (1 << 40)),
}
WRITE_LIES: Final = ("not stored", "stored with other bytes", "stored by half", "kept as it was")


class LyingStore:
    """The objects by their paths, and what is told instead of them."""

    def __init__(self, draw: random.Random) -> None:
        self.url = ""
        self.objects: dict[str, bytes] = {}
        self.read_lie = ""
        self.write_lie = ""
        self.share = 1.0
        self.lies = 0
        self._draw = draw
        self._lock = threading.Lock()

    def read(self, path: str) -> tuple[bytes, int] | None:
        with self._lock:
            content = self.objects.get(path)
            if content is None or not self.read_lie or self._draw.random() > self.share:
                return None if content is None else _whole(content)
            self.lies += 1
            return READ_LIES[self.read_lie](self._draw, content, list(self.objects.values()))

    def size(self, path: str) -> int | None:
        content = self.objects.get(path)
        return None if content is None else len(content)

    def write(self, path: str, content: bytes) -> None:
        with self._lock:
            if not self.write_lie or self._draw.random() > self.share:
                self.objects[path] = content
                return
            self.lies += 1
            if self.write_lie == "stored with other bytes":
                self.objects[path] = self._draw.randbytes(len(content))
            elif self.write_lie == "stored by half":
                self.objects[path] = content[: len(content) // 2]
            elif self.write_lie == "kept as it was":
                self.objects.setdefault(path, b"an old version")


@pytest.fixture
def lying() -> Iterator[LyingStore]:
    store = LyingStore(random.Random(0))

    class Handler(RequestHandler):
        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            store.write(urllib.parse.unquote(self.path), content)
            self.head(200, headers={"ETag": '"any"'})

        def do_HEAD(self) -> None:
            size = store.size(urllib.parse.unquote(self.path))
            self.head(404 if size is None else 200, size or 0, _headers())

        def do_GET(self) -> None:
            answer = store.read(urllib.parse.unquote(self.path))
            if answer is None:
                self.head(404)
                return
            content, length = answer
            self.head(200, length, _headers())
            self.wfile.write(content)
            self.close_connection = length != len(content)

    with listening(Handler) as store.url:
        yield store


def _headers() -> dict[str, str]:
    return {"ETag": '"any"', "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}


@pytest.fixture(params=["http", "s3"])
def url(request: pytest.FixtureRequest, lying: LyingStore, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "http":
        return lying.url
    pytest.importorskip("obstore")
    for name, value in {
        "AWS_ENDPOINT_URL": lying.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "any",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    return "s3://bucket"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def check_contents(host: RunHost) -> None:
    """Check that all contents in a store have their digests."""
    paths = [path for path in Path(host.store.root, "cas").rglob("?" * 64) if path.is_file()]
    assert paths
    for path in paths:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


def run_well(host: RunHost, expected: dict[str, bytes]) -> None:
    report = host.run(PLAN)
    assert report.exit_code == 0
    assert files(host.dist) == expected
    check_contents(host)


@pytest.mark.parametrize("lie", READ_LIES)
def test_what_a_store_tells_wrongly_is_not_kept(
    lie: str, lying: LyingStore, url: str, tmp_path: Path, count: Count
) -> None:
    """A run makes what it cannot have, delivers what one without a remote cache delivers, and ends well."""
    one = RunHost(tmp_path / "one", url, **WRITES)
    assert one.run(PLAN).exit_code == 0
    expected = files(one.dist)
    lying.read_lie = lie
    for number, share in enumerate((1.0, 0.5, 0.2, 0.2)):
        lying.share = share
        run_well(RunHost(tmp_path / f"two{number}", url), expected)
        run_well(RunHost(tmp_path / f"three{number}", url, **WRITES), expected)
    assert lying.lies
    count("lies of stores on reading", lying.lies)


@pytest.mark.parametrize("lie", WRITE_LIES)
def test_what_a_store_keeps_wrongly_harms_nobody(
    lie: str, lying: LyingStore, url: str, tmp_path: Path, count: Count
) -> None:
    """It accepted everything: whoever reads it afterwards, honestly, makes what is not there."""
    lying.write_lie = lie
    lying.share = 0.6
    one = RunHost(tmp_path / "one", url, **WRITES)
    assert one.run(PLAN).exit_code == 0
    expected = files(one.dist)
    for number in range(3):
        run_well(RunHost(tmp_path / f"two{number}", url, **WRITES), expected)
    lying.write_lie = ""
    run_well(RunHost(tmp_path / "honest", url, **WRITES), expected)
    last = RunHost(tmp_path / "last", url)
    run_well(last, expected)
    assert lying.lies
    count("lies of stores on writing", lying.lies)


def test_an_old_version_of_the_index_loses_no_result(
    lying: LyingStore, url: str, tmp_path: Path
) -> None:
    """A listing that is stale names contents that are gone: those results are made."""
    one = RunHost(tmp_path / "one", url, **WRITES)
    assert one.run(PLAN).exit_code == 0
    expected = files(one.dist)
    contents = sorted(path for path in lying.objects if "/cas/" in path)
    for path in contents[::3]:
        del lying.objects[path]
    run_well(RunHost(tmp_path / "two", url), expected)
