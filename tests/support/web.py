"""A small web server for tests of downloads: ranges, refusals, lost connections, and a count of bytes served."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Web:
    """What the server does, and what it did."""

    body: bytes
    url: str = ""
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

    @property
    def served(self) -> int:
        """Bytes of the file in all answers."""
        return sum(self.sent)


@contextlib.contextmanager
def serving(body: bytes) -> Iterator[Web]:
    """A server of this one body, on a free port, for the length of the block."""
    web = Web(body)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            web.requests.append(self.headers.get("Range", ""))
            web.sent.append(0)
            self.answer = len(web.sent) - 1
            self.close_connection = True
            if web.statuses:
                status = web.statuses.pop(0)
                self.send_response(status)
                if web.location:
                    self.send_header("Location", web.location)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start = self._start()
            if start and start >= len(web.body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(web.body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header(
                    "Content-Range", f"bytes {start}-{len(web.body) - 1}/{len(web.body)}"
                )
            self.send_header("ETag", web.etag)
            self.send_header("Content-Length", str(web.declared or len(web.body) - start))
            self.end_headers()
            self._send(web.body[start:])

        def _start(self) -> int:
            wanted = self.headers.get("Range", "")
            same = self.headers.get("If-Range", web.etag) == web.etag
            return int(wanted[6:-1]) if web.ranges and wanted and same else 0

        def _send(self, rest: bytes) -> None:
            if web.break_after:
                rest = rest[: web.break_after.pop(0)]
            with contextlib.suppress(ConnectionError):
                for at in range(0, len(rest), 1 << 16):
                    piece = rest[at : at + (1 << 16)]
                    # counted first: whoever has the last byte may look at once
                    web.sent[self.answer] += len(piece)
                    self.wfile.write(piece)
                    time.sleep(web.slow_s)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.url = f"http://127.0.0.1:{server.server_port}/model.onnx"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
