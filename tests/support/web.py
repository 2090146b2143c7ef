"""A small web server for tests of downloads: ranges, error statuses, lost connections, and a count of bytes sent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.listening import RequestHandler, listening


@dataclass
class Web:
    """How the server behaves, and what it did."""

    body: bytes
    url: str = ""
    others: dict[str, bytes] = field(default_factory=dict)
    """Other files by their paths, such as `/model.onnx_data`; every other path has `body`."""
    etag: str = '"one"'
    ranges: bool = True
    declared: int | None = None
    break_after: list[int] = field(default_factory=list)
    """How many bytes of the next answers are sent before the connection is dropped."""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers, instead of the file."""
    location: str = ""
    slow_s: float = 0.0
    """Seconds between two pieces of 64 KiB."""
    sent: list[int] = field(default_factory=list)
    """Bytes of the file in each answer."""
    requests: list[str] = field(default_factory=list)
    """The Range of each request, empty without one."""
    credentials: list[str] = field(default_factory=list)
    """The `Authorization` of each request, empty without one."""

    @property
    def served(self) -> int:
        """Return how many bytes of the file were sent in all answers."""
        return sum(self.sent)


@contextlib.contextmanager
def serving(body: bytes) -> Iterator[Web]:
    """Give a server of one body on a free port."""
    web = Web(body)

    class Handler(RequestHandler):
        def do_GET(self) -> None:
            web.requests.append(self.headers.get("Range", ""))
            web.credentials.append(self.headers.get("Authorization", ""))
            web.sent.append(0)
            self.number = len(web.sent) - 1
            self.close_connection = True
            if web.statuses:
                headers = {"Location": web.location} if web.location else {}
                self.head(web.statuses.pop(0), headers=headers)
                return
            body = web.others.get(self.path, web.body)
            start, size = self._start(), len(body)
            if start and start >= size:
                self.head(416, headers={"Content-Range": f"bytes */{size}"})
                return
            part = {"Content-Range": f"bytes {start}-{size - 1}/{size}"} if start else {}
            length = web.declared or size - start
            self.head(206 if start else 200, length, {**part, "ETag": web.etag})
            self._send(body[start:])

        def _start(self) -> int:
            requested = self.headers.get("Range", "")
            same = self.headers.get("If-Range", web.etag) == web.etag
            return int(requested[6:-1]) if web.ranges and requested and same else 0

        def _send(self, rest: bytes) -> None:
            if web.break_after:
                rest = rest[: web.break_after.pop(0)]
            with contextlib.suppress(ConnectionError):
                for at in range(0, len(rest), 1 << 16):
                    piece = rest[at : at + (1 << 16)]
                    # counted first: whoever has the last byte may look at once
                    web.sent[self.number] += len(piece)
                    self.wfile.write(piece)
                    time.sleep(web.slow_s)

    with listening(Handler) as address:
        web.url = f"{address}/model.onnx"
        yield web
